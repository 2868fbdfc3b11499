"""Small pools on real digits, made and trained in a second or so, for tests of everything that trains or reads one."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

from shadow_pool.data.records import PoolData
from shadow_pool.prepare import prepare_pool
from shadow_pool.spec import merge
from shadow_pool.store.files import file_sha256
from shadow_pool.store.pool import Pool
from shadow_pool.train.schedule import train_pool
from shadow_pool.train.unit import Receipt

TINY = {
    "n": 4,
    "arms": ["batch", "none"],
    "precision": "fp32",
    "recipe": {"optimizer": "adamw", "lr": 0.005, "batch_size": 16, "epochs": 1},
}
"""Four models an arm, one epoch: they need not learn much."""


def write_digits(path: Path, count: int, **arrays: np.ndarray) -> Path:
    """An .npz of the first ``count`` digits, uint8 [count, 8, 8]."""
    digits = load_digits()
    values = {
        "x": (digits.images[:count] * 15.9).astype(np.uint8),
        "y": digits.target[:count].astype(np.int64),
        **arrays,
    }
    whole = path.with_name(f"{os.getpid()}-{path.name}")
    np.savez(whole, **values)
    return whole.replace(path)


def tiny_pool(folder: Path, changes: dict[str, Any] | None = None, **arrays: np.ndarray) -> tuple[Pool, PoolData]:
    """A pool at ``folder`` on 120 digits beside it, untrained; ``changes`` are nested plain values of a spec."""
    source = folder.with_suffix(".npz")
    if not source.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        write_digits(source, 120, **arrays)
    return prepare_pool(folder, merge({**copy.deepcopy(TINY), "data": {"source": str(source)}}, changes or {}))


def train_here(pool: Pool, data: PoolData) -> list[Receipt]:
    """Train what is missing in this process: no worker has to start."""
    return train_pool(pool, data, workers=1)


def contents(folder: Path, *, names: tuple[str, ...] = ("weights.safetensors", "phi.parquet")) -> dict[str, str]:
    """sha256 of what DESIGN promises to be equal byte for byte, by path: tables, and of each model ``names``."""
    files = [folder / "membership.npy", folder / "records.parquet"]
    files += [path for name in names for path in folder.glob(f"arms/*/[0-9]*/{name}")]
    return {str(path.relative_to(folder)): file_sha256(path) for path in files}
