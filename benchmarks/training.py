"""Training a pool beside the loop everyone writes: the same models, recipe, records, membership and first weights.

``plain``: a Dataset with per-sample ToTensor and Normalize, a DataLoader, torch.optim.SGD, one model after another on
torch's default threads, float32. ``ours``: :func:`shadow_pool.train.schedule.train_pool`, one process per core, its
files included; images/s with workers that run already, ``cold`` with starting them. Both sides train each model and ask
it about all records; images are those trained on. Each side runs in a process of its own. GFLOP/s count forward and
backward by torch.utils.flop_counter; the peak is a product of 2048 x 2048 matrices of that precision on all cores. MB:
the largest resident sets of a side's processes, added. AUC of lira-online with its interval says whether the models of
both sides leak alike.

Measured 2026-11-30 on a virtual machine of 2 Xeon cores (AVX-512, AMX) with nothing else running in it, in one run. Its
host is noisy: plain LeNet gave 3,700 to 6,500 images/s on one day, so compare within a block.

    case                   images/s  ratio    cold  ratio  GFLOP/s  of peak     MB  AUC
    lenet plain               5,057                                            920  0.615 [0.586, 0.645]
      ours fp32              30,290   5.99  25,301   5.00     68.6    29.6%    741  0.610 [0.572, 0.647]
      ours bf16              26,043   5.15  28,152   5.57     59.0     8.0%    739  0.626 [0.589, 0.662]
    lenet-none plain          5,721                                            914  0.575 [0.537, 0.613]
      ours fp32              35,032   6.12  23,887   4.18     79.3    34.3%    742  0.603 [0.585, 0.620]
      ours bf16              30,124   5.27  25,230   4.41     68.2     9.2%    741  0.560 [0.528, 0.593]
    resnet8 plain               671                                          1,139  0.675 [0.651, 0.700]
      ours fp32               1,478   2.20   1,326   1.98    109.5    47.3%    749  0.681 [0.653, 0.709]
      ours bf16               2,864   4.27   2,273   3.39    212.3    28.8%    749  0.676 [0.653, 0.699]
    resnet8-none plain        1,059                                          1,069  0.509 [0.472, 0.546]
      ours fp32               1,860   1.76   1,913   1.81    137.9    59.6%    749  0.512 [0.494, 0.529]
      ours bf16               3,500   3.30   2,654   2.51    259.5    35.2%    749  0.514 [0.500, 0.528]
    resnet18 plain               35                                          1,726  0.560 [0.490, 0.630]
      ours fp32                  41   1.18      38   1.10    135.8    58.7%    829  0.560 [0.487, 0.632]
      ours bf16                  62   1.80      52   1.52    207.1    28.1%    827  0.548 [0.470, 0.627]
    resnet18-none plain          35                                          1,549  0.527 [0.489, 0.564]
      ours fp32                  47   1.35      36   1.02    157.6    68.1%    881  0.527 [0.489, 0.564]
      ours bf16                  69   1.95      66   1.88    228.1    30.9%    873  0.526 [0.497, 0.554]

Both sides leak alike, in either precision. LeNet's convolutions are float32 in bf16 too. A whole ``mia-audit
train-shadows`` of 16 LeNets on 1,500 records, 20 epochs, two starts of Python and torch (3 s) included, took 8.2 to
12.4 s in ten runs, beside plain in five rounds 39.1 to 55.1 s: 4.5 to 5.2 times.

Tried, and how many times as fast it made a core's step. Kept: LeNet's convolutions, BatchNorm, pooling and ReLU as one
operation, the records of a batch side by side in memory (shadow_pool/models/pooled.cpp), four LeNets 2.1, without
BatchNorm 1.9, one LeNet 3.1; what follows the convolutions of the zoo's other networks as one operation
(shadow_pool/models/activations.cpp), ResNet-8 1.07 in float32 and 1.15 to 1.25 in bf16 (gradients of both are as close
to those in float64 as torch's, or closer); four small models side by side, as groups of one channels-last model
(shadow_pool/models/stack.py), LeNet 1.2 with BatchNorm and 1.3 without, with torch's convolutions 1.5 to 1.9, on 8x8
digits 1.9 and 2.1, an MLP of 85 k parameters 1.0 to 1.5; freed memory stays with the process (shadow_pool/memory.py),
LeNet 1.6, ResNet-8 1.3; channels-last order 1.3 and bf16 1.6 for wide models; models asked once a record instead of
twice, 1.05 of a unit of 10 epochs; one gather an epoch; fused optimizers (.1 ms a step); one single-threaded process a
core, started once (2 to 4 s, mostly torch's import) while the command imports torch itself, and killed at its end,
which saves 1.6 of 5.8 s; records shared by memory map; long models first and no barrier before +fit arms, which leaves
no core idle.

Not kept: any traced forward rewritten with such operations, which changed what strangers' networks compute (in-place
operations, hooks, state in buffers, draws); records side by side for ResNet-8 too, 1.0 in float32: its maps leave the
caches; bf16 for LeNet, .9; two or eight LeNets side by side, .9 and .8 of four; ResNet-8 side by side 1.0 in bf16, .8
in float32; for LeNet alone, bf16 and channels-last .7 to 1.0, its batch folded into channels 1.15 to 1.25, and
convolution, BatchNorm, pooling and ReLU as one function on matrix products, batch last, 1.3; for four, BatchNorm,
pooling and ReLU as one function of torch's operations .9 to 1.0; ReLU and sums in place 1.0 (ResNet-8); float32
convolutions that multiply in bf16 .6 of autocast (ResNet-8); torch.compile 1.1, for 8 to 40 s a start; oneDNN's blocked
layout from end to end .9; BatchNorm's statistics by matrix products 1.0; transparent huge pages 1.0; flushing denormals
1.0 and torch.func over stacked models .75 (on other machines).

Run: python benchmarks/training.py [--cases lenet,resnet8] [--precisions fp32,bf16]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

BATCH, LR, SEED = 64, 0.05, 0


@dataclass(frozen=True)
class Case:
    """``records`` digits as images of ``shape``; each of ``models`` trains on half of them."""

    arch: str
    shape: tuple[int, int, int]
    arm: str
    records: int
    models: int
    epochs: int

    @property
    def images(self) -> int:
        """Images trained on, over all models and epochs."""
        return self.models * self.epochs * (self.records // 2)


CASES = {
    "lenet": Case("lenet", (1, 28, 28), "batch", 1796, 16, 20),
    "lenet-none": Case("lenet", (1, 28, 28), "none", 1796, 16, 20),
    "resnet8": Case("resnet8", (3, 32, 32), "batch", 1000, 8, 20),
    "resnet8-none": Case("resnet8", (3, 32, 32), "none", 1000, 8, 20),
    "resnet18": Case("resnet18", (3, 32, 32), "batch", 128, 8, 2),
    "resnet18-none": Case("resnet18", (3, 32, 32), "none", 128, 8, 2),
}


def problem(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Digits blown up to the case's shape, uint8 [N, C, H, W], and their labels, one in ten of them drawn anew."""
    import torch
    from sklearn.datasets import load_digits

    small, label = load_digits(return_X_y=True)
    channels, *size = case.shape
    x = torch.from_numpy(small[: case.records].reshape(-1, 1, 8, 8) * (255 / 16))
    x = torch.nn.functional.interpolate(x, size, mode="bilinear").clamp(0, 255).expand(-1, channels, -1, -1)
    rng, label = np.random.default_rng(SEED), label[: case.records].astype(np.int64)
    drawn = rng.random(len(label)) < 0.1
    label[drawn] = rng.integers(0, 10, drawn.sum())
    return x.to(torch.uint8).numpy(), label


