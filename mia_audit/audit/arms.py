"""The arms of a pool side by side: their evidence, the effect of BatchNorm between them, a summary of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mia_audit.audit.cautions import fit_warnings
from mia_audit.audit.jackknives import Measure
from mia_audit.audit.rows import pool_rows
from mia_audit.audit.scoring import HEADLINE
from mia_audit.audit.tables import arm_summary
from mia_audit.batchnorm.effect import effect_rows
from mia_audit.evidence import REPORT_MODELS, ArmEvidence, arm_trains, load_evidence, reference_arms
from mia_audit.results import ArmSummary, EffectRow
from shadow_pool.data.records import PoolData
from shadow_pool.store.pool import Pool


def evidence_loader(
    pool: Pool, data: PoolData | None, query_mode: str, known: Mapping[str, ArmEvidence]
) -> Callable[[str], ArmEvidence]:
    """Evidence by arm, each read once."""
    evidence = dict(known)

    def load(arm: str) -> ArmEvidence:
        if arm not in evidence:
            evidence[arm] = load_evidence(pool, arm, query_mode=query_mode, data=data)
        return evidence[arm]

    return load


def recipe_effect(
    pool: Pool,
    load: Callable[[str], ArmEvidence],
    attacks: Sequence[str],
    masks: Mapping[str, np.ndarray],
    measure: Measure,
) -> tuple[list[EffectRow], list[str]]:
    """Effect rows of scope ``recipe`` for each attack, and notes on references that could not serve."""
    references, notes = reference_arms(pool)
    found = [
        row
        for matched, arm in references
        for attack in attacks
        for row in effect_rows(attack, matched, load("batch"), load(arm), masks, measure)
    ]
    judged = [load(arm) for _, arm in references]
    return found, [*notes, *(note for one in judged for note in (*one.notes, *fit_warnings(one.arm, one.infos)))]


def arm_summaries(
    pool: Pool, load: Callable[[str], ArmEvidence], masks: Mapping[str, np.ndarray], measure: Measure
) -> tuple[ArmSummary, ...]:
    """What each arm of the pool achieves and leaks: what a remedy that was trained beside the others would do."""
    found = []
    for arm in pool.spec.arms:
        row = None
        if arm_trains(pool, arm) and len(load(arm).indices) >= REPORT_MODELS:
            evidence = load(arm)
            jackknife = measure(HEADLINE, evidence, masks)
            row = pool_rows(HEADLINE, arm, jackknife, evidence.membership, masks)[0]
        found.append(arm_summary(arm, pool.scan(arm)[0].values(), row))
    return tuple(found)
