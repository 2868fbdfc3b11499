"""The same units of work on a Dask cluster, through joblib's dask backend. Needs the extra ``[dask]``.

Workers see the pool through a shared file system and write there; what travels is the records, once per worker,
and a receipt per model. A worker should be one thread in one process: torch's default generator and thread count
belong to the process, so units in one process take turns.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import joblib

from shadow_pool.errors import UserError
from shadow_pool.memory import keep_freed_memory
from shadow_pool.store.pool import open_pool
from shadow_pool.train.job import TrainingData
from shadow_pool.train.shadows import preprocess_of, starting_model
from shadow_pool.train.unit import Receipt, Unit, is_committed, train_units
from shadow_pool.train.usertrain import load_trainer
from shadow_pool.usercode import describe

if TYPE_CHECKING:
    from distributed import Client, Future

WAIT = 10.0
"""Seconds to wait for the scheduler to answer, and for it to have a worker."""
CHECK = 120.0
"""Seconds to wait for every worker to say whether it can train: it imports torch first."""
_TURN = threading.Lock()


@contextmanager
def dask_backend(scheduler: str, pool: Path, data: TrainingData) -> Iterator[None]:
    """Within the block joblib runs :func:`train_on_worker` on the workers of a Dask scheduler.

    Before that every worker is asked whether it can train into the pool. A worker that dies gives its units to the
    others; a unit that Dask gives up ends in a failed receipt.

    Args:
        scheduler: address, e.g. ``tcp://10.0.0.1:8786``.
        pool: absolute path of the pool's folder, the same on every worker.
        data: sent to every worker once; pass this very object to the units.

    Raises:
        UserError: distributed is not installed, the scheduler does not answer or has no workers, or workers have
            several threads, do not answer, do not see the pool, or lack what its models need; those are named.
    """
    try:
        import distributed
    except ImportError:
        raise UserError(
            "--scheduler needs dask's distributed, which is not installed; pip install 'mia-audit[dask]'"
        ) from None
    try:
        client = distributed.Client(scheduler, timeout=WAIT, set_as_default=False)
    except (OSError, ValueError, distributed.TimeoutError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"no Dask scheduler answers at {scheduler} ({reason}); start one with: dask scheduler"
        ) from None
    with client:
        _check_workers(client, scheduler, pool)
        with joblib.parallel_config(backend=_backend(client, data)):
            yield


def train_on_worker(units: list[Unit], data: TrainingData) -> list[Receipt]:
    """:func:`shadow_pool.train.unit.train_units`, one call at a time in a process."""
    keep_freed_memory()
    with _TURN:
        return train_units(units, data)


def arrived(receipt: Receipt) -> Receipt:
    """The receipt of a worker, or a failed one where the model it tells of is not in the pool that this side sees."""
    entry = receipt.unit.entry
    if receipt.outcome in ("failed", "busy") or is_committed(entry):
        return receipt
    message = (
        f"a worker says {receipt.outcome}, but {entry} is not here: it wrote to another folder of that name; "
        "every worker must see this one"
    )
    return Receipt(receipt.unit, "failed", message=message)


def _check_workers(client: Client, scheduler: str, pool: Path) -> None:
    from distributed import TimeoutError as Late  # on Python 3.10 not the builtin one

    none = UserError(
        f"the Dask scheduler at {scheduler} must have workers, found none in {WAIT:g} s; "
        f"start some with: dask worker {scheduler} --nworkers 4 --nthreads 1"
    )
    try:
        client.wait_for_workers(1, timeout=WAIT)
    except (OSError, Late):
        raise none from None
    threads = client.nthreads()
    several = [f"{worker} ({count})" for worker, count in threads.items() if count > 1]
    if several:
        raise UserError(
            f"Dask workers must have one thread each, found {_few(several)}: models in one process take turns; "
            f"start them with: dask worker {scheduler} --nworkers 4 --nthreads 1"
        )
    # A copy of the folder holds the same pool.json, but not a file of a random name that was made just now.
    token = pool / f".seen-{secrets.token_hex(8)}"
    token.touch()
    try:
        asked = {
            worker: client.submit(_obstacle, token, workers=[worker], allow_other_workers=False, pure=False)
            for worker in threads
        }
        found = _answers(client, asked)
    finally:
        token.unlink(missing_ok=True)
    if not found:
        raise none
    unfit = [f"{worker} {obstacle}" for worker, obstacle in found.items() if obstacle]
    if unfit:
        raise UserError(
            f"{len(unfit)} of {len(found)} Dask workers cannot train into the pool: {_few(unfit)}; "
            "give them its folder at the same path, the same packages, and the folder your own files are named from"
        )


def _answers(client: Client, asked: dict[str, Future]) -> dict[str, object]:
    """What each worker answered, without those that left meanwhile. Raises :class:`UserError` after :data:`CHECK`."""
    end = time.monotonic() + CHECK
    while True:
        present = client.nthreads()
        asked = {worker: future for worker, future in asked.items() if future.done() or worker in present}
        silent = [worker for worker, future in asked.items() if not future.done()]
        if not silent:
            return {worker: future.exception() or future.result() for worker, future in asked.items()}
        if time.monotonic() > end:
            raise UserError(
                f"every Dask worker must answer within {CHECK:g} s, {len(silent)} of {len(asked)} did not: "
                f"{_few(silent)}; wait until they end what they are at, or restart them"
            )
        time.sleep(0.05)


def _obstacle(token: Path) -> str | None:
    """On a worker: what keeps it from training into the folder that holds ``token``, in words, or None."""
    path = token.parent
    try:
        (path / "pool.json").read_bytes()
    except OSError as error:
        return f"does not see {path} ({error.strerror})"
    if not token.exists():
        return f"sees another folder, perhaps a copy, in {path}"
    with _TURN:
        try:
            pool = open_pool(path, trust=True)  # checked by whoever asks
            preprocess_of(pool)
            starting_model(pool, pool.spec.arms[0])
            if pool.spec.train is not None:
                load_trainer(pool.spec.train)
        except Exception as error:
            return f"lacks something: {error if isinstance(error, UserError) else describe(error)}"
    return None


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _backend(client: Client, data: TrainingData) -> Any:
    from joblib._dask import DaskDistributedBackend

    class Backend(DaskDistributedBackend):
        """joblib's own never ends a task that Dask gives up (its worker died too often): this one ends it failed."""

        def effective_n_jobs(self, n_jobs: int) -> int:
            # joblib would run a single job in this process.
            return max(2, int(super().effective_n_jobs(n_jobs)))

        def submit(self, func: Any, callback: Callable[[list[list[Receipt]]], None]) -> Any:
            future = super().submit(func, callback)

            def ended(done: Any) -> None:
                error = done.exception()
                if error is not None:
                    message = f"Dask gave it up: {describe(error)}"
                    calls = [units for _, (units, _), _ in func.items]
                    callback([[Receipt(unit, "failed", message=message) for unit in units] for units in calls])

            future.add_done_callback(ended)
            return future

    return Backend(client=client, scatter=[data])