def train_plain(case: Case, precision: str, phi_file: str) -> dict[str, float]:
    """The loop everyone writes: train a model, then ask it about all records."""
    import torch
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, Dataset
    from torchvision import transforms

    from shadow_pool import seeds
    from shadow_pool.membership import draw_membership
    from shadow_pool.models.resolve import build_model
    from shadow_pool.signals import phi_from_logits

    x, label = problem(case)
    mean = [0.2] * case.shape[0]
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize(mean, mean)])

    class Rows(Dataset[Any]):
        def __init__(self, rows: Any) -> None:
            self.x, self.label = x[rows].transpose(0, 2, 3, 1).copy(), label[rows]

        def __len__(self) -> int:
            return len(self.x)

        def __getitem__(self, index: int) -> tuple[Any, int]:
            return transform(self.x[index]), int(self.label[index])

    started, phi = time.perf_counter(), []
    everything = DataLoader(Rows(slice(None)), 256)
    for index, member in enumerate(draw_membership(SEED, case.models, case.records)):
        torch.manual_seed(index)
        weights = seeds.integer(SEED, "weights", index)
        model = build_model(case.arch, case.arm, classes=10, input_shape=case.shape, seed=weights).train()
        loader = DataLoader(Rows(member), BATCH, shuffle=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=5e-4)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, case.epochs * len(loader))
        for _ in range(case.epochs):
            for batch, target in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(batch), target).backward()
                optimizer.step()
                schedule.step()
        model.eval()
        with torch.no_grad():
            phi.append(phi_from_logits(torch.cat([model(batch) for batch, _ in everything]), label))
    seconds, memory = time.perf_counter() - started, peak("self")
    np.save(phi_file, np.stack(phi))
    return {"seconds": seconds, "memory": memory}


