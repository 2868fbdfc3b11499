"""The ROC curve as it is observed: steps, ties moved together, nothing interpolated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Roc:
    """An empirical ROC curve, one point per distinct score after (0, 0), thresholds descending from infinity.

    fpr, tpr, thresholds: float64 [points]; calling "member" every record that scores at or above a threshold gives
    that false-positive and true-positive rate. auc: P(member scores higher) + P(tie) / 2.
    """

    fpr: np.ndarray
    tpr: np.ndarray
    thresholds: np.ndarray
    auc: float

    @property
    def balanced_accuracy(self) -> float:
        """The largest (TPR + 1 - FPR) / 2 over thresholds; at least 0.5."""
        return float(np.max(self.tpr - self.fpr) + 1) / 2

    @property
    def constant(self) -> bool:
        """True where all scores are equal, so that the AUC of 0.5 says nothing."""
        return len(self.thresholds) == 2

    def tpr_at(self, fpr: float) -> float:
        """The largest TPR among the points whose FPR is at most ``fpr``."""
        if not 0 <= fpr <= 1:
            raise ValueError(f"fpr must be in [0, 1], got {fpr}")
        return float(self.tpr[np.searchsorted(self.fpr, fpr, side="right") - 1])


def roc(member: Any, score: Any) -> Roc:
    """The ROC of scores against membership.

    Args:
        member: bool, any shape: a record of one target, or a (model, record) cell of a pool.
        score: float, the same shape; higher is more likely a member; infinities are allowed, NaN is not.

    Returns:
        The curve. Constant scores give the points (0, 0), (1, 1) and an AUC of 0.5.

    Raises:
        ValueError: shapes differ, a score is NaN, or there is no member or no non-member.
    """
    member, score = labelled_scores(member, score)
    order = np.argsort(-score)
    return roc_of_sorted(member[order], score[order])


def labelled_scores(member: Any, score: Any) -> tuple[np.ndarray, np.ndarray]:
    """Membership and scores checked and flattened: bool [K], float64 [K], both kinds present, no NaN."""
    member, score = np.asarray(member), np.asarray(score, dtype=np.float64)
    if member.dtype != np.bool_:
        raise ValueError(f"member must be bool, got dtype {member.dtype}")
    if member.shape != score.shape:
        raise ValueError(f"member and score must have one shape, got {member.shape} and {score.shape}")
    member, score = member.ravel(), score.ravel()
    if np.isnan(score).any():
        raise ValueError(f"score must not be NaN, got {int(np.isnan(score).sum())} NaN; drop those records first")
    if not member.any() or member.all():
        raise ValueError(f"member must hold members and non-members, got {int(member.sum())} of {member.size} members")
    return member, score


def roc_of_sorted(member: np.ndarray, score: np.ndarray) -> Roc:
    """The ROC of scores that descend, [K] each, with members and non-members among them."""
    last = np.flatnonzero(np.concatenate([score[1:] != score[:-1], [True]]))
    true = np.cumsum(member)[last]
    false = last + 1 - true
    fpr, tpr, thresholds = np.zeros(last.size + 1), np.zeros(last.size + 1), np.full(last.size + 1, np.inf)
    np.divide(false, false[-1], out=fpr[1:])
    np.divide(true, true[-1], out=tpr[1:])
    thresholds[1:] = score[last]
    # In whole numbers: twice the pairs of a non-member and a member above it, ties once.
    twice = int(np.dot(np.diff(false, prepend=0), true + np.append(0, true[:-1])))
    return Roc(fpr, tpr, thresholds, twice / (2 * int(true[-1]) * int(false[-1])))
