"""How much of one checkpoint's leak is BatchNorm's doing: the target against its twins.

A twin is a model of another arm trained by the pool's recipe on exactly the target's members. The target is
scored against its own arm's shadows, each twin against the shadows of its arm; the difference in AUC or TPR,
target minus the twins' mean, is the effect. Twins of the target's own arm are the control: they should differ
from it by nothing but the randomness of training, or the recipe does not imitate the target's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mia_audit.metrics.distributions import TWO_SIDED, student_quantile
from mia_audit.metrics.jackknife import measure
from mia_audit.metrics.roc import roc
from mia_audit.results import METRICS, EffectRow, Interval
from shadow_pool import seeds

BOOTSTRAPS = 200


@dataclass(frozen=True)
class TwinScores:
    """The scores of K twins of one arm on the target's records. ``matched`` is ``epochs`` or ``fit``."""

    arm: str
    matched: str
    scores: np.ndarray


def checkpoint_effect(
    attack: str,
    member: np.ndarray,
    target: np.ndarray,
    twins: Sequence[TwinScores],
    masks: Mapping[str, np.ndarray],
    *,
    seed: int,
) -> list[EffectRow]:
    """Effect rows of scope ``checkpoint``, a row per arm of twins, subset and metric.

    The interval joins two sources: which records happened to be members (stratified bootstrap over records,
    target and twins together) and how much twins differ by training (their variance over K), with the degrees of
    freedom of Welch and Satterthwaite. With a single twin the second is unknown and the interval None. Costs
    200 x (K + 1) ROC curves per arm and subset.

    Args:
        member: bool [N]; target: float64 [N], scores against the shadows of the target's arm.
        twins: scores [K, N], each arm's against its own shadows.
        masks: subset -> bool [N].
    """
    rows = []
    for group in twins:
        for subset, mask in masks.items():
            keep = mask & ~np.isnan(target) & ~np.isnan(group.scores).any(axis=0)
            if min(member[keep].sum(), (~member[keep]).sum()) < 2:
                continue
            stacked = np.vstack([target[keep], group.scores[:, keep]])
            values, replicates = _measure_all(member[keep], stacked, seeds.stream(seed, "twins-bootstrap"))
            for place, metric in enumerate(METRICS):
                ours, theirs = values[0, place], values[1:, place]
                rows.append(
                    EffectRow(
                        scope="checkpoint",
                        matched=group.matched,
                        attack=attack,
                        subset=subset,
                        metric=metric,
                        reference=group.arm,
                        with_bn=float(ours),
                        without_bn=float(theirs.mean()),
                        difference=float(ours - theirs.mean()),
                        ci=_interval(ours, theirs, replicates[:, :, place]),
                    )
                )
    return rows


def _measure_all(member: np.ndarray, scores: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Metrics of each row of scores, [K + 1, metrics], and of bootstrap samples, [bootstraps, K + 1, metrics]."""
    inside, outside = np.flatnonzero(member), np.flatnonzero(~member)

    def metrics(rows: np.ndarray) -> list[list[float]]:
        curves = (roc(member[rows], score[rows]) for score in scores)
        return [[measure(curve, metric) for metric in METRICS] for curve in curves]

    samples = (
        np.concatenate([rng.choice(inside, len(inside)), rng.choice(outside, len(outside))]) for _ in range(BOOTSTRAPS)
    )
    return np.array(metrics(np.arange(len(member)))), np.array([metrics(rows) for rows in samples])


def _interval(ours: float, theirs: np.ndarray, replicates: np.ndarray) -> Interval | None:
    """95 % interval of ours - mean(theirs) from bootstrap replicates [bootstraps, K + 1] and the twins' variance."""
    if len(theirs) < 2:
        return None
    records = float((replicates[:, 0] - replicates[:, 1:].mean(axis=1)).var(ddof=1))
    training = float(theirs.var(ddof=1)) / len(theirs)
    total = records + training
    freedom = total**2 / (training**2 / (len(theirs) - 1)) if training > 0 else np.inf
    half = student_quantile(TWO_SIDED, freedom) * total**0.5
    difference = float(ours - theirs.mean())
    return max(-1.0, difference - half), min(1.0, difference + half)
