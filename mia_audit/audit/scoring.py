"""Run the attacks of an audit: which, on a target, and on a pool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mia_audit.attacks import ATTACKS, NEEDS_POPULATION, pool_scores, target_scores
from mia_audit.audit.target import Target
from mia_audit.evidence import ArmEvidence, required_models
from shadow_pool.errors import UserError, unknown_name
from shadow_pool.store.pool import Pool

HEADLINE = "lira-online"
"""Fixed beforehand, never the best row picked after the fact."""
FEWEST_POPULATION = 10


def choose_attacks(asked: Iterable[str], population: int) -> tuple[list[str], list[str]]:
    """The attacks to run in the order of audit.json with so many records in the population, and why others are not."""
    asked = list(asked)
    for name in asked:
        check_choice("attack", name, ATTACKS)
    enough = population >= FEWEST_POPULATION
    possible = [name for name in ATTACKS if enough or name not in NEEDS_POPULATION]
    chosen = [name for name in possible if name in asked or not asked]
    if not chosen:
        raise UserError(
            f"{', '.join(asked)} need a population of at least {FEWEST_POPULATION} held-out records, "
            f"found {population}; make the pool with a larger --holdout"
        )
    notes = [] if enough else [f"RMIA is left out: the population has {population} records"]
    return chosen, notes


def scores_of_target(attack: str, target: Target, evidence: ArmEvidence) -> np.ndarray:
    """Scores [N] of one attack on the target, by all of the arm's usable models."""
    needs = attack in NEEDS_POPULATION
    return target_scores(
        attack,
        target.records.phi,
        evidence.phi,
        evidence.membership,
        population_target_phi=target.population_phi if needs else None,
        population_shadow_phi=evidence.population_phi[:, target.outside] if needs else None,
    )


def scores_of_pool(attack: str, evidence: ArmEvidence) -> np.ndarray:
    """Scores [M, N] of one attack with every model of the arm in turn the target, its pair left out."""
    population = evidence.population_phi if attack in NEEDS_POPULATION else None
    return pool_scores(attack, evidence.phi, evidence.membership, population_phi=population)


def scores_from_disk(
    attacks: Iterable[str], target_phi: Any, pool: Pool, arm: str, *, population_target_phi: Any = None
) -> dict[str, np.ndarray]:
    """Scores [N] by attack on a target, by all usable models of an arm, for pools beyond memory.

    What an audit computes, while phi is read in blocks of records. Held are membership (a byte a model and record) and
    some numbers a record. Blocks are independent: ``joblib.parallel_config`` runs them in processes or, with
    ``backend="dask"``, on workers that see the pool's folder, with the same scores to the bit. Costs one reading and
    hashing of the models' files, and one of phi an attack.

    Args:
        attacks: of :data:`mia_audit.attacks.ATTACKS`.
        target_phi: [N] or [N, Q], of the pool's records in their order.
        population_target_phi: [P] or [P, Q], needed by :data:`mia_audit.attacks.NEEDS_POPULATION` alone.

    Raises:
        UserError: the pool has no such arm or too few usable models, or a file is damaged.
        ValueError: as :func:`mia_audit.attacks.target_scores`.
    """
    usable, _ = required_models(pool, arm)
    membership = pool.membership if len(usable) == pool.spec.n else pool.membership[usable]
    phi, population_phi = (pool.phi(arm, usable, population=population) for population in (False, True))
    ask = {"population_target_phi": population_target_phi, "population_shadow_phi": population_phi}
    return {name: target_scores(name, target_phi, phi, membership, **ask) for name in attacks}


def check_choice(kind: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise unknown_name(kind, value, known)
