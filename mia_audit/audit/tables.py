"""The tables and summaries of an audit: records.parquet, the target, the pool, its arms."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

from mia_audit.audit.jackknives import Measure
from mia_audit.audit.scoring import HEADLINE
from mia_audit.audit.tags import Tags
from mia_audit.audit.target import Target
from mia_audit.evidence import ArmEvidence
from mia_audit.metrics.records import false_positive_rate, memorization, vulnerability
from mia_audit.results import ArmSummary, AttackRow, PoolInfo, TargetInfo
from shadow_pool.data.records import PoolData
from shadow_pool.models.norms import norm_layers
from shadow_pool.store.entry import EntryInfo
from shadow_pool.store.pool import Pool


def record_columns(pool: Pool, tags: Tags, evidence: ArmEvidence) -> pd.DataFrame:
    """The columns of records.parquet that the target has no part in."""
    records = pool.records
    correct = evidence.predicted == records["label"].to_numpy()
    table = pd.DataFrame(
        {
            "id": records["id"],
            "label": records["label"],
            "subset": tags.subset,
            "subset_source": tags.subset_source,
            "member": pd.array([None] * len(records), dtype="boolean"),
            "phi": np.nan,
            "vulnerability": vulnerability(evidence.phi, evidence.membership),
            "memorization": memorization(correct, evidence.membership),
        }
    )
    if (tags.suspected_label >= 0).any():
        table["suspected_label"] = pd.array(
            [None if label < 0 else label for label in tags.suspected_label], dtype="Int64"
        )
    return table


def pool_table(
    pool: Pool,
    tags: Tags,
    evidence: ArmEvidence,
    attacks: Sequence[str],
    masks: Mapping[str, np.ndarray],
    measure: Measure,
) -> pd.DataFrame:
    """records.parquet of a pool: scores are means over a record's non-member and member cells."""
    table = record_columns(pool, tags, evidence)
    table["phi"] = _cell_means(evidence.phi[:, :, 0], ~evidence.membership)
    for name in attacks:
        scores = measure(name, evidence, masks).scores
        table[f"{name}_out"] = _cell_means(scores, ~evidence.membership)
        table[f"{name}_in"] = _cell_means(scores, evidence.membership)
    table["false_positive_rate"] = false_positive_rate(
        table[f"{HEADLINE}_in"].to_numpy(), measure(HEADLINE, evidence, masks).scores, evidence.membership
    )
    return table


def _cell_means(values: np.ndarray, cells: np.ndarray) -> np.ndarray:
    chosen = cells & ~np.isnan(values)
    counts = chosen.sum(axis=0)
    sums = np.where(chosen, values, 0.0).sum(axis=0)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def target_info(target: Target, evidence: ArmEvidence, data: PoolData, query_mode: str) -> TargetInfo:
    """What was audited: the file, the model, and how its accuracy compares with its shadows\'."""
    correct = target.records.predicted == data.records.label
    member = target.member
    members = float(correct[member].mean()) if member is not None and member.any() else None
    others = float(correct[~member].mean()) if member is not None and not member.all() else None
    shadows = [info.nonmember_accuracy for info in evidence.infos if info.nonmember_accuracy is not None]
    percentile = None if others is None or not shadows else float(np.mean([value < others for value in shadows]))
    return TargetInfo(
        path=str(target.path),
        sha256=target.checkpoint.sha256,
        arch=target.arch,
        parameters=sum(parameter.numel() for parameter in target.model.parameters()),
        norm_layers=norm_layers(target.model),
        query_mode=query_mode,
        member_accuracy=members,
        nonmember_accuracy=others,
        shadow_accuracy_percentile=percentile,
    )


def pool_info(pool: Pool, tags: Tags) -> PoolInfo:
    """What the evidence comes from."""
    names, counts = np.unique(tags.subset.astype(str), return_counts=True)
    return PoolInfo(
        path=str(pool.path),
        fingerprint=pool.manifest.fingerprint,
        n=pool.spec.n,
        arms=pool.spec.arms,
        records=len(tags.subset),
        subsets={str(name): int(count) for name, count in zip(names, counts, strict=True)},
    )


def arm_summary(arm: str, infos: Collection[EntryInfo], row: AttackRow | None) -> ArmSummary:
    """One arm of a pool; ``row`` is the headline attack over all its cells, None where it does not train."""
    return ArmSummary(
        arm=arm,
        trained=row is not None,
        test_accuracy=_mean(info.population_accuracy for info in infos),
        member_accuracy=_mean(info.member_accuracy for info in infos),
        auc=row.auc if row else None,
        auc_ci=row.auc_ci if row else None,
        tpr_at_fpr=row.tpr_at_fpr if row else (),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
