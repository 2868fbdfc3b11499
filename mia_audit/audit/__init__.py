"""Audits: a checkpoint judged by a pool, or a pool judged by itself -> AuditResult."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from mia_audit.audit.cautions import accuracy_warnings, dropped_warnings, fit_warnings, member_warnings
from mia_audit.audit.drawings import pool_drawings, target_drawings
from mia_audit.audit.rows import epsilon_of_target, headline_of, pool_rows, target_row
from mia_audit.audit.scoring import (
    HEADLINE,
    Measure,
    check_choice,
    choose_attacks,
    remembering_jackknife,
    scores_of_pool,
    scores_of_target,
)
from mia_audit.audit.tables import arm_summary, pool_info, pool_table, record_columns, target_info
from mia_audit.audit.tags import SUBSET_CHOICES, choose_tags
from mia_audit.audit.target import Target, open_target
from mia_audit.audit.twins import twin_effect
from mia_audit.batchnorm.effect import effect_rows
from mia_audit.batchnorm.ratios import layer_kinds, layer_ratios, pool_ratios
from mia_audit.evidence import REPORT_MODELS, ArmEvidence, arm_trains, load_evidence, reference_arms, subset_masks
from mia_audit.metrics.records import false_positive_rate
from mia_audit.results import ArmSummary, AttackRow, AuditResult, EffectRow
from shadow_pool.data.records import PoolData
from shadow_pool.errors import UserError
from shadow_pool.models.norms import ratios
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
        others: see :func:`mia_audit.target.open_target`.

    Raises:
        UserError: what the user can mend, in one line.
    """
    check_choice("subsets", subsets, SUBSET_CHOICES)
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
    chosen, notes = choose_attacks(attacks, evidence)
    tags = choose_tags(subsets, pool.records, evidence)
    masks = subset_masks(tags.subset)
    scores = {name: scores_of_target(name, target, evidence) for name in chosen}
    cells = {name: scores_of_pool(name, evidence) for name in chosen}
    headline_attack = HEADLINE if HEADLINE in chosen else chosen[0]
    rows = _target_rows(target, evidence, masks, scores, cells) if target.member is not None else []
    load, memo = _loader(pool, data, query_mode, {target.arm: evidence}), remembering_jackknife()
    effect, effect_notes = _recipe_effect(pool, load, [HEADLINE], masks, memo)
    if twins:
        twin_rows, twin_notes = twin_effect(
            pool,
            data,
            target,
            headline_attack,
            scores[headline_attack],
            masks,
            count=twins,
            workers=workers,
            device=device,
            on_progress=on_progress,
        )
        effect, effect_notes = [*effect, *twin_rows], [*effect_notes, *twin_notes]
    table = record_columns(pool, tags, evidence)
    table["member"] = pd.array(target.member if target.member is not None else [None] * len(table), dtype="boolean")
    table["phi"] = target.records.phi[:, 0]
    for name, score in scores.items():
        table[name] = score
    table["false_positive_rate"] = false_positive_rate(
        scores[headline_attack], cells[headline_attack], evidence.membership
    )
    curves, bands, drawn = target_drawings(target, scores[headline_attack], masks)
    info = target_info(target, evidence, data, query_mode)
    warnings = (
        *pool.manifest.warnings,
        *drift_warnings(pool, device=device, here=True),
        *evidence.notes,
        *target.warnings,
        *notes,
        *tags.notes,
        *effect_notes,
        *member_warnings(target, evidence),
        *accuracy_warnings(info, evidence),
        *dropped_warnings(scores, pool),
    )
    return AuditResult(
        kind="target",
        created=now(),
        software=software_versions(),
        headline=headline_of(rows, headline_attack, target.arm),
        target=info,
        pool=pool_info(pool, tags),
        attacks=tuple(rows),
        layers=tuple(layer_ratios([ratios(target.model)], kinds=layer_kinds(target.model))),
        effect=tuple(effect),
        warnings=_unique(warnings),
        records=table,
        curves=curves,
        bands=bands,
        cells=drawn,
        arms=_arm_summaries(pool, load, masks, memo),
        query_mode=query_mode,
    )


