"""Pools audited by the headline attack inside a study: levels per arm, paired differences between arms."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from mia_audit.evidence import arm_trains, load_evidence, subset_masks
from mia_audit.metrics import Jackknife, jackknife_interval, jackknife_pool
from mia_audit.results import METRICS, Interval, ends
from mia_audit.studies.result import StudyRow
from mia_audit.studies.setup import StudyPool

ATTACK = "lira-online"
LEVEL = "what the attack finds"


@dataclass(frozen=True)
class Difference:
    """A paired difference of two arms: estimate [subsets, metrics] and the same without each pair."""

    name: str
    estimate: np.ndarray
    replicates: np.ndarray

    @classmethod
    def between(cls, ours: Jackknife, theirs: Jackknife, name: str) -> Difference:
        """``ours`` minus ``theirs``, the same pair deleted in both."""
        return cls(name, ours.estimate - theirs.estimate, ours.replicates - theirs.replicates)

    def interval(self, subset: int, metric: int) -> Interval | None:
        """95 % interval of one entry (delete-a-pair jackknife)."""
        low, high = jackknife_interval(self.estimate, self.replicates)
        return ends(low[subset, metric], high[subset, metric])

    def minus_twice(self, other: Difference) -> Difference:
        """Above zero where more than half of this difference vanishes in ``other``."""
        name = f"({self.name}) - 2 ({other.name})"
        return Difference(name, self.estimate - 2 * other.estimate, self.replicates - 2 * other.replicates)


def audit_arms(trained: StudyPool, arms: Iterable[str], *, query_mode: str = "eval") -> dict[str, Jackknife]:
    """The headline attack on each arm that trains, over the models that all of them have."""
    usable = [arm for arm in arms if arm_trains(trained.pool, arm)]
    common = trained.models(*usable)
    found = {}
    for arm in usable:
        evidence = load_evidence(trained.pool, arm, query_mode=query_mode, data=trained.data).take(common)
        masks = subset_masks(trained.data.records.subset)
        found[arm] = jackknife_pool(ATTACK, evidence.phi, evidence.membership, masks, metrics=METRICS)
    return found


def level_rows(found: Jackknife, arm: str, at: str | None) -> list[StudyRow]:
    """What the attack finds in one arm: a row per subset and metric, with its interval."""
    low, high = found.interval()
    return [
        StudyRow(LEVEL, arm, subset, metric, at, float(found.estimate[i, j]), ends(low[i, j], high[i, j]))
        for i, subset in enumerate(found.subsets)
        for j, metric in enumerate(found.metrics)
    ]
