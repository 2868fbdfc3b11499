"""Training a pool beside the loop everyone writes: the same models, recipe, records and number of steps, one run.

``plain``: a Dataset with per-sample ToTensor and Normalize, a DataLoader, torch.optim.SGD, one model after another on
torch's default threads. ``ours``: :func:`shadow_pool.train.schedule.train_pool`, one process per core, each model's
signals and files included; ``steady`` is with workers that run already, ``cold`` includes starting them. Each side runs
in a process of its own. GFLOP/s count forward and backward by torch.utils.flop_counter; the peak is a product of
2048 x 2048 float32 matrices on all cores. Memory is the largest resident set of a process, times the number of them.

Tried in the loop, in processor seconds of one thread on an AVX2-only AMD EPYC (least of several, machine shared):
channels-last order: ResNet-8 214 -> 159 ms a step, LeNet unchanged (kept); bf16 autocast: LeNet 3 times, ResNet-8 7
times slower where the processor has no bf16 (``auto`` takes fp32 there); torch's own im2col in place of oneDNN:
ResNet-8 1.7 times slower, LeNet the same; flushing denormals: nothing, early or late in training. The optimizer, the
learning rate and clearing gradients are under 3 % of a LeNet step, so little is left to gain there.

Keeping freed memory (shadow_pool/allocator.py): LeNet 1.6, ResNet-8 1.3 times as fast a core where page faults are
dear, as in virtual machines; BatchNorm over 6 channels and pooling take 45 % of what remains of a LeNet step.

Measured 2026-11-30 on a virtual machine of 2 Xeon cores with nothing else running in it, 8 models, 8 epochs, images/s
of LeNet with BatchNorm in two runs, which differ by what the host did meanwhile: plain 4,488 and 6,081, ours 9,534 and
7,682 steady (2.1 and 1.3 times), 7,354 and 6,006 cold; 17 to 22 GFLOP/s, 8 % of the peak. The other cases were not
measured so.

Run: python benchmarks/training.py [--models 8] [--epochs 10] [--cases lenet,lenet-none,resnet8,resnet8-none]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

BATCH = 64
CASES = {
    # name: arch, shape, arm, records in all
    "lenet": ("lenet", (1, 28, 28), "batch", 3000),
    "lenet-none": ("lenet", (1, 28, 28), "none", 3000),
    "resnet8": ("resnet8", (3, 32, 32), "batch", 1000),
    "resnet8-none": ("resnet8", (3, 32, 32), "none", 1000),
    "resnet18": ("resnet18", (3, 32, 32), "batch", 256),
}


def images(shape: tuple[int, ...], count: int) -> tuple[np.ndarray, np.ndarray]:
    """Noise with a bright square whose place tells the label: uint8 [count, C, H, W]."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 90, (count, *shape), dtype=np.uint8)
    label = rng.integers(0, 10, count)
    for image, place in zip(x, label, strict=True):
        image[:, 4 * (place // 5) : 4 * (place // 5) + 4, 5 * (place % 5) : 5 * (place % 5) + 4] = 250
    return x, label


def train_plain(case: str, models: int, epochs: int) -> dict[str, float]:
    """The loop everyone writes; half of the records are each model's members."""
    import torch
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, Dataset
    from torchvision import transforms

    from shadow_pool.models.resolve import build_model

    arch, shape, arm, count = CASES[case]
    x, label = images(shape, count)
    mean, std = [0.2] * shape[0], [0.2] * shape[0]
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize(mean, std)])

    class Half(Dataset[Any]):
        def __init__(self, rows: np.ndarray) -> None:
            self.x, self.label = x[rows].transpose(0, 2, 3, 1).copy(), label[rows]

        def __len__(self) -> int:
            return len(self.x)

        def __getitem__(self, index: int) -> tuple[Any, int]:
            return transform(self.x[index]), int(self.label[index])

    started = time.perf_counter()
    for index in range(models):
        model = build_model(arch, arm, classes=10, input_shape=shape, seed=index).train()
        loader = DataLoader(Half(np.random.default_rng(index).permutation(count)[: count // 2]), BATCH, shuffle=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
        for _ in range(epochs):
            for batch, target in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(batch), target).backward()
                optimizer.step()
                schedule.step()
    return {"seconds": time.perf_counter() - started, "memory": _peak(resource.RUSAGE_SELF)}


def train_ours(case: str, models: int, epochs: int) -> dict[str, float]:
    """Two pools one after the other: the first starts the workers, the second finds them running."""
    from joblib.externals.loky import get_reusable_executor

    from shadow_pool.prepare import prepare_pool
    from shadow_pool.train.schedule import train_pool, worker_count

    arch, shape, arm, count = CASES[case]
    x, label = images(shape, count)
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / "data.npz", x=x, y=label)
        for name in ("cold", "steady"):
            spec = {
                "n": models,
                "arch": arch,
                "arms": [arm],
                "data": {"source": f"{folder}/data.npz", "holdout": 0.0, "normalize": "0.2/0.2"},
                "recipe": {"epochs": epochs, "batch_size": BATCH, "lr": 0.02},
            }
            pool, data = prepare_pool(Path(folder) / name, spec)
            started = time.perf_counter()
            receipts = train_pool(pool, data)
            seconds.append(time.perf_counter() - started)
            assert not [receipt for receipt in receipts if receipt.outcome == "failed"]
    get_reusable_executor().shutdown(wait=True)
    memory = worker_count(None, "cpu") * _peak(resource.RUSAGE_CHILDREN) + _peak(resource.RUSAGE_SELF)
    return {"cold": seconds[0], "seconds": seconds[1], "memory": memory}


def flops_per_image(case: str) -> float:
    """Of a forward and a backward pass."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from shadow_pool.models.resolve import build_model

    arch, shape, arm, _ = CASES[case]
    model = build_model(arch, arm, classes=10, input_shape=shape, seed=0)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, *shape)).sum().backward()
    return counter.get_total_flops() / 2


def measured_peak() -> float:
    """FLOP/s of the best of several float32 matrix products."""
    import torch

    a = torch.randn(2048, 2048)
    return 2 * 2048**3 / min(_seconds(lambda: a @ a) for _ in range(5))


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _peak(who: int) -> float:
    return resource.getrusage(who).ru_maxrss * 1024


def _apart(function: str, case: str, models: int, epochs: int) -> dict[str, float]:
    """One side in a process of its own, on torch's default threads."""
    command = [sys.executable, __file__, "--run", function, "--cases", case, "--models", str(models)]
    command += ["--epochs", str(epochs)]
    environment = {key: value for key, value in os.environ.items() if not key.endswith("_NUM_THREADS")}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    values: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return values


def main() -> None:
    """Print one line per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--cases", default="lenet,lenet-none,resnet8,resnet8-none")
    parser.add_argument("--run", choices=["plain", "ours"], help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.run:
        side = {"plain": train_plain, "ours": train_ours}[chosen.run]
        print(json.dumps(side(chosen.cases, chosen.models, chosen.epochs)))
        return
    peak = measured_peak()
    print(f"{os.cpu_count()} cores, peak {peak / 1e9:.0f} GFLOP/s; {chosen.models} models a case; images/s")
    print(f"{'case':13}{'plain':>8}{'steady':>8}{'ratio':>7}{'cold':>8}{'GFLOP/s':>9}{'of peak':>9}  memory, MB")
    for case in chosen.cases.split(","):
        seen = chosen.models * (CASES[case][3] // 2) * chosen.epochs
        plain, ours = (_apart(side, case, chosen.models, chosen.epochs) for side in ("plain", "ours"))
        rate = seen * flops_per_image(case) / ours["seconds"]
        print(
            f"{case:13}{seen / plain['seconds']:8,.0f}{seen / ours['seconds']:8,.0f}"
            f"{plain['seconds'] / ours['seconds']:7.2f}{seen / ours['cold']:8,.0f}{rate / 1e9:9.1f}{rate / peak:9.1%}"
            f"  {plain['memory'] / 1e6:,.0f} plain, {ours['memory'] / 1e6:,.0f} ours",
            flush=True,
        )


if __name__ == "__main__":
    main()
