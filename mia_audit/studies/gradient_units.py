"""Per-record gradients while models train: one stored table per model, so that a killed study resumes."""

from __future__ import annotations

import time
from collections.abc import Iterable
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
from shadow_pool.store.pool import open_pool
from shadow_pool.train.schedule import Progress, worker_count
from shadow_pool.train.unit import Receipt, Unit, preprocess_of, train_for_pool
from shadow_pool.train.workers import run_in_workers

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
    units = [Unit(trained.pool.path, arm, int(i), setup.device) for arm in arms for i in trained.models(arm)]
    missing = [unit for unit in units if not _file(folder, unit, epochs).exists()]
    workers = min(worker_count(setup.workers, setup.device), max(1, len(missing)))
    calls = [(unit, trained.data.records, epochs, folder) for unit in missing]
    for done, receipt in enumerate(run_in_workers(_measure_unit, calls, workers=workers), start=1):
        setup.on_progress(Progress(receipt, done, len(missing)))
    tables = [pd.read_parquet(_file(folder, u, epochs)).assign(arm=u.arm, index=u.index) for u in units]
    table = pd.concat(tables, ignore_index=True)
    return table.assign(subset=trained.data.records.subset[table["record"]])


def _file(folder: Path, unit: Unit, epochs: list[int]) -> Path:
    return folder / unit.arm / f"{unit.index:04d}-epochs-{'-'.join(map(str, epochs))}.parquet"


def _measure_unit(unit: Unit, records: Records, epochs: list[int], folder: Path) -> Receipt:
    started = time.perf_counter()
    pool = open_pool(unit.pool, trust=True)  # it was trained by this very command
    members = np.flatnonzero(pool.membership[unit.index])
    parts: list[pd.DataFrame] = []

    def measure(epoch: int, model: nn.Module, loss: float) -> None:
        if epoch not in epochs:
            return
        rng = seeds.stream(pool.spec.seed, "gradient-batches", unit.index, epoch)
        ask: dict[str, Any] = {"preprocess": preprocess_of(pool), "device": unit.device}
        alone = eval_gradients(model, records.x[members], records.label[members], **ask)
        parts.append(_table(epoch, "eval", members, alone, model))
        for _ in range(BATCHES):
            batch = rng.choice(members, min(pool.spec.recipe.batch_size, len(members)), replace=False)
            clean = records.subset[batch] == "clean"
            rows = np.concatenate([np.flatnonzero(~clean), np.flatnonzero(clean)[:CLEAN_PER_BATCH]])
            within = batch_gradients(model, records.x[batch], records.label[batch], rows, **ask)
            parts.append(_table(epoch, "batch", batch[rows], within, model))

    _, outcome = train_for_pool(
        pool,
        unit.arm,
        records.x[members],
        records.label[members],
        seed=pool.spec.seed,
        index=unit.index,
        device=unit.device,
        fit_loss=pool.info("batch", unit.index).loss if parse_arm(unit.arm).fit else None,
        on_epoch=measure,
    )
    path = _file(folder, unit, epochs)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, bytes(pd.concat(parts, ignore_index=True).to_parquet(None, index=False)))
    return Receipt(unit, "trained", time.perf_counter() - started, outcome.epochs * len(members))


def _table(epoch: int, definition: str, rows: np.ndarray, found: RecordGradients, model: nn.Module) -> pd.DataFrame:
    sign = {name: np.sign(p.detach().cpu().numpy()) for name, p in model.named_parameters()}
    pushes = {f"push:{layer}": -(slope * sign[f"{layer}.weight"]).mean(axis=1) for layer, slope in found.gamma.items()}
    return pd.DataFrame(
        {"epoch": epoch, "definition": definition, "record": rows, "loss": found.loss, "norm": found.norm, **pushes}
    )
