"""The report's figures: functions that draw on a given axes, and how a figure becomes SVG text.

In a notebook: ``figure, axes = canvas(); plot_roc(axes, result, [("batch", "all")])``.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Sequence

import matplotlib
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from mia_audit.metrics.intervals import resolved
from mia_audit.report.words import NOTHING, headline_attack, shown, small
from mia_audit.results import AttackRow, AuditResult, EffectRow

# Each hue becomes a CSS variable in the report, so that figures follow its light and dark theme. The hues are Okabe
# and Ito's, darkened for contrast on white; they stay apart under the common kinds of colour blindness.
INK, MUTED, RULE = "#1b2127", "#5c6670", "#d5dae0"
BLUE, ORANGE, GREEN, PURPLE = "#0a63a8", "#b9540a", "#0d7a5f", "#8f4a86"
_CYCLE = (BLUE, ORANGE, GREEN, PURPLE, INK, MUTED)
_DASHES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 1)))
_SUBSET_COLOURS = {"all": INK, "clean": BLUE, "mislabeled": ORANGE, "ood": PURPLE}
_VARIABLES = {
    INK: "ink",
    "#000000": "ink",
    "#ffffff": "paper",
    MUTED: "muted",
    RULE: "rule",
    "#cccccc": "rule",  # a legend's frame
    BLUE: "blue",
    ORANGE: "orange",
    GREEN: "green",
    PURPLE: "purple",
}
_STYLE = {
    "font.size": 10,
    "text.color": INK,
    "text.parse_math": False,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.prop_cycle": cycler(color=_CYCLE),
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
}


def canvas(width: float = 4.9, height: float = 3.5) -> tuple[Figure, Axes]:
    """An empty figure of ``width`` x ``height`` inches and its axes, apart from pyplot's global state."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        return figure, figure.add_subplot()


def to_svg(figure: Figure, *, name: str, alt: str) -> str:
    """The figure as an ``<svg>`` element for a page of HTML; equal figures give equal text.

    Text stays text, the palette's colours become CSS variables (``var(--ink)``), and every id starts with ``name``
    so that several figures can stand in one page. ``alt`` is read out in place of the picture.
    """
    out = io.StringIO()
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    box = re.search(r'viewBox="[^"]*"', text)
    body = text[text.index(">", text.index("<svg")) + 1 :]
    body = re.sub(r"<(metadata|style)\b.*?</\1>\s*|<!--.*?-->\s*", "", body, flags=re.DOTALL)
    body = re.sub(r'(\bid="|xlink:href="#|url\(#)', rf"\g<1>{name}-", body)
    body = re.sub(r"font-family: [^;\"]*", "font-family: inherit", body)
    for colour, variable in _VARIABLES.items():
        body = body.replace(colour, f"var(--{variable})")
    return f'<svg role="img" aria-label="{html.escape(alt)}" {box[0] if box else ""}>{body}'


def plot_roc(axes: Axes, result: AuditResult, keys: Sequence[tuple[str, str]]) -> None:
    """ROC curves of ``keys``, pairs of (arm, subset), on log-log axes with the chance line.

    A curve's 95 % band is shaded where the result holds one and the FPR is resolved, straight between the FPRs it was
    computed at; bars are the intervals of the audit's table at its resolved FPRs, set slightly apart. Curves are
    named by subset, or by arm where they differ in arm.

    Raises:
        ValueError: the result holds no curve of a key, as a pool's read from its folder holds none.
    """
    if lacking := [key for key in keys if key not in result.curves]:
        raise ValueError(f"keys must be among the result's curves, {list(result.curves)}, got {lacking}")
    by_arm = len({arm for arm, _ in keys}) > 1
    smallest = min((fpr[fpr > 0].min() for fpr, _ in (result.curves[key] for key in keys) if (fpr > 0).any()))
    left = float(np.clip(smallest, 1e-4, 1e-2))
    grid = np.geomspace(left, 1, 400)
    axes.plot(grid, grid, color=MUTED, linewidth=1, linestyle=(0, (2, 2)), label="chance")
    for place, key in enumerate(keys):
        label, dash = key[0] if by_arm else key[1], _DASHES[place % len(_DASHES)]
        colour = _CYCLE[place % len(_CYCLE)] if by_arm else _SUBSET_COLOURS[key[1]]
        axes.plot(grid, _step(*result.curves[key], grid), color=colour, linestyle=dash, linewidth=1.8, label=label)
        _band(axes, result, key, colour, floor=left / 10)
        _interval_bars(axes, result, key, colour, 1.06 ** (place - (len(keys) - 1) / 2))
    axes.set(xscale="log", yscale="log", xlim=(left, 1), ylim=(left, 1.3))
    axes.set(xlabel="false-positive rate", ylabel="true-positive rate")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(FixedLocator([1e-4, 1e-3, 1e-2, 1e-1, 1]))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: small(value)))
    axes.legend(loc="lower right", frameon=False, fontsize=9, handlelength=3)


