"""Train a target's twins, score them, and measure the effect of BatchNorm on this very checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from mia_audit.attacks import NEEDS_POPULATION, target_scores
from mia_audit.audit.target import Target
from mia_audit.batchnorm.checkpoint_effect import TwinScores, checkpoint_effect
from mia_audit.evidence import ArmEvidence, load_evidence, reference_arms
from mia_audit.results import EffectRow
from shadow_pool.arms import parse_arm
from shadow_pool.data.records import PoolData
from shadow_pool.errors import UserError
from shadow_pool.store.pool import Pool
from shadow_pool.store.twins import twin_pool
from shadow_pool.train.schedule import Progress, train_pool


def twin_effect(
    pool: Pool,
    data: PoolData,
    target: Target,
    attack: str,
    score: np.ndarray,
    masks: Mapping[str, np.ndarray],
    *,
    count: int,
    workers: int | None,
    device: str,
    on_progress: Callable[[Progress], None],
) -> tuple[list[EffectRow], list[str]]:
    """Effect rows of scope ``checkpoint`` from ``count`` twins an arm, and notes; no rows without BatchNorm.

    Twins are kept in the pool, so a killed run resumes and a second one trains nothing. Costs ``count`` trainings
    for the reference arm, for ``batch`` (the control) and, where the pool has it, for the arm at equal fit.

    Raises:
        UserError: the target's members are unknown, or the pool has no reference arm.
    """
    if target.member is None:
        raise UserError("--twins needs the target's members, found none; name them with --members")
    if parse_arm(target.arm).norm != "batch":
        return [], [f"the target is of arm {target.arm}: without BatchNorm there is no effect of it to measure"]
    references, notes = reference_arms(pool)
    if not references:
        raise UserError(
            f"--twins needs a trained arm without BatchNorm to compare with, {pool.path} has "
            f"{', '.join(pool.spec.arms)}; train it with mia-audit train-shadows --arms batch,none"
        )
    compared = [*references, ("epochs", "batch")]
    twins = twin_pool(pool, target.member, count=count, arms=("batch", *(arm for _, arm in references)))
    train_pool(twins, data, workers=workers, device=device, indices=range(count), on_progress=on_progress)
    groups, short = [], []
    for matched, arm in compared:
        usable = [i for i, info in twins.scan(arm)[0].items() if i < count and info.status == "trained"]
        if len(usable) < count:
            short.append(f"{count - len(usable)} of {count} twins of arm {arm} did not train and are left out")
        if usable:
            evidence = load_evidence(pool, arm)
            scores = np.stack([_score(attack, twins, evidence, index) for index in usable])
            groups.append(TwinScores(arm, matched, scores))
    if count == 1:
        short.append("a single twin an arm does not show how much training alone varies: no interval; use --twins 4")
    rows = checkpoint_effect(attack, target.member, score, groups, masks, seed=pool.spec.seed)
    return rows, [*notes, *short]


def _score(attack: str, twins: Pool, evidence: ArmEvidence, index: int) -> np.ndarray:
    needs = attack in NEEDS_POPULATION
    return target_scores(
        attack,
        twins.signals(evidence.arm, index).phi,
        evidence.phi,
        evidence.membership,
        population_target_phi=twins.signals(evidence.arm, index, population=True).phi if needs else None,
        population_shadow_phi=evidence.population_phi if needs else None,
    )
