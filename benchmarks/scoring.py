"""What `score` spends its time on, and its signals beside bare forward passes.

``signals``: :func:`shadow_pool.signals.compute_signals` (batches of 256, logits to phi in float64) beside the loop that
only calls the model on the same batches, float32, one thread, images/s, best of several. ``score``: the command's own
steps on a pool and a target, in seconds of one process; what is left is torch's import and everything small.

Measured 2026-11-30 on a virtual machine of 2 Xeon cores, images/s:

              forward   signals   of it
    lenet      23,109    21,752     94%
    mlp       132,251   102,882     78%
    resnet8     1,940     1,930     99%

`score` on 64 models of two arms and 1,527 digits: signals .03 s, reading .2 to .3 s, the pool's scores and the
jackknife of BatchNorm's effect 2.3 s the first time and .1 s after, since its replicates stay with the pool; the report
1.1 to 1.3 s. So the forward pass dominates only where it is long: for ResNet-8 from some 4,000 records on. The first
jackknife grows with the square of the models, times records.

Run: python benchmarks/scoring.py [POOL MODEL]
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

CASES = {"lenet": ((1, 28, 28), 4096), "mlp": ((1, 28, 28), 8192), "resnet8": ((3, 32, 32), 1024)}
STEPS = {
    "the target's signals": "compute_signals",
    "reading the pool": "load_evidence",
    "pool's scores and jackknife": "jackknife_pool",
    "the report": "write_report",
    "records.parquet and audit.json": "write",
}


def signals(arch: str) -> None:
    """One line: images/s of a bare forward pass and of signals."""
    import torch

    from shadow_pool.data.preprocess import parse_normalize
    from shadow_pool.models.resolve import build_model
    from shadow_pool.queries import PLAIN
    from shadow_pool.signals import compute_signals

    shape, count = CASES[arch]
    rng = np.random.default_rng(0)
    x, label = rng.integers(0, 256, (count, *shape), dtype=np.uint8), rng.integers(0, 10, count)
    model = build_model(arch, "batch", classes=10, input_shape=shape, seed=0).eval()
    preprocess = parse_normalize("0.5/0.25", shape)
    batches = preprocess(torch.from_numpy(x)).split(256)

    def bare() -> None:
        with torch.no_grad():
            for batch in batches:
                model(batch)

    def ours() -> None:
        compute_signals(model, x, label, preprocess=preprocess, views=(PLAIN,))

    plain, asked = best(bare), best(ours)
    print(f"{arch:10}{count / plain:10,.0f}{count / asked:10,.0f}{plain / asked:8.0%}")


def best(run: Callable[[], None], repeats: int = 7) -> float:
    """The least of several wall-clock times."""
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def steps(pool: Path, model: Path) -> None:
    """The command under Python's profiler, which adds a little to each step."""
    from mia_audit_cli.main import app

    profile = cProfile.Profile()
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        profile.enable()
        app(["score", str(model), "--pool", str(pool), "--out", folder], standalone_mode=False)
        profile.disable()
        total = time.perf_counter() - started
    spent: dict[str, float] = {}
    for (file, _, name), (_, _, _, cumulative, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        if "mia_audit" in file or "shadow_pool" in file:
            spent[name] = spent.get(name, 0.0) + cumulative
    for what, name in STEPS.items():
        print(f"{what:34}{spent.get(name, 0.0):6.2f} s")
    print(f"{'in all':34}{total:6.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pool", nargs="?", type=Path)
    parser.add_argument("model", nargs="?", type=Path)
    chosen = parser.parse_args()
    if chosen.pool is not None:
        steps(chosen.pool, chosen.model)
        return
    import torch

    torch.set_num_threads(1)
    print(f"{'images/s':10}{'forward':>10}{'signals':>10}{'of it':>8}")
    for arch in CASES:
        signals(arch)


if __name__ == "__main__":
    main()
