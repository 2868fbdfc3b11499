"""From what is known of a side to the density of phi on it: the choices called ``spread`` and ``centre``.

``record``, ``pooled`` and ``pooled-in`` are normal with ddof 0 (LiRA, arXiv 2112.03570, section VI, and its
published script); ``moderated`` is the empirical-Bayes variance of Smyth (2004, "Linear models and empirical Bayes
methods for assessing differential expression", equations 2 to 4 and section 6.2) with a Student-t predictive density;
``shrunk`` is ``moderated`` with both means learnt from all records too (:mod:`mia_audit.attacks.shrinkage`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy import special

from mia_audit.attacks.shrinkage import shrink
from mia_audit.attacks.sides import Side

# A scale below this is taken for zero: no real spread of phi is that small, and its square would underflow.
_ZERO_SCALE = 1e-100
_NODES, _WEIGHTS = np.polynomial.laguerre.laggauss(24)


@dataclass(frozen=True)
class Density:
    """A location-scale density per (group, record, query): normal where ``freedom`` is infinite, else Student-t.

    loc [G, N, Q]; scale and freedom broadcast against it. A scale of 0 says that the side is constant: it has no
    density.
    """

    loc: np.ndarray
    scale: np.ndarray
    freedom: np.ndarray

    @cached_property
    def proper(self) -> np.ndarray:
        """bool like scale: False where the side is constant."""
        return self.scale > _ZERO_SCALE

    def log_pdf(self, x: np.ndarray) -> np.ndarray:
        """log density at x [..., G, N, Q]; meaningless where not ``proper``."""
        z, scale = self._standard(x)
        return _log_pdf(z, self.freedom) - np.log(scale)

    def log_sf(self, x: np.ndarray) -> np.ndarray:
        """log P(Z > x) for x [..., G, N, Q], which neither saturates nor underflows."""
        z, _ = self._standard(x)
        return _log_sf(z, self.freedom)

    def _standard(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        scale = self.scale if self.proper.all() else np.where(self.proper, self.scale, 1.0)
        return (x - self.loc) / scale, scale


def densities(sides: Sequence[Side], spread: str, centre: str) -> list[Density]:
    """The density of each side; ``sides`` are (in, out), or (out,) when the attack is offline."""
    return SPREADS[spread](sides, centre)


def _centre(side: Side, centre: str) -> np.ndarray:
    if centre == "mean":
        return side.mean
    assert side.median is not None
    return side.median


_NORMAL = np.array(np.inf)


def _record(sides: Sequence[Side], centre: str) -> list[Density]:
    return [Density(_centre(s, centre), np.sqrt(s.square / np.maximum(s.count, 1)), _NORMAL) for s in sides]


def _pooled(sides: Sequence[Side], centre: str) -> list[Density]:
    return [Density(_centre(s, centre), _std_of_all(s, s.mean - _centre(s, centre)), _NORMAL) for s in sides]


def _pooled_in(sides: Sequence[Side], centre: str) -> list[Density]:
    # The published script offline, where there are no in-values, takes the std of the out-values instead.
    scale = _std_of_all(sides[0], sides[0].mean)
    return [Density(_centre(s, centre), scale, _NORMAL) for s in sides]


def _std_of_all(side: Side, means: np.ndarray) -> np.ndarray:
    """Standard deviation (ddof 0) [G, 1, 1] of all values of a side whose records have the given means [G, N, Q]."""
    weight = np.broadcast_to(np.where(side.enough, side.count, 0), means.shape)
    values = np.maximum(_sum(weight), 1)
    # From one of the means on, so that equal means leave exactly nothing.
    flat = means.reshape(len(means), -1)
    first = flat[np.arange(len(flat)), (weight > 0).reshape(flat.shape).argmax(axis=1)][:, None, None]
    means = np.where(weight > 0, means - first, 0.0)
    around = means - _sum(weight * means) / values
    return np.sqrt(_sum(np.where(weight > 0, side.square, 0.0) + weight * around**2) / values)


def _sum(values: np.ndarray) -> np.ndarray:
    """[G, 1, 1], over the records and queries of each group."""
    return values.sum(axis=(1, 2), keepdims=True)


def _moderated(sides: Sequence[Side], centre: str) -> list[Density]:
    return [_predictive(side, centre, *moderate(side)) for side in sides]


def _predictive(side: Side, centre: str, variance: np.ndarray, freedom: np.ndarray) -> Density:
    # The centre of n values is itself uncertain: a new value varies about it by 1 + 1/n.
    return Density(_centre(side, centre), np.sqrt(variance * (1 + 1 / np.maximum(side.count, 1))), freedom)


def _shrunk(sides: Sequence[Side], centre: str) -> list[Density]:
    moderated = [moderate(side) for side in sides]
    found = [_predictive(side, centre, *known) for side, known in zip(sides, moderated, strict=True)]
    if len(sides) == 1:
        return found
    enough = sides[0].enough & sides[1].enough
    # A group of which one side is constant, or no record has both sides, has no shift to learn.
    live = enough.any(axis=(1, 2)) & np.all([variance.any(axis=(1, 2)) for variance, _ in moderated], axis=0)
    if not live.any():
        return found
    noise = [variance / np.maximum(side.count, 1) for side, (variance, _) in zip(sides, moderated, strict=True)]
    used = np.broadcast_to(enough, noise[0].shape)
    learnt = shrink(found[0].loc[live], found[1].loc[live], noise[0][live], noise[1][live], used[live])
    for place, ((variance, freedom), means) in enumerate(zip(moderated, learnt, strict=True)):
        loc, scale = found[place].loc.copy(), found[place].scale
        loc[live], scale[live] = means.mean, np.sqrt(variance[live] + means.variance)
        found[place] = Density(loc, scale, freedom)
    return found


def moderate(side: Side) -> tuple[np.ndarray, np.ndarray]:
    """(moderated variance [G, N, Q], degrees of freedom [G, N or 1, 1]) of a side.

    The degrees are d0 + d, infinite where records do not differ. The variances of all records and queries of a group
    with two values or more share one prior. Each is first raised to 1 % of their median (of the positive ones where
    the median is 0): otherwise a few near-constant records decide the prior for all. All constant: variance 0.
    """
    degrees = np.maximum(side.count - 1, 1)
    variance = side.square / degrees
    used = np.broadcast_to(side.enough, variance.shape)
    if used.all():
        typical = np.array([_typical(group) for group in variance])[:, None, None]
    else:
        typical = np.array([_typical(group[kept]) for group, kept in zip(variance, used, strict=True)])[:, None, None]
    constant = typical == 0
    # In place of a constant group's variances, which are replaced below, any that can be computed with.
    variance = np.maximum(variance, np.where(constant, 1.0, 0.01 * typical))
    prior_degrees, prior_variance = fit_prior(variance, degrees, used | constant)
    sharp = np.isinf(prior_degrees)
    weight = np.where(sharp, 0.0, prior_degrees)
    variance = (weight * prior_variance + degrees * variance) / (weight + degrees)
    variance = np.where(constant, 0.0, np.where(sharp, prior_variance, variance))
    return variance, np.where(constant | sharp, np.inf, weight + degrees)


def _typical(variance: np.ndarray) -> float:
    """The median, or that of the positive values where it is zero; 0 where none is positive."""
    median = _median(variance)
    return median if median > _ZERO_SCALE**2 else _median(variance[variance > _ZERO_SCALE**2])


def _median(values: np.ndarray) -> float:
    """Median of all values, 0 of none; at a third of the cost of np.median, which looks for NaN first."""
    if not values.size:
        return 0.0
    half = values.size // 2
    ordered = np.partition(values, (half - 1, half) if values.size > 1 else 0, axis=None)
    return float(ordered[half] if values.size % 2 else (ordered[half - 1] + ordered[half]) / 2)


def fit_prior(variance: np.ndarray, degrees: np.ndarray, used: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(d0, s0^2) of the scaled inverse chi-square prior, by moments of log variance (Smyth 2004, section 6.2).

    Args:
        variance: positive [G, N, Q]; degrees: broadcasts against it.
        used: bool [G, N, Q], at least one in every group.

    Returns:
        [G, 1, 1] each; d0 is infinite where log variance varies no more than sampling explains.
    """
    half = degrees / 2
    log_excess = np.log(variance) - (special.digamma(half) - np.log(half))
    sampling = special.zeta(2, half)  # trigamma
    if used.all():
        values, total = np.array(log_excess[0].size), _sum(log_excess)
        expected = sampling.mean(axis=(1, 2), keepdims=True)
    else:
        values, total = _sum(used), _sum(np.where(used, log_excess, 0.0))
        expected = _sum(np.where(used, sampling, 0.0)) / values
    mean = total / values
    deviation = np.where(used, log_excess - mean, 0.0)
    between = _sum(deviation * deviation) / np.maximum(values - 1, 1) - expected
    half_prior = _inverse_trigamma(np.maximum(between, 0.0))
    spread = between > 0
    centre = np.where(spread, special.digamma(half_prior) - np.log(half_prior), 0.0)
    return np.where(spread, 2 * half_prior, np.inf), np.exp(mean + centre)


