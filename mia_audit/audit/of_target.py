"""One checkpoint judged by a pool -> AuditResult."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from mia_audit.audit.arms import arm_summaries, evidence_loader, recipe_effect
from mia_audit.audit.cautions import (
    accuracy_warnings,
    borrowed_warnings,
    dropped_warnings,
    few_models_warnings,
    member_warnings,
    unique,
)
from mia_audit.audit.doubts import asked_again, disagreeing_rows, fit_doubts, reversed_rows
from mia_audit.audit.drawings import target_drawings
from mia_audit.audit.jackknives import remembering_jackknife
from mia_audit.audit.rows import epsilon_of_target, headline_of, target_row
from mia_audit.audit.scoring import (
    HEADLINE,
    check_choice,
    choose_attacks,
    scores_of_pool,
    scores_of_target,
)
from mia_audit.audit.tables import pool_info, record_columns, target_info
from mia_audit.audit.tags import SUBSET_CHOICES, Tags, choose_tags
from mia_audit.audit.target import Target, open_target
from mia_audit.audit.twins import twin_effect
from mia_audit.batchnorm.ratios import layer_kinds, layer_ratios
from mia_audit.evidence import ArmEvidence, load_evidence, subset_masks
from mia_audit.metrics.records import false_positive_rate
from mia_audit.results import ArmSummary, AttackRow, AuditResult, EffectRow
from shadow_pool.data.records import PoolData
from shadow_pool.models.norms import ratios
from shadow_pool.signals import QUERY_MODES
from shadow_pool.store.drift import drift_warnings
from shadow_pool.store.manifest import now, software_versions
from shadow_pool.store.pool import Pool
from shadow_pool.train.schedule import Progress


def audit_target(
    path: Path,
    pool: Pool,
    data: PoolData,
    *,
    arch: str | None = None,
    arm: str | None = None,
    members: Path | None = None,
    attacks: Sequence[str] = (),
    query_mode: str = "eval",
    subsets: str = "auto",
    twins: int = 0,
    trust: bool = False,
    device: str = "cpu",
    workers: int | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> AuditResult:
    """Judge one checkpoint by the shadow models of its arm.

    The target was trained on its own records, so the whole pool is its evidence. Members unknown: scores and
    false-positive rates, no rows. Costs a forward pass, one scoring of the pool, and the jackknife of BatchNorm's
    effect over pairs x models x records.

    Args:
        attacks: which to run (default: all that the pool allows).
        members: a file of the target's members (default: the sidecar beside the model, if there is one).
        twins: this many models of the reference arm and of ``batch`` are trained on the target's members, and
            their difference to the target is BatchNorm's effect on this checkpoint.
        workers, on_progress: of the twins' training, see :func:`shadow_pool.train.schedule.train_pool`.
        others: see :func:`mia_audit.audit.target.open_target`.

    Raises:
        UserError: what the user can mend, in one line.
    """
    check_choice("subsets", subsets, SUBSET_CHOICES)
    check_choice("query mode", query_mode, QUERY_MODES)
    target = open_target(
        path,
        pool,
        data,
        arch=arch,
        arm=arm,
        members=members,
        query_mode=query_mode,
        trust=trust,
        device=device,
    )
    evidence = load_evidence(pool, target.arm, query_mode=query_mode, data=data)
    judged = _judge(target, evidence, pool, attacks, subsets)
    load, memo = evidence_loader(pool, data, query_mode, {target.arm: evidence}), remembering_jackknife(pool.path)
    effect, notes = recipe_effect(pool, load, [HEADLINE], judged.masks, memo)
    if twins:
        rows, twin_notes = twin_effect(
            pool,
            data,
            target,
            judged.headline,
            judged.scores[judged.headline],
            judged.masks,
            count=twins,
            workers=workers,
            device=device,
            on_progress=on_progress,
        )
        effect, notes = [*effect, *rows], [*notes, *twin_notes]
    arms = arm_summaries(pool, load, judged.masks, memo)
    drift = drift_warnings(pool, device=device, here=True)
    if query_mode == "eval":
        notes = [*notes, *asked_again(pool, data, evidence)]
    return _result(pool, data, target, evidence, judged, tuple(effect), arms, query_mode, [*drift, *notes])


@dataclass(frozen=True)
class _Judged:
    """Scores [N] of the target and [M, N] of the pool's own models by attack, and the subsets they are shown by."""

    tags: Tags
    masks: dict[str, np.ndarray]
    scores: dict[str, np.ndarray]
    cells: dict[str, np.ndarray]
    headline: str
    notes: list[str]


