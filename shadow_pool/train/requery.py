"""Signals in query mode ``batch``: recomputed from the stored weights, kept beside the ordinary ones."""

from __future__ import annotations

import contextlib
import hashlib
from typing import Any

import pyarrow as pa
from safetensors.torch import load_file
from torch import nn

from shadow_pool.data.records import PoolData
from shadow_pool.errors import UserError, one_line
from shadow_pool.signals import Signals, compute_signals
from shadow_pool.store.entry import check_file, entry_lock, read_signals, write_signals
from shadow_pool.store.files import file_sha256, read_sealed, readable, write_sealed
from shadow_pool.store.pool import Pool
from shadow_pool.train.shadows import preprocess_of, starting_model

FILES = ("phi-batch.parquet", "population-batch.parquet")


def stored_model(pool: Pool, arm: str, index: int) -> nn.Module:
    """Model ``index`` of an arm with its trained weights, in eval mode.

    Raises :class:`UserError` where they are damaged, or do not fit the architecture any more.
    """
    entry = pool.entry(arm, index)
    path = check_file(entry, pool.info(arm, index), "weights.safetensors")
    model = starting_model(pool, arm)
    with readable(path):
        weights = load_file(path)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(
            f"{path} does not fit {pool.spec.arch}, which has changed since it was trained: {one_line(error)}; bring "
            "the old code back"
        ) from None
    return model.eval()


def batch_mode_signals(pool: Pool, data: PoolData, arm: str, index: int) -> tuple[Signals, Signals]:
    """Signals of one model on records and population through the statistics of fixed batches.

    Computed once, then read from ``phi-batch.parquet`` and ``population-batch.parquet``, which ``batch.json``
    ties to the weights; what is damaged is computed again. Where the pool cannot be
    written they are computed each time.
    """
    entry, info = pool.entry(arm, index), pool.info(arm, index)
    weights = info.files["weights.safetensors"]
    try:
        made = read_sealed(entry / "batch.json", advice="it is computed again")
        contents = [(entry / name).read_bytes() for name in FILES]
        found = {name: hashlib.sha256(content).hexdigest() for name, content in zip(FILES, contents, strict=True)}
        if made["weights"] == weights and made["files"] == found:
            return read_signals(contents[0]), read_signals(contents[1])
    except (UserError, OSError, ValueError, pa.ArrowException, KeyError):
        pass
    model = stored_model(pool, arm, index)
    ask: dict[str, Any] = {"preprocess": preprocess_of(pool), "views": pool.manifest.views, "query_mode": "batch"}
    records, population = (
        compute_signals(model, part.x, part.label, **ask) for part in (data.records, data.population)
    )
    with contextlib.suppress(OSError), entry_lock(entry, wait=True):
        write_signals(entry / FILES[0], records)
        write_signals(entry / FILES[1], population)
        files = {name: file_sha256(entry / name) for name in FILES}
        write_sealed(entry / "batch.json", {"weights": weights, "files": files})
    return records, population
