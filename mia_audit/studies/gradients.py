"""Study: per-record gradients. Does BatchNorm give outliers more influence on a training step?

Second lens of arXiv 2605.24420: the l2 norm of each member's own gradient while models train, by both definitions of
:mod:`mia_audit.gradients` (``eval``: the record alone on running statistics; ``batch``: inside a real training batch).
A fitted record's gradient vanishes, so late norms say which arm has fitted more, not which amplifies: the claim is
judged early, and between records of equal loss. The third quantity is who pushes gamma (the self-reinforcing loop).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, pairwise
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from scipy import stats

from mia_audit.evidence import load_evidence
from mia_audit.metrics import vulnerability
from mia_audit.report.figures import INK, MUTED, canvas
from mia_audit.results import Interval
from mia_audit.studies.draw import PALETTE, draw_course, legend_above, log_scale
from mia_audit.studies.gradient_units import BATCHES, CLEAN_PER_BATCH, DEFINITIONS, measure_gradients
from mia_audit.studies.judge import pair_mean, verdict_above
from mia_audit.studies.result import StudyFigure, StudyResult, StudyRow
from mia_audit.studies.setup import StudySetup, finish, study_pool

DEFAULTS = {
    "n": 12,
    "arms": ["batch", "none"],
    "data": {"mislabeled": 0.05, "ood": 0.05},
    "recipe": {"epochs": 30},
}
EARLY, MIDDLE, LATE = 1 / 10, 1 / 3, 1.0
"""Shares of the epochs: before outliers are fitted in any arm; while BatchNorm fits them; when it has.