def _judge(target: Target, evidence: ArmEvidence, pool: Pool, attacks: Sequence[str], subsets: str) -> _Judged:
    chosen, notes = choose_attacks(attacks, int(target.outside.sum()))
    tags = choose_tags(subsets, pool.records, evidence)
    return _Judged(
        tags=tags,
        masks=subset_masks(tags.subset),
        scores={name: scores_of_target(name, target, evidence) for name in chosen},
        cells={name: scores_of_pool(name, evidence) for name in chosen},
        headline=HEADLINE if HEADLINE in chosen else chosen[0],
        notes=notes,
    )


def _result(
    pool: Pool,
    data: PoolData,
    target: Target,
    evidence: ArmEvidence,
    judged: _Judged,
    effect: tuple[EffectRow, ...],
    arms: tuple[ArmSummary, ...],
    query_mode: str,
    notes: list[str],
) -> AuditResult:
    info = target_info(target, evidence, data, query_mode)
    unlike = accuracy_warnings(info, evidence)
    rows = _target_rows(target, evidence, judged, imitated=not unlike) if target.member is not None else []
    curves, bands, drawn = target_drawings(target, judged.scores[judged.headline], judged.masks)
    warnings = (
        *pool.manifest.warnings,
        *evidence.notes,
        *target.warnings,
        *judged.notes,
        *judged.tags.notes,
        *notes,
        *member_warnings(target, evidence),
        *borrowed_warnings(rows, imitated=not unlike),
        *reversed_rows(rows),
        *disagreeing_rows(rows, judged.headline, target.arm),
        *fit_doubts(target, data.records.label, evidence),
        *unlike,
        *dropped_warnings(judged.scores, pool),
        *few_models_warnings(judged.cells[judged.headline], pool),
    )
    return AuditResult(
        kind="target",
        created=now(),
        software=software_versions(),
        headline=headline_of(rows, judged.headline, target.arm),
        target=info,
        pool=pool_info(pool, judged.tags),
        attacks=tuple(rows),
        layers=tuple(layer_ratios([ratios(target.model)], kinds=layer_kinds(target.model))),
        effect=effect,
        warnings=unique(warnings),
        records=_target_table(pool, target, evidence, judged),
        curves=curves,
        bands=bands,
        cells=drawn,
        arms=arms,
        query_mode=query_mode,
    )


def _target_table(pool: Pool, target: Target, evidence: ArmEvidence, judged: _Judged) -> pd.DataFrame:
    """records.parquet of a target."""
    table = record_columns(pool, judged.tags, evidence)
    table["member"] = pd.array(target.member if target.member is not None else [None] * len(table), dtype="boolean")
    table["phi"] = target.records.phi[:, 0]
    for name, score in judged.scores.items():
        table[name] = score
    table["false_positive_rate"] = false_positive_rate(
        judged.scores[judged.headline], judged.cells[judged.headline], evidence.membership
    )
    return table


def _target_rows(target: Target, evidence: ArmEvidence, judged: _Judged, *, imitated: bool) -> list[AttackRow]:
    member = target.member
    assert member is not None
    rows = []
    for attack, score in judged.scores.items():
        cells = judged.cells[attack]
        epsilon = epsilon_of_target(member, score, cells, evidence.membership) if target.coins else None
        for subset, mask in judged.masks.items():
            rows.append(
                target_row(
                    attack,
                    target.arm,
                    subset,
                    member[mask],
                    score[mask],
                    cells[~evidence.membership & mask],
                    imitated=imitated,
                    epsilon_lower=epsilon if subset == "all" else None,
                )
            )
    return rows
