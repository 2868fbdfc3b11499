"""Signals in query mode ``batch``: recomputed from the stored weights, kept beside the ordinary ones."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from safetensors.torch import load_file
from torch import nn

from shadow_pool.arms import parse_arm
from shadow_pool.data.records import PoolData, Records
from shadow_pool.models.resolve import build_model
from shadow_pool.signals import Signals, compute_signals
from shadow_pool.store.entry import check_file, read_info, read_signals, write_signals
from shadow_pool.store.pool import Pool
from shadow_pool.train.unit import preprocess_of

FILES = ("phi-batch.parquet", "population-batch.parquet")


def stored_model(pool: Pool, arm: str, index: int, classes: int) -> nn.Module:
    """Model ``index`` of an arm with its trained weights, in eval mode."""
    entry = pool.entry(arm, index)
    path = check_file(entry, read_info(entry), "weights.safetensors")
    shape = pool.manifest.input_shape
    model = build_model(pool.spec.arch, parse_arm(arm).norm, classes=classes, input_shape=shape, seed=0)
    model.load_state_dict(load_file(path))
    return model.eval()


def batch_mode_signals(pool: Pool, data: PoolData, arm: str, index: int) -> tuple[Signals, Signals]:
    """Signals of one model on records and population through the statistics of fixed batches.

    Computed once, then read from ``phi-batch.parquet`` and ``population-batch.parquet``, whose pages carry
    checksums; a damaged file is computed again.
    """
    entry = pool.entry(arm, index)
    try:
        return read_signals(entry / FILES[0]), read_signals(entry / FILES[1])
    except (OSError, pa.ArrowException, KeyError):
        model = stored_model(pool, arm, index, len(data.records.classes))
    parts: Sequence[Records] = (data.records, data.population)
    found = []
    for name, part in zip(FILES, parts, strict=True):
        signals = compute_signals(
            model,
            part.x,
            part.label,
            preprocess=preprocess_of(pool),
            views=pool.manifest.views,
            query_mode="batch",
        )
        write_signals(entry / name, signals)
        found.append(signals)
    return found[0], found[1]
