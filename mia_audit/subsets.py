"""Suspected outliers: records whose label or input the models that never saw them do not believe.

A user's data has no tags. Every record has predictions of models that did not train on it (half of a pool's), and
these are enough for confident learning (Northcutt, Jiang and Chuang 2021, arXiv 1911.00068) and for the energy score
(Liu et al. 2020, arXiv 2010.03759).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import expit

ENERGY_FENCE = 2.0
"""How many times the distance from median to upper quartile an energy must lie above the median to be suspect.

The distance is of the upper half alone, because energies trail off towards confident records, and of quartiles, which
a quarter of outliers does not move. Chosen with :data:`LABEL_SUPPORT` on pools of digits and of Fashion-MNIST.
"""

LABEL_SUPPORT = 0.5
"""A record is suspect only where its label has less than this share of the probability usual for its class: one whose
label the models find by themselves may be hard, but is no outlier."""

MAJORITY = 0.5
"""Another class must be at least this probable: where models know little, what is usual for a class is no evidence."""


@dataclass(frozen=True)
class Suspects:
    """What the models suspect of N records.

    Attributes:
        subset: object [N]: ``clean``, ``mislabeled`` or ``ood``.
        label: int64 [N]: the class the models believe where ``mislabeled``, else -1.
    """

    subset: np.ndarray
    label: np.ndarray


def suspect_subsets(
    label: np.ndarray,
    predicted: np.ndarray,
    predicted_probability: np.ndarray,
    phi: np.ndarray,
    energy: np.ndarray,
    membership: np.ndarray,
) -> Suspects:
    """Tag suspected mislabeled and out-of-distribution records from non-member predictions alone.

    Mislabeled: the confident joint off its diagonal. A class is believed of a record where its mean probability
    reaches the mean that records labelled so have of it, and :data:`MAJORITY`; the record is suspect where another
    class than its own is believed and its label has little support, see :data:`LABEL_SUPPORT`. Of classes that a model
    does not predict, the probability is unknown and taken to be 0.

    Out of distribution, among the rest: the mean energy, in each model's own median absolute deviations, lies
    beyond :data:`ENERGY_FENCE`, and the label has little support.

    Args:
        label: int64 [N], 0..C-1.
        predicted: int [M, N], each model's class of each record.
        predicted_probability: [M, N], its probability.
        phi: [M, N], of the plain record; the given label's probability is its sigmoid.
        energy: [M, N], -logsumexp of the logits.
        membership: bool [M, N]. Records that every model trained on are never suspected.

    Raises:
        ValueError: shapes that do not match.
    """
    models, n = membership.shape
    for name, array in (("predicted", predicted), ("phi", phi), ("energy", energy)):
        if array.shape != (models, n):
            raise ValueError(f"{name} must have shape {(models, n)}, got {array.shape}")
    if label.shape != (n,) or predicted_probability.shape != (models, n):
        raise ValueError(f"label must have shape {(n,)} and predicted_probability {(models, n)}")
    out = ~membership
    seen = out.sum(axis=0) > 0
    own, believed, best = _belief(label, predicted, predicted_probability, phi, out)
    least = _class_means(own, label, seen, 1 + int(max(label.max(), predicted.max())))
    unsupported = seen & (own < LABEL_SUPPORT * least[label])
    mislabeled = unsupported & (best > own) & (best >= np.maximum(least[believed], MAJORITY))
    strangeness = _mean_outside(_in_deviations(energy.astype(np.float64), out), out)
    ood = unsupported & ~mislabeled
    if ood.any():
        middle, upper = np.quantile(strangeness[seen & ~mislabeled], [0.5, 0.75])
        ood &= strangeness > middle + ENERGY_FENCE * (upper - middle)
    subset = np.full(n, "clean", dtype=object)
    subset[mislabeled], subset[ood] = "mislabeled", "ood"
    return Suspects(subset, np.where(mislabeled, believed, -1))


def _belief(
    label: np.ndarray, predicted: np.ndarray, probability: np.ndarray, phi: np.ndarray, out: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per record: mean probability of the own class, the likeliest other class, and its mean probability."""
    own = _mean_outside(expit(phi.astype(np.float64)), out)
    believed, best = np.zeros(len(label), dtype=np.int64), np.full(len(label), -1.0)
    for other in range(1 + int(predicted.max())):
        mean = _mean_outside(np.where(predicted == other, probability, 0.0), out)
        better = (mean > best) & (label != other)
        believed[better], best[better] = other, mean[better]
    return own, believed, best


def _class_means(own: np.ndarray, label: np.ndarray, seen: np.ndarray, classes: int) -> np.ndarray:
    """[C]: the mean probability of a class over the records labelled so; 1.01, out of reach, where there are none."""
    count = np.bincount(label[seen], minlength=classes)
    total = np.bincount(label[seen], weights=own[seen], minlength=classes)
    return np.where(count > 0, total / np.maximum(count, 1), 1.01)


def _in_deviations(energy: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Energies about each model's median over its non-members, in its median absolute deviations."""
    scaled = np.zeros_like(energy)
    for row, values, outside in zip(scaled, energy, out, strict=True):
        if outside.any():
            middle = np.median(values[outside])
            spread = np.median(np.abs(values[outside] - middle))
            row[...] = (values - middle) / spread if spread > 0 else 0.0
    return scaled


def _mean_outside(values: np.ndarray, out: np.ndarray) -> np.ndarray:
    """[N]: the mean of [M, N] over the models that did not train on each record; 0 where there are none."""
    return np.where(out, values, 0.0).sum(axis=0) / np.maximum(out.sum(axis=0), 1)
