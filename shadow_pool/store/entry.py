"""One model on disk: a directory written under a temporary name; the rename is the commit."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.torch import save
from torch import Tensor

from shadow_pool.plain import build
from shadow_pool.signals import Signals
from shadow_pool.store.files import (
    ADVICE,
    damaged,
    file_lock,
    file_sha256,
    read_sealed,
    write_atomically,
    write_sealed,
)

STATUSES = ("trained", "chance", "diverged")
FILES = ("weights.safetensors", "phi.parquet", "population.parquet", "history.parquet")
ROWS_AT_ONCE = 2**14
"""Rows of signals that are written, and later read, together: a few records of many models cost few bytes."""


@dataclass(frozen=True)
class EntryInfo:
    """model.json: ``status`` is ``trained``, ``chance`` (no better than the largest class) or ``diverged``.

    ``epsilon`` is what a +dp arm spent; ``reached`` whether a +fit arm got to its loss; ``digest`` is that of the
    pool's manifest; ``files`` maps the other files of the directory to their sha256.
    """

    arm: str
    index: int
    seed: int
    status: str
    seconds: float
    epochs: int
    loss: float | None
    reached: bool | None
    epsilon: float | None
    member_accuracy: float | None
    nonmember_accuracy: float | None
    population_accuracy: float | None
    digest: str
    software: dict[str, str]
    files: dict[str, str] = field(default_factory=dict)


def entry_path(pool: Path, arm: str, index: int) -> Path:
    """POOL/arms/ARM/0007"""
    return pool / "arms" / arm / f"{index:04d}"


@contextmanager
def entry_lock(entry: Path, *, wait: bool) -> Iterator[bool]:
    """Hold the entry's lock; yields False at once when another process holds it and ``wait`` is False."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(entry.with_name(f".{entry.name}.lock"), wait=wait) as held:
        yield held


def temporary_path(entry: Path) -> Path:
    """Where an entry is written before its commit. One name suffices: the writer holds the entry's lock."""
    return entry.with_name(f".{entry.name}.tmp")


@contextmanager
def workspace(entry: Path) -> Iterator[Path]:
    """The entry's temporary directory, new and empty, removed at the end unless it was committed.

    The caller holds the entry's lock. While it exists the model is in training; one that outlives its process
    shows which model a killed worker was at.
    """
    temporary = temporary_path(entry)
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir()
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def clear_leftover(entry: Path, *, remove: bool = True) -> bool:
    """Whether a killed process left the entry's temporary directory behind; it is removed unless told otherwise."""
    if not temporary_path(entry).exists():
        return False
    with entry_lock(entry, wait=False) as held:
        if held and remove:
            shutil.rmtree(temporary_path(entry), ignore_errors=True)
        return held


def remove_entry(entry: Path) -> None:
    """Remove a committed entry in one step for whoever reads it. The caller holds the entry's lock."""
    with workspace(entry) as temporary:
        entry.replace(temporary)


def commit_entry(
    entry: Path,
    info: EntryInfo,
    *,
    state: dict[str, Tensor],
    records: Signals,
    population: Signals,
    history: pa.Table,
) -> EntryInfo:
    """Write a whole entry into its workspace and commit it; returns what is there afterwards.

    Where locks do not reach (some network file systems) another process may have committed the same model
    meanwhile: the first rename wins.
    """
    temporary = temporary_path(entry)
    write_atomically(temporary / FILES[0], weights_bytes(state))
    write_signals(temporary / FILES[1], records)
    write_signals(temporary / FILES[2], population)
    write_atomically(temporary / FILES[3], parquet_bytes(history))
    info = replace(info, files={name: file_sha256(temporary / name) for name in FILES})
    write_sealed(temporary / "model.json", dataclasses.asdict(info))
    try:
        temporary.rename(entry)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return read_info(entry)
    return info


