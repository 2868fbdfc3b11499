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
    """A location-scale density per (record, query): normal where ``freedom`` is infinite, else Student-t.

    loc [N, Q]; scale and freedom broadcast against it. A scale of 0 says that the side is constant: it has no density.
    """

    loc: np.ndarray
    scale: np.ndarray
    freedom: np.ndarray

    @cached_property
    def proper(self) -> np.ndarray:
        """bool like scale: False where the side is constant."""
        return self.scale > _ZERO_SCALE

    def log_pdf(self, x: np.ndarray) -> np.ndarray:
        """log density at x [..., N, Q]; meaningless where not ``proper``."""
        z, scale = self._standard(x)
        return _log_pdf(z, self.freedom) - np.log(scale)

    def log_sf(self, x: np.ndarray) -> np.ndarray:
        """log P(Z > x) for x [..., N, Q], which neither saturates nor underflows."""
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
    """Standard deviation (ddof 0) of all values of a side whose records have the given means [N, Q]."""
    weight = np.broadcast_to(np.where(side.enough, side.count, 0), means.shape)
    if not weight.any():
        return np.zeros(())
    # From one of the means on, so that equal means leave exactly nothing.
    means = np.where(weight > 0, means - means[weight > 0][0], 0.0)
    around = means - np.average(means, weights=weight)
    within = np.where(weight > 0, side.square, 0.0)
    return np.sqrt((within + weight * around**2).sum() / weight.sum())


def _moderated(sides: Sequence[Side], centre: str) -> list[Density]:
    found = []
    for side in sides:
        variance, freedom = moderate(side)
        # The centre of n values is itself uncertain: a new value varies about it by 1 + 1/n.
        scale = np.sqrt(variance * (1 + 1 / np.maximum(side.count, 1)))
        found.append(Density(_centre(side, centre), scale, freedom))
    return found


def _shrunk(sides: Sequence[Side], centre: str) -> list[Density]:
    if len(sides) == 1:
        return _moderated(sides, centre)
    (variance_in, freedom_in), (variance_out, freedom_out) = (moderate(side) for side in sides)
    inside, outside = sides
    used = np.broadcast_to(inside.enough & outside.enough, variance_in.shape)
    if not (used.any() and variance_in.any() and variance_out.any()):
        return _moderated(sides, centre)
    means_in, means_out = shrink(
        _centre(inside, centre),
        _centre(outside, centre),
        variance_in / np.maximum(inside.count, 1),
        variance_out / np.maximum(outside.count, 1),
        used,
    )
    return [
        Density(means_in.mean, np.sqrt(variance_in + means_in.variance), freedom_in),
        Density(means_out.mean, np.sqrt(variance_out + means_out.variance), freedom_out),
    ]


def moderate(side: Side) -> tuple[np.ndarray, np.ndarray]:
    """(moderated variance [N, Q], degrees of freedom) of a side: d0 + d, infinite where records do not differ.

    The variances of all records and queries with two values or more share one prior. Each is first raised to 1 % of
    their median (of the positive ones where the median is 0): otherwise a few near-constant records decide the
    prior for all. All constant: variance 0.
    """
    degrees = np.maximum(side.count - 1, 1)
    variance = side.square / degrees
    used = variance if side.enough.all() else variance[np.broadcast_to(side.enough, variance.shape)]
    typical = _median(used)
    if typical <= _ZERO_SCALE**2:
        typical = _median(used[used > _ZERO_SCALE**2])
    if not typical:
        return np.zeros(variance.shape), _NORMAL
    variance = np.maximum(variance, 0.01 * typical)
    prior_degrees, prior_variance = fit_prior(variance, degrees, side.enough)
    if math.isinf(prior_degrees):
        return np.full(variance.shape, prior_variance), _NORMAL
    freedom = prior_degrees + degrees
    return (prior_degrees * prior_variance + degrees * variance) / freedom, freedom


def _median(values: np.ndarray) -> float:
    """Median of all values, 0 of none; at a third of the cost of np.median, which looks for NaN first."""
    if not values.size:
        return 0.0
    half = values.size // 2
    ordered = np.partition(values, (half - 1, half) if values.size > 1 else 0, axis=None)
    return float(ordered[half] if values.size % 2 else (ordered[half - 1] + ordered[half]) / 2)


def fit_prior(variance: np.ndarray, degrees: np.ndarray, used: np.ndarray) -> tuple[float, float]:
    """(d0, s0^2) of the scaled inverse chi-square prior, by moments of log variance (Smyth 2004, section 6.2).

    Args:
        variance: positive [N, Q]; degrees, used (bool): broadcast against it.

    Returns:
        d0 is infinite where log variance varies no more than sampling explains.
    """
    half = degrees / 2
    log_excess = np.log(variance) - (special.digamma(half) - np.log(half))
    sampling = special.zeta(2, half)  # trigamma
    if not used.all():
        keep = np.broadcast_to(used, variance.shape)
        log_excess, sampling = log_excess[keep], np.broadcast_to(sampling, variance.shape)[keep]
    mean = float(log_excess.mean())
    deviation = (log_excess - mean).ravel()
    between = float(deviation @ deviation) / max(deviation.size - 1, 1) - float(sampling.mean())
    if between <= 0:
        return math.inf, math.exp(mean)
    half_prior = _inverse_trigamma(between)
    return 2 * half_prior, math.exp(mean + float(special.digamma(half_prior)) - math.log(half_prior))


def _inverse_trigamma(value: float) -> float:
    """y > 0 with trigamma(y) = value, by Newton's method on 1/trigamma, nearly linear (Smyth 2004, appendix)."""
    if value > 1e7:
        return 1 / math.sqrt(value)
    if value < 1e-7:
        return 1 / value
    y = 0.5 + 1 / value
    for _ in range(50):
        trigamma, tetragamma = float(special.zeta(2, y)), -2 * float(special.zeta(3, y))
        step = trigamma * (1 - trigamma / value) / tetragamma
        y += step
        if abs(step) < 1e-12 * y:
            break
    return y


def _log_pdf(z: np.ndarray, freedom: np.ndarray) -> np.ndarray:
    if np.isinf(freedom).all():
        return -0.5 * (z * z + math.log(2 * math.pi))
    half = freedom / 2
    constant = special.gammaln(half + 0.5) - special.gammaln(half) - 0.5 * np.log(freedom * math.pi)
    return constant - (half + 0.5) * np.log1p(z * z / freedom)


def _log_sf(z: np.ndarray, freedom: np.ndarray) -> np.ndarray:
    if np.isinf(freedom).all():
        return special.log_ndtr(-z)
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
