"""RMIA, the robust membership-inference attack (Zarifzadeh, Liu, Shokri 2024, arXiv 2312.03262, equations 2 to 4).

A record is compared with held-out ones: on what share of them did the target raise the probability of the label
less, relative to shadow models, than on the record? Probabilities are sigmoid(phi), kept as logarithms, so that
confident and hopeless records neither overflow nor vanish.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from scipy.special import log_expit

from mia_audit.attacks.lira import MODES
from mia_audit.attacks.shadows import Shadows, check_choice, reduce_all, reduce_without, target_values

Reduce = Callable[[np.ufunc, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


def rmia(
    target_phi: Any,
    shadow_phi: Any,
    membership: np.ndarray,
    population_target_phi: Any,
    population_shadow_phi: Any,
    *,
    gamma: float = 1.0,
    mode: str = "online",
    a: float = 1.0,
) -> np.ndarray:
    """RMIA score of every record for one target: a share in [0, 1], averaged over queries.

    The score is the mean over population records z of 1[(p(x|target) / p(x)) / (p(z|target) / p(z)) > gamma].

    Args:
        target_phi: [N] or [N, Q].
        shadow_phi: [M, N] or [M, N, Q].
        membership: bool [M, N].
        population_target_phi: [P] or [P, Q], phi of records that no model trained on.
        population_shadow_phi: [M, P] or [M, P, Q].
        gamma: > 0, by how much the record's ratio must exceed z's.
        mode: ``online``: p(x) is the mean of the shadows' in-mean and out-mean. ``offline``: p(x) is
            ((1 + a) out-mean + (1 - a)) / 2, and the same map is applied to p(z).
        a: in [0, 1], offline only; 1 takes the out-mean as it is.

    Returns:
        float64 [N]; NaN where a record has no value on a side that is needed.

    Raises:
        ValueError: phi is not finite, shapes do not fit, an option is unknown, or the population is empty.
    """
    _check(mode, gamma, a)
    target, shadows = target_values(target_phi), Shadows(shadow_phi, membership)
    shadows.check_target(target)
    population = target_values(population_target_phi, "population_target_phi")
    outsiders = _outsiders(population_shadow_phi, shadows)
    outsiders.check_target(population)
    log_all = log_expit(outsiders.values())
    ranked = np.sort(log_expit(population) - _log_population(log_all, reduce_all, mode, a)[0], axis=0)
    scores = np.empty(shadows.records)
    for block, found in shadows.map_blocks(partial(_compare, ranked=ranked, gamma=gamma, mode=mode, a=a), target):
        scores[block] = found
    return scores


def rmia_pool(
    phi: Any,
    membership: np.ndarray,
    population_phi: Any,
    *,
    leave_out: str = "pair",
    gamma: float = 1.0,
    mode: str = "online",
    a: float = 1.0,
) -> np.ndarray:
    """RMIA scores with every model of a pool in turn as the target, judged by the models that remain.

    Args:
        phi: [M, N] or [M, N, Q].
        membership: bool [M, N].
        population_phi: [M, P] or [M, P, Q], phi of the held-out records under the same models.
        leave_out: ``pair`` or ``one``, as :func:`mia_audit.attacks.lira_pool`.
        gamma, mode, a: as :func:`rmia`.

    Returns:
        float64 [M, N]: what :func:`rmia` gives for model i with the remaining models as shadows.

    Raises:
        ValueError: as :func:`rmia`; or rows are not paired under ``"pair"``.
    """
    _check(mode, gamma, a)
    shadows = Shadows(phi, membership)
    width = shadows.groups(leave_out).shape[1]
    outsiders = _outsiders(population_phi, shadows)
    reduce = partial(reduce_without, width=width)
    log_all = log_expit(outsiders.values())
    ranked = np.sort(log_all - _log_population(log_all, reduce, mode, a).repeat(width, axis=0), axis=1)
    scores = np.empty((shadows.models, shadows.records))
    work = partial(_compare_without, ranked=ranked, width=width, gamma=gamma, mode=mode, a=a)
    for block, found in shadows.map_blocks(work):
        scores[:, block] = found
    return scores


def _compare(
    values: np.ndarray,
    inside: np.ndarray,
    target: np.ndarray,
    *,
    ranked: np.ndarray,
    gamma: float,
    mode: str,
    a: float,
) -> np.ndarray:
    """[B]: scores of one target [B, Q] from the shadows' values [M, B, Q]."""
    log_reference = _log_reference(log_expit(values), inside, reduce_all, mode, a)[0]
    return _share_below(log_expit(target) - log_reference, ranked, gamma)


