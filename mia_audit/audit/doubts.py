"""Checks that an audit makes of itself: for what a mistake, or other files than were meant, explains best."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from mia_audit.audit.rows import FEWEST_NONMEMBERS, clearer_rows
from mia_audit.audit.target import Target
from mia_audit.evidence import ArmEvidence
from mia_audit.metrics.distributions import TWO_SIDED, normal_quantile, student_quantile
from mia_audit.metrics.intervals import auc_delong
from mia_audit.metrics.records import auc_of_columns
from mia_audit.results import AttackRow
from shadow_pool.data.records import PoolData
from shadow_pool.queries import PLAIN
from shadow_pool.signals import compute_signals
from shadow_pool.store.pool import Pool
from shadow_pool.train.requery import stored_model
from shadow_pool.train.shadows import one_thread, preprocess_of

PROBED = 32
"""Records that a stored model is asked about again."""
_COMPARED = 16
_ROUNDING = 0.01


def reversed_rows(rows: Iterable[AttackRow]) -> list[str]:
    """Attacks that score members below non-members by more than chance: no model of its members does so."""
    found = [
        f"{row.attack} on arm {row.arm} ({row.auc:.3f})"
        for row in rows
        if row.subset == "all" and row.auc is not None and row.auc_ci is not None and row.auc_ci[1] < 0.5
    ]
    if not found:
        return []
    return [f"AUC below .5, {', '.join(found)}: are members and non-members exchanged?"]


def disagreeing_rows(rows: Sequence[AttackRow], attack: str, arm: str) -> list[str]:
    """Attacks that find members where the headline attack, fixed beforehand, finds none."""
    clearer = clearer_rows(rows, attack, arm)
    if not clearer:
        return []
    named = ", ".join(f"{row.attack} ({row.auc:.3f})" for row in clearer)
    return [
        f"{attack} does not tell members from others, but by AUC {named} does: the target leaks, and its shadows do "
        "not imitate it, so the headline understates; train the pool by the target's own recipe"
    ]


def fit_doubts(target: Target, label: np.ndarray, evidence: ArmEvidence) -> list[str]:
    """Whether the target fits what are said to be its members as its shadows fit theirs.

    The AUC of phi between members and the rest is held against the 97.5 % prediction bound for one more shadow. With
    members unknown, its accuracy on all records is held against theirs on records they did not train on.
    """
    member = target.member
    if member is None:
        correct = evidence.predicted == label
        others = [float(row[~inside].mean()) for row, inside in zip(correct, evidence.membership, strict=True)]
        found = float((target.records.predicted == label).mean())
        if found >= _least(others, 0.0):
            return []
        return [
            f"the target is right on {found:.3f} of the records, its shadows on {min(others):.3f} to {max(others):.3f} "
            "of those they did not train on: is its class order (--classes) or its preprocessing (--normalize, "
            "--image-size) another?"
        ]
    if min(member.sum(), (~member).sum()) < FEWEST_NONMEMBERS:
        return []
    phi = target.records.phi[:, :1]
    found = float(auc_of_columns(phi, member[:, None])[0])
    low, high = auc_delong(member, phi[:, 0])
    theirs = auc_of_columns(evidence.phi[:_COMPARED, :, 0].T, evidence.membership[:_COMPARED].T).tolist()
    if found >= _least(theirs, (high - low) / (2 * normal_quantile(TWO_SIDED))):
        return []
    return [
        f"phi tells the target's members from other records with an AUC of {found:.3f}, its shadows' with "
        f"{min(theirs):.3f} to {max(theirs):.3f}: is the file of members another model's, in another order or "
        "reversed, or was the target trained otherwise than its shadows?"
    ]


def asked_again(pool: Pool, data: PoolData, evidence: ArmEvidence) -> list[str]:
    """Whether a stored model, asked again about some records in other company, says what the evidence holds.

    It does not where phi was computed in training mode, of augmented or otherwise preprocessed records, of another
    model, or by code that has changed since. ``evidence`` is that of query mode ``eval``.
    """
    index = int(evidence.indices[0])
    rows = np.linspace(0, len(data.records) - 1, min(PROBED, len(data.records))).astype(int)
    with one_thread():  # so few records are not worth more
        again = compute_signals(
            stored_model(pool, evidence.arm, index),
            data.records.x[rows],
            data.records.label[rows],
            preprocess=preprocess_of(pool),
            views=(PLAIN,),
        )
    stored = evidence.phi[0, rows, 0]
    gap = np.abs(again.phi[:, 0] - stored)
    if (gap <= _ROUNDING * (1 + np.abs(stored))).all():
        return []
    return [
        f"model {index} of arm {evidence.arm}, asked again about {len(rows)} records, gives another phi than was "
        f"stored, by up to {gap.max():.3g}: has the code that builds or feeds it changed since it was trained? Do not "
        "rely on this audit"
    ]


def _least(values: list[float], own_error: float) -> float:
    """The least that one more of the same kind may be: within the values seen, or what chance allows below them."""
    spread = float(np.std(values, ddof=1))
    chance = (spread**2 / len(values) + max(spread, own_error) ** 2) ** 0.5
    return min(*values, float(np.mean(values)) - max(0.02, student_quantile(TWO_SIDED, len(values) - 1) * chance))
