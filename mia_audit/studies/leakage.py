"""Study: membership inference. How much of what a pool leaks does BatchNorm cause, and is it more than fit?

Third lens of arXiv 2605.24420, which reports 3 to 5 points of AUC. Pools at several shares of outliers are audited
by LiRA (the headline attack), every model in turn the target. The arm without BatchNorm stands twice: at equal epochs,
where it has usually fitted less, and at equal fit (``+fit``: trained on to the same training loss). ``affine`` is the
control that has a gamma but no statistics.
"""

from __future__ import annotations

from collections.abc import Mapping

from mia_audit.metrics import Jackknife
from mia_audit.report.figures import MUTED, canvas
from mia_audit.studies.audits import ATTACK, Difference, audit_arms, level_rows, unresolved_warnings
from mia_audit.studies.draw import PALETTE, legend_above
from mia_audit.studies.judge import HOLDS, verdict_above, verdict_within
from mia_audit.studies.result import StudyFigure, StudyResult, StudyRow
from mia_audit.studies.setup import OUTLIERS, StudyPool, StudySetup, finish, study_pool
from shadow_pool.spec import merge

DEFAULTS = {"n": 12, "arms": ["batch", "none", "none+fit", "affine"], "recipe": {"epochs": 20, "lr": 0.05}}
SHARES = (0.0, 0.01, 0.05)
"""Shares of the records that become outliers, of each kind."""
PAPER = (0.03, 0.05)
"""The points of AUC that the paper reports."""
ADDS = "BatchNorm adds leakage"
AS_REPORTED = "BatchNorm adds 3 to 5 points of AUC"
MOSTLY_FIT = "more than half of the difference at equal epochs is fit"
CONTROL = "a scale and shift without statistics adds leakage"


def leakage(setup: StudySetup) -> StudyResult:
    """AUC and TPR by subset at each share of outliers; BatchNorm's effect at equal epochs and at equal fit.

    Signals are taken in ``setup.query_mode``. Shares the user sets take the place of :data:`SHARES`. Intervals by
    the delete-a-pair jackknife. Raises :class:`UserError` where no arm without BatchNorm trains.
    """
    rows: list[StudyRow] = []
    warnings: list[str] = []
    pools, effects = [], {}
    for share, shares in _shares(setup).items():
        values = setup.values(merge(DEFAULTS, {"data": shares}), compares=True)
        trained = study_pool(setup, values, f"leakage-pool-{share}")
        pools.append(trained)
        found = audit_arms(trained, trained.pool.spec.arms, query_mode=setup.query_mode)
        rows += [row for arm, one in found.items() for row in level_rows(one, arm, share)]
        differences = _differences(trained, found)
        rows += _effect_rows(differences, found["batch"], share)
        rows += _fit_rows(trained.references(), found, differences["epochs"], share)
        warnings += [f"outlier share {share}: {text}" for text in unresolved_warnings(found["batch"])]
        effects[share] = (differences, found)
    figures = [_figure(effects, subset) for subset in ("all", "clean", *OUTLIERS)]
    settings = {
        "outlier shares of each kind": list(effects),
        "query mode": setup.query_mode,
        "attack": ATTACK,
        "reference arms": pools[0].references(),
    }
    return finish("leakage", rows, [figure for figure in figures if figure], pools, settings, warnings=warnings)


def _shares(setup: StudySetup) -> dict[str, dict[str, float]]:
    """Name of a pool -> its shares of outliers; what the user sets stands."""
    asked = setup.changes.get("data", {})
    found = {}
    for share in SHARES:
        values = {kind: float(asked.get(kind, share)) for kind in OUTLIERS}
        found["+".join(f"{value:g}" for value in dict.fromkeys(values.values()))] = values
    return found


def _differences(trained: StudyPool, found: Mapping[str, Jackknife]) -> dict[str, Difference]:
    """``epochs`` and ``fit`` against the reference arms, ``control``: affine against none."""
    pairs = {matched: ("batch", arm) for matched, arm in trained.references().items()}
    if {"affine", "none"} <= set(found):
        pairs["control"] = ("affine", "none")
    return {
        name: Difference.between(found[ours], found[theirs], f"{ours} - {theirs}")
        for name, (ours, theirs) in pairs.items()
    }


def _effect_rows(differences: Mapping[str, Difference], found: Jackknife, at: str) -> list[StudyRow]:
    rows = []
    for i, subset in enumerate(found.subsets):
        for j, metric in enumerate(found.metrics):
            for name, difference in differences.items():
                value, ci = float(difference.estimate[i, j]), difference.interval(i, j)
                claim = CONTROL if name == "control" else f"{ADDS} at equal {name}"
                # The claims are about AUC; TPR at low rates rests on few cells: it is reported, not judged.
                verdict = verdict_above(ci, 0) if metric == "auc" else None
                rows.append(StudyRow(claim, difference.name, subset, metric, at, value, ci, verdict))
                if metric == "auc" and name != "control":
                    claim = f"{AS_REPORTED} at equal {name}"
                    verdict = verdict_within(ci, *PAPER)
                    rows.append(StudyRow(claim, difference.name, subset, metric, at, value, ci, verdict))
    return rows


def _fit_rows(arms: Mapping[str, str], found: Mapping[str, Jackknife], epochs: Difference, at: str) -> list[StudyRow]:
    """Whether most of the difference at equal epochs vanishes at equal fit, by subset, in AUC.

    Judged where that difference (``epochs``) is itself resolved above zero: else there is nothing to vanish.
    """
    if "fit" not in arms:
        return []
    name = f"(batch - {arms['epochs']}) - 2 (batch - {arms['fit']})"
    excess = Difference.mostly_fit(found["batch"], found[arms["epochs"]], found[arms["fit"]], name)
    j = found["batch"].metrics.index("auc")
    rows = []
    for i, subset in enumerate(found["batch"].subsets):
        ci = excess.interval(i, j) if verdict_above(epochs.interval(i, j), 0) == HOLDS else None
        value = float(excess.estimate[i, j])
        rows.append(StudyRow(MOSTLY_FIT, name, subset, "auc", at, value, ci, verdict_above(ci, 0)))
    return rows


def _figure(
    effects: Mapping[str, tuple[Mapping[str, Difference], Mapping[str, Jackknife]]], subset: str
) -> StudyFigure | None:
    figure, axes = canvas()
    drawn = []
    for place, (share, (differences, found)) in enumerate(effects.items()):
        first = next(iter(found.values()))
        if subset not in first.subsets:
            continue
        cell = (first.subsets.index(subset), first.metrics.index("auc"))
        drawn.append((place, share))
        for k, difference in enumerate(differences.values()):
            x, value, ci = place + 0.18 * (k - 1), difference.estimate[cell], difference.interval(*cell)
            if ci is not None:
                axes.plot([x, x], ci, color=PALETTE[k], linewidth=2)
            axes.plot(x, value, marker="os^"[k], color=PALETTE[k], linestyle="none", label=difference.name)
    if not drawn:
        return None
    axes.axhline(0, linewidth=1, color=MUTED)
    axes.set_xticks([place for place, _ in drawn], [share for _, share in drawn])
    axes.set(xlabel="outliers of each kind, share of the records", ylabel=f"difference in AUC, {subset}")
    legend_above(axes, columns=3)
    return StudyFigure(
        f"BatchNorm's effect on {subset} records",
        f"Differences in AUC between paired arms ({subset} records) with 95 % intervals, by share of outliers: at "
        "equal epochs, at equal fit, and the control without statistics.",
        figure,
    )
