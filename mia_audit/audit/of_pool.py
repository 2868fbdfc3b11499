"""A pool judged by itself -> AuditResult."""

from __future__ import annotations

from mia_audit.audit.arms import arm_summaries, evidence_loader, recipe_effect
from mia_audit.audit.cautions import unique
from mia_audit.audit.doubts import asked_again, reversed_rows
from mia_audit.audit.drawings import pool_drawings
from mia_audit.audit.jackknives import remembering_jackknife
from mia_audit.audit.rows import headline_of, pool_rows
from mia_audit.audit.scoring import HEADLINE, check_choice, choose_attacks
from mia_audit.audit.tables import pool_info, pool_table
from mia_audit.audit.tags import SUBSET_CHOICES, choose_tags
from mia_audit.batchnorm.ratios import pool_ratios
from mia_audit.evidence import REPORT_MODELS, ArmEvidence, arm_trains, load_evidence, subset_masks, usable_models
from mia_audit.results import AuditResult
from shadow_pool.data.records import PoolData
from shadow_pool.errors import UserError
from shadow_pool.signals import QUERY_MODES
from shadow_pool.store.drift import drift_warnings
from shadow_pool.store.manifest import now, software_versions
from shadow_pool.store.pool import Pool


def audit_pool(
    pool: Pool, *, data: PoolData | None = None, subsets: str = "auto", query_mode: str = "eval"
) -> AuditResult:
    """A pool judges itself: every model of every arm in turn the target, its pair left out.

    Costs one jackknife (pairs x models x records x queries) per arm and attack.

    Args:
        data: the records, needed by query mode ``batch``; in ``eval`` a stored model is asked again about some.

    Raises:
        UserError: fewer than 6 usable models in every arm, or a damaged file.
    """
    check_choice("subsets", subsets, SUBSET_CHOICES)
    check_choice("query mode", query_mode, QUERY_MODES)
    judged, notes = _judged_arms(pool, data, query_mode)
    first = "batch" if "batch" in judged else next(iter(judged))
    lead = judged[first]
    chosen, attack_notes = choose_attacks((), lead.population_phi.shape[1])
    tags = choose_tags(subsets, pool.records, lead)
    masks = subset_masks(tags.subset)
    memo = remembering_jackknife(pool.path)
    rows = [
        row
        for arm, found in judged.items()
        for name in chosen
        for row in pool_rows(name, arm, memo(name, found, masks), found.membership, masks)
    ]
    load = evidence_loader(pool, data, query_mode, judged)
    effect, effect_notes = recipe_effect(pool, load, chosen, masks, memo)
    if data is not None and query_mode == "eval":
        notes += asked_again(pool, data, lead)
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
        warnings=unique(
            (
                *pool.manifest.warnings,
                *drift_warnings(pool, here=query_mode == "batch"),
                *notes,
                *attack_notes,
                *tags.notes,
                *effect_notes,
                *reversed_rows(rows),
            )
        ),
        records=pool_table(pool, tags, lead, chosen, masks, memo),
        curves=curves,
        bands=bands,
        cells=drawn,
        arms=arm_summaries(pool, load, masks, memo),
        query_mode=query_mode,
    )


def _judged_arms(pool: Pool, data: PoolData | None, query_mode: str) -> tuple[dict[str, ArmEvidence], list[str]]:
    """The arms with enough usable models to judge themselves, and notes on the others."""
    judged: dict[str, ArmEvidence] = {}
    notes: list[str] = []
    most = 0
    for arm in pool.spec.arms:
        if not arm_trains(pool, arm):
            notes += [*usable_models(pool, arm)[1], f"arm {arm} does not train here (see mia-audit pool info)"]
            continue
        found = load_evidence(pool, arm, query_mode=query_mode, data=data)
        notes += found.notes
        most = max(most, len(found.indices))
        if len(found.indices) >= REPORT_MODELS:
            judged[arm] = found
        else:
            notes.append(f"arm {arm}: {len(found.indices)} usable models, {REPORT_MODELS} are needed")
    if not judged:
        raise UserError(
            f"a pool judges itself from {REPORT_MODELS} usable models an arm on, {pool.path} has {most}; train more "
            f"(mia-audit train-shadows --n {REPORT_MODELS}), or see with mia-audit pool info how its models ended"
        )
    return judged, notes
