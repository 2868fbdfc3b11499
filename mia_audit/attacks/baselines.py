"""Attacks that need no or little evidence: the loss, and the loss against a reference.

``loss`` is Yeom et al. (2018, arXiv 1709.01604): a record with a low loss is called a member. ``reference`` is the
difficulty calibration of Watson et al. (2022, arXiv 2111.08440): how much lower than models that never saw it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from scipy.special import log_expit

from mia_audit.attacks.shadows import Shadows, reduce_all, reduce_without, target_values


def loss(target_phi: Any) -> np.ndarray:
    """Minus the cross-entropy, -softplus(-phi), mean over queries: [N] or [N, Q] -> float64 [N].

    Raises ValueError where phi is not finite or not of that shape.
    """
    return log_expit(target_values(target_phi)).mean(axis=1)


def loss_pool(phi: Any) -> np.ndarray:
    """:func:`loss` of every model of a pool: [M, N] or [M, N, Q] -> float64 [M, N]."""
    everyone = _unlabelled(phi)
    scores = np.empty((everyone.models, everyone.records))
    for block, found in everyone.map_blocks(_loss):
        scores[:, block] = found
    return scores


def reference(target_phi: Any, shadow_phi: Any, membership: np.ndarray) -> np.ndarray:
    """The target's loss score minus its mean over the shadows that did not train on the record.

    Args:
        target_phi: [N] or [N, Q].
        shadow_phi: [M, N] or [M, N, Q].
        membership: bool [M, N].

    Returns:
        float64 [N], mean over queries; NaN where no shadow is out.

    Raises:
        ValueError: phi is not finite or shapes do not fit.
    """
    target, shadows = target_values(target_phi), Shadows(shadow_phi, membership)
    shadows.check_target(target)
    scores = np.empty(shadows.records)
    for block, found in shadows.map_blocks(_reference, target):
        scores[block] = found
    return scores


def reference_pool(phi: Any, membership: np.ndarray, *, leave_out: str = "pair") -> np.ndarray:
    """:func:`reference` with every model of a pool in turn as the target, judged by the models that remain.

    Args:
        phi: [M, N] or [M, N, Q].
        membership: bool [M, N].
        leave_out: ``pair`` or ``one``, as :func:`mia_audit.attacks.lira_pool`.

    Returns:
        float64 [M, N].

    Raises:
        ValueError: as :func:`reference`; or rows are not paired under ``"pair"``.
    """
    shadows = Shadows(phi, membership)
    width = shadows.groups(leave_out).shape[1]
    scores = np.empty((shadows.models, shadows.records))
    for block, found in shadows.map_blocks(partial(_reference_without, width=width)):
        scores[:, block] = found
    return scores


def _loss(values: np.ndarray, _: np.ndarray) -> np.ndarray:
    return log_expit(values).mean(axis=2)


def _reference(values: np.ndarray, inside: np.ndarray, target: np.ndarray) -> np.ndarray:
    total, count = reduce_all(np.add, log_expit(values), ~inside)
    return _above(log_expit(target)[None], total, count)[0]


def _reference_without(values: np.ndarray, inside: np.ndarray, *, width: int) -> np.ndarray:
    score = log_expit(values)
    total, count = reduce_without(np.add, score, ~inside, width)
    return _above(score, total.repeat(width, axis=0), count.repeat(width, axis=0))


def _above(score: np.ndarray, total: np.ndarray, count: np.ndarray) -> np.ndarray:
    """[T, N]: scores [T, N, Q] minus the mean total / count, averaged over queries; NaN where count is 0."""
    above = (score - total / np.maximum(count, 1)).mean(axis=2)
    return np.where(count[..., 0] > 0, above, np.nan)


def _unlabelled(phi: Any) -> Shadows:
    values = phi if hasattr(phi, "shape") else np.asarray(phi, dtype=np.float64)
    return Shadows(values, np.zeros(values.shape[:2], dtype=bool))
