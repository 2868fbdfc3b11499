"""A lower bound on epsilon from one training run (Steinke, Nasr, Jagielski 2023, arXiv 2305.08846).

Members of the target must have been drawn by independent fair coins. If training were (epsilon, delta)-private, the
number of right guesses among those made could exceed a binomial one only so often; the bound is the largest epsilon
that this refutes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import special

from mia_audit.metrics.distributions import binomial_pmf
from mia_audit.metrics.roc import labelled_scores

# Of the records to guess about at either end: what choose_guesses chooses from.
_SHARES = (0.0, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5)


def p_value(correct: int, guesses: int, records: int, epsilon: float, delta: float) -> float:
    """The chance of so many right guesses under (epsilon, delta)-differential privacy, at most (theorem 5.2).

    Args:
        correct: right guesses.
        guesses: guesses made, the rest abstained from.
        records: records whose membership was drawn by coins.
        epsilon, delta: the privacy claimed.
    """
    if not 0 <= correct <= guesses <= records:
        raise ValueError(f"must have 0 <= correct <= guesses <= records, got {correct}, {guesses}, {records}")
    rate = special.expit(epsilon)
    beta = float(special.bdtrc(correct - 1, guesses, rate))  # P(W >= correct), W binomial
    if delta == 0 or correct == 0:
        return beta
    # alpha: the largest mean of P(W = correct - 1), ..., P(W = correct - i) over i.
    missed = np.arange(1, correct + 1)
    alpha = float((np.cumsum(binomial_pmf(correct - missed, guesses, rate)) / missed).max())
    return min(1.0, beta + 2 * records * delta * alpha)


def epsilon_lower(correct: int, guesses: int, records: int, *, delta: float = 1e-5, confidence: float = 0.95) -> float:
    """The largest epsilon that ``correct`` of ``guesses`` refutes with the given confidence; 0 where none is.

    The number of guesses must not have been chosen by looking at how many are right.

    >>> round(epsilon_lower(86, 132, 132, delta=0.0), 4)
    0.3122
    """
    refuted = 1 - confidence

    def is_refuted(epsilon: float) -> bool:
        return p_value(correct, guesses, records, epsilon, delta) < refuted

    if not is_refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while is_refuted(high):
        low, high = high, 2 * high
    while high - low > 1e-9 * max(high, 1.0):
        middle = (low + high) / 2
        low, high = (middle, high) if is_refuted(middle) else (low, middle)
    return low


def choose_guesses(member: Any, score: Any, *, records: int) -> tuple[int, int]:
    """How many of a target's records to call members (highest scores) and non-members (lowest), from practice.

    Practice targets are models whose membership says nothing about the target's coins, as every model of its pool:
    then the choice is as good as fixed in advance. It is the one with the largest bound for the mean number of
    right guesses in practice (at delta 0, which hardly moves the choice).

    Args:
        member: bool [T, N], the membership of T practice targets.
        score: [T, N], their scores; a record that scores NaN under any is left out.
        records: the number of the target's records that will be scored.

    Returns:
        (top, bottom), with top + bottom <= records.

    Raises:
        ValueError: shapes differ, or no record is scored under all practice targets.
    """
    member, score = np.asarray(member, dtype=bool), np.asarray(score, dtype=np.float64)
    if member.shape != score.shape or member.ndim != 2:
        raise ValueError(f"member and score must be [targets, records], got {member.shape} and {score.shape}")
    scored = ~np.isnan(score).any(axis=0)
    if not scored.any():
        raise ValueError(f"score must have a record without NaN, got none of {score.shape[1]}")
    order = np.argsort(-score[:, scored], axis=1)
    ranked = np.take_along_axis(member[:, scored], order, axis=1).mean(axis=0)
    best, best_counts = -1.0, (0, 0)
    for high in _SHARES:
        for low in _SHARES:
            top, bottom = int(high * records), int(low * records)
            # Mean share of right guesses in practice among the same share of records.
            right_top = ranked[: round(high * ranked.size)].mean() * top if top else 0.0
            right_bottom = (1 - ranked[ranked.size - round(low * ranked.size) :]).mean() * bottom if bottom else 0.0
            bound = epsilon_lower(int(right_top + right_bottom), top + bottom, records, delta=0.0)
            if bound > best:
                best, best_counts = bound, (top, bottom)
    return best_counts


def one_run_epsilon(
    member: Any, score: Any, top: int, bottom: int, *, delta: float = 1e-5, confidence: float = 0.95
) -> float:
    """:func:`epsilon_lower` of a target whose ``top`` highest scores are called members and ``bottom`` lowest not.

    Args:
        member: bool [K], drawn by independent fair coins.
        score: [K], without NaN; ties are guessed in the records' order.
        top, bottom: numbers of guesses fixed without looking at ``member``, see :func:`choose_guesses`.
        delta, confidence: of the bound.

    Raises:
        ValueError: as :func:`mia_audit.metrics.roc`, or top + bottom exceeds K.
    """
    member, score = labelled_scores(member, score)
    if top < 0 or bottom < 0 or top + bottom > member.size:
        raise ValueError(f"top and bottom must be at least 0 and at most {member.size} together, got {top}, {bottom}")
    ranked = member[np.argsort(-score, kind="stable")]
    correct = int(ranked[:top].sum()) + int((~ranked[member.size - bottom :]).sum())
    return epsilon_lower(correct, top + bottom, member.size, delta=delta, confidence=confidence)
