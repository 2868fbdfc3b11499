"""Per-record gradients while models train: one stored table per model, so that a killed study resumes."""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from torch import nn

from mia_audit.gradients import RecordGradients, batch_gradients, eval_gradients
from mia_audit.studies.setup import StudyPool, StudySetup
from shadow_pool import seeds
from shadow_pool.arms import parse_arm
from shadow_pool.data.records import Records
from shadow_pool.store.files import write_atomically
from shadow_pool.store.pool import Pool, open_pool
from shadow_pool.train.schedule import Progress, blocks_of
from shadow_pool.train.shadows import Shadow, block_size, preprocess_of, train_shadows
from shadow_pool.train.unit import Receipt, Unit
from shadow_pool.train.workers import run_in_workers, worker_count

DEFINITIONS = ("eval", "batch")
BATCHES = 4
"""Training batches a model and epoch from which the definition ``batch`` takes its sample."""
CLEAN_PER_BATCH = 8
"""Clean records of that sample; outliers are all taken, being few."""


def measure_gradients(setup: StudySetup, trained: StudyPool, arms: Iterable[str], epochs: list[int]) -> pd.DataFrame:
    """Train the pool's models again and measure their members' gradients at the given epochs.

    Equal seeds give the pool's own models. Every member is measured by the definition ``eval``; by ``batch`` a
    sample: of :data:`BATCHES` random training batches all outliers and :data:`CLEAN_PER_BATCH` clean records.
    A model of a ``+fit`` arm has no rows after the epoch where it stopped.

    Returns:
        One row per (arm, model ``index``, ``epoch``, ``definition``, ``record``): ``subset``, ``loss``, ``norm``
        (l2, all parameters) and ``push:LAYER`` per BatchNorm layer, the mean over channels of minus the
        derivative of the loss by abs(gamma): positive where a step on the record raises gamma.
    """
    folder = setup.out / "gradients" / trained.pool.manifest.digest[:12]
    pool = trained.pool
    units = [Unit(pool.path, arm, int(i), setup.device) for arm in arms for i in trained.models(arm)]
    missing = [unit for unit in units if not _file(folder, unit, epochs).exists()]
    blocks = blocks_of(missing, {arm: block_size(pool, arm, setup.device) for arm in {unit.arm for unit in missing}})
    workers = min(worker_count(setup.workers, setup.device), max(1, len(blocks)))
    calls = [(block, trained.data.records, epochs, folder) for block in blocks]
    receipts = chain.from_iterable(run_in_workers(_measure_units, calls, workers=workers))
    for done, receipt in enumerate(receipts, start=1):
        setup.on_progress(Progress(receipt, done, len(missing)))
    tables = [pd.read_parquet(_file(folder, u, epochs)).assign(arm=u.arm, index=u.index) for u in units]
    table = pd.concat(tables, ignore_index=True)
    return table.assign(subset=trained.data.records.subset[table["record"]])


def _file(folder: Path, unit: Unit, epochs: list[int]) -> Path:
    return folder / unit.arm / f"{unit.index:04d}-epochs-{'-'.join(map(str, epochs))}.parquet"


def _measure_units(units: list[Unit], records: Records, epochs: list[int], folder: Path) -> list[Receipt]:
    started = time.perf_counter()
    pool = open_pool(units[0].pool, trust=True)  # it was trained by this very command
    measurements = [_Measurement(pool, unit, records, epochs) for unit in units]
    shadows = [
        Shadow(
            unit.index,
            records.x[measured.members],
            records.label[measured.members],
            fit_loss=pool.info("batch", unit.index).loss if parse_arm(unit.arm).fit else None,
            on_epoch=measured,
        )
        for unit, measured in zip(units, measurements, strict=True)
    ]
    trained = train_shadows(pool, units[0].arm, shadows, device=units[0].device)
    receipts = []
    for unit, measured, (_, outcome) in zip(units, measurements, trained, strict=True):
        path = _file(folder, unit, epochs)
        path.parent.mkdir(parents=True, exist_ok=True)
        table = pd.concat(measured.parts, ignore_index=True)
        write_atomically(path, bytes(table.to_parquet(None, index=False)))
        seconds = (time.perf_counter() - started) / len(units)
        receipts.append(Receipt(unit, "trained", seconds, outcome.epochs * len(measured.members)))
    return receipts


class _Measurement:
    """Called after every epoch of a model's training; at the given ones its members' gradients go to ``parts``."""

    def __init__(self, pool: Pool, unit: Unit, records: Records, epochs: list[int]) -> None:
        self.members = np.flatnonzero(pool.membership[unit.index])
        self.parts: list[pd.DataFrame] = []
        self._pool, self._unit, self._records, self._epochs = pool, unit, records, epochs

    def __call__(self, epoch: int, model: nn.Module, loss: float) -> None:
        if epoch not in self._epochs:
            return
        pool, unit, records, members = self._pool, self._unit, self._records, self.members
        rng = seeds.stream(pool.spec.seed, "gradient-batches", unit.index, epoch)
        ask: dict[str, Any] = {"preprocess": preprocess_of(pool), "device": unit.device}
        alone = eval_gradients(model, records.x[members], records.label[members], **ask)
        self.parts.append(_table(epoch, "eval", members, alone, model))
        for _ in range(BATCHES):
            batch = rng.choice(members, min(pool.spec.recipe.batch_size, len(members)), replace=False)
            clean = records.subset[batch] == "clean"
            rows = np.concatenate([np.flatnonzero(~clean), np.flatnonzero(clean)[:CLEAN_PER_BATCH]])
            within = batch_gradients(model, records.x[batch], records.label[batch], rows, **ask)
            self.parts.append(_table(epoch, "batch", batch[rows], within, model))


def _table(epoch: int, definition: str, rows: np.ndarray, found: RecordGradients, model: nn.Module) -> pd.DataFrame:
    sign = {name: np.sign(p.detach().cpu().numpy()) for name, p in model.named_parameters()}
    pushes = {f"push:{layer}": -(slope * sign[f"{layer}.weight"]).mean(axis=1) for layer, slope in found.gamma.items()}
    return pd.DataFrame(
        {"epoch": epoch, "definition": definition, "record": rows, "loss": found.loss, "norm": found.norm, **pushes}
    )
