"""Train many models: independent units of work through joblib, any backend; what is missing is what is done."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace

import joblib
from joblib.externals.loky import get_reusable_executor
from joblib.externals.loky.process_executor import TerminatedWorkerError

from shadow_pool.arms import parse_arm
from shadow_pool.data.records import PoolData
from shadow_pool.store.entry import temporary_path
from shadow_pool.store.pool import Pool
from shadow_pool.train.unit import Receipt, TrainingData, Unit, train_unit

STRIKES = 3
"""A unit that was in flight this many times when a worker died is given up and reported."""


@dataclass(frozen=True)
class Progress:
    """One unit has ended: ``done`` of ``total`` so far."""

    receipt: Receipt
    done: int
    total: int


def train_pool(
    pool: Pool,
    data: PoolData,
    *,
    workers: int | None = None,
    device: str = "cpu",
    scheduler: str | None = None,
    indices: range | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> list[Receipt]:
    """Train every model the pool lacks, one single-threaded process per core.

    Arms whose length depends on another arm (+fit) come after it. A model that fails is reported in its receipt
    and the rest goes on; a worker that dies is replaced and its model tried again. An interrupt loses only the
    models in flight.

    Args:
        workers: processes (default: one per core; on a GPU one per device).
        scheduler: address of a Dask scheduler whose workers see the pool's folder.
        indices: train these models only (each arm), for Slurm arrays and the like.

    Returns:
        One receipt per model that was missing.
    """
    lean = TrainingData.of(data)
    chosen = indices if indices is not None else range(pool.spec.n)
    units = [
        Unit(pool.path, arm, index, device) for arm in pool.spec.arms for index in pool.missing(arm) if index in chosen
    ]
    phases = [[u for u in units if parse_arm(u.arm).fit is fit] for fit in (False, True)]
    receipts: list[Receipt] = []
    for phase in phases:
        for receipt in _run(phase, lean, worker_count(workers, device), scheduler):
            receipts.append(receipt)
            on_progress(Progress(receipt, len(receipts), len(units)))
    return receipts


def worker_count(workers: int | None, device: str) -> int:
    """Processes to train in: as asked, or one per core (on a GPU one)."""
    if workers is not None:
        return workers
    return len(os.sched_getaffinity(0)) if device == "cpu" else 1


def _run(units: list[Unit], data: TrainingData, workers: int, scheduler: str | None) -> Iterator[Receipt]:
    """Run units to their receipts, in rounds: a round ends early when a worker dies."""
    strikes: dict[Unit, int] = {}
    while units:
        left, busy = dict.fromkeys(units), []
        try:
            for receipt in _round(units, data, workers, scheduler):
                del left[receipt.unit]
                if receipt.outcome == "busy":
                    busy.append(replace(receipt.unit, wait=True))
                else:
                    yield receipt
        except (TerminatedWorkerError, BrokenProcessPool):
            # Uncommitted directories show which units were in flight; any of them may have killed the worker.
            for unit in left:
                strikes[unit] = strikes.get(unit, 0) + temporary_path(unit.entry).exists()
        for unit in [u for u in left if strikes.get(u, 0) >= STRIKES]:
            del left[unit]
            yield Receipt(unit, "failed", message=f"its worker died {STRIKES} times (out of memory?)")
        units = [*left, *busy]


def _round(units: list[Unit], data: TrainingData, workers: int, scheduler: str | None) -> Iterator[Receipt]:
    if scheduler is not None:
        from shadow_pool.train.cluster import dask_backend

        with dask_backend(scheduler, units[0].pool):
            yield from joblib.Parallel(return_as="generator_unordered")(
                joblib.delayed(train_unit)(unit, data) for unit in units
            )
        return
    parallel = joblib.Parallel(
        n_jobs=min(workers, len(units)), batch_size=1, pre_dispatch="2*n_jobs", return_as="generator_unordered"
    )
    with joblib.parallel_config(backend="loky", inner_max_num_threads=1):
        try:
            yield from parallel(joblib.delayed(_in_worker)(unit, data, os.getpid()) for unit in units)
        except KeyboardInterrupt:
            get_reusable_executor().shutdown(wait=False, kill_workers=True)
            raise


def _in_worker(unit: Unit, data: TrainingData, parent: int) -> Receipt:
    """In a worker process an interrupt is the parent's business: it ends its workers itself."""
    if os.getpid() != parent and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return train_unit(unit, data)