def _inverse_trigamma(value: np.ndarray) -> np.ndarray:
    """y > 0 with trigamma(y) = value, by Newton's method on 1/trigamma, nearly linear (Smyth 2004, appendix).

    Beyond 1e-7 and 1e7 the two asymptotes serve; what is below 1e-300 counts as that.
    """
    within = np.clip(value, 1e-7, 1e7)
    y = 0.5 + 1 / within
    for _ in range(50):
        trigamma, tetragamma = special.zeta(2, y), -2 * special.zeta(3, y)
        step = trigamma * (1 - trigamma / within) / tetragamma
        y = y + step
        if (np.abs(step) < 1e-12 * y).all():
            break
    y = np.where(value > 1e7, 1 / np.sqrt(np.maximum(value, 1e7)), y)
    return np.where(value < 1e-7, 1 / np.maximum(value, 1e-300), y)


def _log_pdf(z: np.ndarray, freedom: np.ndarray) -> np.ndarray:
    normal = np.isinf(freedom)
    if normal.all():
        return -0.5 * (z * z + math.log(2 * math.pi))
    if normal.any():
        return np.where(normal, _log_pdf(z, _NORMAL), _log_pdf(z, np.where(normal, 1.0, freedom)))
    half = freedom / 2
    constant = special.gammaln(half + 0.5) - special.gammaln(half) - 0.5 * np.log(freedom * math.pi)
    return constant - (half + 0.5) * np.log1p(z * z / freedom)


