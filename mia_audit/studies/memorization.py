"""Study: forced memorization. Are outliers among the members fitted faster and further with BatchNorm?

First lens of arXiv 2605.24420: mislabeled and out-of-distribution records can only be fitted by memorizing them, so
a model's accuracy on those it trained on is what it memorized of them.
"""

from __future__ import annotations

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
    """Accuracy and loss of the members of each subset per epoch and arm; epochs until 50 % and 90 % are fitted.

    Speed is judged by accuracy at :data:`EARLY` of the epochs, reach by accuracy at the last, as the difference of
    paired models with and without BatchNorm (interval over pairs). Raises :class:`UserError` where no arm without
    BatchNorm trains.
    """
    values = setup.values(DEFAULTS, compares=True)
    epochs = values["recipe"]["epochs"]
    early = max(1, round(EARLY * epochs))
    values["recipe"] |= {"evaluate_epochs": sorted({*evaluation_epochs(epochs), early})}
    trained = study_pool(setup, values, "memorization-pool")
    reference = trained.references()["epochs"]
    outliers = trained.outliers()
    courses = {arm: _course(trained, arm) for arm in trained.pool.spec.arms}
    rows = [
        row
        for arm, course in courses.items()
        for subset in ("clean", *outliers)
        for row in _arm_rows(course, arm, subset, early)
    ]
    rows += _difference_rows(trained, courses, reference, outliers, early)
    figures = [_figure(courses, subset, metric) for subset in (*outliers, "clean") for metric in ("accuracy", "loss")]
    settings = {"judged": {"faster, at epoch": early, "further, at epoch": epochs, "reference arm": reference}}
    return finish("memorization", rows, figures, [trained], settings)


def _course(trained: StudyPool, arm: str) -> pd.DataFrame:
    """Loss and accuracy of members in the arm's usable models: metric, subset, index, epoch, value, last."""
    parts = []
    for index in trained.models(arm):
        history = trained.pool.history(arm, int(index))
        members = history[history["member"].eq(True) & history["metric"].isin(("loss", "accuracy"))]
        parts.append(members.assign(index=int(index), last=members["epoch"] == members["epoch"].max()))
    return pd.concat(parts, ignore_index=True)


def _values(course: pd.DataFrame, metric: str, subset: str, epoch: int | None) -> pd.Series:
    """Value by model index at an epoch, or at each model's last one (None)."""
    when = course["last"] if epoch is None else course["epoch"] == epoch
    chosen = course[when & (course["metric"] == metric) & (course["subset"] == subset)]
    return chosen.set_index("index")["value"].sort_index()


def _arm_rows(course: pd.DataFrame, arm: str, subset: str, early: int) -> list[StudyRow]:
    last = int(course["epoch"].max())
    rows = []
    for metric in ("accuracy", "loss"):
        for at, epoch in ((early, early), (last, None)):
            within = SHARE if metric == "accuracy" else (0.0, np.inf)
            mean, ci = pair_mean(_values(course, metric, subset, epoch).to_numpy(), within=within)
            rows.append(StudyRow(COURSE, arm, subset, metric, at, mean, ci))
    accuracy = course[(course["metric"] == "accuracy") & (course["subset"] == subset)]
    models = accuracy["index"].nunique()
    for level in LEVELS:
        first = accuracy[accuracy["value"] >= level].groupby("index")["epoch"].min()
        reached = np.sort(np.concatenate([first.to_numpy(float), np.full(models - len(first), np.inf)]))
        median = float(reached[(models - 1) // 2])
        value = median if np.isfinite(median) else None
        name = f"{100 * level:g} %"
        rows.append(StudyRow(COURSE, arm, subset, f"epochs to fit {name} (empty: never)", None, value))
        rows.append(StudyRow(COURSE, arm, subset, f"share of models that fit {name}", None, len(first) / models))
    return rows


def _difference_rows(
    trained: StudyPool, courses: dict[str, pd.DataFrame], reference: str, outliers: tuple[str, ...], early: int
) -> list[StudyRow]:
    models = trained.models("batch", reference)
    name = f"batch - {reference}"

    def gain(subset: str, epoch: int | None) -> np.ndarray:
        ours, theirs = (_values(courses[arm], "accuracy", subset, epoch)[models] for arm in ("batch", reference))
        return (ours - theirs).to_numpy()

    rows = []
    for claim, at, epoch in ((FASTER, early, early), (FURTHER, trained.epochs, None)):
        clean = gain("clean", epoch)
        mean, ci = pair_mean(clean)
        rows.append(StudyRow(COURSE, name, "clean", "accuracy", at, mean, ci))
        for subset in outliers:
            mean, ci = pair_mean(gain(subset, epoch))
            rows.append(StudyRow(claim, name, subset, "accuracy", at, mean, ci, verdict_above(ci, 0)))
            mean, ci = pair_mean(gain(subset, epoch) - clean)
            rows.append(StudyRow(MORE_THAN_CLEAN, name, subset, "accuracy", at, mean, ci, verdict_above(ci, 0)))
    return rows


def _figure(courses: dict[str, pd.DataFrame], subset: str, metric: str) -> StudyFigure:
    figure, axes = canvas()
    ends = []
    for arm, course in courses.items():
        chosen = course[(course["metric"] == metric) & (course["subset"] == subset)]
        table = chosen.pivot(index="index", columns="epoch", values="value").dropna(axis=1)
        ends.append(f"{arm} ends at {draw_course(axes, table, arm, share=metric == 'accuracy')[-1]:.2f}")
    axes.set(xlabel="epoch", ylabel=f"{metric} on {subset} members")
    axes.legend()
    return StudyFigure(
        f"{subset} members: {metric} over training",
        f"Mean {metric} over models with the 95 % interval of the mean (over pairs), by arm: {', '.join(ends)}.",
        figure,
    )
