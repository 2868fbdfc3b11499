"""The curve every study draws: a mean over models with the interval of the mean."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from mia_audit.studies.judge import pair_mean


def draw_course(axes: Axes, table: pd.DataFrame, label: str, *, marker: str | None = None) -> np.ndarray:
    """Draw the mean over models with its 95 % interval (over pairs) as a band.

    Args:
        table: [models, epochs], models in whole pairs; the columns are the epochs.

    Returns:
        The means [epochs].
    """
    summary = [pair_mean(table[epoch].to_numpy()) for epoch in table.columns]
    mean = np.array([value for value, _ in summary])
    low, high = np.array([ci or (np.nan, np.nan) for _, ci in summary]).T
    (line,) = axes.plot(table.columns, mean, marker=marker, markersize=3, label=label)
    axes.fill_between(table.columns, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    return mean