def _log_sf(z: np.ndarray, freedom: np.ndarray) -> np.ndarray:
    normal = np.isinf(freedom)
    if normal.all():
        return special.log_ndtr(-z)
    if normal.any():
        return np.where(normal, _log_sf(z, _NORMAL), _log_sf(z, np.where(normal, 1.0, freedom)))
    freedom = np.broadcast_to(freedom, z.shape)
    tail = special.stdtr(freedom, -z)
    deep = tail < 1e-200
    log_tail = np.log(np.where(deep, 1.0, tail))
    if deep.any():
        log_tail[deep] = _deep_log_sf(z[deep], freedom[deep])
    return log_tail


def _deep_log_sf(z: np.ndarray, freedom: np.ndarray) -> np.ndarray:
    """log of the Student-t tail where it underflows, z [K] large.

    With s = (freedom / 2) log((freedom + u^2) / (freedom + z^2)) the integral of the density from z on becomes
    f(z) (1 + z^2 / freedom) times that of exp(-s) / sqrt(z^2 + freedom (1 - exp(-2 s / freedom))) over s > 0, whose
    second factor hardly varies: Gauss-Laguerre quadrature.
    """
    z, freedom = z[:, None], freedom[:, None]
    slow = 1 / np.sqrt(1 - freedom / z**2 * np.expm1(-2 * _NODES / freedom))
    integral = np.log(slow @ _WEIGHTS) - np.log(z[:, 0])
    return _log_pdf(z, freedom)[:, 0] + np.log1p(z * z / freedom)[:, 0] + integral


SPREADS: dict[str, Callable[[Sequence[Side], str], list[Density]]] = {
    "record": _record,
    "pooled": _pooled,
    "pooled-in": _pooled_in,
    "moderated": _moderated,
    "shrunk": _shrunk,
}