Equation (2) of :mod:`mia_audit.batchnorm.theory` has the push on gamma change sign in between.
"""
BIN_EDGES = (0.25, 0.5, 1.0, 2.0)
"""Bins of equal loss, in units of log(classes), the loss of a guess; below a quarter a record is fitted."""
FEWEST_CELLS = 10
"""A bin counts for a model with at least this many of its cells."""
FEWEST_RECORDS = 20
"""A rank correlation is taken over at least this many records."""
LARGER = "early in training outliers' gradients are larger with BatchNorm"
AT_EQUAL_LOSS = "at equal loss outliers' gradients are larger with BatchNorm"
MORE_THAN_CLEAN = "early in training BatchNorm enlarges outliers' gradients more than clean records'"
LOOP = "per head, outliers push gamma up more than clean records"
VULNERABLE = "records with larger early gradients are more vulnerable"
COURSE = "members' gradients over training"
DASHES = ("-", "--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 3)))
"""How lines of the arms are drawn, ``batch`` first."""


def gradients(setup: StudySetup) -> StudyResult:
    """Gradient norms by subset, arm, definition and epoch; at equal loss; the push on gamma; vulnerability.

    Judged as ratios (norms) or differences (pushes) of paired models with intervals over pairs, at epochs and
    losses fixed beforehand. Raises :class:`UserError` where no arm without BatchNorm trains.
    """
    values = setup.values(DEFAULTS, compares=True, follows=True)
    trained = study_pool(setup, values, "gradients-pool")
    reference = trained.references()["epochs"]
    judged = tuple(max(1, round(share * trained.epochs)) for share in (EARLY, MIDDLE, LATE))
    early = judged[0]
    course = np.geomspace(1, trained.epochs, min(8, trained.epochs))
    epochs = sorted({*judged, *(round(epoch) for epoch in course)})
    cells = measure_gradients(setup, trained, dict.fromkeys(("batch", reference, *trained.arms())), epochs)
    both = cells[cells["arm"].isin(("batch", reference)) & cells["index"].isin(trained.models("batch", reference))]
    classes = len(trained.data.records.classes)
    subsets = ("clean", *trained.outliers())
    rows = _course_rows(cells, subsets)
    rows += _early_rows(both, reference, subsets, early)
    rows += _equal_loss_rows(both, reference, subsets, classes=classes)
    rows += _loss_rows(cells, subsets, classes=classes)
    rows += _push_rows(cells, subsets, judged)
    for arm in ("batch", reference):
        evidence = load_evidence(trained.pool, arm)
        rows += _vulnerability_rows(vulnerability(evidence.phi, evidence.membership), cells, arm, early)
    figures = [_course_figure(cells, subsets, definition) for definition in DEFINITIONS]
    figures.append(_loss_figure(cells, subsets, classes))
    figures += [_push_figure(cells, subsets)] if _layers(cells) else []
    settings = {
        "judged": {"norms, at epoch": early, "pushes, at epochs": list(judged), "reference arm": reference},
        "batch definition": f"{BATCHES} batches a model and epoch: all outliers and {CLEAN_PER_BATCH} clean records",
        "loss bins": _edges(classes).tolist(),
    }
    return finish("gradients", rows, figures, [trained], settings)


def _where(cells: pd.DataFrame, **wanted: Any) -> pd.DataFrame:
    """The cells with these values in the columns so named."""
    keep = np.ones(len(cells), bool)
    for column, value in wanted.items():
        keep &= (cells[column] == value).to_numpy()
    return cells[keep]


def _models(cells: pd.DataFrame) -> np.ndarray:
    """Indices of the models of a table, in whole pairs: each has cells of the definition ``eval``."""
    return np.unique(cells["index"])


def _by_model(cells: pd.DataFrame, column: str, models: np.ndarray) -> np.ndarray:
    """Mean of a column over the cells of each of ``models``, [M]; NaN for one that has none of them."""
    return cells.groupby("index")[column].mean().reindex(models).to_numpy()


def _course_rows(cells: pd.DataFrame, subsets: tuple[str, ...]) -> list[StudyRow]:
    rows = []
    for arm in cells["arm"].unique():
        models = _models(_where(cells, arm=arm))
        for definition in DEFINITIONS:
            part = _where(cells, arm=arm, definition=definition)
            for epoch in sorted(part["epoch"].unique()):
                for subset in subsets:
                    mean, ci = pair_mean(_by_model(_where(part, subset=subset, epoch=epoch), "norm", models))
                    rows.append(StudyRow(COURSE, arm, subset, f"{definition} norm", int(epoch), mean, ci))
    return rows


def _log_ratio(cells: pd.DataFrame, reference: str, models: np.ndarray) -> np.ndarray:
    """log of the mean norm of each ``batch`` model over that of its twin, [M]."""
    ours, theirs = (_by_model(_where(cells, arm=arm), "norm", models) for arm in ("batch", reference))
    with np.errstate(divide="ignore", invalid="ignore"):  # a norm of 0 has no ratio, and no interval
        return np.log(ours / theirs)


def _ratio_row(claim: str, arm: str, subset: str, metric: str, at: float | None, logs: np.ndarray) -> StudyRow:
    mean, ci = pair_mean(logs)
    judged = subset != "clean"
    scaled = None if ci is None else (float(np.exp(ci[0])), float(np.exp(ci[1])))
    return StudyRow(
        claim, arm, subset, metric, at, float(np.exp(mean)), scaled, verdict_above(ci, 0) if judged else None
    )


def _early_rows(cells: pd.DataFrame, reference: str, subsets: tuple[str, ...], early: int) -> list[StudyRow]:
    rows, name, models = [], f"batch / {reference}", _models(cells)
    for definition in DEFINITIONS:
        part = _where(cells, definition=definition, epoch=early)
        logs = {subset: _log_ratio(_where(part, subset=subset), reference, models) for subset in subsets}
        metric = f"{definition} norm ratio"
        for subset in subsets:
            rows.append(_ratio_row(LARGER, name, subset, metric, early, logs[subset]))
            if subset != "clean":
                gain = logs[subset] - logs["clean"]
                rows.append(_ratio_row(MORE_THAN_CLEAN, name, subset, f"{metric} over clean's", early, gain))
    return rows


def _equal_loss_rows(cells: pd.DataFrame, reference: str, subsets: tuple[str, ...], *, classes: int) -> list[StudyRow]:
    """The ratio of norms within a bin of loss, the mean of its log over the bins that both models of an index fill."""
    rows, name, models = [], f"batch / {reference}", _models(cells)
    for definition in DEFINITIONS:
        for subset in subsets:
            part = _where(cells, definition=definition, subset=subset)
            ours, theirs = (
                np.log(_norm_by_loss(_where(part, arm=arm), models, classes)) for arm in ("batch", reference)
            )
            logs = (ours - theirs).mean(axis=1).to_numpy()
            if np.isfinite(logs).any():
                rows.append(_ratio_row(AT_EQUAL_LOSS, name, subset, f"{definition} norm ratio", None, logs))
    return rows


def _loss_rows(cells: pd.DataFrame, subsets: tuple[str, ...], *, classes: int) -> list[StudyRow]:
    """Norms at a chosen fit: their mean in each bin of loss, by arm and subset, where models fill it."""
    rows = []
    for arm in cells["arm"].unique():
        models = _models(_where(cells, arm=arm))
        for definition in DEFINITIONS:
            for subset in subsets:
                part = _where(cells, arm=arm, definition=definition, subset=subset)
                table = _norm_by_loss(part, models, classes)
                for place, (low, high) in enumerate(pairwise(_edges(classes))):
                    mean, ci = pair_mean(table[place].to_numpy())
                    metric = f"{definition} norm at loss {low:.2f} to {high:.2f}"
                    if np.isfinite(mean):
                        rows.append(StudyRow(COURSE, arm, subset, metric, None, mean, ci))
    return rows


def _edges(classes: int) -> np.ndarray:
    return np.array(BIN_EDGES) * np.log(classes)


def _norm_by_loss(cells: pd.DataFrame, models: np.ndarray, classes: int) -> pd.DataFrame:
    """[models, bins of loss]: mean norm over all measured epochs; NaN in bins of too few of a model's cells."""
    place = np.searchsorted(_edges(classes), cells["loss"]) - 1
    grouped = cells.groupby(["index", place])["norm"].agg(["mean", "count"])
    filled = grouped["mean"].where(grouped["count"] >= FEWEST_CELLS).unstack()
    return filled.reindex(index=models, columns=range(len(BIN_EDGES) - 1))


