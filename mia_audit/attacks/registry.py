"""The attacks by the names of audit.json, each in its one way to run: on a target, and on a whole pool."""

from __future__ import annotations

from typing import Any

import numpy as np

from mia_audit.attacks.baselines import loss, loss_pool, reference, reference_pool
from mia_audit.attacks.lira import lira, lira_pool
from mia_audit.attacks.rmia import rmia, rmia_pool
from mia_audit.results import ATTACKS
from shadow_pool.errors import unknown_name

NEEDS_POPULATION = frozenset({"rmia", "rmia-offline"})
NEEDS_IN_SHADOWS = frozenset({"lira-online", "rmia"})
# What LiRA estimates its densities by in audits: benchmarks/spreads.py says why.
SPREAD = "shrunk"
_MODES = {"lira-online": "online", "lira-offline": "offline", "rmia": "online", "rmia-offline": "offline"}


def target_scores(
    attack: str,
    target_phi: Any,
    shadow_phi: Any,
    membership: np.ndarray,
    *,
    population_target_phi: Any = None,
    population_shadow_phi: Any = None,
    spread: str = SPREAD,
) -> np.ndarray:
    """Scores [N] of one attack on one target, higher is more likely a member.

    Args:
        attack: one of :data:`ATTACKS`.
        target_phi: [N] or [N, Q].
        shadow_phi: [M, N] or [M, N, Q].
        membership: bool [M, N].
        population_target_phi, population_shadow_phi: [P] or [P, Q] and [M, P] or [M, P, Q]; needed by
            :data:`NEEDS_POPULATION` alone.
        spread: LiRA's, see :func:`mia_audit.attacks.lira`.

    Raises:
        ValueError: unknown attack, no population where one is needed, or what the attack itself refuses.
    """
    _check(attack, population_target_phi, population_shadow_phi)
    if attack == "loss":
        return loss(target_phi)
    if attack == "reference":
        return reference(target_phi, shadow_phi, membership)
    mode = _MODES[attack]
    if attack in NEEDS_POPULATION:
        return rmia(target_phi, shadow_phi, membership, population_target_phi, population_shadow_phi, mode=mode)
    return lira(target_phi, shadow_phi, membership, mode=mode, spread=spread)


def pool_scores(
    attack: str,
    phi: Any,
    membership: np.ndarray,
    *,
    population_phi: Any = None,
    leave_out: str = "pair",
    spread: str = SPREAD,
) -> np.ndarray:
    """Scores [M, N] of one attack with every model of a pool in turn as the target.

    Args:
        attack: one of :data:`ATTACKS`.
        phi: [M, N] or [M, N, Q].
        membership: bool [M, N].
        population_phi: [M, P] or [M, P, Q]; needed by :data:`NEEDS_POPULATION` alone.
        leave_out, spread: see :func:`mia_audit.attacks.lira_pool`.

    Raises:
        ValueError: unknown attack, no population where one is needed, or what the attack itself refuses.
    """
    _check(attack, population_phi)
    if attack == "loss":
        return loss_pool(phi)
    if attack == "reference":
        return reference_pool(phi, membership, leave_out=leave_out)
    mode = _MODES[attack]
    if attack in NEEDS_POPULATION:
        return rmia_pool(phi, membership, population_phi, leave_out=leave_out, mode=mode)
    return lira_pool(phi, membership, leave_out=leave_out, mode=mode, spread=spread)


def _check(attack: str, *population: Any) -> None:
    if attack not in ATTACKS:
        raise unknown_name("attack", attack, ATTACKS)
    if attack in NEEDS_POPULATION and any(part is None for part in population):
        raise ValueError(f"attack {attack} must have population phi (held-out records), got none")
