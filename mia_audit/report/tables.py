"""The report's tables: an AuditResult as rows of text, in the order in which they are shown."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import numpy as np

from mia_audit.audit.rows import FEWEST_NONMEMBERS
from mia_audit.metrics.intervals import clopper_pearson, resolved
from mia_audit.report.words import (
    SUBSET_WORDS,
    arm_words,
    fpr_words,
    headline_attack,
    interval,
    metric_words,
    number,
    percent,
    point_at,
    points,
    shown,
    signed,
)
from mia_audit.results import SUBSET_ROWS, ArmSummary, AttackRow, AuditResult, EffectRow, Interval, TprAtFpr

SHOWN_FPRS = (0.1, 0.01, 0.001)


@dataclass(frozen=True)
class Cell:
    """A number with its interval below it; ``resolved`` False is marked as below the sample's resolution."""

    text: str
    below: str = ""
    resolved: bool = True


@dataclass(frozen=True)
class Row:
    """A table row: its heading (with a remark below it) and its cells."""

    head: str
    cells: tuple[Cell, ...]
    remark: str = ""


@dataclass(frozen=True)
class Table:
    """A table. ``caption`` says what it holds; ``columns`` name the cells, ``corner`` the row headings."""

    caption: str
    corner: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]

    @property
    def has_unresolved(self) -> bool:
        """Whether any cell needs the footnote on resolution."""
        return any(not cell.resolved for row in self.rows for cell in row.cells)


def leakage(rows: list[AttackRow], caption: str, *, by_attack: bool = False) -> Table:
    """AUC and TPR with intervals, one line per attack row, headed by subset or ``by_attack``."""
    several_arms = len({row.arm for row in rows}) > 1
    epsilon = any(row.epsilon_lower is not None for row in rows)
    columns = ("AUC", *(f"TPR at {100 * fpr:g} % FPR" for fpr in SHOWN_FPRS), "balanced accuracy")
    columns += (("epsilon, at least",) if epsilon else ()) + ("members", "non-members")
    lines = []
    for row in rows:
        cells = [Cell(number(row.auc), interval(row.auc_ci))]
        cells += [_tpr(point_at(row.tpr_at_fpr, fpr)) for fpr in SHOWN_FPRS]
        cells += [Cell(number(row.balanced_accuracy))] + ([Cell(number(row.epsilon_lower, 2))] if epsilon else [])
        cells += [Cell(f"{row.members:,}"), Cell(f"{row.nonmembers:,}")]
        head, remark = row.subset, _subset_remark(row.subset)
        if by_attack:
            head, remark = row.attack, f"{row.arm}, {row.subset}" if several_arms else row.subset
        lines.append(Row(head, tuple(cells), remark))
    return Table(caption, "attack" if by_attack else "subset", columns, tuple(lines))


def _subset_remark(subset: str) -> str:
    return "out of distribution" if subset == "ood" else ""


def _tpr(point: TprAtFpr | None) -> Cell:
    if point is None:
        return Cell(number(None))
    return Cell(percent(point.tpr), _percent_interval(point.ci), point.resolved)


def _percent_interval(ci: Interval | None) -> str:
    return interval(ci, 1, scale=100)


def other_attacks(result: AuditResult) -> Table | None:
    """Every attack row that is not the headline's, None where there is none."""
    rows = [row for row in result.attacks if (row.attack, row.arm) != headline_attack(result)]
    return leakage(rows, "Every other attack and arm, by subset.", by_attack=True) if rows else None


def effects(result: AuditResult) -> list[Table]:
    """One table per comparison (scope, matched, reference): subsets down, metrics across, headline attack."""
    rows = headline_effects(result)
    metrics = list(dict.fromkeys(row.metric for row in rows))
    tables = []
    for (scope, matched, reference), group in groupby(rows, key=lambda row: (row.scope, row.matched, row.reference)):
        members = list(group)
        lines = []
        for subset in dict.fromkeys(row.subset for row in members):
            found = {row.metric: row for row in members if row.subset == subset}
            cells = [cell for metric in metrics for cell in _effect_cells(found.get(metric), metric)]
            lines.append(Row(subset, tuple(cells)))
        whose = "this checkpoint against its twins" if scope == "checkpoint" else "the recipe: the pool's arms"
        caption = f"At equal {matched}, {whose}. Without BatchNorm: {reference} ({arm_words(reference)})."
        columns = tuple(
            text for metric in metrics for text in ("with", "without", f"difference in {metric_words(metric)}")
        )
        tables.append(Table(caption, "subset", columns, tuple(lines)))
    return tables


def _effect_cells(row: EffectRow | None, metric: str) -> tuple[Cell, Cell, Cell]:
    if row is None:
        return Cell(number(None)), Cell(number(None)), Cell(number(None))
    if metric == "auc":
        return (
            Cell(number(row.with_bn)),
            Cell(number(row.without_bn)),
            Cell(signed(row.difference), interval(row.ci, plus=True)),
        )
    change = Cell(points(row.difference), interval(row.ci, 1, scale=100, plus=True))
    return Cell(percent(row.with_bn)), Cell(percent(row.without_bn)), change


def headline_effects(result: AuditResult) -> list[EffectRow]:
    """The effect rows of the headline attack (of the first row's where there is none), one comparison after another."""
    chosen = headline_attack(result)
    attack = chosen[0] if chosen else (result.effect[0].attack if result.effect else "")
    rows = [row for row in result.effect if row.attack == attack]
    return sorted(rows, key=lambda row: (row.scope, row.matched, row.reference))


