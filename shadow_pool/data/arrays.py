"""Source: what a reader returns, before labels are encoded and records are chosen. Checks of raw arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shadow_pool.data.records import SUBSETS
from shadow_pool.errors import UserError, unknown_name


@dataclass(frozen=True)
class Source:
    """All rows of a data source, in its own order.

    Attributes:
        x: uint8 or float32 images [N, C, H, W], or float32 features [N, D].
        label: [N], int64 or object of str.
        classes: names of the integer labels, or None where the source names none.
        id: object [N] of str, or None where the source has none.
        group: object [N] of str, or None.
        subset: object [N] of :data:`SUBSETS`, or None.
        test: bool [N], the source's own test split, or None where it has none.
        warnings: what was changed while reading.
    """

    x: np.ndarray
    label: np.ndarray
    classes: tuple[str, ...] | None = None
    id: np.ndarray | None = None
    group: np.ndarray | None = None
    subset: np.ndarray | None = None
    test: np.ndarray | None = None
    warnings: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.label)

    @property
    def source_index(self) -> np.ndarray:
        """int64 [N]: the row in the source, counted within its split where it has splits."""
        if self.test is None:
            return np.arange(len(self), dtype=np.int64)
        return np.where(self.test, np.cumsum(self.test), np.cumsum(~self.test)).astype(np.int64) - 1

    def row_ids(self) -> np.ndarray:
        """object [N] of str: ids for a source that has none: ``17``, or ``train-17`` and ``test-3``."""
        rows = self.source_index.astype(str).astype(object)
        if self.test is None:
            return rows
        return np.where(self.test, "test-", "train-").astype(object) + rows


def from_arrays(
    where: str,
    x: np.ndarray,
    y: np.ndarray,
    *,
    id: np.ndarray | None = None,
    group: np.ndarray | None = None,
    subset: np.ndarray | None = None,
) -> Source:
    """Check a user's arrays and bring them into the form of a :class:`Source`.

    Args:
        where: what the arrays came from, for errors.
        x: images [N, H, W], [N, C, H, W] or [N, H, W, C], or features [N, D]; uint8, bool, integer or float.
        y: [N] or [N, 1], integers or strings.
        id, group, subset: [N], integers or strings.

    Raises:
        UserError: a shape, dtype or value that is none of these.
    """
    label = as_labels(where, y)
    if len(label) == 0:
        raise UserError(f"{where} holds no records; expected at least one row")
    if x.ndim not in (2, 3, 4) or len(x) != len(label) or 0 in x.shape:
        raise UserError(
            f"{where}: x must be images [N, H, W], [N, C, H, W] or [N, H, W, C], or features [N, D], with one row "
            f"for each of the {len(label)} labels, got shape {x.shape}"
        )
    pixels = as_features(where, x) if x.ndim == 2 else as_images(where, x)
    source = Source(
        pixels,
        label,
        id=None if id is None else as_strings(where, "id", id, len(label)),
        group=None if group is None else as_strings(where, "group", group, len(label)),
        subset=None if subset is None else as_strings(where, "subset", subset, len(label)),
    )
    return checked(where, source)


def checked(where: str, source: Source) -> Source:
    """The same source, once its ids are known to be unique and its subsets to be known ones."""
    if source.id is not None:
        values, counts = np.unique(source.id.astype(str), return_counts=True)
        if len(values) < len(source):
            raise UserError(
                f"{where}: ids must differ, but {int((counts > 1).sum())} of them occur more than once, "
                f"first {str(values[counts > 1][0])!r}"
            )
    if source.subset is not None:
        for name in np.unique(source.subset.astype(str)):
            if name not in SUBSETS:
                raise unknown_name(f"subset in {where}", str(name), SUBSETS)
    return source


def as_labels(where: str, y: np.ndarray) -> np.ndarray:
    """[N] int64 or object of str from labels [N] or [N, 1], whole floats too; UserError for anything else."""
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.dtype.kind == "f" and ((np.abs(y) < 2**53) & (y == np.round(y))).all():
        y = y.astype(np.int64)
    if y.ndim != 1:
        raise UserError(f"{where}: labels must be one per record [N], got shape {y.shape}")
    if y.dtype.kind in "iub":
        return y.astype(np.int64)
    if y.dtype.kind in "US" or (y.dtype == object and all(isinstance(value, str) for value in y)):
        return _text(y)
    raise UserError(f"{where}: labels must be integers 0..C-1 or strings, got {y.dtype}")


def as_strings(where: str, name: str, column: np.ndarray, n: int) -> np.ndarray:
    """object [N] of str from integers or strings; UserError for other types and for missing values."""
    if column.shape != (n,):
        raise UserError(f"{where}: {name} must have one value for each of the {n} records, got shape {column.shape}")
    if column.dtype.kind not in "iuUS" and not (
        column.dtype == object and all(isinstance(value, str) for value in column)
    ):
        raise UserError(f"{where}: {name} must be integers or strings without missing values, got {column.dtype}")
    return _text(column)


def as_features(where: str, x: np.ndarray) -> np.ndarray:
    """float32 [N, D] from bool, integer or float features; UserError where a value is not finite."""
    if x.dtype.kind not in "iubf":
        raise UserError(f"{where}: features must be numbers, got {x.dtype}")
    return _finite(where, x.astype(np.float32, copy=False))


def as_images(where: str, x: np.ndarray) -> np.ndarray:
    """uint8 or float32 [N, C, H, W] from images [N, H, W], [N, C, H, W] or [N, H, W, C].

    Integers of another type than uint8 must lie in 0..255.
    """
    if x.ndim == 3:
        x = x[:, None]
    elif not _channels_first(where, x.shape):
        x = x.transpose(0, 3, 1, 2)
    if x.dtype.kind in "iu" and x.dtype != np.uint8:
        low, high = int(x.min()), int(x.max())
        if low < 0 or high > 255:
            raise UserError(f"{where}: integer images must hold 0..255, got {low}..{high}; save them as floats")
        x = x.astype(np.uint8)
    if x.dtype.kind in "fb":
        x = _finite(where, x.astype(np.float32, copy=False))
    if x.dtype not in (np.uint8, np.float32):
        raise UserError(f"{where}: images must be uint8 or float, got {x.dtype}")
    return np.ascontiguousarray(x)


def _channels_first(where: str, shape: tuple[int, ...]) -> bool:
    _, a, b, c = shape
    if b == c != a:
        return True
    if a == b != c:
        return False
    first, last = a <= 4, c <= 4
    if first == last:
        raise UserError(
            f"{where}: x of shape {shape} can be read as [N, C, H, W] and as [N, H, W, C]; transpose it so that the "
            "channels (1 to 4) stand beside two longer sides"
        )
    return first


def _finite(where: str, x: np.ndarray) -> np.ndarray:
    # A sum is finite only if every term is; it needs no array of flags the size of x.
    if not np.isfinite(np.sum(x, dtype=np.float64)):
        bad = np.flatnonzero([not np.isfinite(row).all() for row in x])
        if len(bad):
            raise UserError(
                f"{where}: x must be finite, but {len(bad)} records hold NaN or infinity, first row {bad[0]}; "
                "repair or drop them"
            )
    return x


def _text(column: np.ndarray) -> np.ndarray:
    if column.dtype.kind == "S":
        column = np.char.decode(column, "utf-8", "replace")
    return column.astype(str).astype(object)
