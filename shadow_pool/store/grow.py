"""Bring a pool's folder to what a spec asks for: create it, add pairs and arms, mend its tables."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from shadow_pool.arms import parse_arm
from shadow_pool.data.preprocess import model_input_shape
from shadow_pool.data.records import PoolData
from shadow_pool.errors import UserError
from shadow_pool.membership import draw_membership
from shadow_pool.plain import short
from shadow_pool.queries import query_views
from shadow_pool.spec import PoolSpec, differences, from_dict, merge, to_dict
from shadow_pool.store.entry import parquet_bytes, read_info
from shadow_pool.store.files import file_lock, file_sha256, write_atomically
from shadow_pool.store.manifest import Manifest, now, software_versions
from shadow_pool.store.pool import INITIAL, TABLE, Pool, open_pool, rows_sha256
from shadow_pool.store.trust import code_versions, vouch


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
            f"the pool {path} was made with {name} = {short(theirs)}, asked for {short(ours)}; "
            "leave the option out, or choose another folder with --pool (demo and study: --out)"
        )
    return asked, True


def create_pool(path: Path, spec: PoolSpec, data: PoolData, *, initial: bytes | None = None) -> None:
    """Create the pool's files, unless another process has made a pool there meanwhile.

    ``spec`` has its normalization and precision made explicit; ``initial`` is the safetensors file of the weights that
    its ``init`` names. pool.json is written last: a folder without it is
    no pool.

    Raises:
        UserError: the folder holds other files, or models of another spec or other records; or a group is so
            large that a half would be left without two records.
    """
    if path.exists() and (not path.is_dir() or (any(path.iterdir()) and not (path / ".lock").exists())):
        raise UserError(
            f"{path} must be a new or empty folder for a pool, found other files there; choose another --pool"
        )
    rows = _membership(spec, data)
    path.mkdir(parents=True, exist_ok=True)
    with file_lock(path / ".lock", wait=True):
        if (path / "pool.json").exists():
            return
        manifest = Manifest(
            spec=spec,
            fingerprint=data.fingerprint(),
            input_shape=data.records.x.shape[1:],
            model_shape=model_input_shape(spec.data.normalize, data.records.x),
            views=query_views(spec.queries, data.records.x.shape[1:]),
            files={},
            warnings=data.warnings,
            software=software_versions(),
            created=now(),
            code=code_versions(spec),
        )
        _refuse_other_models(path, manifest)
        manifest = write_initial(path, manifest, initial)
        write_pool(path, manifest, rows, _table_bytes(data))
        vouch(manifest)


def write_pool(path: Path, manifest: Manifest, rows: np.ndarray, table: bytes | None) -> None:
    """Write membership (bool [n, records]), records.parquet (None: as it is) and, last, pool.json.

    The caller holds the pool's lock. Killed in between, the folder still is the pool it was.
    """
    buffer = io.BytesIO()
    np.save(buffer, rows, allow_pickle=False)
    write_atomically(path / "membership.npy", buffer.getvalue())
    if table is not None:
        write_atomically(path / "records.parquet", table)
    files = {"membership.npy": rows_sha256(rows), "records.parquet": file_sha256(path / "records.parquet")}
    replace(manifest, files=manifest.files | files).write(path / "pool.json")


def write_initial(path: Path, manifest: Manifest, initial: bytes | None) -> Manifest:
    """Write the weights that every model starts from, where there are such; the manifest with their sha256."""
    if initial is None:
        return manifest
    write_atomically(path / INITIAL, initial)
    return replace(manifest, files=manifest.files | {INITIAL: file_sha256(path / INITIAL)})


def extend_pool(pool: Pool, spec: PoolSpec, data: PoolData, *, initial: bytes | None = None) -> Pool:
    """Bring the pool up to ``spec`` (more pairs, more arms) and mend its tables, which are pure in spec and data.

    ``initial``, where given, takes the place of a damaged file of initial weights.
    """
    with file_lock(pool.path / ".lock", wait=True):
        current = open_pool(pool.path, trust=pool.trusted)
        if initial is not None and not _is_sound(current, "initial"):
            write_initial(pool.path, current.manifest, initial)
        spec = replace(spec, n=max(spec.n, current.spec.n), arms=tuple(dict.fromkeys([*current.spec.arms, *spec.arms])))
        whole = _is_sound(current, "table")
        if spec == current.spec and whole and _is_sound(current, "membership"):
            return current
        rows = _membership(spec, data)
        # Older rows may not move: models were trained on them.
        if rows_sha256(rows[: current.spec.n]) != current.manifest.files.get("membership.npy"):
            raise UserError(
                f"the groups of the records are not those the pool {pool.path} was made with, so its halves cannot be "
                "drawn again; give the original records with --data, or train a new pool"
            )
        write_pool(pool.path, replace(current.manifest, spec=spec), rows, None if whole else _table_bytes(data))
    return open_pool(pool.path, trust=pool.trusted)


def rewrite_membership(pool: Pool) -> bool:
    """Draw membership.npy again from the seed and records.parquet; whether it came out as pool.json says.

    It does not for the twins of a target, which have members of their own.
    """
    spec, group = pool.spec, pool.records["group"]
    rows = draw_membership(spec.seed, spec.n, len(group), None if group.isna().all() else group.to_numpy(object))
    if rows_sha256(rows) != pool.manifest.files.get("membership.npy"):
        return False
    with file_lock(pool.path / ".lock", wait=True):
        write_pool(pool.path, pool.manifest, rows, None)
    return True


def _settled(asked: PoolSpec, stored: PoolSpec) -> PoolSpec:
    """``auto`` asks for whatever was settled when the pool was made."""
    data = replace(asked.data, normalize=stored.data.normalize) if asked.data.normalize == "auto" else asked.data
    return replace(asked, data=data, precision=stored.precision if asked.precision == "auto" else asked.precision)


def _is_sound(pool: Pool, table: str) -> bool:
    try:
        getattr(pool, table)
    except UserError:
        return False
    return True


def _membership(spec: PoolSpec, data: PoolData) -> np.ndarray:
    records = data.records
    rows = draw_membership(spec.seed, spec.n, len(records), records.group)
    fewest = int(rows.sum(axis=1).min())
    if fewest < 2:
        raise UserError(
            f"{spec.data.source} must give each half at least 2 of its {len(records)} records, found a half of "
            f"{fewest}; add records, or name a finer --group"
        )
    return rows


def _refuse_other_models(path: Path, manifest: Manifest) -> None:
    """Where pool.json was lost, the models that are there must be the new pool's own."""
    for found in sorted(path.glob("arms/*/[0-9]*/model.json")):
        try:
            digest = read_info(found.parent).digest
        except UserError:
            continue  # damaged: it will be trained again
        if digest != manifest.digest:
            raise UserError(
                f"{path} holds models of another spec or other records (first {found.parent}); give the options "
                "that pool was made with, or choose another --pool"
            )


def _table_bytes(data: PoolData) -> bytes:
    frame = pd.concat([data.records.to_frame("record"), data.population.to_frame("population")], ignore_index=True)
    return parquet_bytes(pa.Table.from_pandas(frame, schema=TABLE, preserve_index=False))
