"""Study: what each remedy does to leakage and what it costs in test accuracy.

Remedies: the gamma/sigma penalty (:mod:`shadow_pool.train.penalty`) at several strengths, GroupNorm, no normalization,
and DP-SGD with GroupNorm (Abadi et al. 2016, arXiv 1607.00133; its epsilon from Opacus's accountant).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mia_audit.metrics import Jackknife
from mia_audit.report.figures import canvas
from mia_audit.report.words import interval, signed
from mia_audit.results import ends
from mia_audit.studies.audits import ATTACK, Difference, audit_arms, level_rows, unresolved_warnings
from mia_audit.studies.draw import PALETTE, legend_above
from mia_audit.studies.judge import HOLDS, SHARE, pair_mean, verdict_above
from mia_audit.studies.result import StudyFigure, StudyResult, StudyRow
from mia_audit.studies.setup import StudyPool, StudySetup, finish, must_have_population, study_pool
from shadow_pool.errors import UserError
from shadow_pool.train.private import DELTA

DEFAULTS = {
    "n": 8,
    "arms": [
        "batch",
        *(f"batch+penalty({strength:g})" for strength in (0.1, 0.3, 1, 3)),
        "group",
        "none",
        "group+dp(8)",
    ],
    "data": {"mislabeled": 0.05, "ood": 0.05},
    "recipe": {"epochs": 20, "lr": 0.05},
}
ALLOWED_COST = 0.01
"""Test accuracy that a recommended arm may cost, at most: one point."""
LESS = "the remedy leaks less than batch"
CHEAP = "the remedy costs at most one point of test accuracy"
ACCURACY = "test accuracy"
RATIO = "gamma/sigma at the end of training"
EPSILON = f"epsilon spent at delta {DELTA:g} (accountant: Opacus)"


def mitigation(setup: StudySetup) -> StudyResult:
    """Test accuracy against AUC and TPR by subset for each arm, as differences to ``batch``; a recommendation.

    AUC intervals by the delete-a-pair jackknife, accuracy by pairs. Raises :class:`UserError` where the arm
    ``batch`` does not train.
    """
    trained = study_pool(setup, setup.values(DEFAULTS), "mitigation-pool", check=must_have_population)
    found = audit_arms(trained, trained.pool.spec.arms, query_mode=setup.query_mode)
    if "batch" not in found:
        raise UserError(
            f"the models of the arm batch in {trained.pool.path} must train, found them at chance or diverged; train "
            "longer (--epochs) or lower --lr"
        )
    accuracy = _accuracies(trained, list(found))
    rows = [row for arm in found for row in _arm_rows(trained, found[arm], accuracy[arm], arm)]
    rows += [row for arm in found if arm != "batch" for row in _difference_rows(found, accuracy, arm)]
    figures = [_figure(found, accuracy, subset) for subset in found["batch"].subsets]
    settings = {
        "attack": ATTACK,
        "query mode": setup.query_mode,
        "test accuracy allowed to be lost": ALLOWED_COST,
        "arms that did not train": [arm for arm in trained.pool.spec.arms if arm not in found],
    }
    conclusion = _recommendation(found, accuracy)
    warnings = unresolved_warnings(found["batch"])
    return finish("mitigation", rows, figures, [trained], settings, conclusion=conclusion, warnings=warnings)


def _accuracies(trained: StudyPool, arms: list[str]) -> dict[str, np.ndarray]:
    """Test (population) accuracy of each of the models that all arms have, [M] by arm."""
    common = trained.models(*arms)
    found = {}
    for arm in arms:
        infos = trained.pool.scan(arm)[0]
        values = [infos[int(index)].population_accuracy for index in common]
        found[arm] = np.array([np.nan if value is None else value for value in values])
    return found


def _arm_rows(trained: StudyPool, found: Jackknife, accuracy: np.ndarray, arm: str) -> list[StudyRow]:
    mean, ci = pair_mean(accuracy, within=SHARE)
    rows = [StudyRow(ACCURACY, arm, "population", "accuracy", None, mean, ci), *level_rows(found, arm, None)]
    models = trained.models(arm)
    infos = trained.pool.scan(arm)[0]
    spent = [epsilon for i in models if (epsilon := infos[int(i)].epsilon) is not None]
    if spent:
        rows.append(StudyRow(EPSILON, arm, "all", "epsilon", None, max(spent)))
    ratios = [_last_ratio(trained, arm, int(index)) for index in models]
    if not np.isnan(ratios).all():
        mean, ci = pair_mean(np.array(ratios))
        rows.append(StudyRow(RATIO, arm, "all", "mean over layers", None, mean, ci))
    return rows


def _last_ratio(trained: StudyPool, arm: str, index: int) -> float:
    history = trained.pool.history(arm, index)
    chosen = history[(history["metric"] == "ratio_mean") & (history["epoch"] == history["epoch"].max())]
    return float(chosen["value"].mean())


def _difference_rows(found: Mapping[str, Jackknife], accuracy: Mapping[str, np.ndarray], arm: str) -> list[StudyRow]:
    name = f"{arm} - batch"
    mean, ci = pair_mean(accuracy[arm] - accuracy["batch"])
    verdict = verdict_above(ci, -ALLOWED_COST)
    rows = [StudyRow(CHEAP, name, "population", "accuracy", None, mean, ci, verdict)]
    less = Difference.between(found["batch"], found[arm], f"batch - {arm}")
    for i, subset in enumerate(found[arm].subsets):
        for j, metric in enumerate(found[arm].metrics):
            ci = less.interval(i, j)
            # TPR at the lowest rates rests on few cells: it is reported, not judged.
            verdict_or_none = verdict_above(ci, 0) if metric == "auc" else None
            value = float(less.estimate[i, j])
            rows.append(StudyRow(LESS, less.name, subset, metric, None, value, ci, verdict_or_none))
    return rows


def _recommendation(found: Mapping[str, Jackknife], accuracy: Mapping[str, np.ndarray]) -> str:
    """In words: the least leaking arm (AUC, all records) whose mean test accuracy is within a point of batch's.

    Recommended where its AUC is resolved below batch's; else it is but named. The cost is told with its interval.
    """
    cell = found["batch"].subsets.index("all"), found["batch"].metrics.index("auc")
    auc = {arm: float(one.estimate[cell]) for arm, one in found.items()}
    mean = {arm: float(values.mean()) for arm, values in accuracy.items()}
    within = [arm for arm in found if mean[arm] >= mean["batch"] - ALLOWED_COST]
    best = min(within, key=lambda arm: auc[arm])
    if best == "batch":
        return "Recommended: nothing tried here leaks less than batch within one point of its test accuracy."
    gain = Difference.between(found[best], found["batch"], f"{best} - batch").interval(*cell)
    cost, cost_ci = pair_mean(accuracy[best] - accuracy["batch"])
    resolved = verdict_above(cost_ci, -ALLOWED_COST) == HOLDS
    told = (
        f"AUC {signed(auc[best] - auc['batch'])} {interval(gain, plus=True) or '(no interval)'} against batch's "
        f"{auc['batch']:.3f}, test accuracy {signed(cost)} {interval(cost_ci, plus=True) or '(no interval)'} against "
        f"{mean['batch']:.3f}; that it costs at most a point is {'' if resolved else 'not '}resolved"
    )
    if gain is None or gain[1] >= 0:
        return (
            f"Recommended: nothing, since no gain is resolved. Candidate: {best}, the least leaking arm within one "
            f"point of batch's mean test accuracy, but that it leaks less is not resolved: {told}."
        )
    return f"Recommended: {best}, the least leaking arm within one point of batch's mean test accuracy: {told}."


def _figure(found: Mapping[str, Jackknife], accuracy: Mapping[str, np.ndarray], subset: str) -> StudyFigure:
    figure, axes = canvas(height=4.0)
    told = []
    for place, (arm, one) in enumerate(found.items()):
        i, j = one.subsets.index(subset), one.metrics.index("auc")
        low, high = one.interval()
        mean, ci = pair_mean(accuracy[arm], within=SHARE)
        x, colour = one.estimate[i, j], PALETTE[place % len(PALETTE)]
        if (span := ends(low[i, j], high[i, j])) is not None:
            axes.plot(span, [mean, mean], color=colour, linewidth=1.5)
        if ci is not None:
            axes.plot([x, x], ci, color=colour, linewidth=1.5)
        axes.plot(x, mean, color=colour, marker="osD^vP*X"[place % 8], linestyle="none", label=arm)
        told.append(f"{arm} AUC {x:.2f}, accuracy {mean:.2f}")
    axes.set(xlabel=f"AUC, {subset} records", ylabel="test accuracy")
    legend_above(axes, columns=3)
    return StudyFigure(
        f"What remedies cost: {subset} records",
        "Test accuracy against what the attack finds, with 95 % intervals; up and to the left is better. "
        f"{'; '.join(told)}.",
        figure,
    )
