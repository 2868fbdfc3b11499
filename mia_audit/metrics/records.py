"""What the pool says about single records. With n models every value rests on n/2 in-values and n/2 out-values."""

from __future__ import annotations

from typing import Any

import numpy as np

from mia_audit.attacks.shadows import Shadows
from mia_audit.metrics.distributions import midranks


def vulnerability(phi: Any, membership: np.ndarray) -> np.ndarray:
    """How well a record's phi tells models that trained on it from those that did not: their AUC, ties half.

    Comes in steps of 1 / (in-values x out-values), or half of that with ties; 0.5 is no difference.

    Args:
        phi: [M, N] or [M, N, Q]; queries are averaged first.
        membership: bool [M, N].

    Returns:
        float64 [N]; NaN where a record is in all models or in none.

    Raises:
        ValueError: phi is not finite or shapes do not fit.
    """
    shadows = Shadows(phi, membership)
    found = np.empty(shadows.records)
    for block, auc in shadows.map_blocks(_auc):
        found[block] = auc
    return found


def _auc(values: np.ndarray, inside: np.ndarray) -> np.ndarray:
    return auc_of_columns(values.mean(axis=2), inside)


def auc_of_columns(values: np.ndarray, inside: np.ndarray) -> np.ndarray:
    """AUC [N], ties half, of each column of values [K, N] between the rows that are inside, bool [K, N], and the rest.

    By the sum of ranks; NaN where a column has no row inside or none outside.
    """
    ranks = midranks(values)
    n_in = inside.sum(axis=0)
    pairs = n_in * (len(inside) - n_in)
    wins = (ranks * inside).sum(axis=0) - n_in * (n_in + 1) / 2
    return np.where(pairs > 0, wins / np.maximum(pairs, 1), np.nan)


def memorization(correct: Any, membership: np.ndarray) -> np.ndarray:
    """Mean correctness of models that trained on a record minus that of the others (Feldman and Zhang 2020, eq. 1).

    In [-1, 1]; comes in steps of 1 / in-values and 1 / out-values.

    Args:
        correct: bool [M, N], whether model i gives record j its label.
        membership: bool [M, N].

    Returns:
        float64 [N]; NaN where a record is in all models or in none.

    Raises:
        ValueError: shapes differ.
    """
    correct, membership = np.asarray(correct, dtype=np.float64), np.asarray(membership, dtype=bool)
    if correct.shape != membership.shape or correct.ndim != 2:
        raise ValueError(f"correct and membership must be [models, records], got {correct.shape}, {membership.shape}")
    n_in = membership.sum(axis=0)
    n_out = len(membership) - n_in
    inside = (correct * membership).sum(axis=0) / np.maximum(n_in, 1)
    outside = (correct * ~membership).sum(axis=0) / np.maximum(n_out, 1)
    return np.where((n_in > 0) & (n_out > 0), inside - outside, np.nan)


def false_positive_rate(score: Any, pool_score: Any, membership: np.ndarray) -> np.ndarray:
    """The rate at which non-members score as high: (1 + non-member cells at or above) / (1 + non-member cells).

    A value at or below a is expected for a share a of the target's non-members, if the target was trained as the
    pool's models were. By sorting: O((cells + scores) log cells).

    Args:
        score: [...], scores of the target's records.
        pool_score: [M, N], the same attack with every model of the target's arm in turn as target.
        membership: bool [M, N].

    Returns:
        float64 [...] in (0, 1]; NaN where the score is.

    Raises:
        ValueError: pool_score and membership differ in shape.
    """
    score, pool_score = np.asarray(score, dtype=np.float64), np.asarray(pool_score, dtype=np.float64)
    if pool_score.shape != membership.shape:
        raise ValueError(f"pool_score and membership must match, got {pool_score.shape} and {membership.shape}")
    cells = pool_score[~membership]
    cells = np.sort(cells[~np.isnan(cells)])
    above = cells.size - np.searchsorted(cells, score, side="left")
    return np.where(np.isnan(score), np.nan, (1 + above) / (1 + cells.size))
