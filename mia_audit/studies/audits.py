"""Pools audited by the headline attack inside a study: levels per arm, paired differences between arms."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from mia_audit.evidence import load_evidence, subset_masks
from mia_audit.metrics import Jackknife, jackknife_interval, jackknife_pool
from mia_audit.results import METRICS, Interval, ends
from mia_audit.studies.result import StudyRow
from mia_audit.studies.setup import StudyPool

ATTACK = "lira-online"
LEVEL = "what the attack finds"


@dataclass(frozen=True)
class Difference:
    """A comparison of paired arms: the estimate and the ends of its 95 % interval, each [subsets, metrics]."""

    name: str
    estimate: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @classmethod
    def between(cls, ours: Jackknife, theirs: Jackknife, name: str) -> Difference:
        """``ours`` minus ``theirs``, the same pair deleted in both."""
        return cls(name, *ours.minus(theirs))

    @classmethod
    def mostly_fit(cls, batch: Jackknife, epochs: Jackknife, fit: Jackknife, name: str) -> Difference:
        """(batch - epochs) - 2 (batch - fit): above zero where over half of the first vanishes at equal fit."""
        estimate = 2 * fit.estimate - epochs.estimate - batch.estimate
        replicates = 2 * fit.replicates - epochs.replicates - batch.replicates
        low, high = jackknife_interval(estimate, replicates)
        blind = low == high  # as in Jackknife.minus: without spread nothing is known
        return cls(name, estimate, np.where(blind, np.nan, low), np.where(blind, np.nan, high))

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
    low, high = found.interval()
    return [
        StudyRow(LEVEL, arm, subset, metric, at, float(found.estimate[i, j]), ends(low[i, j], high[i, j]))
        for i, subset in enumerate(found.subsets)
        for j, metric in enumerate(found.metrics)
    ]