def _step(fpr: np.ndarray, tpr: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """The largest TPR whose FPR is at most each grid value; NaN where that is 0, which a log axis cannot show."""
    best = np.concatenate([[0.0], np.maximum.accumulate(tpr)])[np.searchsorted(fpr, grid, side="right")]
    return np.where(best > 0, best, np.nan)


def _row(result: AuditResult, key: tuple[str, str]) -> AttackRow | None:
    """The headline attack's row for (arm, subset)."""
    chosen = headline_attack(result)
    rows = (
        row for row in result.attacks if chosen is not None and (row.attack, row.arm, row.subset) == (chosen[0], *key)
    )
    return next(rows, None)


def _band(axes: Axes, result: AuditResult, key: tuple[str, str], colour: str, *, floor: float) -> None:
    row = _row(result, key)
    if row is None or key not in result.bands:
        return
    fpr, low, high = result.bands[key]
    shown_part = np.array([resolved(value, row.nonmembers) for value in fpr])
    low, high = np.maximum(low, floor)[shown_part], high[shown_part]
    axes.fill_between(fpr[shown_part], low, high, color=colour, alpha=0.15, linewidth=0)


def _interval_bars(axes: Axes, result: AuditResult, key: tuple[str, str], colour: str, shift: float) -> None:
    row = _row(result, key)
    for point in row.tpr_at_fpr if row is not None else ():
        if point.resolved and point.ci is not None:
            axes.plot([point.fpr * shift] * 2, point.ci, color=colour, linewidth=1.4, solid_capstyle="butt")


def plot_scores(axes: Axes, member: np.ndarray, score: np.ndarray, *, name: str) -> None:
    """Histograms of the scores of members (filled) and non-members (outline), each as a share of its own.

    ``member``: bool [cells]; ``score``: [cells], non-finite ones left out. Scores beyond the central 99 % are
    counted in the outermost bins.
    """
    keep = np.isfinite(score)
    member, score = np.asarray(member, dtype=bool)[keep], np.asarray(score)[keep]
    low, high = np.quantile(score, [0.005, 0.995])
    if low == high:
        low, high = low - 0.5, high + 0.5
    bins = np.linspace(low, high, int(np.clip(np.sqrt(len(score)), 10, 50)) + 1)
    clipped = np.clip(score, low, high)
    for side, label, colour, fill in ((member, "members", ORANGE, True), (~member, "non-members", BLUE, False)):
        if side.any():
            share = np.histogram(clipped[side], bins)[0] / side.sum()
            axes.stairs(share, bins, label=label, color=colour, fill=fill, alpha=0.55 if fill else 1, linewidth=1.8)
    axes.set(xlabel=f"score ({name}); higher is more likely a member", ylabel="share", xlim=(low, high))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: small(value) if value else "0"))
    axes.legend(loc="best", frameon=False, fontsize=9)


def plot_ratios(axes: Axes, result: AuditResult) -> None:
    """gamma/sigma per BatchNorm layer, by depth: median, mean and maximum over channels, with the line at one."""
    depth = np.arange(1, len(result.layers) + 1)
    median, mean, top = (
        np.array([getattr(layer, name) for layer in result.layers], dtype=float)
        for name in ("ratio_median", "ratio_mean", "ratio_max")
    )
    axes.axhline(1, color=INK, linewidth=1.2, linestyle=(0, (4, 2)))
    axes.vlines(depth, median, top, color=MUTED, linewidth=1)
    axes.plot(depth, top, color=MUTED, marker="^", markersize=4, linestyle="none", label="maximum")
    axes.plot(depth, mean, color=ORANGE, marker="D", markersize=4, linestyle="none", label="mean")
    axes.plot(depth, median, color=BLUE, marker="o", markersize=5, linestyle="-", linewidth=1, label="median")
    axes.set(ylabel="gamma / sigma", xlabel="BatchNorm layer, by depth", xlim=(0.5, len(depth) + 0.5))
    axes.set_ylim(bottom=0)
    names = [shown(layer.layer, 16) for layer in result.layers]
    if len("  ".join(names)) <= 44:
        axes.set_xticks(depth, names)
        for label in axes.get_xticklabels():
            label.set_parse_math(False)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="upper left", frameon=False, fontsize=9)


def plot_effect(axes: Axes, rows: Sequence[EffectRow]) -> None:
    """Differences with and without BatchNorm, a line for each of ``rows`` (at least one, of one metric), and zero."""
    place = -np.arange(len(rows))
    axes.axvline(0, color=INK, linewidth=1.2, linestyle=(0, (4, 2)))
    for y, row in zip(place, rows, strict=True):
        colour = BLUE if row.matched == "epochs" else ORANGE
        if row.ci is not None:
            axes.plot(row.ci, [y, y], color=colour, linewidth=2, solid_capstyle="butt")
        axes.plot(row.difference, y, color=colour, marker="o" if row.matched == "epochs" else "s", markersize=6)
    axes.set_yticks(place, [effect_label(row) for row in rows])
    axes.set_ylim(-len(rows) + 0.4, 0.6)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(f"difference in {'AUC' if rows[0].metric == 'auc' else 'TPR'}")


def effect_label(row: EffectRow) -> str:
    """``recipe, equal fit, ood``."""
    return f"{row.scope}, equal {row.matched}, {row.subset or NOTHING}"