def _layers(cells: pd.DataFrame) -> list[str]:
    return [name for name in cells.columns if name.startswith("push:")]


def _pushes(cells: pd.DataFrame) -> pd.DataFrame:
    """The cells of the arm ``batch`` (definition ``eval``) with their ``push``, the mean over the layers."""
    alone = _where(cells, arm="batch", definition="eval")
    return alone.assign(push=alone[_layers(cells)].mean(axis=1))


def _push_rows(cells: pd.DataFrame, subsets: tuple[str, ...], judged: tuple[int, ...]) -> list[StudyRow]:
    """Push on gamma per head and channel: over all layers with its verdict, and by layer. None without a gamma."""
    layers, alone = _layers(cells), _pushes(cells)
    models = _models(alone)
    rows = []
    for epoch in sorted(int(epoch) for epoch in alone["epoch"].unique()) if layers else ():
        parts = {subset: _where(alone, epoch=epoch, subset=subset) for subset in subsets}
        means = {subset: _by_model(part, "push", models) for subset, part in parts.items()}
        for subset in subsets:
            mean, ci = pair_mean(means[subset])
            rows.append(StudyRow(COURSE, "batch", subset, "eval push on gamma", epoch, mean, ci))
            if subset == "clean" or epoch not in judged:
                continue
            mean, ci = pair_mean(means[subset] - means["clean"])
            metric = "eval push on gamma, minus clean's"
            rows.append(StudyRow(LOOP, "batch", subset, metric, epoch, mean, ci, verdict_above(ci, 0)))
        for layer in layers if epoch in judged else ():
            for subset, part in parts.items():
                mean, ci = pair_mean(_by_model(part, layer, models))
                metric = f"eval push on gamma of {layer.removeprefix('push:')}"
                rows.append(StudyRow(COURSE, "batch", subset, metric, epoch, mean, ci))
    return rows


def _vulnerability_rows(exposed: np.ndarray, cells: pd.DataFrame, arm: str, early: int) -> list[StudyRow]:
    """Rank correlation of early norms, each the mean over the models that show it, with vulnerability [N]."""
    rows = []
    subsets = ("all", *dict.fromkeys(cells["subset"]))
    for definition in DEFINITIONS:
        chosen = _where(cells, arm=arm, definition=definition, epoch=early)
        for name in subsets:
            part = chosen if name == "all" else _where(chosen, subset=name)
            norm = part.groupby("record")["norm"].mean()
            if len(norm) < FEWEST_RECORDS:
                continue
            rho, ci = rank_correlation(norm.to_numpy(), exposed[norm.index])
            metric = f"rank correlation of {definition} norm and vulnerability"
            rows.append(StudyRow(VULNERABLE, arm, name, metric, early, rho, ci, verdict_above(ci, 0)))
    return rows


