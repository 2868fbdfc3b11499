"""The report's figures: functions that draw on a given axes, and how a figure becomes SVG text."""

from __future__ import annotations

import io

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure


def canvas(width: float = 6.4, height: float = 4.0) -> tuple[Figure, Axes]:
    """An empty figure of ``width`` x ``height`` inches and its axes, apart from pyplot's global state."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def to_svg(figure: Figure) -> str:
    """The figure as an ``<svg>`` element; equal figures give equal text."""
    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "mia-audit", "svg.fonttype": "none"}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    return text[text.index("<svg") :]