def _compare_without(
    values: np.ndarray, inside: np.ndarray, *, ranked: np.ndarray, width: int, gamma: float, mode: str, a: float
) -> np.ndarray:
    """[M, B]: scores of every model, each without its group of ``width``."""
    log_p = log_expit(values)
    log_reference = _log_reference(log_p, inside, partial(reduce_without, width=width), mode, a)
    ratios = (log_p[model] - log_reference[model // width] for model in range(len(log_p)))
    return np.stack([_share_below(ratio, row, gamma) for ratio, row in zip(ratios, ranked, strict=True)])


def _log_reference(log_p: np.ndarray, inside: np.ndarray, reduce: Reduce, mode: str, a: float) -> np.ndarray:
    """log p(x) per group of left-out models [groups, records, queries] from log p of each shadow [M, ...]."""
    log_out = _log_mean(log_p, ~inside, reduce)
    if mode == "offline":
        return _offline(log_out, a)
    with np.errstate(invalid="ignore"):  # NaN where a side has no value
        return np.logaddexp(_log_mean(log_p, inside, reduce), log_out) - math.log(2)


def _log_population(log_p: np.ndarray, reduce: Reduce, mode: str, a: float) -> np.ndarray:
    """log p(z) per group of left-out models: no shadow trained on z, so all of them count."""
    log_mean = _log_mean(log_p, np.ones(log_p.shape[:2], dtype=bool), reduce)
    return _offline(log_mean, a) if mode == "offline" else log_mean


def _log_mean(log_p: np.ndarray, mask: np.ndarray, reduce: Reduce) -> np.ndarray:
    log_sum, count = reduce(np.logaddexp, log_p, mask)
    return np.where(count > 0, log_sum - np.log(np.maximum(count, 1)), np.nan)


def _offline(log_out: np.ndarray, a: float) -> np.ndarray:
    """log of ((1 + a) out-mean + (1 - a)) / 2, the paper's guess at the mean of in and out (its equation 11)."""
    if a == 1:
        return log_out
    with np.errstate(invalid="ignore"):
        return np.logaddexp(log_out + math.log1p(a), math.log1p(-a)) - math.log(2)


def _share_below(ratio: np.ndarray, ranked: np.ndarray, gamma: float) -> np.ndarray:
    """[N]: the share of the population's log ratios [P, Q], in ascending order, that [N, Q] exceed by log gamma."""
    bar = ratio - math.log(gamma)
    below = [np.searchsorted(ranked[:, q], bar[:, q], side="left") for q in range(bar.shape[1])]
    share = np.mean(below, axis=0) / len(ranked)
    return np.where(np.isnan(ratio).any(axis=1), np.nan, share)


def _outsiders(population_phi: Any, shadows: Shadows) -> Shadows:
    """The population under the same shadows, a member of none."""
    shape = np.shape(population_phi)
    if len(shape) != len(shadows.phi.shape) or shape[0] != shadows.models or shape[2:] != shadows.phi.shape[2:]:
        raise ValueError(f"population phi must match phi {shadows.phi.shape} but for its records, got {shape}")
    if shape[1] == 0:
        raise ValueError("the population must hold at least one record, got none")
    return Shadows(population_phi, np.zeros(shape[:2], dtype=bool))


def _check(mode: str, gamma: float, a: float) -> None:
    check_choice("mode", mode, MODES)
    if not gamma > 0:
        raise ValueError(f"gamma must be above 0, got {gamma}")
    if not 0 <= a <= 1:
        raise ValueError(f"a must be in [0, 1], got {a}")
