"""What a reader of an audit must know before believing it: its warnings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from mia_audit.audit.rows import FEWEST_NONMEMBERS
from mia_audit.audit.target import Target
from mia_audit.evidence import REPORT_MODELS, ArmEvidence
from mia_audit.metrics.distributions import TWO_SIDED, student_quantile
from mia_audit.results import AttackRow, TargetInfo
from shadow_pool.store.entry import EntryInfo
from shadow_pool.store.pool import Pool


def member_warnings(target: Target, evidence: ArmEvidence) -> list[str]:
    """What unknown, missing or many members mean for the audit."""
    member = target.member
    if member is None:
        return ["members are unknown: scores and false-positive rates are given, but no ROC; name them with --members"]
    found = []
    members, nonmembers = int(member.sum()), int((~member).sum())
    if nonmembers < FEWEST_NONMEMBERS:
        found.append(
            f"only {nonmembers} non-members among the records: no AUC, and the thresholds of TPR come from what the "
            "pool's own models score on records they did not train on"
        )
    share = members / len(member)
    if share > 0.6:
        found.append(
            f"the target trained on {share:.0%} of the records, its shadows on half: they saw less data, fit it "
            "harder, and may understate how ordinary the target's scores are"
        )
    if not members:
        found.append("the target has no members among the records, so nothing can leak about them")
    return found


def borrowed_warnings(rows: Iterable[AttackRow], imitated: bool) -> list[str]:
    """Subsets whose TPRs stand on the pool's thresholds, though all records have non-members enough; and a pool whose
    thresholds do not hold for this target."""
    few = {row.subset: row.nonmembers for row in rows if row.nonmembers < FEWEST_NONMEMBERS}
    if "all" in few:
        if imitated or few["all"]:
            return []
        return ["TPRs stand on the thresholds of a pool that does not imitate the target: none is resolved"]
    found = ", ".join(f"{subset} ({count})" for subset, count in few.items())
    if not found:
        return []
    return [
        f"subsets with few non-members of the target: {found}; no AUC, and the thresholds of their TPRs come from the "
        "pool's own models: not resolved"
    ]


def accuracy_warnings(info: TargetInfo, evidence: ArmEvidence) -> list[str]:
    """Whether the shadows fit their members as the target fits its own; else they do not imitate it.

    Outside the range of M shadows lies one model in (M + 1) / 2 of the very same recipe: the target must also lie
    outside the 95 % prediction interval for one more of them, and more than two points from their mean.
    """
    values = [v.member_accuracy for v in evidence.infos if v.member_accuracy is not None]
    if info.member_accuracy is None or len(values) < 2:
        return []
    mean, spread = float(np.mean(values)), float(np.std(values, ddof=1)) * (1 + 1 / len(values)) ** 0.5
    reach = max(0.02, student_quantile(TWO_SIDED, len(values) - 1) * spread)
    low, high = min(*values, mean - reach), max(*values, mean + reach)
    if low <= info.member_accuracy <= high:
        return []
    return [
        f"the target's accuracy on its members is {info.member_accuracy:.3f}, its shadows' {min(values):.3f} to "
        f"{max(values):.3f}: they do not imitate it; usual causes are other preprocessing (--normalize, --image-size), "
        "another class order (--classes), another recipe (--spec) or other initial weights (--init)"
    ]


def dropped_warnings(scores: Mapping[str, np.ndarray], pool: Pool) -> list[str]:
    """The records that each attack could not score."""
    found = []
    for name, score in scores.items():
        lost = np.isnan(score)
        if lost.any():
            ids = ", ".join(pool.records["id"][lost].head(3))
            found.append(f"{name}: {int(lost.sum())} records have too few shadow values and are dropped ({ids}, ...)")
    return found


def few_models_warnings(cells: np.ndarray, pool: Pool) -> list[str]:
    """Where no model of the pool can be judged by the rest, [M, N] scores of the headline attack all NaN."""
    if not np.isnan(cells).all():
        return []
    return [
        f"with {len(cells)} usable models none is left to judge another by: every record's false-positive rate is 1, "
        f"and LiRA has no epsilon_lower; mia-audit train-shadows --n {REPORT_MODELS} --pool {pool.path} mends that"
    ]


def fit_warnings(arm: str, infos: Sequence[EntryInfo]) -> list[str]:
    """Where models of a +fit arm stopped short of their loss, equal fit is not what was compared."""
    short = sum(info.reached is False for info in infos)
    if not short:
        return []
    return [
        f"arm {arm}: {short} of {len(infos)} models did not reach the training loss of their batch "
        "model within ten times the epochs; the effect at equal fit still contains a difference in fit"
    ]


def unique(texts: Iterable[str]) -> tuple[str, ...]:
    """Each text once, in order."""
    return tuple(dict.fromkeys(texts))
