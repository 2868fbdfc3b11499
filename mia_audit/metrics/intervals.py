"""95 % confidence intervals of one target's AUC and TPR.

Members and non-members are taken as two independent samples; the shadow models are taken as given.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mia_audit.metrics.distributions import TWO_SIDED, beta_quantile, binomial_quantile, midranks, normal_quantile
from mia_audit.metrics.roc import labelled_scores
from shadow_pool import seeds

_REPLICATES = 10_000
_RESOLVING = 5  # non-members expected at or above a threshold from which an FPR counts as resolved


def resolved(fpr: float, nonmembers: int) -> bool:
    """Whether a sample resolves an FPR: at least five of its non-members (cells, for a pool) are expected there."""
    return fpr * nonmembers >= _RESOLVING


def clopper_pearson(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Exact two-sided interval of a proportion (Clopper and Pearson 1934); (0, 1) without trials."""
    if not 0 <= successes <= trials:
        raise ValueError(f"successes must be in [0, trials], got {successes} of {trials}")
    tail = (1 - confidence) / 2
    low = beta_quantile(tail, successes, trials - successes + 1) if successes else 0.0
    high = beta_quantile(1 - tail, successes + 1, trials - successes) if successes < trials else 1.0
    return low, high


def auc_delong(member: Any, score: Any) -> tuple[float, float]:
    """95 % interval of the AUC (DeLong, DeLong, Clarke-Pearson 1988), by the normal approximation within [0, 1].

    Where the variance is estimated as 0 (members and non-members fully separated) the interval ends at the
    Clopper-Pearson bound of as many successes as the smaller of the two samples holds.

    Args:
        member, score: as :func:`mia_audit.metrics.roc`.

    Returns:
        (low, high); with a single member or non-member (0, 1).

    Raises:
        ValueError: as :func:`mia_audit.metrics.roc`.
    """
    member, score = labelled_scores(member, score)
    m, n = int(member.sum()), int((~member).sum())
    if min(m, n) < 2:
        return 0.0, 1.0
    above, below = placements(member, score)
    auc = float(above.mean())
    variance = above.var(ddof=1) / m + below.var(ddof=1) / n
    if variance == 0 and auc in (0.0, 1.0):
        return clopper_pearson(min(m, n) if auc else 0, min(m, n))
    half = normal_quantile(TWO_SIDED) * math.sqrt(variance)
    return max(auc - half, 0.0), min(auc + half, 1.0)


def placements(member: np.ndarray, score: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each member's share of non-members below it, and each non-member's share of members above it, ties half.

    bool [K], float64 [K], with both kinds among them -> [members], [non-members]; either's mean is the AUC.
    """
    ranks = midranks(score)
    m, n = int(member.sum()), int((~member).sum())
    return (ranks[member] - midranks(score[member])) / n, 1 - (ranks[~member] - midranks(score[~member])) / m


def tpr_interval(member: Any, score: Any, fpr: float, seed: int) -> tuple[float, float]:
    """95 % interval of the TPR at an FPR, with the threshold estimated from the same non-members.

    Where :func:`resolved`: stratified parametric bootstrap, percentiles of 10,000 replicates, each of a number of
    non-members above the true threshold and of the share of members there. Else a conservative one: bounds on the
    true threshold by order statistics of the non-members, joined with Clopper-Pearson bounds on the members above
    either, each at 97.5 %. Both hold the observed TPR.

    Args:
        member, score: as :func:`mia_audit.metrics.roc`.
        fpr: in (0, 1).
        seed: root seed of the bootstrap's stream.

    Returns:
        (low, high).

    Raises:
        ValueError: as :func:`mia_audit.metrics.roc`.
    """
    member, score = labelled_scores(member, score)
    if not 0 < fpr < 1:
        raise ValueError(f"fpr must be in (0, 1), got {fpr}")
    nonmembers = np.sort(score[~member])[::-1]
    members = np.sort(score[member])
    # hits[k]: how many members score above the k-th highest non-member, from 0 for "above all of nothing".
    hits = np.concatenate([[0], members.size - np.searchsorted(members, nonmembers, side="right"), [members.size]])
    if resolved(fpr, nonmembers.size):
        return _bootstrap(hits, members.size, nonmembers.size, fpr, seeds.stream(seed, "tpr-bootstrap"))
    return _conservative(hits, members.size, nonmembers.size, fpr)


def _bootstrap(hits: np.ndarray, m: int, n: int, fpr: float, rng: np.random.Generator) -> tuple[float, float]:
    # Non-members: how many lie above the threshold whose true FPR is fpr is binomial, whatever their distribution;
    # resampling them instead centres on the sample's threshold and covers 88 % where few are expected there.
    # Members: the share above a threshold given the number seen (Jeffreys), which has no zero width at 0 or all.
    rank = rng.binomial(n, fpr, size=_REPLICATES) + rng.integers(0, 2, size=_REPLICATES)
    seen = hits[rank]
    low, high = np.quantile(rng.beta(seen + 0.5, m - seen + 0.5), [0.025, 0.975])
    found = hits[math.floor(fpr * n + 1e-9) + 1] / m
    return min(float(low), found), max(float(high), found)


def _conservative(hits: np.ndarray, m: int, n: int, fpr: float) -> tuple[float, float]:
    # The number of non-members above the threshold whose true FPR is fpr is binomial.
    fewest, most = binomial_quantile(0.0125, n, fpr), binomial_quantile(0.9875, n, fpr)
    low, _ = clopper_pearson(int(hits[fewest]), m, confidence=0.975)
    _, high = clopper_pearson(int(hits[most + 1]), m, confidence=0.975)
    return low, high
