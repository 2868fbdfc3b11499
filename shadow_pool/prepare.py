"""From settings to an open pool and its records: create it, extend it, or find its inputs again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shadow_pool.data.load import load_data, resolve_data_spec
from shadow_pool.data.records import PoolData
from shadow_pool.models.resolve import build_model, check_model
from shadow_pool.spec import PoolSpec
from shadow_pool.store.pool import Pool, check_fingerprint, create_pool, extend_pool, open_pool, planned_spec
from shadow_pool.train.precision import settle_precision


def prepare_pool(
    path: Path,
    changes: Mapping[str, Any],
    *,
    data_root: Path | None = None,
    download: bool = False,
    device: str = "cpu",
) -> tuple[Pool, PoolData]:
    """The pool at ``path`` brought up to ``changes`` (nested plain values of a spec), and its records.

    A new pool is created; an existing one keeps its stored spec where ``changes`` is silent and grows in n and
    arms. The architecture is tried on the records before anything is written. Raises :class:`UserError` for
    what the user can mend.
    """
    spec, exists = planned_spec(path, changes)
    data = load_data(spec.data, seed=spec.seed, data_root=data_root, download=download)
    if not exists:
        spec = replace(
            spec, data=resolve_data_spec(spec.data, data), precision=settle_precision(spec.precision, device)
        )
        _try_architecture(spec, data)
        return create_pool(path, spec, data), data
    pool = open_pool(path)
    check_fingerprint(pool, data)
    return extend_pool(pool, spec, data), data


def pool_data(pool: Pool, *, source: str | None = None, data_root: Path | None = None) -> PoolData:
    """The records of an existing pool, from its source or from where they moved, checked against its fingerprint."""
    spec = pool.spec.data if source is None else replace(pool.spec.data, source=source)
    data = load_data(spec, seed=pool.spec.seed, data_root=data_root)
    check_fingerprint(pool, data)
    return data


def _try_architecture(spec: PoolSpec, data: PoolData) -> None:
    shape, classes = data.records.x.shape[1:], len(data.records.classes)
    model = build_model(spec.arch, "batch", classes=classes, input_shape=shape, seed=0)
    check_model(model, shape, classes)
