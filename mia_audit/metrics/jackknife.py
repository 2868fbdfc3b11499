"""Confidence intervals of a pool: delete a pair of models, score the whole pool again, see how much changes.

The cells of a pool are not independent: its targets share their shadow models, and all its models share
records. What is exchangeable is the pairs, so they are what is deleted (Quenouille 1949; Efron 1982, section 3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mia_audit.attacks.registry import SPREAD, pool_scores
from mia_audit.metrics.distributions import TWO_SIDED, student_quantile
from mia_audit.metrics.intervals import clopper_pearson
from mia_audit.metrics.roc import Roc, roc_of_sorted

METRICS = ("auc", "tpr@0.1", "tpr@0.01", "tpr@0.001", "balanced_accuracy")
_FEWEST_PAIRS = 4  # three remain when one is deleted, two when a target's is left out: two values a side


@dataclass(frozen=True)
class Jackknife:
    """What one attack finds in a pool, and in the pool without each of its pairs.

    scores: [M, N], of the whole pool. records: [subsets], how many records of each are scored. estimate:
    [subsets, metrics]; NaN where a subset has no member or no non-member cell. replicates: [pairs, subsets, metrics],
    with pair j deleted; NaN for fewer than four pairs, since too little remains to score. Subsets and metrics in the
    order of their names.
    """

    subsets: tuple[str, ...]
    metrics: tuple[str, ...]
    scores: np.ndarray
    records: np.ndarray
    estimate: np.ndarray
    replicates: np.ndarray

    def interval(self) -> tuple[np.ndarray, np.ndarray]:
        """(low, high), each [subsets, metrics], within [0, 1].

        Where estimate and replicates are all 0 or all 1 the jackknife sees no spread: then the Clopper-Pearson
        interval of none or all of the subset's records. NaN where the replicates are, or are all 0 below a positive
        estimate, or are all the same otherwise (constant scores).
        """
        low, high = jackknife_interval(self.estimate, _scaled(self.estimate, self.replicates))
        low, high = np.maximum(low, 0.0), np.minimum(high, 1.0)
        for row, column in zip(*np.nonzero(low == high), strict=True):
            trials, value = int(self.records[row]), self.estimate[row, column]
            ends = clopper_pearson(trials if value else 0, trials) if value in (0, 1) else (np.nan, np.nan)
            low[row, column], high[row, column] = ends
        return low, high

    def minus(self, other: Jackknife) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(difference, low, high), each [subsets, metrics], to a paired arm: the same pair deleted in both.

        low and high are NaN where either arm's interval is, and where the difference is the same in all replicates.
        """
        if (self.subsets, self.metrics, len(self.replicates)) != (other.subsets, other.metrics, len(other.replicates)):
            raise ValueError(
                f"arms must share subsets, metrics and pairs, got {self.subsets}, {self.metrics}, "
                f"{len(self.replicates)} pairs and {other.subsets}, {other.metrics}, {len(other.replicates)} pairs"
            )
        difference = self.estimate - other.estimate
        replicates = _scaled(self.estimate, self.replicates) - _scaled(other.estimate, other.replicates)
        low, high = jackknife_interval(difference, replicates)
        blind = low == high
        low, high = np.where(blind, np.nan, low), np.where(blind, np.nan, high)
        return difference, np.maximum(low, -1.0), np.minimum(high, 1.0)


