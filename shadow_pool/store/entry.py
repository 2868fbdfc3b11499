"""One model on disk: a directory written under a temporary name; the rename is the commit."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.torch import save_file
from torch import Tensor

from shadow_pool.errors import UserError
from shadow_pool.signals import Signals
from shadow_pool.store.manifest import file_sha256, write_atomically

STATUSES = ("trained", "chance", "diverged")
FILES = ("weights.safetensors", "phi.parquet", "population.parquet", "history.parquet")


@dataclass(frozen=True)
class EntryInfo:
    """model.json: ``status`` is ``trained``, ``chance`` (no better than the largest class) or ``diverged``.

    ``epsilon`` is what a +dp arm spent; ``reached`` whether a +fit arm got to its loss; ``files`` maps the
    other files of the directory to their sha256; ``digest`` is the training digest of the pool's spec.
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
    files: dict[str, str]


def entry_path(pool: Path, arm: str, index: int) -> Path:
    """POOL/arms/ARM/0007"""
    return pool / "arms" / arm / f"{index:04d}"


def temporary_path(entry: Path) -> Path:
    """Where an entry is written before its commit. One name suffices: the writer holds the entry's lock."""
    return entry.with_name(f".{entry.name}.tmp")


@contextmanager
def entry_lock(entry: Path, *, wait: bool) -> Iterator[bool]:
    """Hold the entry's lock, which the system releases when its holder dies.

    Yields False at once when another process holds it and ``wait`` is False.
    """
    entry.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(entry.with_name(f".{entry.name}.lock"), wait=wait) as held:
        yield held


@contextmanager
def file_lock(path: Path, *, wait: bool) -> Iterator[bool]:
    """An exclusive flock on ``path``; the file stays behind, empty (removing it would race)."""
    with path.open("ab") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


def write_entry(
    entry: Path,
    info: dict[str, Any],
    *,
    state: dict[str, Tensor],
    records: Signals,
    population: Signals,
    history: pa.Table,
) -> EntryInfo:
    """Write a whole entry and commit it. The caller holds the entry's lock.

    ``info`` holds the fields of :class:`EntryInfo` but ``files``.
    """
    temporary = temporary_path(entry)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    # A clone each, since tied parameters share storage and safetensors refuses that.
    save_file({k: v.detach().cpu().contiguous().clone() for k, v in state.items()}, temporary / FILES[0])
    write_signals(temporary / FILES[1], records)
    write_signals(temporary / FILES[2], population)
    pq.write_table(history, temporary / FILES[3])
    files = {name: file_sha256(temporary / name) for name in FILES}
    (temporary / "model.json").write_text(json.dumps({**info, "files": files}, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(entry, ignore_errors=True)
    temporary.rename(entry)
    return EntryInfo(**info, files=files)


def read_info(entry: Path) -> EntryInfo:
    """model.json of an entry. Raises :class:`UserError` naming the file where it is damaged or misplaced."""
    path = entry / "model.json"
    try:
        info = EntryInfo(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise damaged(path, f"is not readable ({' '.join(str(error).split())})") from None
    if (info.arm, f"{info.index:04d}") != (entry.parent.name, entry.name):
        raise damaged(path, f"belongs to arm {info.arm}, model {info.index}")
    return info


def check_file(entry: Path, info: EntryInfo, name: str) -> Path:
    """The path of one file of an entry after its bytes were checked against model.json."""
    path = entry / name
    try:
        found = file_sha256(path)
    except OSError as error:
        raise damaged(path, f"is not readable ({error.strerror})") from None
    if found != info.files.get(name):
        raise damaged(path, "does not match its sha256 in model.json")
    return path


def damaged(path: Path, what: str) -> UserError:
    """The error for a file of a pool that cannot be used as it is."""
    return UserError(f"{path} {what}; run mia-audit pool verify --repair on the pool, then train-shadows again")


def write_signals(path: Path, signals: Signals) -> None:
    """Signals as parquet, one row per record; the same arrays give the same bytes."""
    columns = {f"phi_{q}": pa.array(signals.phi[:, q]) for q in range(signals.phi.shape[1])}
    columns["predicted"] = pa.array(signals.predicted.astype(np.int64))
    columns["predicted_probability"] = pa.array(signals.predicted_probability)
    columns["energy"] = pa.array(signals.energy)
    sink = pa.BufferOutputStream()
    # Random mantissas neither compress nor repeat: plain pages read fastest.
    pq.write_table(
        pa.table(columns),
        sink,
        compression="none",
        use_dictionary=False,
        write_statistics=False,
        write_page_checksum=True,
    )
    write_atomically(path, sink.getvalue().to_pybytes())


def read_signals(path: Path, rows: slice | None = None) -> Signals:
    """Signals of the rows in ``rows`` (all where None)."""
    table = pq.read_table(path, memory_map=True, page_checksum_verification=True)
    if rows is not None:
        start, stop, _ = rows.indices(len(table))
        table = table.slice(start, stop - start)
    queries = sum(name.startswith("phi_") for name in table.column_names)
    return Signals(
        phi=np.stack([table[f"phi_{q}"].to_numpy() for q in range(queries)], axis=1),
        predicted=table["predicted"].to_numpy(),
        predicted_probability=table["predicted_probability"].to_numpy(),
        energy=table["energy"].to_numpy(),
    )
