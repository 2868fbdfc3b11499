"""phi of many models where it lies: read in blocks of records, here or by any process that sees the pool's files."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from shadow_pool.store.files import damaged, file_version, readable


@dataclass(frozen=True)
class StoredPhi:
    """phi of M models on N records, float64 [M, N, Q], read from disk by ``np.asarray``.

    It slices like an array, by models and by records (slices, index arrays or masks), into what is again such a
    handle: some bytes a model, to be sent to where the values are needed. Only row groups with wanted records are read,
    and their checksums verified; :class:`UserError` names the file that is damaged or gone.

    Attributes:
        files: absolute path of each model's signals [M].
        records: the rows of the files, range or int array [N].
        queries: Q.
    """

    files: tuple[str, ...]
    records: range | np.ndarray
    queries: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self.files), len(self.records), self.queries

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: Any) -> StoredPhi:
        models, records = index if isinstance(index, tuple) else (index, slice(None))
        files = tuple(self.files[model] for model in np.arange(len(self.files))[models])
        if isinstance(records, slice) and isinstance(self.records, range) and records.step in (None, 1):
            return replace(self, files=files, records=self.records[records])
        return replace(self, files=files, records=np.asarray(self.records)[records])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        values = np.empty(self.shape)
        for path, rows in zip(self.files, values, strict=True):
            if rows.size:
                _read(path, self.records, rows)
        return values if dtype is None else values.astype(dtype, copy=False)


def stored_phi(paths: Iterable[Path]) -> StoredPhi:
    """The handle of files that :func:`shadow_pool.store.entry.write_signals` wrote, one a model.

    Raises :class:`UserError` naming a file that cannot be read or differs from the first in records or queries.
    """
    files = tuple(str(path.resolve()) for path in paths)
    shapes = [(int(ends[-1]) if len(ends) else 0, queries) for _, ends, queries in map(_layout, files)]
    for path, shape in zip(files, shapes, strict=True):
        if shape != shapes[0]:
            raise damaged(path, f"holds (records, queries) = {shape}, {files[0]} {shapes[0]}")
    records, queries = shapes[0]
    return StoredPhi(files, range(records), queries)


def _read(path: str, records: range | np.ndarray, values: np.ndarray) -> None:
    """phi of one model's ``records`` into ``values`` [N, Q]."""
    footer, ends, queries = _layout(path)
    if isinstance(records, range):
        first, last = np.searchsorted(ends, [records[0], records[-1]], side="right")
        groups = np.arange(first, last + 1)
        start = records[0] - (ends[first - 1] if first else 0)
        place: Any = slice(start, start + len(records))
    else:
        of_record = np.searchsorted(ends, records, side="right")
        groups = np.unique(of_record)
        sizes = np.diff(ends, prepend=0)[groups]
        shift = ends[groups] - np.cumsum(sizes)  # between a row's place in the file and in what is read of it
        place = records - shift[np.searchsorted(groups, of_record)]
    with readable(path):
        file = pq.ParquetFile(path, metadata=footer, page_checksum_verification=True)
        table = file.read_row_groups(groups.tolist(), [f"phi_{q}" for q in range(queries)], use_threads=False)
        for query in range(queries):
            values[:, query] = table.column(query).to_numpy()[place]


def _layout(path: str) -> tuple[pq.FileMetaData, np.ndarray, int]:
    """A file's footer, the row after each of its row groups, and its number of queries; read once a version."""
    return _layout_of(path, file_version(path))


@functools.lru_cache(maxsize=1024)
def _layout_of(path: str, version: tuple[int, ...] | None) -> tuple[pq.FileMetaData, np.ndarray, int]:
    with readable(path):
        footer = pq.read_metadata(path)
    ends = np.cumsum([footer.row_group(group).num_rows for group in range(footer.num_row_groups)], dtype=np.int64)
    return footer, ends, sum(name.startswith("phi_") for name in footer.schema.names)
