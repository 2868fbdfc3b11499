"""A pool on disk: create, open, extend; what is there, what is missing; signals in blocks of records."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from shadow_pool.arms import parse_arm
from shadow_pool.data.records import PoolData, Records
from shadow_pool.errors import UserError
from shadow_pool.membership import draw_membership
from shadow_pool.queries import query_views
from shadow_pool.signals import Signals
from shadow_pool.spec import PoolSpec, differences, from_dict, merge, to_dict
from shadow_pool.store.entry import EntryInfo, check_file, damaged, entry_path, file_lock, read_info, read_signals
from shadow_pool.store.manifest import (
    Manifest,
    file_sha256,
    now,
    read_manifest,
    software_versions,
    training_digest,
    write_atomically,
)


@dataclass(frozen=True)
class Pool:
    """An open pool. Opening reads pool.json only; tables are read, and checked, when asked for."""

    path: Path
    manifest: Manifest

    @property
    def spec(self) -> PoolSpec:
        """The stored spec."""
        return self.manifest.spec

    @cached_property
    def membership(self) -> np.ndarray:
        """bool [n, records], True where the record trained the model."""
        rows: np.ndarray = np.load(self._checked("membership.npy"), allow_pickle=False)
        return rows

    @cached_property
    def table(self) -> pd.DataFrame:
        """records.parquet: records first, then the population."""
        return pd.read_parquet(self._checked("records.parquet"))

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

    def scan(self, arm: str) -> tuple[dict[int, EntryInfo], dict[int, UserError]]:
        """The committed models of an arm by index, and those whose model.json cannot be used with the reason."""
        digest = training_digest(self.spec)
        good: dict[int, EntryInfo] = {}
        bad: dict[int, UserError] = {}
        for index in range(self.spec.n):
            entry = self.entry(arm, index)
            if not entry.exists():
                continue
            try:
                info = read_info(entry)
                if info.digest != digest:
                    raise damaged(entry / "model.json", "was trained under another spec than the pool's")
                good[index] = info
            except UserError as error:
                bad[index] = error
        return good, bad

    def verify(self, arm: str) -> dict[int, UserError]:
        """Read every byte of an arm's models; the damaged ones by index with the reason."""
        good, bad = self.scan(arm)
        for index, info in good.items():
            try:
                for name in info.files:
                    check_file(self.entry(arm, index), info, name)
            except UserError as error:
                bad[index] = error
        return bad

    def missing(self, arm: str) -> list[int]:
        """Indices of an arm without a committed model: the whole of resuming."""
        return [index for index in range(self.spec.n) if not self.entry(arm, index).exists()]

    def signals(self, arm: str, index: int, *, population: bool = False, rows: slice | None = None) -> Signals:
        """The stored signals of one model on the records (or the population), its bytes checked."""
        entry = self.entry(arm, index)
        name = "population.parquet" if population else "phi.parquet"
        return read_signals(check_file(entry, read_info(entry), name), rows)

    def phi(self, arm: str, indices: np.ndarray, *, population: bool = False, rows: slice | None = None) -> np.ndarray:
        """float64 [len(indices), records, queries] of the models at ``indices``; ``rows`` selects a block."""
        return np.stack([self.signals(arm, int(i), population=population, rows=rows).phi for i in indices])

    def history(self, arm: str, index: int) -> pd.DataFrame:
        """history.parquet of one model: epoch, metric, subset, member, layer, value."""
        entry = self.entry(arm, index)
        return pd.read_parquet(check_file(entry, read_info(entry), "history.parquet"))

    def _checked(self, name: str) -> Path:
        path = self.path / name
        try:
            found = file_sha256(path)
        except OSError as error:
            raise damaged(path, f"is not readable ({error.strerror})") from None
        if found != self.manifest.files[name]:
            raise damaged(path, "does not match its sha256 in pool.json")
        return path


def open_pool(path: Path) -> Pool:
    """Open a pool for reading. Raises :class:`UserError` where there is none or pool.json is damaged."""
    return Pool(path, read_manifest(path / "pool.json"))


def planned_spec(path: Path, changes: Mapping[str, Any]) -> tuple[PoolSpec, bool]:
    """The spec that ``changes`` (nested plain values) ask for at ``path``, and whether a pool is there already.

    On an existing pool the stored spec is the default, a larger n extends it, new arms join it, and any other
    difference raises :class:`UserError` naming the field.
    """
    if not (path / "pool.json").exists():
        return from_dict(changes), False
    stored = open_pool(path).spec
    wanted = dict(merge(to_dict(stored), changes))
    # Canonical spellings, so that an arm named in another way does not join a second time.
    wanted["arms"] = list(dict.fromkeys([*stored.arms, *(parse_arm(arm).name for arm in wanted["arms"])]))
    asked = _settled(from_dict(wanted), stored)
    for name, ours, theirs in differences(asked, stored):
        if name == "arms" or (name == "n" and ours > theirs):
            continue
        raise UserError(
            f"the pool {path} was made with {name} = {theirs!r}, asked for {ours!r}; "
            "leave the option out, or choose another folder with --pool"
        )
    return asked, True