def _scaled(estimate: np.ndarray, replicates: np.ndarray) -> np.ndarray:
    """Replicates with their spread brought to the size that it has about the estimate.

    A pool of few pairs loses much of its power with one of them: replicates of a small TPR lie well below the
    estimate, and near 0 they vary little. As of a proportion, the spread is taken to go with the root of the value;
    from 16 models on this changes little. NaN where all replicates are 0 and the estimate is not.
    """
    mean = replicates.mean(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(estimate == mean, 1.0, estimate / mean)
    scale = np.where(np.isinf(ratio), np.nan, np.sqrt(np.maximum(ratio, 1.0)))
    return mean + (replicates - mean) * scale


def jackknife_interval(estimate: np.ndarray, replicates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """95 % interval from delete-one replicates, with Student t of (replicates - 1).

    Args:
        estimate: [...], of the whole sample.
        replicates: [pairs, ...], each without one pair.

    Returns:
        (low, high), each [...]; NaN where a replicate is NaN or there are fewer than two.
    """
    pairs = len(replicates)
    if pairs < 2:
        return np.full_like(estimate, np.nan), np.full_like(estimate, np.nan)
    variance = (pairs - 1) / pairs * ((replicates - replicates.mean(axis=0)) ** 2).sum(axis=0)
    half = student_quantile(TWO_SIDED, pairs - 1) * np.sqrt(variance)
    return estimate - half, estimate + half


def jackknife_pool(
    attack: str,
    phi: Any,
    membership: np.ndarray,
    subsets: Mapping[str, np.ndarray],
    *,
    population_phi: Any = None,
    metrics: Sequence[str] = METRICS,
    spread: str = SPREAD,
    replicates: np.ndarray | None = None,
) -> Jackknife:
    """Score a pool of complementary pairs, whole and without each pair, and measure all of it.

    Cost: pairs + 1 times that of scoring and sorting the pool, O(models^2 x records x queries): 64 models of 1,500
    records one to three seconds, of 5,000 about ten. phi is held in memory, twice.

    Args:
        attack: as :func:`mia_audit.attacks.pool_scores`.
        phi: [M, N] or [M, N, Q].
        membership: bool [M, N], rows 2j and 2j+1 complementary.
        subsets: name -> bool [N], the records to measure over.
        population_phi: [M, P] or [M, P, Q], for attacks that need it.
        metrics: of ``auc``, ``balanced_accuracy``, ``tpr@FPR``.
        spread: LiRA's.
        replicates: those of an earlier call with the same arguments, nearly all of whose cost they are.

    Raises:
        ValueError: as :func:`mia_audit.attacks.pool_scores`, a metric is unknown, or replicates have another shape.
    """
    phi = np.asarray(phi, dtype=np.float64)
    masks = np.array([np.broadcast_to(subsets[name], phi.shape[1]) for name in subsets], dtype=bool)

    def score(keep: np.ndarray) -> np.ndarray:
        population = None if population_phi is None else np.asarray(population_phi)[keep]
        return pool_scores(attack, phi[keep], membership[keep], population_phi=population, spread=spread)

    everyone = np.ones(len(phi), dtype=bool)
    scores = score(everyone)
    estimate = measure_cells(scores, membership, masks, metrics)
    pairs = len(phi) // 2
    if replicates is None:
        replicates = np.full((pairs, *estimate.shape), np.nan)
        for pair in range(pairs if pairs >= _FEWEST_PAIRS else 0):
            keep = everyone.copy()
            keep[2 * pair : 2 * pair + 2] = False
            replicates[pair] = measure_cells(score(keep), membership[keep], masks, metrics)
    elif replicates.shape != (pairs, *estimate.shape):
        raise ValueError(f"replicates must have shape {(pairs, *estimate.shape)}, got {replicates.shape}")
    records = (masks & ~np.isnan(scores).any(axis=0)).sum(axis=1)
    return Jackknife(tuple(subsets), tuple(metrics), scores, records, estimate, replicates)


def measure_cells(scores: np.ndarray, membership: np.ndarray, masks: np.ndarray, metrics: Sequence[str]) -> np.ndarray:
    """[subsets, metrics] over the (model, record) cells of a pool [M, N]; cells that score NaN are left out.

    ``masks`` is bool [subsets, N]. The cells are sorted once for all subsets.
    """
    order = np.argsort(-scores, axis=None)
    order = order[: scores.size - int(np.isnan(scores).sum())]  # NaN sorts last
    score, member, record = scores.ravel()[order], membership.ravel()[order], order % scores.shape[1]
    found = np.full((len(masks), len(metrics)), np.nan)
    for row, mask in zip(found, masks, strict=True):
        chosen = slice(None) if mask.all() else mask[record]
        in_subset = member[chosen]
        if in_subset.any() and not in_subset.all():
            curve = roc_of_sorted(in_subset, score[chosen])
            row[:] = [measure(curve, metric) for metric in metrics]
    return found


def measure(curve: Roc, metric: str) -> float:
    """One metric of a curve by its name: ``auc``, ``balanced_accuracy`` or ``tpr@FPR``."""
    if metric == "auc":
        return curve.auc
    if metric == "balanced_accuracy":
        return curve.balanced_accuracy
    name, _, fpr = metric.partition("@")
    if name != "tpr" or not fpr:
        raise ValueError(f'metric must be "auc", "balanced_accuracy" or "tpr@FPR", got {metric!r}')
    return curve.tpr_at(float(fpr))
