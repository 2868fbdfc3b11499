"""What a report draws of an audit: ROC curves, their bands, and scores by membership."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mia_audit.audit.jackknives import BAND_FPRS, Measure
from mia_audit.audit.rows import FEWEST_NONMEMBERS
from mia_audit.audit.scoring import HEADLINE
from mia_audit.audit.target import Target
from mia_audit.evidence import ArmEvidence
from mia_audit.metrics.intervals import tpr_interval
from mia_audit.metrics.roc import roc
from mia_audit.results import ends

Drawings = tuple[
    dict[tuple[str, str], tuple[np.ndarray, np.ndarray]],
    dict[tuple[str, str], tuple[np.ndarray, np.ndarray, np.ndarray]],
    dict[str, tuple[np.ndarray, np.ndarray]],
]


def target_drawings(target: Target, score: np.ndarray, masks: Mapping[str, np.ndarray]) -> Drawings:
    """What the report draws of a target: curves by subset, the band over all records, members and scores."""
    member = target.member
    if member is None:
        return {}, {}, {}
    curves, bands = {}, {}
    for subset, mask in masks.items():
        rows = mask & ~np.isnan(score)
        if member[rows].any() and (~member[rows]).sum() >= FEWEST_NONMEMBERS:
            curve = roc(member[rows], score[rows])
            curves[target.arm, subset] = (curve.fpr, curve.tpr)
            if subset == "all":
                both = [tpr_interval(member[rows], score[rows], fpr, 0) for fpr in BAND_FPRS]
                bands[target.arm, subset] = (np.array(BAND_FPRS), *np.array(both).T)
    return curves, bands, {target.arm: (member, score)}


def pool_drawings(judged: Mapping[str, ArmEvidence], masks: Mapping[str, np.ndarray], measure: Measure) -> Drawings:
    """What the report draws of a pool: per arm and subset, over (model, record) cells."""
    curves, bands, cells = {}, {}, {}
    for arm, evidence in judged.items():
        found = measure(HEADLINE, evidence, masks)
        low, high = found.interval()
        columns = [found.metrics.index(f"tpr@{fpr:g}") for fpr in BAND_FPRS]
        cells[arm] = (evidence.membership.ravel(), found.scores.ravel())
        for place, (subset, mask) in enumerate(masks.items()):
            chosen = mask & ~np.isnan(found.scores)
            curve = roc(evidence.membership[chosen], found.scores[chosen])
            curves[arm, subset] = (curve.fpr, curve.tpr)
            if ends(low[place, columns[0]], high[place, columns[0]]) is not None:
                bands[arm, subset] = (np.array(BAND_FPRS), low[place, columns], high[place, columns])
    return curves, bands, cells