def read_info(entry: Path) -> EntryInfo:
    """model.json of an entry. Raises :class:`UserError` naming the file where it is damaged or misplaced."""
    path = entry / "model.json"
    info = build(EntryInfo, read_sealed(path, advice=ADVICE), str(path), unknown="ignore")
    if (info.arm, f"{info.index:04d}") != (entry.parent.name, entry.name):
        raise damaged(path, f"belongs to arm {info.arm}, model {info.index}")
    if info.status not in STATUSES:
        raise damaged(path, f"has an unknown status {info.status!r}")
    return info


def check_file(entry: Path, info: EntryInfo, name: str) -> Path:
    """The path of one file of an entry after its bytes were checked against model.json."""
    path = entry / name
    try:
        found = file_sha256(path)
    except OSError as error:
        raise damaged(path, f"is not readable ({error.strerror})") from None
    _check_sha256(path, info, found)
    return path


def read_file(entry: Path, info: EntryInfo, name: str) -> bytes:
    """The bytes of one file of an entry, checked against model.json."""
    path = entry / name
    try:
        content = path.read_bytes()
    except OSError as error:
        raise damaged(path, f"is not readable ({error.strerror})") from None
    _check_sha256(path, info, hashlib.sha256(content).hexdigest())
    return content


def _check_sha256(path: Path, info: EntryInfo, found: str) -> None:
    if found != info.files.get(path.name):
        raise damaged(path, "does not match its sha256 in model.json")


def weights_bytes(state: Mapping[str, Tensor]) -> bytes:
    """A state dict as the bytes of a safetensors file; the same tensors give the same bytes."""
    # A clone each, since tied parameters share storage and safetensors refuses that.
    return bytes(save({name: value.detach().cpu().contiguous().clone() for name, value in state.items()}))


def parquet_bytes(table: pa.Table, **options: object) -> bytes:
    """A table as the bytes of a parquet file; the same table gives the same bytes."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, **options)
    return bytes(sink.getvalue().to_pybytes())


def write_signals(path: Path, signals: Signals) -> None:
    """Signals as parquet, one row per record; the same arrays give the same bytes."""
    columns = {f"phi_{q}": pa.array(signals.phi[:, q]) for q in range(signals.phi.shape[1])}
    columns["predicted"] = pa.array(signals.predicted.astype(np.int64))
    columns["predicted_probability"] = pa.array(signals.predicted_probability)
    columns["energy"] = pa.array(signals.energy)
    # Random mantissas neither compress nor repeat: plain pages read fastest.
    content = parquet_bytes(
        pa.table(columns),
        row_group_size=ROWS_AT_ONCE,
        compression="none",
        use_dictionary=False,
        write_statistics=False,
        write_page_checksum=True,
    )
    write_atomically(path, content)


def read_signals(content: bytes) -> Signals:
    """Signals from the bytes of the file that :func:`write_signals` wrote.

    Raises ValueError where it has other columns, and what pyarrow raises: for :func:`shadow_pool.store.files.readable`.
    """
    # One thread, since starting others takes longer than half a millisecond of work.
    table = pq.ParquetFile(pa.BufferReader(content)).read(use_threads=False)
    queries = sum(name.startswith("phi_") for name in table.column_names)
    expected = [(f"phi_{q}", pa.float64()) for q in range(queries)]
    expected += [("predicted", pa.int64()), ("predicted_probability", pa.float32()), ("energy", pa.float32())]
    if not queries or [(field.name, field.type) for field in table.schema] != expected:
        raise ValueError(f"columns must be phi_0, ..., predicted, predicted_probability, energy, got {table.schema}")
    if any(column.null_count for column in table.columns):
        raise ValueError("no value may be missing")
    return Signals(
        phi=np.stack([table[f"phi_{q}"].to_numpy() for q in range(queries)], axis=1),
        predicted=table["predicted"].to_numpy(),
        predicted_probability=table["predicted_probability"].to_numpy(),
        energy=table["energy"].to_numpy(),
    )
