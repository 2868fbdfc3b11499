"""Means of the two sides that learn from all records: the spread called ``shrunk``.

With few models a record's own shift from out to in is known to little better than the spread of phi. Records of the
same level shift alike, though, and that is known well. So the shift gets a normal prior whose mean and variance follow
the level over all records (empirical Bayes by moments), and both means and what they leave uncertain follow from it:
the normal hierarchical model of Morris (1983), in the coordinates of the MA plot (level, difference).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_BINS = 25
_BIN_RECORDS = 40


@dataclass(frozen=True)
class Means:
    """Posterior mean of one side's mean, and its variance, each [G, N, Q]."""

    mean: np.ndarray
    variance: np.ndarray


def shrink(
    inside: np.ndarray, outside: np.ndarray, noise_in: np.ndarray, noise_out: np.ndarray, used: np.ndarray
) -> tuple[Means, Means]:
    """The means of both sides, given one another and all records.

    With m and t the prior mean and variance of the shift d = inside - outside at the record's level, and s = noise_in +
    noise_out, the shift's posterior mean is d - (1 - w)(d - m), w = t / (t + s), its variance w s. What it moves is
    shared out by the two sides' noise; the level itself has a flat prior.

    Args:
        inside, outside: [G, N, Q], each side's observed centre; every group is a problem of its own.
        noise_in, noise_out: [G, N, Q], sampling variance of those, positive.
        used: bool [G, N, Q], the records that a group's prior is fitted to.

    Returns:
        (in, out).
    """
    shift, noise = inside - outside, noise_in + noise_out
    priors = [_fit_prior(*group) for group in zip((inside + outside) / 2, shift, noise, used, strict=True)]
    prior_mean, prior_variance = (np.stack(part) for part in zip(*priors, strict=True))
    weight = prior_variance / (prior_variance + noise)
    move = (1 - weight) * (shift - prior_mean)
    known = noise_in * noise_out / noise  # variance of both means if the shift were known
    share_in, share_out = noise_in / noise, noise_out / noise
    return (
        Means(inside - share_in * move, known + share_in**2 * weight * noise),
        Means(outside + share_out * move, known + share_out**2 * weight * noise),
    )


def _fit_prior(
    level: np.ndarray, shift: np.ndarray, noise: np.ndarray, used: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance [N, Q] of the true shift at each level [N, Q] of one group.

    Those of bins with equally many records, interpolated between. Without records to fit to: no prior, mean 0.
    """
    if not used.any():
        return np.zeros(level.shape), np.zeros(level.shape)
    chosen = slice(None) if used.all() else used.ravel()
    order = np.argsort(level.ravel()[chosen])
    x, y, expected = (values.ravel()[chosen][order] for values in (level, shift, noise))
    bins = min(_BINS, max(1, x.size // _BIN_RECORDS))
    sizes = np.full(bins, x.size // bins)
    sizes[: x.size % bins] += 1
    starts = np.cumsum(sizes) - sizes
    at = np.add.reduceat(x, starts) / sizes
    mean_at = np.add.reduceat(y, starts) / sizes
    mean = np.interp(level, at, mean_at)
    # Moments: what varies beyond the sampling noise is the prior's variance.
    excess = np.add.reduceat((y - mean.ravel()[chosen][order]) ** 2, starts) / np.maximum(sizes - 1, 1)
    variance_at = np.maximum(excess - np.add.reduceat(expected, starts) / sizes, 0.0)
    return mean, np.interp(level, at, variance_at)
