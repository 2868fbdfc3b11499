"""The README's table of findings: what BatchNorm does to leakage, and what takes it away, on real data.

For each task a paired pool is trained (or resumed) and audited by LiRA, every model in turn the target: test and
member accuracy, AUC by subset, TPR at 1 % FPR, and BatchNorm's effect on AUC at equal epochs and at equal fit, with
95 % intervals (delete-a-pair jackknife).

Tasks read named data sets (--data-root), or NAME.npz with x and y from --data FOLDER where it is there.

Measured 2026-11-30, one run, 2 cores that others used too (410 s to train); 16 models an arm, 20 epochs, lr .05, 1,527
digits of which 5 % mislabeled and 5 % patches of photographs:

    digits, LeNet       test   member  AUC all [95 %]        clean  mislabeled  ood    TPR at 1 %
    batch               .944   .983    .726 [.718, .735]     .675   1.000       .963   .120
    none                .961   .918    .626 [.608, .644]     .585    .942       .798   .055
    none+fit            .938   .983    .671 [.657, .685]     .607    .998       .975   .094
    batch+penalty(1)    .968   .931    .687 [.671, .703]     .646    .970       .879   .087

    BatchNorm's effect, points of AUC   all                clean              mislabeled         ood
    at equal epochs                     +10.0 [7.8, 12.2]  +9.0 [6.3, 11.7]   +5.7 [4.5, 6.9]    +16.5 [13.1, 20.0]
    at equal fit                         +5.5 [4.1, 7.0]   +6.8 [4.9, 8.6]    +0.1 [-.1, .4]      -1.2 [-2.4, .1]

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
