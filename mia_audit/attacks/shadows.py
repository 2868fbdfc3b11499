"""The arrays every attack takes, checked once at the border: phi of shadow models, membership, a target's phi.

phi of shadows may be any object with ``shape`` that slices like an array and that ``np.asarray`` turns into one: an
array, a memory map, a pool's files (:class:`shadow_pool.store.phi.StoredPhi`). It is read in blocks of records, so that
memory stays bounded however large it is. Blocks are independent of one another: under ``joblib.parallel_config`` they
run in several processes, or on a Dask cluster, with the same scores to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import joblib
import numpy as np

from shadow_pool.errors import unknown_name

LEAVE_OUT = ("pair", "one")
_READ_CELLS = 2**22  # phi values that are read, or sent, at a time: 32 MB
_BLOCK_CELLS = 2**20  # phi values that are worked on at a time: 8 MB, and a few times that in intermediates
T = TypeVar("T")


def check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    """Raise the error that lists ``known`` where ``value`` is not in it."""
    if value not in known:
        raise unknown_name(name, value, known)


def target_values(phi: Any, name: str = "target_phi") -> np.ndarray:
    """phi of one model, [N] or [N, Q], as finite float64 [N, Q]."""
    values = np.asarray(phi, dtype=np.float64)
    if values.ndim not in (1, 2):
        raise ValueError(f"{name} must have shape [records] or [records, queries], got {values.shape}")
    return _finite(values[:, None] if values.ndim == 1 else values, name)


@dataclass(frozen=True)
class Shadows:
    """phi [models, records] or [models, records, queries] and membership [models, records] of shadow models."""

    phi: Any
    membership: np.ndarray

    def __post_init__(self) -> None:
        phi = self.phi if hasattr(self.phi, "shape") else np.asarray(self.phi, dtype=np.float64)
        membership = np.asarray(self.membership)
        if len(phi.shape) not in (2, 3):
            raise ValueError(f"phi must have shape [models, records] or [models, records, queries], got {phi.shape}")
        if membership.dtype != np.bool_:
            raise ValueError(f"membership must be bool, got dtype {membership.dtype}")
        if membership.shape != tuple(phi.shape[:2]):
            raise ValueError(f"membership must have shape {tuple(phi.shape[:2])} as phi, got {membership.shape}")
        object.__setattr__(self, "phi", phi)
        object.__setattr__(self, "membership", membership)

    @property
    def models(self) -> int:
        return int(self.phi.shape[0])

    @property
    def records(self) -> int:
        return int(self.phi.shape[1])

    @property
    def queries(self) -> int:
        return int(self.phi.shape[2]) if len(self.phi.shape) == 3 else 1

    def map_blocks(self, work: Callable[..., T], *columns: np.ndarray) -> Iterator[tuple[slice, T]]:
        """(records, work(phi [models, block, queries], membership [models, block], *columns [block, ...])) by block.

        In the records' order, wherever ``joblib.parallel_config`` has the blocks worked on: in this process by
        default. What travels then is ``work``, the membership, and phi (of a stored pool, its files' names).
        """
        step = self._step(_READ_CELLS)
        # Powers of two, as rows are stored: no row is read for two of them.
        parts = [slice(start, min(start + step, self.records)) for start in range(0, self.records, step)]
        inner = self._step(_BLOCK_CELLS)
        # Nothing is sent twice, so there is nothing to gain from mapping it.
        parallel = joblib.Parallel(return_as="generator", max_nbytes=None)
        found = parallel(
            joblib.delayed(_work_on)(
                work, inner, self.phi[:, part], self.membership[:, part], *(column[part] for column in columns)
            )
            for part in parts
        )
        for part, results in zip(parts, found, strict=True):
            for start, result in zip(range(part.start, part.stop, inner), results, strict=True):
                yield slice(start, min(start + inner, part.stop)), result

    def _step(self, cells: int) -> int:
        """The largest power of two of records that have no more phi values than ``cells``."""
        records = max(1, cells // max(1, self.models * self.queries))
        return 1 << (records.bit_length() - 1)

    def values(self) -> np.ndarray:
        """All of phi at once, float64 [models, records, queries]; for the population, which is small."""
        return _finite(_three_axes(self.phi[:]), "population phi")

    def row(self, model: int) -> np.ndarray:
        """phi of one model, float64 [records, queries]."""
        return _three_axes(self.phi[model : model + 1])[0]

    def columns(self, records: np.ndarray) -> np.ndarray:
        """phi of some records under all models, float64 [models, len(records), queries]."""
        return _three_axes(self.phi[:, records])

    def check_target(self, values: np.ndarray) -> None:
        """Raise ValueError where a target's values [records, queries] do not fit these shadows."""
        if values.shape != (self.records, self.queries):
            raise ValueError(
                f"target_phi must have (records, queries) = {(self.records, self.queries)} as phi of the shadows, "
                f"got {values.shape}"
            )

    def groups(self, leave_out: str) -> np.ndarray:
        """int [groups, 1 or 2]: the models left out together when one of them is the target.

        Raises ValueError under "pair" where rows 2j and 2j+1 are not complementary.
        """
        check_choice("leave_out", leave_out, LEAVE_OUT)
        if leave_out == "one":
            return np.arange(self.models)[:, None]
        if self.models % 2 or not np.array_equal(self.membership[0::2], ~self.membership[1::2]):
            raise ValueError(
                'membership must come in complementary pairs (rows 2j and 2j+1) for leave_out="pair", got '
                f'{self.models} rows that do not; use leave_out="one" for models drawn otherwise'
            )
        return np.arange(self.models).reshape(-1, 2)


def _work_on(work: Callable[..., T], step: int, phi: Any, membership: np.ndarray, *columns: np.ndarray) -> list[T]:
    """``work`` on a part of the records, ``step`` of them at a time."""
    values = _finite(_three_axes(phi), "phi")
    blocks = [slice(start, start + step) for start in range(0, values.shape[1], step)]
    return [work(values[:, b], membership[:, b], *(column[b] for column in columns)) for b in blocks]


def reduce_all(combine: np.ufunc, values: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Combine values over all models: as :func:`reduce_without` for one group [1, records, queries] that is empty."""
    filled = np.where(mask[..., None], values, combine.identity)
    return combine.reduce(filled, axis=0)[None], mask.sum(axis=0)[None, :, None]


def reduce_without(
    combine: np.ufunc, values: np.ndarray, mask: np.ndarray, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Combine values over models, without each group of ``width`` consecutive models in turn.

    From running results before and after each group, so that nothing is subtracted and a huge value left out
    leaves no trace in the rest.

    Args:
        combine: associative ufunc with an identity, ``np.add`` or ``np.logaddexp``.
        values: [models, records, queries].
        mask: bool [models, records], which values count.

    Returns:
        combined [groups, records, queries] and the number of values in each [groups, records, 1].
    """
    empty = combine.identity
    filled = np.where(mask[..., None], values, empty)
    grouped = combine.reduce(filled.reshape(-1, width, *filled.shape[1:]), axis=1)
    before, after = np.full_like(grouped, empty), np.full_like(grouped, empty)
    combine.accumulate(grouped[:-1], axis=0, out=before[1:])
    combine.accumulate(grouped[:0:-1], axis=0, out=after[-2::-1])
    counts = mask.reshape(-1, width, mask.shape[1]).sum(axis=1)
    return combine(before, after), (counts.sum(axis=0) - counts)[..., None]


def _three_axes(values: Any) -> np.ndarray:
    array = np.asarray(values, dtype=np.float64)
    return array[..., None] if array.ndim == 2 else array


def _finite(values: np.ndarray, name: str) -> np.ndarray:
    if not np.isfinite(values).all():
        bad = values.size - int(np.isfinite(values).sum())
        raise ValueError(f"{name} must be finite, got {bad} NaN or infinite values; compute phi from logits in float64")
    return values