def create_pool(path: Path, spec: PoolSpec, data: PoolData) -> Pool:
    """Create the pool's files, or return the pool another process created from the same spec meanwhile.

    ``spec`` has its normalization and precision made explicit. pool.json is written last: a folder without it
    is no pool.
    """
    if path.exists() and (not path.is_dir() or (any(path.iterdir()) and not (path / ".lock").exists())):
        raise UserError(
            f"{path} must be a new or empty folder for a pool, found other files there; choose another --pool"
        )
    path.mkdir(parents=True, exist_ok=True)
    with file_lock(path / ".lock", wait=True):
        if (path / "pool.json").exists():
            return open_pool(path)
        views = query_views(spec.queries, data.records.x.shape[1:])
        write_atomically(path / "records.parquet", _table_bytes(data))
        write_atomically(path / "membership.npy", _membership_bytes(spec, data.records))
        Manifest(
            spec=spec,
            fingerprint=data.fingerprint(),
            input_shape=data.records.x.shape[1:],
            views=views,
            files={name: file_sha256(path / name) for name in ("membership.npy", "records.parquet")},
            warnings=data.warnings,
            software=software_versions(),
            created=now(),
        ).write(path / "pool.json")
    return open_pool(path)


def extend_pool(pool: Pool, spec: PoolSpec, data: PoolData) -> Pool:
    """Bring the pool up to ``spec`` (more pairs, more arms) and mend its tables, which are pure in spec and data."""
    with file_lock(pool.path / ".lock", wait=True):
        current = open_pool(pool.path)
        spec = replace(spec, n=max(spec.n, current.spec.n), arms=tuple(dict.fromkeys([*current.spec.arms, *spec.arms])))
        contents = {"membership.npy": _membership_bytes(spec, data.records), "records.parquet": _table_bytes(data)}
        files = {}
        for name, content in contents.items():
            path = pool.path / name
            if not path.exists() or path.read_bytes() != content:
                write_atomically(path, content)
            files[name] = file_sha256(path)
        if spec != current.spec or files != current.manifest.files:
            replace(current.manifest, spec=spec, files=files).write(pool.path / "pool.json")
    return open_pool(pool.path)


def rewrite_membership(pool: Pool) -> None:
    """Draw membership.npy again from the seed and records.parquet; it must come out as pool.json says."""
    spec, group = pool.spec, pool.records["group"]
    rows = draw_membership(spec.seed, spec.n, len(group), None if group.isna().all() else group.to_numpy(object))
    write_atomically(pool.path / "membership.npy", _npy(rows))
    _ = Pool(pool.path, pool.manifest).membership


def check_fingerprint(pool: Pool, data: PoolData) -> None:
    """Raise :class:`UserError` where ``data`` is not what the pool was trained on."""
    found = data.fingerprint()
    if found != pool.manifest.fingerprint:
        raise UserError(
            f"the records do not match the pool {pool.path}: expected fingerprint {pool.manifest.fingerprint[:12]}, "
            f"found {found[:12]}; the source has changed since the pool was made: give the original with --data, "
            "or train a new pool"
        )


def _settled(asked: PoolSpec, stored: PoolSpec) -> PoolSpec:
    """``auto`` asks for whatever was settled when the pool was made."""
    data = replace(asked.data, normalize=stored.data.normalize) if asked.data.normalize == "auto" else asked.data
    return replace(asked, data=data, precision=stored.precision if asked.precision == "auto" else asked.precision)


def _membership_bytes(spec: PoolSpec, records: Records) -> bytes:
    return _npy(draw_membership(spec.seed, spec.n, len(records), records.group))


def _npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def _table_bytes(data: PoolData) -> bytes:
    frame = pd.concat([data.records.to_frame("record"), data.population.to_frame("population")], ignore_index=True)
    integers = ("label", "original_label", "source_index")
    schema = pa.schema([(name, pa.int64() if name in integers else pa.string()) for name in frame.columns])
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pandas(frame, schema=schema, preserve_index=False), sink)
    return bytes(sink.getvalue().to_pybytes())