def ratios(result: AuditResult) -> Table:
    """gamma/sigma per BatchNorm layer."""
    columns = ("channels", "median", "mean", "maximum", "share above 1", "amplification, median")
    rows = tuple(
        Row(
            shown(layer.layer, 60),
            (
                Cell(f"{layer.channels:,}"),
                Cell(number(layer.ratio_median, 2)),
                Cell(number(layer.ratio_mean, 2)),
                Cell(number(layer.ratio_max, 2)),
                Cell(percent(layer.fraction_above_one, 0)),
                Cell(number(layer.amplification_median, 2)),
            ),
            f"{place}, {shown(layer.kind, 40)}",
        )
        for place, layer in enumerate(result.layers, start=1)
    )
    return Table("The ratio gamma/sigma over the channels of each BatchNorm layer, by depth.", "layer", columns, rows)


def arms(result: AuditResult) -> Table:
    """What the pool's arms achieve and leak."""
    columns = ("test accuracy", "member accuracy", "AUC", "TPR at 1 % FPR", "TPR at 0.1 % FPR")
    rows = tuple(
        Row(
            arm.arm,
            (
                Cell(percent(arm.test_accuracy)),
                Cell(percent(arm.member_accuracy)),
                Cell(number(arm.auc), interval(arm.auc_ci)),
                _tpr(point_at(arm.tpr_at_fpr, 0.01)),
                _tpr(point_at(arm.tpr_at_fpr, 0.001)),
            ),
            arm_words(arm.arm) + ("" if arm.trained else "; did not train, its leakage says nothing"),
        )
        for arm in result.arms
    )
    return Table("The pool's arms: what their models achieve and, over all records, leak.", "arm", columns, rows)


def scores(result: AuditResult) -> Table | None:
    """The histogram of scores as quantiles of members' and non-members', None where it is not drawn."""
    chosen = headline_attack(result)
    if chosen is None or chosen[1] not in result.cells:
        return None
    member, score = result.cells[chosen[1]]
    sides = [score[side & ~np.isnan(score)] for side in (member, ~member)]
    if not all(side.size for side in sides):
        return None
    rows = tuple(
        Row(f"{share} %", tuple(Cell(number(float(np.percentile(side, share)), 2)) for side in sides))
        for share in (5, 25, 50, 75, 95, 99)
    )
    caption = f"Scores under {chosen[0]}, arm {chosen[1]}: the value that a share of them lies below."
    return Table(caption, "share below", ("members", "non-members"), rows)


def calibration(result: AuditResult) -> tuple[Table | None, str]:
    """How often records that are known not to be members reach a false-positive rate, and what follows in words.

    A rate at or below a is what a share a of all non-members is expected to have; of a subset it need not be. None
    where fewer than 20 non-members are known.
    """
    others = result.records[~result.records["member"].fillna(True).astype(bool)].dropna(subset="false_positive_rate")
    rows, off = [], []
    for subset in SUBSET_ROWS:
        rates = others.loc[(others["subset"] == subset) | (subset == "all"), "false_positive_rate"].to_numpy()
        if len(rates) < FEWEST_NONMEMBERS:
            continue
        cells = []
        for limit in SHOWN_FPRS:
            count = int((rates <= limit).sum())
            low, high = clopper_pearson(count, len(rates))
            cells.append(Cell(percent(count / len(rates)), _percent_interval((low, high)), resolved(limit, len(rates))))
            if cells[-1].resolved and not low <= limit <= high:
                off.append(f"{percent(count / len(rates))} of {SUBSET_WORDS[subset]} for {fpr_words(limit)}")
        rows.append(Row(subset, (Cell(f"{len(rates):,}"), *cells), _subset_remark(subset)))
    if not rows:
        return None, ""
    columns = ("non-members", *(f"at or below {fpr_words(limit)}" for limit in SHOWN_FPRS))
    caption = (
        "Of the known non-members, the share whose false-positive rate is at or below a limit: it should equal it."
    )
    table = Table(caption, "subset", columns, tuple(rows))
    if not off:
        return (
            table,
            "Checked on this target's non-members, these rates hold: no resolved share is off its nominal value.",
        )
    return table, (
        f"Checked on this target's non-members, these rates do not hold everywhere: {'; '.join(off)}. They are right "
        "on average over all records of the pool; a subset on which models are more often sure has more false alarms."
    )


def recommendation(result: AuditResult) -> str:
    """Which arm leaks least at a test accuracy within one point of ``batch``'s; empty where that cannot be said."""
    named = {arm.arm: arm for arm in result.arms}
    batch = named.get("batch")
    if batch is None or batch.test_accuracy is None or batch.auc is None or len(named) < 2:
        return ""
    close = [arm for arm in result.arms if _near(arm, batch.test_accuracy)]
    best = min(close, key=lambda arm: arm.auc if arm.auc is not None else 1.0, default=batch)
    if best.arm == "batch" or best.auc is None or best.test_accuracy is None:
        return "No other arm of this pool leaks less at a test accuracy within one point of batch's."
    if best.auc_ci is None or batch.auc_ci is None:
        overlap = " There are no intervals to compare: they take eight models an arm."
    else:
        overlap = "" if best.auc_ci[1] < batch.auc_ci[0] else " The two intervals overlap."
    return (
        f"Of the arms whose test accuracy is within one point of batch's, {best.arm} ({arm_words(best.arm)}) leaks "
        f"least: AUC {_auc(best)} against {_auc(batch)}, "
        f"test accuracy {percent(best.test_accuracy)} against {percent(batch.test_accuracy)}." + overlap
    )


def _auc(arm: ArmSummary) -> str:
    return " ".join(filter(None, [number(arm.auc), interval(arm.auc_ci)]))


def _near(arm: ArmSummary, accuracy: float) -> bool:
    return (
        arm.trained and arm.auc is not None and arm.test_accuracy is not None and arm.test_accuracy >= accuracy - 0.01
    )
