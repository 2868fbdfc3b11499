"""Pools audited by the headline attack inside a study: levels per arm, paired differences between arms."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from mia_audit.evidence import load_evidence, subset_masks
from mia_audit.metrics import Jackknife, jackknife_interval, jackknife_pool, resolved
from mia_audit.results import METRICS, Interval, ends
from mia_audit.studies.result import StudyRow
from mia_audit.studies.setup import StudyPool

ATTACK = "lira-online"
LEVEL = "what the attack finds"


@dataclass(frozen=True)
class Difference:
    """A comparison of paired arms: the estimate and the ends of its 95 % interval, each [subsets, metrics].

    The ends are NaN where the comparison has no spread over pairs, or is of a TPR that is not resolved.
    """

    name: str
    estimate: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @classmethod
    def between(cls, ours: Jackknife, theirs: Jackknife, name: str) -> Difference:
        """``ours`` minus ``theirs``, the same pair deleted in both."""
        estimate, low, high = ours.minus(theirs)
        return cls(name, estimate, *_where_resolved(ours, low, high))

    @classmethod
    def mostly_fit(cls, batch: Jackknife, epochs: Jackknife, fit: Jackknife, name: str) -> Difference:
        """(batch - epochs) - 2 (batch - fit): above zero where over half of the first vanishes at equal fit."""
        estimate = 2 * fit.estimate - epochs.estimate - batch.estimate
        replicates = 2 * fit.replicates - epochs.replicates - batch.replicates
        return cls(name, estimate, *_where_resolved(batch, *jackknife_interval(estimate, replicates)))

    def interval(self, subset: int, metric: int) -> Interval | None:
        """The interval of one entry; None where there is none."""
        return ends(self.low[subset, metric], self.high[subset, metric])


def audit_arms(trained: StudyPool, arms: Iterable[str], *, query_mode: str = "eval") -> dict[str, Jackknife]:
    """The headline attack on each arm that trains, over the models that all of them have."""
    usable = [arm for arm in trained.arms() if arm in set(arms)]
    common = trained.models(*usable)
    found = {}
    for arm in usable:
        evidence = load_evidence(trained.pool, arm, query_mode=query_mode, data=trained.data).take(common)
        masks = subset_masks(trained.data.records.subset)
        found[arm] = jackknife_pool(ATTACK, evidence.phi, evidence.membership, masks, metrics=METRICS)
    return found


def level_rows(found: Jackknife, arm: str, at: str | None) -> list[StudyRow]:
    """What the attack finds in one arm: a row per subset and metric, with its interval."""
    low, high = _where_resolved(found, *found.interval())
    return [
        StudyRow(LEVEL, arm, subset, metric, at, float(found.estimate[i, j]), ends(low[i, j], high[i, j]))
        for i, subset in enumerate(found.subsets)
        for j, metric in enumerate(found.metrics)
    ]


def unresolved(found: Jackknife) -> np.ndarray:
    """bool [subsets, metrics]: a TPR at so low an FPR that fewer than 5 non-member cells are expected above it."""
    nonmembers = found.records * len(found.scores) // 2  # a record is in one half of the models
    fprs = [float(metric.partition("@")[2] or 1) for metric in found.metrics]
    return np.array([[fpr < 1 and not resolved(fpr, int(cells)) for fpr in fprs] for cells in nonmembers])


def unresolved_warnings(found: Jackknife) -> list[str]:
    """Which TPRs stand without an interval since their subsets are too small."""
    lost = unresolved(found)
    where = [
        f"{metric} ({', '.join(np.array(found.subsets)[lost[:, j]])})"
        for j, metric in enumerate(found.metrics)
        if lost[:, j].any()
    ]
    if not where:
        return []
    return [
        f"{' and '.join(where)}: fewer than 5 non-member cells are expected above the threshold; these TPRs are not "
        "resolved and stand without an interval"
    ]


def _where_resolved(found: Jackknife, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ends of intervals, NaN for a TPR that is not resolved and where pairs differ by rounding alone."""
    lost = unresolved(found) | (high - low <= 1e-12)
    return np.where(lost, np.nan, low), np.where(lost, np.nan, high)
