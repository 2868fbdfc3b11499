"""gamma/sigma of a pool's BatchNorm models over training: per layer and channel, the share above one, amplification."""

from __future__ import annotations

import numpy as np
import pandas as pd

from mia_audit.batchnorm.ratios import pool_ratios
from mia_audit.evidence import load_evidence
from mia_audit.report.figures import MUTED, canvas
from mia_audit.studies.draw import draw_course, legend_above
from mia_audit.studies.judge import SHARE, pair_mean, verdict_above
from mia_audit.studies.result import StudyFigure, StudyRow
from mia_audit.studies.setup import StudyPool

METRICS = {
    "ratio_mean": "mean gamma/sigma",
    "ratio_median": "median gamma/sigma",
    "ratio_max": "largest gamma/sigma",
    "fraction_above_one": "share of channels above one",
}
ABOVE_ONE = "in a real network a layer's mean gamma/sigma ends above one: it amplifies"
RISES = "in a real network a layer's gamma/sigma rises during training"
COURSE = "gamma/sigma of real networks over training"


def network_rows(trained: StudyPool) -> list[StudyRow]:
    """Per layer: :data:`METRICS` over epochs, amplification over the channels of all models, and two verdicts."""
    history = _history(trained)
    last = int(history["epoch"].max())
    shown = sorted({int(epoch) for epoch in np.geomspace(1, last, 6).round()})
    rows = []
    for layer in history["layer"].unique():
        values = {metric: _table(history, layer, metric) for metric in METRICS}
        for metric, name in METRICS.items():
            for epoch in (epoch for epoch in shown if epoch in values[metric]):
                within = SHARE if metric == "fraction_above_one" else (0.0, np.inf)
                mean, ci = pair_mean(values[metric][epoch].to_numpy(), within=within)
                rows.append(StudyRow(COURSE, "batch", layer, name, epoch, mean, ci))
        mean, ci = pair_mean(values["ratio_mean"][last].to_numpy())
        rows.append(StudyRow(ABOVE_ONE, "batch", layer, METRICS["ratio_mean"], last, mean, ci, verdict_above(ci, 1)))
        rise = values["ratio_mean"][last] - values["ratio_mean"].iloc[:, 0]
        mean, ci = pair_mean(rise.to_numpy())
        metric = f"mean gamma/sigma, minus that of epoch {values['ratio_mean'].columns[0]}"
        rows.append(StudyRow(RISES, "batch", layer, metric, last, mean, ci, verdict_above(ci, 0)))
    for found in pool_ratios(trained.pool, load_evidence(trained.pool, "batch")):
        metric = "median amplification of a channel"
        rows.append(StudyRow(COURSE, "batch", found.layer, metric, last, found.amplification_median))
    return rows


def network_figures(trained: StudyPool) -> list[StudyFigure]:
    """Mean gamma/sigma and the share of channels above one, by layer over epochs."""
    history = _history(trained)
    figures = []
    for metric in ("ratio_mean", "fraction_above_one"):
        figure, axes = canvas()
        for layer in history["layer"].unique():
            draw_course(axes, _table(history, layer, metric), layer, share=metric == "fraction_above_one")
        if metric == "ratio_mean":
            axes.axhline(1, color=MUTED, linewidth=1)
        axes.set(xlabel="epoch", ylabel=METRICS[metric])
        legend_above(axes, columns=4)
        figures.append(
            StudyFigure(
                f"Real networks: {METRICS[metric]}",
                f"{METRICS[metric].capitalize()} of each BatchNorm layer over training, mean over models with its 95 % "
                "interval (over pairs). Above one a layer amplifies margin steps.",
                figure,
            )
        )
    return figures


def _history(trained: StudyPool) -> pd.DataFrame:
    parts = [trained.pool.history("batch", int(i)).assign(index=int(i)) for i in trained.models("batch")]
    history = pd.concat(parts, ignore_index=True)
    return history[history["layer"].notna()]


def _table(history: pd.DataFrame, layer: str, metric: str) -> pd.DataFrame:
    """[models, epochs] of one metric of one layer."""
    chosen = history[(history["layer"] == layer) & (history["metric"] == metric)]
    return chosen.pivot(index="index", columns="epoch", values="value")
