"""The README's table of findings: what BatchNorm does to leakage, and what takes it away, on real data.

For each task a paired pool is trained (or resumed) and audited by LiRA, every model in turn the target: test and
member accuracy, AUC by subset, TPR at 1 % FPR, and BatchNorm's effect on AUC at equal epochs and at equal fit, with
95 % intervals (delete-a-pair jackknife).

Tasks read named data sets (--data-root), or NAME.npz with x and y from --data FOLDER where it is there.

Measured 2026-11-30, one run on 2 cores that others used too. 5 % of the records mislabeled, 5 % ood. Digits: 1,527
records, lr .05; MNIST and Fashion-MNIST: 3,000 each, lr .02, all 16 models an arm and 20 epochs; CIFAR-10: 4,000, 12
models, 30 epochs, lr .05, bf16; CIFAR-100: 4,000, 8 models, 30 epochs; DenseNet-22: 2,000, 8 models, 15 epochs, the
last two of a size that half an hour of two cores allows.

    data, network         arm               test   member  AUC all             clean  misl.  ood    TPR at 1 %
    digits, LeNet         batch             .947   .984    .723 [.717, .728]   .669   1.000  .964   .111
                          none              .958   .917    .627 [.611, .644]   .586   .946   .798   .057
                          none+fit          .939   .983    .673 [.655, .691]   .609   .998   .979   .100
                          batch+penalty(1)  .972   .930    .684 [.670, .698]   .643   .972   .869   .083
    Fashion-MNIST, LeNet  batch             .807   .997    .837 [.832, .842]   .801   1.000  .998   .243
                          none              .797   .809    .635 [.621, .649]   .593   .883   .902   .066
                          none+fit          .798   .992    .771 [.765, .778]   .722   .999   .988   .187
                          batch+penalty(1)  .813   .864    .645 [.594, .696]   .603   .898   .926   .069
    MNIST, LeNet          batch             .942   .998    .794 [.787, .801]   .748   1.000  .998   .196
                          none              .941   .935    .671 [.664, .678]   .621   .994   .884   .098
                          none+fit          .930   .996    .702 [.695, .709]   .639   1.000  .990   .129
                          batch+penalty(1)  .963   .944    .709 [.632, .787]   .664   .986   .935   .130
    CIFAR-10, ResNet-8    batch             .463   .978    .938 [.927, .948]   .928   .994   .989   .314
                          none              .471   .548    .675 [.657, .694]   .662   .783   .770   .041
    CIFAR-100, ResNet-8   batch             .134   .342    .854 [.832, .876]   .846   .921   .909   .146
                          group             .097   .171    .733 [.716, .750]   .726   .805   .776   .051
    CIFAR-10, DenseNet-22 batch             .438   .571    .722 [.707, .738]   .708   .829   .833   .059
                          group             .345   .379    .598 [.591, .605]   .592   .659   .636   .023

    BatchNorm's effect, points of AUC  all                clean              mislabeled         ood
    digits, equal epochs                9.5 [7.6, 11.5]    8.3 [5.9, 10.7]    5.4 [4.0, 6.9]    16.6 [14.0, 19.3]
    digits, equal fit                   5.0 [2.9, 7.1]     6.0 [3.6, 8.5]     0.2 [-.1, .4]     -1.5 [-2.7, -.3]
    Fashion-MNIST, equal epochs        20.2 [18.6, 21.8]  20.8 [19.1, 22.5]  11.7 [9.5, 13.9]    9.6 [7.4, 11.7]
    Fashion-MNIST, equal fit            6.6 [5.8, 7.3]     7.8 [7.0, 8.7]     0.1 [0, .2]        1.0 [.5, 1.5]
    MNIST, equal epochs                12.3 [11.5, 13.1]  12.7 [11.7, 13.7]   0.5 [.3, .8]      11.4 [9.7, 13.1]
    MNIST, equal fit                    9.2 [8.4, 10.0]   10.9 [9.9, 11.9]    0.0 [0, 0]         0.8 [.3, 1.3]
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
