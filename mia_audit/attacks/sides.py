"""Count, mean, sum of squares and median of phi per record, apart for the models that trained on it and the rest.

For a pool they follow for every left-out group of models from sums kept once, so that all targets together
cost O(models x records x queries).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from mia_audit.attacks.shadows import Shadows

# A difference of sums below this share of what was summed has lost over four digits: computed afresh then.
_CANCELLED = 1e-4


@dataclass(frozen=True)
class Side:
    """One side (in or out) of every record, for G groups of models left out in turn (G = 1: of all models).

    count: [G or 1, N or 1, 1], 1 where it is the same for all. mean, square (sum of squared deviations from the mean),
    median: [G, N, Q]; mean is 0 and median NaN where count is 0.
    """

    count: np.ndarray
    mean: np.ndarray
    square: np.ndarray
    median: np.ndarray | None = None

    @cached_property
    def enough(self) -> np.ndarray:
        """bool like count: at least two values, without which there is no spread."""
        return self.count >= 2


class Totals:
    """Sums of one side over all models, from which the side without some models follows.

    Sums are of phi minus the record's own mean: an offset common to all phi, however large, costs no digits, and
    a side whose values are all equal has exactly zero residuals.
    """

    def __init__(self, shadows: Shadows, inside: bool, median: bool) -> None:
        shape = (shadows.records, shadows.queries)
        self.shadows, self.inside = shadows, inside
        self.count = np.zeros((shadows.records, 1), dtype=np.int64)
        self.mean, self.total, self.square = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self.middle = np.full((3, *shape), np.nan) if median else None

    def put(self, block: slice, found: _Sums) -> None:
        """Take in what was found of a block of records."""
        self.count[block], self.mean[block] = found.count, found.mean
        self.total[block], self.square[block] = found.total, found.square
        if self.middle is not None:
            self.middle[:, block] = found.middle

    def finish(self) -> None:
        """After the last block: keep a count that all records share as one number."""
        if self.count.size and (self.count == self.count[0]).all():
            self.count = self.count[:1]

    def whole(self) -> Side:
        """The side with no model left out."""
        square = np.maximum(self.square - self.total**2 / np.maximum(self.count, 1), 0.0)
        median = None if self.middle is None else _median(self.middle, self.count)[None]
        return Side(self.count[None], self.mean[None], square[None], median)

    def without(self, models: np.ndarray, removed: np.ndarray, present: np.ndarray | None) -> Side:
        """The side without each of G groups of models, of which at most one is on this side of a record.

        Args:
            models: int [G, 1 or 2], the models left out.
            removed: [G, N, Q], the value that leaves this side.
            present: bool [G, N, 1], where a value leaves at all; None where one leaves everywhere.
        """
        residual = removed - self.mean
        count = self.count[None] - 1
        if present is not None:
            residual = np.where(present, residual, 0.0)
            count = self.count - present
        total = self.total - residual
        safe = np.maximum(count, 1)
        shift = total / safe
        mean = self.mean + shift
        square = np.maximum(self.square - residual * residual - total * shift, 0.0)
        cancelled: np.ndarray = np.any((square < _CANCELLED * self.square) & (count >= 2), axis=2)
        for group in np.flatnonzero(cancelled.any(axis=1)):
            self._afresh(np.flatnonzero(cancelled[group]), models[group], mean[group], square[group])
        median = None if self.middle is None else _median_without(self.middle, self.count, removed, present)
        return Side(count, mean, square, median)

    def _afresh(self, records: np.ndarray, models: np.ndarray, mean: np.ndarray, square: np.ndarray) -> None:
        values, mask = self.shadows.columns(records), self.shadows.membership[:, records]
        mask = mask.copy() if self.inside else ~mask
        mask[models] = False
        _, mean[records], residual = _residuals(values, mask)
        square[records] = np.einsum("mbq,mbq->bq", residual, residual)


def totals(shadows: Shadows, *, inside: bool, median: bool) -> tuple[Totals, ...]:
    """(in, out) sums, or (out,) where ``inside`` is False; one pass over phi. NaN or infinite phi raises ValueError."""
    sides = (True, False) if inside else (False,)
    parts = tuple(Totals(shadows, side, median) for side in sides)
    for block, found in shadows.map_blocks(partial(_sums, sides=sides, median=median)):
        for part, sums in zip(parts, found, strict=True):
            part.put(block, sums)
    for part in parts:
        part.finish()
    return parts


@dataclass(frozen=True)
class _Sums:
    """One side of a block: count [B, 1]; mean, total, square [B, Q]; middle [3, B, Q] where medians are wanted."""

    count: np.ndarray
    mean: np.ndarray
    total: np.ndarray
    square: np.ndarray
    middle: np.ndarray | None


def _sums(values: np.ndarray, membership: np.ndarray, *, sides: tuple[bool, ...], median: bool) -> list[_Sums]:
    """Of all models' values [M, B, Q] of a block of records, on each side."""
    found = []
    for inside in sides:
        mask = membership if inside else ~membership
        count, mean, residual = _residuals(values, mask)
        square = np.einsum("mbq,mbq->bq", residual, residual)
        middle = _middle(values, mask, count) if median else None
        found.append(_Sums(count, mean, residual.sum(axis=0), square, middle))
    return found


def _residuals(values: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """count [B, 1], mean [B, Q] and values minus mean [M, B, Q], 0 off the mask.

    Sums start from each record's first value, so that equal values give that value as mean, to the last bit.
    """
    count = mask.sum(axis=0)[:, None]
    first = values[mask.argmax(axis=0), np.arange(values.shape[1])]
    weight = mask[..., None]
    residual = (values - first) * weight
    shift = residual.sum(axis=0) / np.maximum(count, 1)
    mean = np.where(count > 0, first + shift, 0.0)
    residual = (values - mean) * weight
    return count, mean, residual


def _middle(values: np.ndarray, mask: np.ndarray, count: np.ndarray) -> np.ndarray:
    """[3, B, Q]: the order statistics around the middle, enough to know the median without any one value.

    Odd counts: those at middle - 1, middle, middle + 1. Even counts: the two middle ones and the upper again.
    """
    ordered = np.sort(np.where(mask[..., None], values, np.nan), axis=0)  # NaN sorts last
    start = (count[:, 0] - 1) // 2 - count[:, 0] % 2
    index = np.clip(start + np.arange(3)[:, None], 0, values.shape[0] - 1)
    return np.take_along_axis(ordered, index[..., None], axis=0)


def _median(middle: np.ndarray, count: np.ndarray) -> np.ndarray:
    """[B, Q] from :func:`_middle`; a single value is its own median, no value none (NaN)."""
    first, second, _ = middle
    odd = np.where(count == 1, first, second)
    even = first + (second - first) / 2
    return np.where(count == 0, np.nan, np.where(count % 2 == 1, odd, even))


def _median_without(
    middle: np.ndarray, count: np.ndarray, removed: np.ndarray, present: np.ndarray | None
) -> np.ndarray:
    """[G, N, Q]: the median once ``removed`` has left its side."""
    first, second, third = middle
    even = np.where(removed <= first, second, first)
    low = np.where(removed <= first, second, first)
    high = np.where(removed >= third, second, third)
    odd = low + (high - low) / 2
    median = np.where(count <= 1, np.nan, np.where(count % 2 == 1, odd, even))
    return median if present is None else np.where(present, median, _median(middle, count))
