"""A pool on disk: open it; what is there, what is missing; the signals of its models."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shadow_pool.data.records import PoolData
from shadow_pool.errors import UserError
from shadow_pool.signals import Signals
from shadow_pool.spec import PoolSpec
from shadow_pool.store.entry import FILES, EntryInfo, check_file, entry_path, read_file, read_info, read_signals
from shadow_pool.store.files import damaged, file_sha256, file_version, readable
from shadow_pool.store.manifest import Manifest, read_manifest
from shadow_pool.store.phi import StoredPhi, stored_phi

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

INITIAL = "init.safetensors"
TABLE = pa.schema(
    [("id", pa.string()), ("label", pa.int64()), ("original_label", pa.int64()), ("subset", pa.string())]
    + [("subset_source", pa.string()), ("source_index", pa.int64()), ("role", pa.string()), ("group", pa.string())]
)
"""The columns of records.parquet; the first four have a value in every row."""


@dataclass(frozen=True)
class Pool:
    """An open pool. Opening reads pool.json only; tables are read, and checked, when asked for.

    ``trusted``: the user vouches for the code that the spec names, wherever the pool was made.
    """

    path: Path
    manifest: Manifest
    trusted: bool = False

    @property
    def spec(self) -> PoolSpec:
        """The stored spec."""
        return self.manifest.spec

    @cached_property
    def membership(self) -> np.ndarray:
        """bool [n, records], True where the record trained the model."""
        path = self.path / "membership.npy"
        try:
            # Mapped, so that a header that promises more than the file holds allocates nothing.
            rows = np.load(path, mmap_mode="r", allow_pickle=False)
            # The file has more rows than pool.json says while the pool is being extended.
            found = np.array(rows[: self.spec.n])
        except Exception as error:  # a damaged header raises whatever Python's parser does
            raise damaged(path, f"is not readable ({' '.join(str(error).split())})") from None
        if found.ndim != 2 or found.dtype != bool or rows_sha256(found) != self.manifest.files.get(path.name):
            raise damaged(path, "does not match its sha256 in pool.json")
        return found

    @cached_property
    def initial(self) -> dict[str, Tensor] | None:
        """The state dict that every model starts from (``spec.init``), or None."""
        if INITIAL not in self.manifest.files:
            return None
        from safetensors.torch import load

        path = self.path / INITIAL
        content = path.read_bytes() if path.is_file() else b""
        if hashlib.sha256(content).hexdigest() != self.manifest.files[INITIAL]:
            raise UserError(
                f"{path} is missing or does not match its sha256 in pool.json; run train-shadows with --init and "
                f"the file {self.spec.init} again"
            )
        with readable(path):
            return load(content)

    @cached_property
    def table(self) -> pd.DataFrame:
        """records.parquet: records first, then the population."""
        path = self.path / "records.parquet"
        try:
            found = file_sha256(path)
        except OSError as error:
            raise damaged(path, f"is not readable ({error.strerror})") from None
        if found != self.manifest.files.get(path.name):
            raise damaged(path, "does not match its sha256 in pool.json")
        with readable(path):
            # Not pq.read_table, which imports a library of datasets, for half a second.
            found = pq.ParquetFile(path).read()
            found.validate(full=True)  # text that is not UTF-8 would raise only when it is read
            if not found.schema.equals(TABLE) or any(found[name].null_count for name in TABLE.names[:4]):
                raise ValueError(f"columns must be {', '.join(TABLE.names)}, got {found.schema.names}")
            # The writer's notes on pandas types are not needed, and nothing may hang on what a stranger put there.
            return found.to_pandas(ignore_metadata=True)

    @cached_property
    def _sizes(self) -> tuple[int, int]:
        """The numbers of records and of the population, the first checked against membership."""
        sizes = tuple(int((self.table["role"] == role).sum()) for role in ("record", "population"))
        if self.membership.shape[1] != sizes[0] or sum(sizes) != len(self.table):
            raise damaged(self.path / "records.parquet", f"holds {sizes[0]} records, membership.npy has others")
        return sizes[0], sizes[1]

    @property
    def records(self) -> pd.DataFrame:
        """The rows of records.parquet whose role is ``record``, in the order of membership's columns."""
        return self.table[self.table["role"] == "record"].reset_index(drop=True)

    @property
    def population(self) -> pd.DataFrame:
        """The rows of records.parquet whose role is ``population``."""
        return self.table[self.table["role"] == "population"].reset_index(drop=True)

    def entry(self, arm: str, index: int) -> Path:
        """The directory of one model."""
        return entry_path(self.path, arm, index)

    def info(self, arm: str, index: int) -> EntryInfo:
        """model.json of one model. Raises :class:`UserError` where it is damaged or belongs to another pool."""
        path = self.entry(arm, index) / "model.json"
        version = file_version(path)
        if version is None or self._infos.get(path, (None,))[0] != version:
            info = read_info(path.parent)
            if info.digest != self._digest:
                raise damaged(path, "was trained under another spec or on other records")
            self._infos[path] = (version, info)
        return self._infos[path][1]

    @cached_property
    def _digest(self) -> str:
        return self.manifest.digest

    @cached_property
    def _infos(self) -> dict[Path, tuple[tuple[int, ...] | None, EntryInfo]]:
        """What was read of models, with the version of the file it was read from."""
        return {}

    def scan(self, arm: str) -> tuple[dict[int, EntryInfo], dict[int, UserError]]:
        """The committed models of an arm by index, and those whose model.json cannot be used with the reason."""
        good: dict[int, EntryInfo] = {}
        bad: dict[int, UserError] = {}
        for index in range(self.spec.n):
            if not self.entry(arm, index).exists():
                continue
            try:
                good[index] = self.info(arm, index)
            except UserError as error:
                bad[index] = error
        return good, bad

    def verify(self, arm: str, index: int) -> UserError | None:
        """Read every byte of one model: what is wrong with it, or None where it is sound or not trained yet."""
        entry = self.entry(arm, index)
        if not entry.exists():
            return None
        try:
            info = self.info(arm, index)
            for name in FILES:
                check_file(entry, info, name)
            self.history(arm, index)
            for name in map(_signals_file, (False, True)):
                with readable(entry / name):
                    read_signals((entry / name).read_bytes())
        except UserError as error:
            return error
        return None

    def missing(self, arm: str) -> list[int]:
        """Indices of an arm without a committed model: the whole of resuming."""
        return [index for index in range(self.spec.n) if not self.entry(arm, index).exists()]

    def signals(self, arm: str, index: int, *, population: bool = False) -> Signals:
        """The stored signals of one model on the records (or the population), its bytes checked."""
        entry, info, name = self.entry(arm, index), self.info(arm, index), _signals_file(population)
        with readable(entry / name):
            found = read_signals(read_file(entry, info, name))
        self._check_shape(entry / name, found.phi.shape, population)
        if info.status == "trained" and not np.isfinite(found.phi).all():
            raise damaged(entry / name, "holds phi that is not finite, of a model that trained")
        return found

    def _check_shape(self, path: Path, shape: tuple[int, ...], population: bool) -> None:
        expected = (self._sizes[population], self.spec.queries)
        if shape != expected:
            raise damaged(path, f"must hold (records, queries) = {expected}, holds {shape}")

    def phi(self, arm: str, indices: Iterable[int], *, population: bool = False) -> StoredPhi:
        """phi of the models at ``indices`` [M], where it lies: ``np.asarray`` reads it, float64 [M, records, queries].

        The bytes of every file are checked once, here, which costs a read of them.
        """
        name = _signals_file(population)
        with ThreadPoolExecutor() as threads:
            found = stored_phi(
                threads.map(lambda i: check_file(self.entry(arm, int(i)), self.info(arm, int(i)), name), indices)
            )
        self._check_shape(Path(found.files[0]), found.shape[1:], population)
        return found

    def history(self, arm: str, index: int) -> pd.DataFrame:
        """history.parquet of one model: epoch, metric, subset, member, layer, value."""
        path = check_file(self.entry(arm, index), self.info(arm, index), "history.parquet")
        with readable(path):
            return pq.ParquetFile(path).read().to_pandas(ignore_metadata=True)


def open_pool(path: Path, *, trust: bool = False) -> Pool:
    """Open a pool for reading; nothing in it is run.

    ``trust`` lets what is done with it later run the code that its spec names, see :mod:`shadow_pool.store.trust`.
    Raises :class:`UserError` where there is no pool or pool.json is damaged.
    """
    return Pool(path, read_manifest(path / "pool.json"), trusted=trust)


def _signals_file(population: bool) -> str:
    return "population.parquet" if population else "phi.parquet"


def rows_sha256(rows: np.ndarray) -> str:
    """sha256 (hex) of a membership matrix's rows, which stays what it is when rows are added after them."""
    return hashlib.sha256(np.ascontiguousarray(rows).data).hexdigest()


def check_fingerprint(pool: Pool, data: PoolData) -> None:
    """Raise :class:`UserError` where ``data`` is not what the pool was trained on."""
    found = data.fingerprint()
    if found != pool.manifest.fingerprint:
        raise UserError(
            f"the records do not match the pool {pool.path}: expected fingerprint {pool.manifest.fingerprint[:12]}, "
            f"found {found[:12]}; the source has changed since the pool was made: give the original with --data, "
            "or train a new pool"
        )
