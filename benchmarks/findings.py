"""The README's table of findings: what BatchNorm does to leakage, and what takes it away, on real data.

For each task a paired pool is trained (or resumed) and audited by LiRA, every model in turn the target: test and
member accuracy, AUC by subset, TPR at 1 % FPR, and BatchNorm's effect on AUC at equal epochs and at equal fit, with
95 % intervals (delete-a-pair jackknife).

Tasks read named data sets (--data-root), or NAME.npz with x and y from --data FOLDER where it is there.

Measured 2026-11-30, one run each on 2 cores that others used too. 5 % of the records mislabeled, 5 % ood. Digits: 1,527
records, lr .05; MNIST and Fashion-MNIST: 3,000 each, lr .02, all 16 models an arm and 20 epochs, float32; the others in
bf16, lr .05. CIFAR-10: 4,000, 12 models, 30 epochs; CIFAR-100: 4,000, 8 models, 30 epochs; DenseNet-22: 2,000, 8
models, 15 epochs, the last two of a size that half an hour of two cores allows.

    data, network         arm               test   member  AUC all             clean  misl.  ood    TPR at 1 %
    digits, LeNet         batch             .944   .983    .727 [.717, .737]   .676   1.000  .964   .117
                          none              .961   .918    .626 [.608, .644]   .585   .942   .797   .055
                          none+fit          .937   .982    .671 [.658, .684]   .607   .999   .974   .098
                          batch+penalty(1)  .969   .931    .687 [.671, .703]   .646   .970   .878   .085
    Fashion-MNIST, LeNet  batch             .810   .997    .840 [.837, .843]   .803   1.000  .999   .251
                          none              .796   .809    .635 [.625, .646]   .593   .883   .903   .062
                          none+fit          .797   .992    .770 [.764, .777]   .722   .999   .990   .185
                          batch+penalty(1)  .816   .869    .663 [.623, .702]   .618   .921   .941   .080
    MNIST, LeNet          batch             .943   .998    .796 [.789, .802]   .750   1.000  .998   .197
                          none              .941   .935    .668 [.658, .678]   .618   .994   .885   .095
                          none+fit          .930   .995    .707 [.701, .712]   .645   1.000  .989   .134
                          batch+penalty(1)  .963   .944    .701 [.595, .806]   .655   .981   .926   .135
    CIFAR-10, ResNet-8    batch             .463   .978    .938 [.927, .948]   .928   .994   .989   .314
                          none              .471   .548    .675 [.657, .694]   .662   .783   .770   .041
    CIFAR-100, ResNet-8   batch             .134   .342    .854 [.832, .876]   .846   .921   .909   .146
                          group             .097   .171    .733 [.716, .750]   .726   .805   .776   .051
    CIFAR-10, DenseNet-22 batch             .438   .571    .722 [.707, .738]   .708   .829   .833   .059
                          group             .345   .379    .598 [.591, .605]   .592   .659   .636   .023

    BatchNorm's effect, points of AUC  all                clean              mislabeled         ood
    digits, equal epochs               10.1 [7.9, 12.3]    9.1 [6.4, 11.7]    5.8 [4.6, 6.9]    16.6 [13.1, 20.1]
    digits, equal fit                   5.6 [4.0, 7.3]     6.9 [4.9, 8.8]     0.1 [0.0, 0.2]    -1.0 [-2.4, 0.3]
    Fashion-MNIST, equal epochs        20.4 [19.3, 21.5]  21.0 [19.9, 22.2]  11.7 [9.3, 14.0]    9.6 [7.6, 11.6]
    Fashion-MNIST, equal fit            6.9 [6.1, 7.7]     8.2 [7.2, 9.1]     0.0 [0.0, 0.1]     0.9 [0.1, 1.6]
    MNIST, equal epochs                12.7 [11.6, 13.9]  13.1 [11.7, 14.6]   0.6 [0.4, 0.8]    11.4 [9.5, 13.2]
    MNIST, equal fit                    8.9 [8.1, 9.6]    10.5 [9.7, 11.3]    0.0 [0.0, 0.1]     1.0 [0.4, 1.5]
    CIFAR-10, equal epochs             26.2 [24.1, 28.4]  26.6 [24.1, 29.1]  21.1 [18.4, 23.7]  21.9 [18.4, 25.5]
    CIFAR-100, equal epochs            12.1 [9.3, 14.9]   12.0 [9.2, 14.9]   11.6 [7.6, 15.6]   13.4 [7.6, 19.2]
    DenseNet-22, equal epochs          12.4 [10.8, 14.0]  11.6 [10.0, 13.2]  17.1 [8.0, 26.2]   19.7 [15.3, 24.0]

Run: python benchmarks/findings.py digits fashion-mnist --out findings [--data FOLDER] [--workers 2] [--n 16]
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mia_audit.studies.audits import Difference, audit_arms
from mia_audit.studies.setup import StudyPool, StudySetup, study_pool
from shadow_pool import seeds
from shadow_pool.data.sources import open_source
from shadow_pool.spec import DataSpec
from shadow_pool.train.schedule import Progress


@dataclass(frozen=True)
class Task:
    """``records`` and ``population`` are how many are drawn from the source (None: all, a holdout of .15)."""

    source: str
    arch: str
    n: int
    epochs: int
    lr: float
    ood_from: str | None = None
    records: int | None = None
    population: int = 1000
    arms: tuple[str, ...] = ("batch", "none", "none+fit", "batch+penalty(1)")


TASKS = {
    "digits": Task("digits", "lenet", 16, 20, 0.05),
    "fashion-mnist": Task("fashion-mnist", "lenet", 16, 20, 0.02, "mnist", 3000),
    "mnist": Task("mnist", "lenet", 16, 20, 0.02, "fashion-mnist", 3000),
    "cifar10": Task("cifar10", "resnet8", 12, 30, 0.05, "cifar100", 4000, arms=("batch", "none")),
    "cifar100": Task("cifar100", "resnet8", 8, 30, 0.05, "cifar10", 4000, arms=("batch", "group")),
    "cifar10-densenet": Task("cifar10", "densenet22", 8, 15, 0.05, "cifar100", 2000, arms=("batch", "group")),
}


def npz_or_name(name: str, folder: Path | None) -> str:
    path = None if folder is None else folder / f"{name}.npz"
    return str(path) if path is not None and path.exists() else name


def drawn(task: Task, name: str, out: Path, folder: Path | None, root: Path | None) -> dict[str, Any]:
    """The spec's data table; a part of a larger source is drawn once and written to ``out``."""
    outliers = {"mislabeled": 0.05, "ood": 0.05}
    if task.ood_from is not None:
        outliers["ood_from"] = npz_or_name(task.ood_from, folder)
    if task.records is None:
        return {"source": task.source, **outliers}
    path = out / f"{name}.npz"
    if not path.exists():
        source = open_source(DataSpec(source=npz_or_name(task.source, folder)), data_root=root, download=False)
        total = task.records + task.population
        chosen = seeds.stream(0, "findings").permutation(len(source.label))[:total]
        out.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, x=source.x[chosen], y=source.label[chosen])
    return {"source": str(path), "holdout": task.population / (task.records + task.population), **outliers}


