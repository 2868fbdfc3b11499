"""What the studies' figures share: the mean over models with its interval, palette, logarithmic axes, legends."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from mia_audit.report.figures import BLUE, GREEN, INK, MUTED, ORANGE, PURPLE
from mia_audit.studies.judge import SHARE, pair_mean

PALETTE = (BLUE, ORANGE, GREEN, PURPLE, INK, MUTED)


def draw_course(axes: Axes, table: pd.DataFrame, label: str, *, marker: str | None = None, share: bool = False) -> None:
    """Draw the mean over models with its 95 % interval (over pairs) as a band.

    Args:
        table: [models, epochs], models in whole pairs; the columns are the epochs.
        share: the values are shares; the band stays between 0 and 1.
    """
    within = SHARE if share else (-np.inf, np.inf)
    summary = [pair_mean(table[epoch].to_numpy(), within=within) for epoch in table.columns]
    mean = np.array([value for value, _ in summary])
    low, high = np.array([ci or (np.nan, np.nan) for _, ci in summary]).reshape(-1, 2).T
    (line,) = axes.plot(table.columns, mean, marker=marker, markersize=3, label=label)
    axes.fill_between(table.columns, low, high, color=line.get_color(), alpha=0.2, linewidth=0)


def log_scale(axes: Axes, names: str) -> None:
    """Logarithmic axes (``names``: "x", "y" or "xy") with plain numbers at 1, 2 and 5 of each decade."""
    for name in names:
        axes.set(**{f"{name}scale": "log"})
        axis = {"x": axes.xaxis, "y": axes.yaxis}[name]
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def legend_above(axes: Axes, *, columns: int) -> None:
    """A legend over the plot, for more series than fit inside it; each label once."""
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    axes.figure.legend(once.values(), once.keys(), loc="outside upper center", ncols=columns)
