"""Worker processes: single-threaded, deaf to the terminal's Ctrl-C, dead within a second of their parent's death."""

from __future__ import annotations

import gc
import importlib
import multiprocessing.resource_tracker
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import joblib
from joblib.externals.loky.backend import resource_tracker as loky_tracker

from shadow_pool.memory import keep_freed_memory

T = TypeVar("T")
_starting: list[Iterator[object]] = []


def worker_count(workers: int | None, device: str) -> int:
    """Processes to train in: as asked, or one per core (on a GPU one)."""
    if workers is not None:
        return workers
    return joblib.cpu_count() if device == "cpu" else 1


def start_workers(workers: int) -> None:
    """Start the processes that :func:`run_in_workers` will ask for: they import torch while this one does.

    For whoever knows early that there will be work; the start, of seconds, is then over when the work is at hand.
    More than one per core would only be in each other's way, and start when they are asked for.
    """
    first = min(workers, joblib.cpu_count())
    if first > 1:
        _starting.append(_results(importlib.import_module, [("shadow_pool.train.unit",)] * first, first))


def run_in_workers(function: Callable[..., T], calls: Sequence[tuple[Any, ...]], *, workers: int) -> Iterator[T]:
    """``function(*call)`` of each call in worker processes, yielded as they end; in this process for one worker.

    Workers start once (seconds, to import torch) and are kept for later calls of this function. Large arrays
    among the arguments are shared by memory map. Ending the iteration early, by an interrupt say, kills them.

    Raises:
        concurrent.futures.process.BrokenProcessPool: a worker died; all are gone by then.
    """
    while _starting:
        for _ in _starting.pop():
            pass
    yield from _results(function, calls, workers)


def kill_workers() -> None:
    """End the processes that wait for more work, at once: torch takes most of a second to end in order."""
    for worker in multiprocessing.active_children():
        if worker.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)


def _results(function: Callable[..., T], calls: Sequence[tuple[Any, ...]], workers: int) -> Iterator[T]:
    start: dict[str, Any] = {"initializer": _settle_in, "initargs": (os.getpid(),)}
    with joblib.parallel_config(backend="loky", inner_max_num_threads=1, **start), _interrupts_held():
        parallel = joblib.Parallel(
            n_jobs=workers, batch_size=1, pre_dispatch="2*n_jobs", return_as="generator_unordered"
        )
        results: Iterator[T] = parallel(joblib.delayed(_call)(function, call) for call in calls)
    return results


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Processes started in the block never see SIGINT or SIGHUP; one that this process gets meanwhile comes at its end.

    A terminal sends Ctrl-C to every process of the group, and SIGHUP when it is closed. Ending workers is the parent's
    business; a worker that hears it too, while it still imports, prints a traceback, and a tracker leaves behind what
    it should clear away.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        _start_trackers()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_trackers() -> None:
    """The helpers that clear semaphores and shared memory away after a crash: starting them unblocks SIGINT.

    They warn, in terms of multiprocessing, of what they clear after an interrupt; nobody can do anything about it.
    """
    before = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [before, "ignore:resource_tracker:UserWarning"]))
    try:
        multiprocessing.resource_tracker.ensure_running()
        loky_tracker.ensure_running()
    finally:
        del os.environ["PYTHONWARNINGS"]
        if before is not None:
            os.environ["PYTHONWARNINGS"] = before


def _call(function: Callable[..., T], arguments: tuple[Any, ...]) -> T:
    keep_freed_memory()
    return function(*arguments)


def _settle_in(parent: int) -> None:
    """A killed parent cannot end its workers: each watches for it, so that none trains on for nobody.

    Not from the first call on but from the start: one without a call may wait long for a queue that died with another.
    """
    # The objects that come with torch stay: looking among them for garbage lengthens the import by a tenth.
    gc.set_threshold(100_000)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