def trained_pool(name: str, arguments: argparse.Namespace) -> StudyPool:
    task = TASKS[name]
    setup = StudySetup(
        arguments.out / name, data_root=arguments.data_root, workers=arguments.workers, on_progress=Reporter()
    )
    values = {
        "n": arguments.n or task.n,
        "arch": task.arch,
        "arms": list(task.arms),
        "data": drawn(task, name, arguments.out, arguments.data, arguments.data_root),
        "recipe": {"epochs": task.epochs, "lr": task.lr},
    }
    return study_pool(setup, values, "pool")


class Reporter:
    """A line each minute."""

    def __init__(self) -> None:
        self.started = self.last = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if now - self.last >= 60 or progress.done == progress.total:
            self.last = now
            print(f"  {progress.done}/{progress.total} models, {now - self.started:.0f} s", flush=True)


def table(name: str, trained: StudyPool) -> list[str]:
    """Markdown rows of one task: one per arm, then one per comparison."""
    found = audit_arms(trained, trained.pool.spec.arms)
    lines = []
    for arm, one in found.items():
        infos = [info for info in trained.pool.scan(arm)[0].values() if info.status == "trained"]
        test = np.mean([info.population_accuracy for info in infos])
        member = np.mean([info.member_accuracy for info in infos])
        low, high = one.interval()
        all_auc = f"{one.estimate[0, 0]:.3f} [{low[0, 0]:.3f}, {high[0, 0]:.3f}]"
        rest = " | ".join(f"{one.estimate[i, 0]:.3f}" for i in range(1, len(one.subsets)))
        tpr = one.estimate[0, one.metrics.index("tpr@0.01")]
        lines.append(f"| {name} | {arm} | {test:.3f} | {member:.3f} | {all_auc} | {rest} | {tpr:.3f} |")
    for matched, arm in trained.references().items():
        gap = Difference.between(found["batch"], found[arm], f"batch - {arm}")
        for i, subset in enumerate(found[arm].subsets):
            ci = gap.interval(i, 0)
            span = "" if ci is None else f" [{100 * ci[0]:+.1f}, {100 * ci[1]:+.1f}]"
            points = 100 * gap.estimate[i, 0]
            lines.append(f"  effect on AUC at equal {matched} ({gap.name}), {subset}: {points:+.1f} points{span}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+", choices=TASKS)
    parser.add_argument("--out", type=Path, default=Path("findings"))
    parser.add_argument("--data", type=Path, help="folder with NAME.npz")
    parser.add_argument("--data-root", type=Path, help="torchvision's folder")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--n", type=int, help="models an arm, in place of the task's")
    arguments = parser.parse_args()
    head = "| task | arm | test acc. | member acc. | AUC all | clean | mislabeled | ood | TPR at 1 % |"
    lines = [head, "|" + "---|" * 9]
    for name in arguments.tasks:
        print(f"{name} ...", flush=True)
        lines += table(name, trained_pool(name, arguments))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
