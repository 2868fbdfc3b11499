"""gamma/sigma of a pool's BatchNorm models over training, by layer: its distribution over channels, and amplification.

Channels are no individuals across models, which start from their own weights: a layer's channels are told by mean,
quantiles, the share above one and the median of the squared ratio (the amplification), each a mean over models with
its interval over pairs.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from mia_audit.report.figures import MUTED, canvas
from mia_audit.studies.draw import draw_course, legend_above
from mia_audit.studies.judge import SHARE, pair_mean, verdict_above
from mia_audit.studies.result import StudyFigure, StudyRow
from mia_audit.studies.setup import StudyPool

METRICS = {
    "ratio_mean": "mean gamma/sigma",
    "ratio_median": "median gamma/sigma",
    "ratio_max": "largest gamma/sigma",
    "ratio_low": "gamma/sigma, 10th percentile of channels",
    "ratio_high": "gamma/sigma, 90th percentile of channels",
    "fraction_above_one": "share of channels above one",
    "amplification_median": "amplification (gamma/sigma)^2, median of channels",
}
ABOVE_ONE = "in a real network a layer's mean gamma/sigma ends above one: it amplifies"
RISES = "in a real network a layer's gamma/sigma rises during training"
COURSE = "gamma/sigma of real networks over training"


def network_rows(trained: StudyPool) -> list[StudyRow]:
    """Per layer: :data:`METRICS` over epochs, and two verdicts on the mean."""
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
    return rows


def network_figures(trained: StudyPool) -> list[StudyFigure]:
    """By layer over epochs: the mean ratio, the channels' spread about their median, amplification, share above one.

    A pool trained before its history held a metric has no figure of it.
    """
    history = _history(trained)
    figures = [
        _course_figure(history, metric)
        for metric in ("ratio_mean", "amplification_median", "fraction_above_one")
        if metric in set(history["metric"])
    ]
    if {"ratio_low", "ratio_high"} <= set(history["metric"]):
        figures.insert(1, _channel_figure(history))
    return figures


def _course_figure(history: pd.DataFrame, metric: str) -> StudyFigure:
    figure, axes = canvas()
    for layer in history["layer"].unique():
        draw_course(axes, _table(history, layer, metric), layer, share=metric == "fraction_above_one")
    if metric != "fraction_above_one":
        axes.axhline(1, color=MUTED, linewidth=1)
    axes.set(xlabel="epoch", ylabel=METRICS[metric])
    legend_above(axes, columns=4)
    return StudyFigure(
        f"Real networks: {METRICS[metric]}",
        f"{METRICS[metric].capitalize()}, of each BatchNorm layer over training, mean over models with its 95 % "
        "interval (over pairs). Where gamma/sigma is above one, margin steps are amplified.",
        figure,
    )


def _channel_figure(history: pd.DataFrame) -> StudyFigure:
    figure, axes = canvas()
    for layer in history["layer"].unique():
        middle, low, high = (
            _table(history, layer, metric).mean() for metric in ("ratio_median", "ratio_low", "ratio_high")
        )
        (line,) = axes.plot(middle.index, middle, label=layer)
        axes.fill_between(middle.index, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.axhline(1, color=MUTED, linewidth=1)
    axes.set(xlabel="epoch", ylabel="gamma/sigma of channels")
    legend_above(axes, columns=4)
    return StudyFigure(
        "Real networks: gamma/sigma over the channels of a layer",
        "Median channel of each BatchNorm layer over training, from the 10th to the 90th percentile of channels "
        "shaded; each quantile is the mean over models.",
        figure,
    )


def _history(trained: StudyPool) -> pd.DataFrame:
    parts = [trained.pool.history("batch", int(i)).assign(index=int(i)) for i in trained.models("batch")]
    history = pd.concat(parts, ignore_index=True)
    return history[history["layer"].notna()]


def _table(history: pd.DataFrame, layer: str, metric: str) -> pd.DataFrame:
    """[models, epochs] of one metric of one layer."""
    chosen = history[(history["layer"] == layer) & (history["metric"] == metric)]
    return chosen.pivot(index="index", columns="epoch", values="value")