def audit_pool(
    pool: Pool, *, data: PoolData | None = None, subsets: str = "auto", query_mode: str = "eval"
) -> AuditResult:
    """A pool judges itself: every model of every arm in turn the target, its pair left out.

    Costs one jackknife (pairs x models x records x queries) per arm and attack.

    Args:
        data: the records, needed by query mode ``batch`` alone.

    Raises:
        UserError: fewer than 6 usable models in every arm, or a damaged file.
    """
    check_choice("subsets", subsets, SUBSET_CHOICES)
    arms = [arm for arm in pool.spec.arms if arm_trains(pool, arm)]
    if not arms:
        raise UserError(
            f"no arm of {pool.path} has enough trained models; mia-audit pool info {pool.path} shows how they ended"
        )
    evidence = {arm: load_evidence(pool, arm, query_mode=query_mode, data=data) for arm in arms}
    judged = {arm: found for arm, found in evidence.items() if len(found.indices) >= REPORT_MODELS}
    if not judged:
        most = max(len(found.indices) for found in evidence.values())
        raise UserError(
            f"a pool judges itself from {REPORT_MODELS} usable models an arm on, {pool.path} has {most}; "
            f"extend it with mia-audit train-shadows --n {REPORT_MODELS}"
        )
    first = "batch" if "batch" in judged else next(iter(judged))
    lead = judged[first]
    chosen, notes = choose_attacks((), lead)
    tags = choose_tags(subsets, pool.records, lead)
    masks = subset_masks(tags.subset)
    memo = remembering_jackknife()
    rows = [
        row
        for arm, found in judged.items()
        for name in chosen
        for row in pool_rows(name, arm, memo(name, found, masks), found.membership, masks)
    ]
    load = _loader(pool, data, query_mode, evidence)
    effect, effect_notes = _recipe_effect(pool, load, chosen, masks, memo)
    skipped = [
        f"arm {a}: {len(e.indices)} usable models, {REPORT_MODELS} are needed"
        for a, e in evidence.items()
        if a not in judged
    ]
    untrained = [f"arm {arm} does not train here (see pool info)" for arm in pool.spec.arms if arm not in arms]
    curves, bands, drawn = pool_drawings(judged, masks, memo)
    return AuditResult(
        kind="pool",
        created=now(),
        software=software_versions(),
        headline=headline_of(rows, HEADLINE, first),
        target=None,
        pool=pool_info(pool, tags),
        attacks=tuple(rows),
        layers=tuple(pool_ratios(pool, lead)),
        effect=tuple(effect),
        warnings=_unique(
            (
                *pool.manifest.warnings,
                *drift_warnings(pool, here=query_mode == "batch"),
                *(note for found in evidence.values() for note in found.notes),
                *skipped,
                *untrained,
                *notes,
                *tags.notes,
                *effect_notes,
            )
        ),
        records=pool_table(pool, tags, lead, chosen, masks, memo),
        curves=curves,
        bands=bands,
        cells=drawn,
        arms=_arm_summaries(pool, load, masks, memo),
        query_mode=query_mode,
    )


def _target_rows(
    target: Target,
    evidence: ArmEvidence,
    masks: Mapping[str, np.ndarray],
    scores: Mapping[str, np.ndarray],
    cells: Mapping[str, np.ndarray],
) -> list[AttackRow]:
    member = target.member
    assert member is not None
    rows = []
    for attack, score in scores.items():
        epsilon = epsilon_of_target(member, score, cells[attack], evidence.membership) if target.coins else None
        for subset, mask in masks.items():
            nonmember_cells = cells[attack][~evidence.membership & mask]
            rows.append(
                target_row(
                    attack,
                    target.arm,
                    subset,
                    member[mask],
                    score[mask],
                    nonmember_cells,
                    epsilon_lower=epsilon if subset == "all" else None,
                )
            )
    return rows


def _loader(
    pool: Pool, data: PoolData | None, query_mode: str, known: Mapping[str, ArmEvidence]
) -> Callable[[str], ArmEvidence]:
    """Evidence by arm, each read once."""
    evidence = dict(known)

    def load(arm: str) -> ArmEvidence:
        if arm not in evidence:
            evidence[arm] = load_evidence(pool, arm, query_mode=query_mode, data=data)
        return evidence[arm]

    return load


def _recipe_effect(
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
    return found, [*notes, *(note for _, arm in references for note in fit_warnings(load(arm)))]


def _arm_summaries(
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


def _unique(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))
