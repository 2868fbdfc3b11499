"""Study: forced memorization. Are outliers among the members fitted faster and further with BatchNorm?

First lens of arXiv 2605.24420: mislabeled and out-of-distribution records can only be fitted by memorizing them, so
a model's accuracy on those it trained on is what it memorized of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from mia_audit.report.figures import canvas
from mia_audit.studies.draw import draw_course
from mia_audit.studies.judge import SHARE, pair_mean, verdict_above
from mia_audit.studies.result import StudyFigure, StudyResult, StudyRow
from mia_audit.studies.setup import StudyPool, StudySetup, evaluation_epochs, finish, study_pool

DEFAULTS = {
    "n": 12,
    "arms": ["batch", "none"],
    "data": {"mislabeled": 0.05, "ood": 0.05},
    "recipe": {"epochs": 30},
}
EARLY = 1 / 3
"""Speed is judged at this share of the epochs: late enough that clean records are learned, before rates fall."""
LEVELS = (0.5, 0.9)
FASTER = "with BatchNorm outliers are fitted faster"
FURTHER = "with BatchNorm outliers are fitted further"
MORE_THAN_CLEAN = "BatchNorm adds more to the fit of outliers than of clean records"
COURSE = "how far the members of a subset are fitted"


def memorization(setup: StudySetup) -> StudyResult:
    """Accuracy and loss of the members of each subset at every evaluated epoch, by arm; epochs until it is fitted.

    Speed is judged by accuracy at :data:`EARLY` of the epochs, reach by accuracy at the last, as the difference of
    paired models with and without BatchNorm (interval over pairs). Raises :class:`UserError` where no arm without
    BatchNorm trains.
    """
    values = setup.values(DEFAULTS, compares=True, follows=True)
    epochs = values["recipe"]["epochs"]
    early = max(1, round(EARLY * epochs))
    values["recipe"] |= {"evaluate_epochs": sorted({*evaluation_epochs(epochs), early})}
    trained = study_pool(setup, values, "memorization-pool")
    reference = trained.references()["epochs"]
    outliers = trained.outliers()
    courses = {arm: _course(trained, arm) for arm in trained.arms()}
    rows = [
        row
        for arm, course in courses.items()
        for subset in ("clean", *outliers)
        for row in _arm_rows(course, arm, subset)
    ]
    judged = {FASTER: early, FURTHER: epochs}
    rows += _difference_rows(trained.models("batch", reference), courses, reference, outliers, judged)
    figures = [_figure(courses, subset, metric) for subset in (*outliers, "clean") for metric in ("accuracy", "loss")]
    settings = {"judged": {"faster, at epoch": early, "further, at epoch": epochs, "reference arm": reference}}
    return finish("memorization", rows, figures, [trained], settings)


@dataclass(frozen=True)
class Course:
    """The members of an arm's usable models over training.

    Attributes:
        models: int64 [M], their indices, in whole pairs.
        table: metric (``loss`` or ``accuracy``), subset, index, epoch, value. A model whose half holds none of a
            subset has no rows of it.
        last: epoch at which each model ended, by index. Those of a ``+fit`` arm differ.
    """

    models: np.ndarray
    table: pd.DataFrame
    last: pd.Series

    @property
    def epochs(self) -> list[int]:
        """The evaluated epochs that all models reached."""
        reached = self.table.groupby("epoch")["index"].nunique()
        return [int(epoch) for epoch in reached.index[reached == len(self.models)]]

    @property
    def end(self) -> int | None:
        """The epoch at which all models ended; None where they ended at different ones."""
        return int(self.last.iloc[0]) if self.last.nunique() == 1 else None

    def values(self, metric: str, subset: str) -> pd.DataFrame:
        """[models, evaluated epochs]; NaN where a model has no value."""
        chosen = self.table[(self.table["metric"] == metric) & (self.table["subset"] == subset)]
        return chosen.pivot(index="index", columns="epoch", values="value").reindex(self.models)

    def at(self, metric: str, subset: str, epoch: int) -> np.ndarray:
        """Values at an epoch, [M]."""
        return self.values(metric, subset).reindex(columns=[epoch])[epoch].to_numpy()

    def at_end(self, metric: str, subset: str) -> np.ndarray:
        """Values at each model's last epoch, [M]."""
        values = self.table[(self.table["metric"] == metric) & (self.table["subset"] == subset)]
        ends = values[values["epoch"] == values["index"].map(self.last)]
        return ends.set_index("index")["value"].reindex(self.models).to_numpy()


