"""Fixtures that train: one small pool on real digits, trained once a session for every test that reads a pool."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from shadow_pool.data.records import PoolData
from shadow_pool.prepare import pool_data as find_data
from shadow_pool.prepare import prepare_pool
from shadow_pool.store.pool import Pool, open_pool
from shadow_pool.train.unit import TrainingData, Unit, train_unit

POOL_SPEC = {
    "n": 8,
    "arms": ["batch", "none", "none+fit"],
    "precision": "fp32",
    "data": {"mislabeled": 0.05, "ood": 0.05},
    "recipe": {"optimizer": "adamw", "lr": 0.005, "batch_size": 16, "epochs": 6},
}


def write_digits(path: Path, count: int, **arrays: np.ndarray) -> Path:
    """An .npz of the first ``count`` digits, uint8 [count, 8, 8]."""
    digits = load_digits()
    x = (digits.images[:count] * 15.9).astype(np.uint8)
    whole = path.with_name(f"{os.getpid()}-{path.name}")
    np.savez(whole, x=x, y=digits.target[:count].astype(np.int64), **arrays)
    return whole.replace(path)


def train_here(pool: Pool, data: PoolData) -> None:
    """Train what is missing in this process: no worker has to start."""
    lean = TrainingData.of(data)
    for arm in pool.spec.arms:
        for index in pool.missing(arm):
            receipt = train_unit(Unit(pool.path, arm, index, wait=True), lean)
            assert receipt.outcome in ("trained", "present"), receipt


@pytest.fixture(scope="session")
def pool_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pool of arms batch, none and none+fit, 8 models each, all trained, on 340 digits. Read it only: it is shared.

    Processes of pytest-xdist train it together.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if base.name.startswith("popen-") else base) / "shared-pool"
    folder.mkdir(exist_ok=True)
    source = folder / "digits.npz"
    write_digits(source, 400)
    spec = {**POOL_SPEC, "data": {**POOL_SPEC["data"], "source": str(source)}}
    pool, data = prepare_pool(folder / "pool", spec)
    train_here(pool, data)
    return folder / "pool"


@pytest.fixture(scope="session")
def pool(pool_folder: Path) -> Pool:
    """The shared pool, open."""
    return open_pool(pool_folder)


@pytest.fixture(scope="session")
def pool_data(pool: Pool) -> PoolData:
    """The records of the shared pool."""
    return find_data(pool)
