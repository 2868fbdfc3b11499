"""Records: the table of examples that everything else indexes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

SUBSETS = ("clean", "mislabeled", "ood")


@dataclass(frozen=True)
class Records:
    """N examples, one row each, in a fixed order.

    Attributes:
        x: uint8 or float32 images [N, C, H, W], or float32 features [N, D].
        label: int64 [N], 0 .. len(classes) - 1; the label a model is trained on.
        id: object [N] of str, unique.
        original_label: int64 [N], the label in the source, before outliers were made.
        subset: object [N] of :data:`SUBSETS`.
        subset_source: object [N]: ``injected``, ``given`` or None where nothing is known.
        source_index: int64 [N], the row in the source (in its split, where it has splits of its own).
        group: object [N] of str, or None.
        classes: the names of the classes, in label order.
    """

    x: np.ndarray
    label: np.ndarray
    id: np.ndarray
    original_label: np.ndarray
    subset: np.ndarray
    subset_source: np.ndarray
    source_index: np.ndarray
    group: np.ndarray | None
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        n = len(self.label)
        if self.x.ndim not in (2, 4) or len(self.x) != n:
            raise ValueError(f"x must be [N, C, H, W] or [N, D] with N={n}, got shape {self.x.shape}")
        if self.x.dtype not in (np.dtype(np.uint8), np.dtype(np.float32)):
            raise ValueError(f"x must be uint8 or float32, got {self.x.dtype}")
        for name in ("label", "original_label", "source_index"):
            column = getattr(self, name)
            if column.shape != (n,) or column.dtype != np.int64:
                raise ValueError(f"{name} must be int64 [{n}], got {column.dtype} {column.shape}")
        for name in ("id", "subset", "subset_source", "group"):
            column = getattr(self, name)
            if column is not None and (column.shape != (n,) or column.dtype != object):
                raise ValueError(f"{name} must be an object array [{n}], got {column.dtype} {column.shape}")

    def __len__(self) -> int:
        return len(self.label)

    def take(self, index: np.ndarray) -> Records:
        """The rows at ``index`` (integers or bool), in that order."""
        rows = {
            name: getattr(self, name)[index]
            for name in ("x", "label", "id", "original_label", "subset", "subset_source", "source_index")
        }
        return replace(self, **rows, group=None if self.group is None else self.group[index])

    @property
    def is_image(self) -> bool:
        """Whether x holds images rather than features."""
        return self.x.ndim == 4

    def to_frame(self, role: str) -> pd.DataFrame:
        """The columns of records.parquet for these rows; ``role`` is ``record`` or ``population``."""
        import pandas as pd  # here, since workers never need it and it takes long to import

        return pd.DataFrame(
            {
                "id": self.id,
                "label": self.label,
                "original_label": self.original_label,
                "subset": self.subset,
                "subset_source": self.subset_source,
                "source_index": self.source_index,
                "role": role,
                "group": self.group if self.group is not None else np.full(len(self), None, dtype=object),
            }
        )


@dataclass(frozen=True)
class PoolData:
    """The records of a pool, the population held out of it, and what the user should know about both."""

    records: Records
    population: Records
    warnings: tuple[str, ...] = ()

    def fingerprint(self) -> str:
        """sha256 (hex) over inputs, labels and ids of records and population, in their order."""
        digest = hashlib.sha256()
        for part in (self.records, self.population):
            digest.update(f"{part.x.dtype.str}{part.x.shape}".encode())
            digest.update(np.ascontiguousarray(part.x).data)
            digest.update(np.ascontiguousarray(part.label).data)
            for name in part.id:
                digest.update(name.encode() + b"\0")
        return digest.hexdigest()


def content_hashes(x: np.ndarray) -> np.ndarray:
    """object [N]: a digest of each example's bytes; equal digests are exact duplicates."""
    return np.array([hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in x], dtype=object)
