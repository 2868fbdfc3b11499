"""Rows of audit.json: one attack on one subset, of a target or of a whole pool, with its intervals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from mia_audit.metrics.epsilon import choose_guesses, one_run_epsilon
from mia_audit.metrics.intervals import auc_delong, clopper_pearson, resolved, tpr_interval
from mia_audit.metrics.jackknife import Jackknife
from mia_audit.metrics.roc import roc
from mia_audit.results import FPRS, AttackRow, Headline, Interval, TprAtFpr, ends, finite

FEWEST_NONMEMBERS = 20
"""Below this many non-members a target's ROC says little; thresholds come from the pool instead."""


def target_row(
    attack: str,
    arm: str,
    subset: str,
    member: np.ndarray,
    score: np.ndarray,
    pool_nonmember_scores: np.ndarray,
    *,
    imitated: bool = True,
    epsilon_lower: float | None = None,
) -> AttackRow:
    """One attack on the records of one subset of a target.

    With fewer than :data:`FEWEST_NONMEMBERS` non-members the AUC is None and each TPR is the share of members
    above the threshold that the pool's non-member cells set, with its Clopper-Pearson interval. Those resolve a TPR
    where there is no non-member at all and the pool imitates the target; a few of its own never do.

    Args:
        member: bool [K]; score: float64 [K], NaN where the pool says too little of a record.
        pool_nonmember_scores: [cells], the same attack's scores of pool models on records they did not train on.
        imitated: whether the pool's models fit their members as the target fits its own.
    """
    keep = ~np.isnan(score)
    member, score = member[keep], score[keep]
    members, nonmembers = int(member.sum()), int((~member).sum())
    auc, auc_ci, balanced = None, None, None
    if members and nonmembers >= FEWEST_NONMEMBERS:
        curve = roc(member, score)
        auc, auc_ci, balanced = curve.auc, auc_delong(member, score), curve.balanced_accuracy
        points = tuple(
            TprAtFpr(fpr, curve.tpr_at(fpr), tpr_interval(member, score, fpr, 0), resolved(fpr, nonmembers))
            for fpr in FPRS
        )
    else:
        points = tuple(
            _borrowed(fpr, score[member], pool_nonmember_scores, imitated and not nonmembers) for fpr in FPRS
        )
    return AttackRow(attack, arm, subset, members, nonmembers, auc, auc_ci, balanced, points, epsilon_lower)


def _borrowed(fpr: float, scores: np.ndarray, nonmember_scores: np.ndarray, trusted: bool) -> TprAtFpr:
    cells = np.sort(nonmember_scores[~np.isnan(nonmember_scores)])[::-1]
    if not len(scores) or not len(cells):
        return TprAtFpr(fpr, None, None, False)
    # Above the (allowed + 1)-th highest cell lie at most the allowed share of them.
    allowed = int(fpr * len(cells) + 1e-9)
    caught = int((scores > cells[min(allowed, len(cells) - 1)]).sum())
    return TprAtFpr(
        fpr, caught / len(scores), clopper_pearson(caught, len(scores)), trusted and resolved(fpr, len(cells))
    )


def clearer_rows(rows: Iterable[AttackRow], attack: str, arm: str) -> list[AttackRow]:
    """Where ``attack`` does not tell an arm's members from others by AUC: the rows of attacks that do, all records.

    At 99 %, since there are up to five of them, and one in twenty intervals at 95 % errs.
    """
    found = [row for row in rows if row.arm == arm and row.subset == "all" and row.auc is not None and row.auc_ci]
    if any(row.attack == attack and row.auc_ci and row.auc_ci[0] > 0.5 for row in found):
        return []
    return [
        row
        for row in found
        if row.attack != attack
        and row.auc is not None
        and row.auc_ci
        and 1.314 * (row.auc - row.auc_ci[0]) < row.auc - 0.5
    ]


def epsilon_of_target(
    member: np.ndarray, score: np.ndarray, pool_score: np.ndarray, membership: np.ndarray
) -> float | None:
    """The one-run bound of a target whose members were drawn by coins; guesses are fixed on the pool's models.

    None where there is nothing to guess, and where those say nothing: of four models none is left to judge another by.
    """
    keep = ~np.isnan(score)
    if not member[keep].any() or member[keep].all() or np.isnan(pool_score).any(axis=0).all():
        return None
    top, bottom = choose_guesses(membership, pool_score, records=int(keep.sum()))
    return one_run_epsilon(member[keep], score[keep], top, bottom)


def pool_rows(
    attack: str, arm: str, found: Jackknife, membership: np.ndarray, masks: Mapping[str, np.ndarray]
) -> list[AttackRow]:
    """One attack on a whole pool: a row per subset over its (model, record) cells, intervals by the jackknife."""
    low, high = found.interval()
    column = {metric: place for place, metric in enumerate(found.metrics)}
    scored = ~np.isnan(found.scores)
    rows = []
    for place, subset in enumerate(found.subsets):

        def value(metric: str, place: int = place) -> float | None:
            return finite(found.estimate[place, column[metric]])

        def interval(metric: str, place: int = place) -> Interval | None:
            return ends(low[place, column[metric]], high[place, column[metric]])

        cells = scored & masks[subset]
        members, nonmembers = int((cells & membership).sum()), int((cells & ~membership).sum())
        points = tuple(
            TprAtFpr(fpr, value(f"tpr@{fpr:g}"), interval(f"tpr@{fpr:g}"), resolved(fpr, nonmembers)) for fpr in FPRS
        )
        rows.append(
            AttackRow(
                attack,
                arm,
                subset,
                members,
                nonmembers,
                value("auc"),
                interval("auc"),
                value("balanced_accuracy"),
                points,
            )
        )
    return rows


def headline_of(rows: list[AttackRow], attack: str, arm: str) -> Headline | None:
    """The headline attack over all records at the lowest resolved FPR; None where none is resolved."""
    for row in rows:
        if (row.attack, row.arm, row.subset) == (attack, arm, "all"):
            for point in row.tpr_at_fpr:
                if point.resolved and point.tpr is not None and point.ci is not None:
                    return Headline(attack, arm, "all", point.fpr, point.tpr, point.ci)
    return None