def rank_correlation(a: np.ndarray, b: np.ndarray) -> tuple[float, Interval | None]:
    """Spearman's rho of [N] and [N] and its 95 % interval (Bonett and Wright 2000); records as independent."""
    if len(a) < 4 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return float("nan"), None
    rho = float(stats.spearmanr(a, b).statistic)
    half = stats.norm.ppf(0.975) * np.sqrt((1 + rho**2 / 2) / (len(a) - 3))
    middle = np.arctanh(np.clip(rho, -1 + 1e-12, 1 - 1e-12))
    return rho, (float(np.tanh(middle - half)), float(np.tanh(middle + half)))


def _parts(cells: pd.DataFrame, subsets: tuple[str, ...]) -> Iterator[tuple[pd.DataFrame, dict[str, Any]]]:
    """The cells of each arm and subset with the line they are drawn by: subset by colour, arm by dash."""
    for arm, dash in zip(cells["arm"].unique(), cycle(DASHES)):
        for subset, colour in zip(subsets, PALETTE, strict=False):
            style = {"linestyle": dash, "color": colour, "marker": "o", "markersize": 3}
            yield _where(cells, arm=arm, subset=subset), style


def _legend(axes: Axes, cells: pd.DataFrame, subsets: tuple[str, ...]) -> None:
    """Colours and dashes each by themselves: together they would be too many to name."""
    for subset, colour in zip(subsets, PALETTE, strict=False):
        axes.plot([], [], color=colour, marker="o", markersize=3, label=subset)
    for arm, dash in zip(cells["arm"].unique(), cycle(DASHES)):
        axes.plot([], [], color=INK, linestyle=dash, label=arm)
    legend_above(axes, columns=3)


def _course_figure(cells: pd.DataFrame, subsets: tuple[str, ...], definition: str) -> StudyFigure:
    figure, axes = canvas()
    for part, style in _parts(_where(cells, definition=definition), subsets):
        mean = part.groupby("epoch")["norm"].mean()
        axes.plot(mean.index, mean, **style)
    log_scale(axes, "xy")
    axes.set(xlabel="epoch", ylabel=f"gradient norm ({definition})")
    _legend(axes, cells, subsets)
    what = {"eval": "alone, on running statistics", "batch": "inside a training batch, through its statistics"}
    return StudyFigure(
        f"Gradient norms, definition {definition}",
        f"Mean l2 norm of a member's own gradient, {what[definition]}, by subset (colour) and arm (line). "
        "A fitted record's gradient vanishes, so curves fall as subsets are fitted.",
        figure,
    )


def _loss_figure(cells: pd.DataFrame, subsets: tuple[str, ...], classes: int) -> StudyFigure:
    figure, axes = canvas()
    edges = np.geomspace(0.02, 3, 10) * np.log(classes)
    for part, style in _parts(_where(cells, definition="eval"), subsets):
        binned = part.groupby(pd.cut(part["loss"], edges, labels=False))["norm"].agg(["mean", "count"])
        shown = binned[binned["count"] >= FEWEST_CELLS]
        middle = np.sqrt(edges[1:] * edges[:-1])[shown.index.astype(int)]
        axes.plot(middle, shown["mean"], **style)
    log_scale(axes, "xy")
    axes.set(xlabel="the record's loss", ylabel="gradient norm (eval)")
    _legend(axes, cells, subsets)
    return StudyFigure(
        "Gradient norms at equal loss",
        "Mean gradient norm (eval) of members against their own loss, all measured epochs together, by subset (colour) "
        "and arm (line). Where batch lies above its reference, BatchNorm enlarges the gradient beyond what the loss "
        "explains.",
        figure,
    )


def _push_figure(cells: pd.DataFrame, subsets: tuple[str, ...]) -> StudyFigure:
    figure, axes = canvas()
    alone = _pushes(cells)
    for subset in subsets:
        table = _where(alone, subset=subset).pivot_table(index="index", columns="epoch", values="push")
        draw_course(axes, table.reindex(_models(alone)), subset, marker="o")
    axes.axhline(0, linewidth=1, color=MUTED)
    log_scale(axes, "x")
    axes.set(xlabel="epoch", ylabel="push on gamma per head")
    axes.legend()
    return StudyFigure(
        "Who pushes gamma",
        "Minus the derivative of a member's own loss by abs(gamma), mean over channels and layers (eval), by subset, "
        "with the 95 % interval of the mean. Above zero a step on the record raises gamma.",
        figure,
    )
