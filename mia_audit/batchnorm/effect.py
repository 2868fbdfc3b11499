"""The effect of BatchNorm: paired differences between the ``batch`` arm and a reference arm of one pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from mia_audit.evidence import ArmEvidence
from mia_audit.metrics.jackknife import Jackknife
from mia_audit.results import METRICS, EffectRow, ends


def effect_rows(
    attack: str,
    matched: str,
    with_bn: ArmEvidence,
    without_bn: ArmEvidence,
    masks: Mapping[str, np.ndarray],
    jackknife: Callable[[str, ArmEvidence, Mapping[str, np.ndarray]], Jackknife],
) -> list[EffectRow]:
    """Differences in AUC and TPR by subset with 95 % intervals, over the pairs that both arms have.

    Models of one index share records, seed and batch order in both arms, so the same pair is deleted in both
    and the interval is that of the difference (delete-a-pair jackknife). Costs two jackknives of a pool.

    Args:
        matched: ``epochs`` or ``fit``, what the two arms have in common.
        jackknife: scores and measures one arm's evidence, see :func:`mia_audit.metrics.jackknife_pool`.
    """
    common = np.intersect1d(with_bn.indices, without_bn.indices)
    if len(common) < 4:
        return []
    ours = jackknife(attack, with_bn.take(common), masks)
    theirs = jackknife(attack, without_bn.take(common), masks)
    difference, low, high = ours.minus(theirs)
    rows = []
    for i, subset in enumerate(ours.subsets):
        for metric in METRICS:
            j = ours.metrics.index(metric)
            if not np.isfinite(difference[i, j]):
                continue
            rows.append(
                EffectRow(
                    scope="recipe",
                    matched=matched,
                    attack=attack,
                    subset=subset,
                    metric=metric,
                    reference=without_bn.arm,
                    with_bn=float(ours.estimate[i, j]),
                    without_bn=float(theirs.estimate[i, j]),
                    difference=float(difference[i, j]),
                    ci=ends(low[i, j], high[i, j]),
                )
            )
    return rows
