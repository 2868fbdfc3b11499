"""The few quantiles and ranks that intervals need, on scipy.special: scipy.stats alone takes longer to import than
``mia-audit score`` has for all of its work on a small pool. The tests hold each against scipy.stats.
"""

from __future__ import annotations

import numpy as np
from scipy import special

TWO_SIDED = 0.975
"""The quantile that leaves 95 % between itself and its mirror image."""


def normal_quantile(p: float) -> float:
    """x with P(Z <= x) = p, Z standard normal."""
    return float(special.ndtri(p))


def student_quantile(p: float, freedom: float) -> float:
    """x with P(T <= x) = p, T Student-t; infinite ``freedom`` is the normal."""
    return normal_quantile(p) if np.isinf(freedom) else float(special.stdtrit(freedom, p))


def beta_quantile(p: float, a: float, b: float) -> float:
    """x with P(B <= x) = p, B beta(a, b)."""
    return float(special.betaincinv(a, b, p))


def binomial_quantile(p: float, trials: int, rate: float) -> int:
    """The least k with P(K <= k) >= p, K binomial, ``rate`` in (0, 1)."""
    k = max(int(np.ceil(special.bdtrik(p, trials, rate))), 0)
    return k - 1 if k and special.bdtr(k - 1, trials, rate) >= p else k


def binomial_pmf(k: np.ndarray, trials: int, rate: float) -> np.ndarray:
    """P(K = k) for whole k [...] in [0, trials], K binomial, ``rate`` in [0, 1]."""
    ways = special.gammaln(trials + 1) - special.gammaln(k + 1) - special.gammaln(trials - k + 1)
    return np.exp(ways + special.xlogy(k, rate) + special.xlog1py(trials - k, -rate))


def midranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1 along the first axis, [K, ...] -> float64 [K, ...]; ties share the mean of their ranks."""
    order = np.argsort(values, axis=0)
    ordered = np.take_along_axis(values, order, axis=0)
    place = np.arange(1, len(values) + 1, dtype=np.float64).reshape(-1, *[1] * (values.ndim - 1))
    starts = np.ones(values.shape, dtype=bool)
    starts[1:] = ordered[1:] != ordered[:-1]
    ends = np.ones(values.shape, dtype=bool)
    ends[:-1] = starts[1:]
    first = np.maximum.accumulate(np.where(starts, place, 0), axis=0)
    last = np.minimum.accumulate(np.where(ends, place, np.inf)[::-1], axis=0)[::-1]
    ranks = np.empty(values.shape)
    np.put_along_axis(ranks, order, (first + last) / 2, axis=0)
    return ranks