def _course(trained: StudyPool, arm: str) -> Course:
    models = trained.models(arm)
    parts = [trained.pool.history(arm, int(index)).assign(index=int(index)) for index in models]
    history = pd.concat(parts, ignore_index=True)
    table = history[history["member"].eq(True) & history["metric"].isin(("loss", "accuracy"))]
    return Course(models, table, table.groupby("index")["epoch"].max())


def _arm_rows(course: Course, arm: str, subset: str) -> list[StudyRow]:
    """Accuracy and loss at every epoch that all models reached, and at their ends; epochs to fit."""
    rows = []
    for metric, within in (("accuracy", SHARE), ("loss", (0.0, np.inf))):
        for epoch in course.epochs:
            mean, ci = pair_mean(course.at(metric, subset, epoch), within=within)
            rows.append(StudyRow(COURSE, arm, subset, metric, epoch, mean, ci))
        if course.end is None:
            mean, ci = pair_mean(course.at_end(metric, subset), within=within)
            rows.append(StudyRow(COURSE, arm, subset, f"{metric} where each model ends", None, mean, ci))
    return rows + _fit_rows(course, arm, subset)


def _fit_rows(course: Course, arm: str, subset: str) -> list[StudyRow]:
    """When models first fit a share of the subset: the median epoch, never counting as infinite, and how many do.

    The median of an even number is the mean of the middle two: it is infinite where half of the models never do. After
    the recipe's epochs a ``+fit`` model is evaluated at its end alone, so that it may have fitted them sooner.
    """
    accuracy = course.values("accuracy", subset).dropna(how="all")
    rows = []
    for level in LEVELS if len(accuracy) else ():
        reached = (accuracy >= level).to_numpy()
        first = np.where(reached.any(axis=1), accuracy.columns.to_numpy(float)[reached.argmax(axis=1)], np.inf)
        median = float(np.median(first))
        name = f"{100 * level:g} %"
        metric = f"epochs to fit {name}, median of models ({'' if course.end else 'at most; '}empty: never)"
        rows.append(StudyRow(COURSE, arm, subset, metric, None, median if np.isfinite(median) else None))
        share = float(np.isfinite(first).mean())
        rows.append(StudyRow(COURSE, arm, subset, f"share of models that fit {name}", None, share))
    return rows


def _difference_rows(
    models: np.ndarray, courses: dict[str, Course], reference: str, outliers: tuple[str, ...], judged: dict[str, int]
) -> list[StudyRow]:
    """``judged``: claim -> epoch. Both arms have it: neither is a ``+fit`` arm."""
    name = f"batch - {reference}"

    def gain(subset: str, epoch: int) -> np.ndarray:
        ours, theirs = (
            pd.Series(courses[arm].at("accuracy", subset, epoch), courses[arm].models)[models]
            for arm in ("batch", reference)
        )
        return (ours - theirs).to_numpy()

    rows = []
    for claim, epoch in judged.items():
        clean = gain("clean", epoch)
        mean, ci = pair_mean(clean)
        rows.append(StudyRow(COURSE, name, "clean", "accuracy", epoch, mean, ci))
        for subset in outliers:
            mean, ci = pair_mean(gain(subset, epoch))
            rows.append(StudyRow(claim, name, subset, "accuracy", epoch, mean, ci, verdict_above(ci, 0)))
            mean, ci = pair_mean(gain(subset, epoch) - clean)
            rows.append(StudyRow(MORE_THAN_CLEAN, name, subset, "accuracy", epoch, mean, ci, verdict_above(ci, 0)))
    return rows


def _figure(courses: dict[str, Course], subset: str, metric: str) -> StudyFigure:
    figure, axes = canvas()
    ends = []
    for arm, course in courses.items():
        draw_course(axes, course.values(metric, subset)[course.epochs], arm, share=metric == "accuracy")
        end, _ = pair_mean(course.at_end(metric, subset))
        ends.append(f"{arm} ends at {end:.2f}{'' if course.end else _ends_apart(course)}")
    axes.set(xlabel="epoch", ylabel=f"{metric} on {subset} members")
    axes.legend()
    return StudyFigure(
        f"{subset} members: {metric} over training",
        f"Mean {metric} over models with the 95 % interval of the mean (over pairs), by arm: {', '.join(ends)}.",
        figure,
    )


def _ends_apart(course: Course) -> str:
    shown = f"drawn to {course.epochs[-1]}, which all reach" if course.epochs else "not drawn: they share none"
    return f" (its models stop at epochs {course.last.min()} to {course.last.max()}; {shown})"