def train_ours(case: Case, precision: str, phi_file: str) -> dict[str, float]:
    """Two pools one after the other: the first starts the workers, the second finds them running."""
    from joblib.externals.loky import get_reusable_executor

    from shadow_pool.prepare import prepare_pool
    from shadow_pool.train.schedule import train_pool

    x, label = problem(case)
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / "data.npz", x=x, y=label)
        for name in ("cold", "steady"):
            spec = {
                "n": case.models,
                "arch": case.arch,
                "arms": [case.arm],
                "seed": SEED,
                "precision": precision,
                "data": {"source": f"{folder}/data.npz", "holdout": 0.0, "normalize": "0.2/0.2"},
                "recipe": {"epochs": case.epochs, "batch_size": BATCH, "lr": LR, "weight_decay": 5e-4},
            }
            pool, data = prepare_pool(Path(folder) / name, spec)
            started = time.perf_counter()
            receipts = train_pool(pool, data)
            seconds.append(time.perf_counter() - started)
            assert not [receipt for receipt in receipts if receipt.outcome == "failed"]
        np.save(phi_file, np.stack([pool.signals(case.arm, index).phi[:, 0] for index in range(case.models)]))
    workers = get_reusable_executor()
    memory = sum(map(peak, ["self", *workers._processes]))
    workers.shutdown(wait=True)
    return {"cold": seconds[0], "seconds": seconds[1], "memory": memory}


def auc(case: Case, phi: np.ndarray) -> str:
    """AUC of lira-online, every model in turn the target, with its interval; a dash below eight models."""
    from mia_audit.metrics.jackknife import jackknife_pool
    from shadow_pool.membership import draw_membership

    if case.models < 8:
        return "-"
    membership = draw_membership(SEED, case.models, case.records)
    found = jackknife_pool("lira-online", phi, membership, {"all": np.ones(case.records, bool)}, metrics=("auc",))
    low, high = found.interval()
    return f"{found.estimate[0, 0]:.3f} [{low[0, 0]:.3f}, {high[0, 0]:.3f}]"


def flops_per_image(case: Case) -> float:
    """Of a forward and a backward pass."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from shadow_pool.models.resolve import build_model

    model = build_model(case.arch, case.arm, classes=10, input_shape=case.shape, seed=0)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, *case.shape)).sum().backward()
    return counter.get_total_flops() / 2


def measured_peak(precision: str) -> float:
    """FLOP/s of the best of several matrix products on all cores."""
    import torch

    a = torch.randn(2048, 2048, dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[precision])
    return 2 * 2048**3 / min(_seconds(lambda: a @ a) for _ in range(8))


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def peak(process: str | int) -> float:
    """Bytes: the largest resident set so far (getrusage's counts that of the parent in)."""
    status = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    return 1024 * float(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def _apart(side: str, name: str, precision: str) -> tuple[dict[str, float], np.ndarray]:
    """One side in a process of its own, on torch's default threads: what it measured, and phi [M, N]."""
    environment = {key: value for key, value in os.environ.items() if not key.endswith("_NUM_THREADS")}
    with tempfile.TemporaryDirectory() as folder:
        phi_file = f"{folder}/phi.npy"
        command = [sys.executable, __file__, "--side", side, "--cases", name, "--precisions", precision]
        command += ["--phi-file", phi_file]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
        values: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return values, np.load(phi_file)


def main() -> None:
    """Print one line per case and precision."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--precisions", default="fp32,bf16", help="bf16 is slow where the processor has none")
    parser.add_argument("--side", choices=["plain", "ours"], help=argparse.SUPPRESS)
    parser.add_argument("--phi-file", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.side:
        side = {"plain": train_plain, "ours": train_ours}[chosen.side]
        print(json.dumps(side(CASES[chosen.cases], chosen.precisions, chosen.phi_file)))
        return
    precisions = chosen.precisions.split(",")
    peaks = {precision: measured_peak(precision) for precision in precisions}
    print(f"{os.cpu_count()} cores, peak GFLOP/s:", {name: round(peak / 1e9) for name, peak in peaks.items()})
    print(f"{'case':22}{'images/s':>9}{'ratio':>7}{'cold':>8}{'ratio':>7}{'GFLOP/s':>9}{'of peak':>9}{'MB':>7}  AUC")
    for name in chosen.cases.split(","):
        case = CASES[name]
        plain, phi = _apart("plain", name, "fp32")
        rate, memory = case.images / plain["seconds"], plain["memory"] / 1e6
        print(f"{name + ' plain':22}{rate:9,.0f}{'':40}{memory:7,.0f}  {auc(case, phi)}", flush=True)
        for precision in precisions:
            ours, phi = _apart("ours", name, precision)
            rates = [case.images / ours[key] for key in ("seconds", "cold")]
            speed = rates[0] * flops_per_image(case)
            columns = "".join(f"{r:{width},.0f}{r / rate:7.2f}" for r, width in zip(rates, (9, 8), strict=True))
            share = f"{speed / 1e9:9.1f}{speed / peaks[precision]:9.1%}{ours['memory'] / 1e6:7,.0f}"
            print(f"{'  ours ' + precision:22}{columns}{share}  {auc(case, phi)}", flush=True)


if __name__ == "__main__":
    main()
