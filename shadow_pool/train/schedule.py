"""Train many models: independent units of work through joblib, any backend; what is missing is what is done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from itertools import chain

import joblib

from shadow_pool.arms import parse_arm
from shadow_pool.data.records import PoolData
from shadow_pool.errors import UserError
from shadow_pool.store.entry import clear_leftover
from shadow_pool.store.pool import Pool
from shadow_pool.store.trust import check_code
from shadow_pool.train.job import TrainingData
from shadow_pool.train.shadows import block_size
from shadow_pool.train.unit import Receipt, Unit, train_units
from shadow_pool.train.workers import run_in_workers, worker_count

STILLBORN = 3
"""Training stops when workers die this many times in a row with no model in flight."""


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

    Long ones come early, so that no core is left with one at the end; a +fit model whose batch model is not done when
    its turn comes is put off. A model that fails is reported in its receipt and the rest goes on; a worker that dies
    is replaced and its model tried again. An interrupt, or the death of this process, loses only the models in flight.
    Which process trains a model, and how many train beside it, changes none of its bits. That ends with the machine:
    another type of processor, a GPU (even the same one twice) or another version of torch gives other last digits, in
    bf16 sooner than in float32; :mod:`shadow_pool.store.drift` warns.

    Args:
        workers: processes (default: one per core; on a GPU one). One worker is this process itself.
        device: ``cpu``, ``cuda`` or ``cuda:N``, one GPU. Several are used by as many processes at once, each with its
            device and its ``indices`` of the same pool: ``cuda:0`` with 0 to 31, ``cuda:1`` with 32 to 63.
        scheduler: address of a Dask scheduler whose workers see the pool's folder.
        indices: train these models only (each arm), for Slurm arrays and the like.

    Returns:
        One receipt per model that was missing.

    Raises:
        OSError: the disk is full or read-only; what was committed is kept.
        UserError: workers die before they train anything, or the pool names code that may not be run
            (:mod:`shadow_pool.store.trust`).
    """
    check_code(pool)
    lean = TrainingData.of(data)
    chosen = indices if indices is not None else range(pool.spec.n)
    # A worker on another machine starts in a folder of its own.
    path = pool.path.resolve()
    units = [Unit(path, arm, index, device) for arm in pool.spec.arms for index in pool.missing(arm) if index in chosen]
    sizes = {arm: block_size(pool, arm, device) for arm in {unit.arm: None for unit in units}}
    workers = worker_count(workers, device)
    receipts: list[Receipt] = []
    for receipt in _run(_in_order(units, sizes, workers), sizes, lean, workers, scheduler):
        receipts.append(receipt)
        on_progress(Progress(receipt, len(receipts), len(units)))
    return receipts


def _in_order(units: list[Unit], sizes: Mapping[str, int], workers: int) -> list[Unit]:
    """The batch arm, on which +fit arms wait, then the arms that take several times as long, then the others.

    Each worker takes a block of the others in between: meanwhile the last batch models end, and no +fit model is put
    off.
    """
    arms = {unit: parse_arm(unit.arm) for unit in units}
    batch = [unit for unit in units if unit.arm == "batch"]
    long = [unit for unit in units if arms[unit].dp is not None] + [unit for unit in units if arms[unit].fit]
    short = [unit for unit in units if unit not in {*batch, *long}]
    between = workers * max((sizes[unit.arm] for unit in short), default=1)
    return batch + short[:between] + long + short[between:]


def blocks_of(units: list[Unit], sizes: Mapping[str, int]) -> list[list[Unit]]:
    """Units that one call trains, in order of their first: those of one block of an arm."""
    blocks: dict[tuple[str, int, bool], list[Unit]] = {}
    for unit in units:
        blocks.setdefault((unit.arm, unit.index // sizes[unit.arm], unit.wait), []).append(unit)
    return list(blocks.values())


def _run(
    units: list[Unit], sizes: Mapping[str, int], data: TrainingData, workers: int, scheduler: str | None
) -> Iterator[Receipt]:
    """Run units to their receipts, in rounds: a round ends early when a worker dies.

    The models in flight then, any of which may have killed it, are tried again after the others, by half the
    workers each time (memory may have been short), and given up once their worker dies while they train alone.
    A unit that was ``busy`` waits in a later round, for the batch model it follows in one after that model's end.
    """
    deaths: Counter[Unit] = Counter()
    stillborn = 0
    left = dict.fromkeys(units)
    while left:
        ready = [unit for unit in left if not (unit.wait and unit.follows in left)]
        fewest = min(deaths[unit] for unit in ready)
        width = max(1, workers >> fewest)
        batch = [unit for unit in ready if deaths[unit] == fewest]
        if fewest and width == 1:
            batch = batch[:1]
        for unit in batch:
            clear_leftover(unit.entry)
        try:
            for receipt in _round(blocks_of(batch, sizes), data, 1 if workers == 1 else max(2, width), scheduler):
                stillborn = 0
                del left[receipt.unit]
                if receipt.outcome == "busy":
                    left[replace(receipt.unit, wait=True)] = None
                else:
                    yield receipt
        except BrokenProcessPool:
            suspects = [unit for unit in batch if unit in left and clear_leftover(unit.entry)]
            stillborn = 0 if suspects else stillborn + 1
            if stillborn == STILLBORN:
                raise UserError(
                    f"workers died {STILLBORN} times before they trained anything; free memory, or use fewer --workers"
                ) from None
            for unit in suspects:
                deaths[unit] += 1
                if fewest and width == 1:
                    del left[unit]
                    yield Receipt(unit, "failed", message="its worker died while it trained alone (out of memory?)")


def _round(blocks: list[list[Unit]], data: TrainingData, workers: int, scheduler: str | None) -> Iterator[Receipt]:
    calls = [(block, data) for block in blocks]
    if scheduler is None:
        yield from chain.from_iterable(run_in_workers(train_units, calls, workers=workers))
        return
    from shadow_pool.train.cluster import arrived, dask_backend, train_on_worker

    with dask_backend(scheduler, blocks[0][0].pool, data):
        parallel = joblib.Parallel(batch_size=1, pre_dispatch="all", return_as="generator_unordered")
        done = parallel(joblib.delayed(train_on_worker)(*call) for call in calls)
        yield from map(arrived, chain.from_iterable(done))
