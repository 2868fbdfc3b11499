"""Training beyond one process: real Dask schedulers and workers on loopback, and ranges of indices by hand."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import joblib
import numpy as np
import pytest
from distributed import Client, LocalCluster
from pools import contents, tiny_pool, train_here
from processes import Child

from mia_audit.attacks.shadows import Shadows
from mia_audit.audit.scoring import scores_from_disk
from mia_audit.metrics import vulnerability
from shadow_pool.data.records import PoolData
from shadow_pool.errors import UserError
from shadow_pool.store.pool import Pool, open_pool
from shadow_pool.store.repair import verify_pool
from shadow_pool.train import cluster
from shadow_pool.train.job import TrainingData
from shadow_pool.train.schedule import Progress, train_pool


def make(folder: Path, *, epochs: int = 8, **changes: Any) -> tuple[Pool, PoolData]:
    return tiny_pool(folder, {"arch": "mlp", "recipe": {"epochs": epochs}, **changes})


@contextmanager
def process(*command: str, folder: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process working in ``folder``, killed at the end."""
    folder.mkdir(exist_ok=True)
    with (folder / "log.txt").open("wb") as log:
        started = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env={**os.environ, **environment})
    try:
        yield started
    finally:
        started.kill()
        started.wait()


@dataclass(frozen=True)
class Dask:
    """A scheduler and its workers, each a process of Dask's own command line in a folder of its own."""

    address: str
    workers: list[subprocess.Popen[bytes]]
    folders: list[Path]
    start: Callable[[Path], subprocess.Popen[bytes]]

    def revive(self) -> None:
        """Start the workers that died again."""
        for index, (worker, folder) in enumerate(zip(self.workers, self.folders, strict=True)):
            if worker.poll() is not None:
                self.workers[index] = self.start(folder)
        with Client(self.address, timeout=60, set_as_default=False) as client:
            client.wait_for_workers(len(self.workers), timeout=120)


@contextmanager
def start_dask(folder: Path, *, workers: int, nanny: str = "--no-nanny", allowed_failures: int = 3) -> Iterator[Dask]:
    command = (sys.executable, "-m", "dask")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    address = f"tcp://127.0.0.1:{port}"
    folders = [folder / f"worker-{index}" for index in range(workers)]
    setting = {"DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": str(allowed_failures)}
    with ExitStack() as stack:
        scheduler = (*command, "scheduler", "--host", "127.0.0.1", "--port", port, "--no-dashboard")
        stack.enter_context(process(*scheduler, folder=folder / "scheduler", **setting))
        worker = (*command, "worker", address, nanny, "--no-dashboard", "--nthreads", "1")

        def start(folder: Path) -> subprocess.Popen[bytes]:
            return stack.enter_context(process(*worker, folder=folder))

        dask = Dask(address, [start(folder) for folder in folders], folders, start)
        dask.revive()
        yield dask


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dask]:
    with start_dask(tmp_path_factory.mktemp("dask"), workers=2) as dask:
        yield dask


@pytest.fixture
def two_workers(shared: Dask) -> Dask:
    shared.revive()
    return shared


def test_two_workers_give_the_bits_of_one_process(two_workers: Dask, tmp_path: Path) -> None:
    pool, data = make(tmp_path / "cluster", arms=["batch", "none", "none+fit"])
    seen: list[Progress] = []
    receipts = train_pool(pool, data, scheduler=two_workers.address, on_progress=seen.append)
    assert Counter(receipt.outcome for receipt in receipts) == {"trained": 12}
    assert [progress.done for progress in seen] == list(range(1, 13))
    alone, data = make(tmp_path / "alone", arms=["batch", "none", "none+fit"])
    train_here(alone, data)
    assert contents(pool.path) == contents(alone.path)
    assert train_pool(pool, data, scheduler=two_workers.address) == []


def test_blocks_of_records_are_scored_by_the_workers_with_the_bits_of_one_process(
    two_workers: Dask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, data = make(tmp_path / "pool", arms=["batch"], epochs=1)
    train_here(pool, data)
    shadows = Shadows(pool.phi("batch", range(4)), pool.membership)
    target = pool.signals("batch", 0).phi
    monkeypatch.setattr("mia_audit.attacks.shadows._READ_CELLS", 4 * 16)

    def process_id(values: np.ndarray, membership: np.ndarray) -> int:
        return os.getpid()

    def scores() -> np.ndarray:
        found = scores_from_disk(["lira-online", "reference"], target, pool, "batch")
        return np.stack([*found.values(), vulnerability(shadows.phi, pool.membership)])

    alone = scores()
    with Client(two_workers.address), joblib.parallel_config(backend="dask"):
        np.testing.assert_array_equal(scores(), alone)
        ran = [process for _, process in shadows.map_blocks(process_id)]
    assert len(ran) == 7
    assert set(ran) <= {worker.pid for worker in two_workers.workers}


@pytest.fixture
def unshared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An absolute path that leads every process into its own working folder, as a disk that is not shared does."""
    monkeypatch.chdir(tmp_path)
    return Path("/proc/self/cwd/pool")


def test_workers_that_cannot_train_are_named_before_anything_is_trained(
    two_workers: Dask, tmp_path: Path, unshared: Path
) -> None:
    pool, data = make(tmp_path / "pool")
    copy = two_workers.folders[0] / "pool"
    shutil.copytree(pool.path, copy)
    with (
        pytest.raises(UserError) as caught,
        cluster.dask_backend(two_workers.address, unshared, TrainingData.of(data)),
    ):
        pass
    text = str(caught.value)
    assert text.startswith("2 of 2 Dask workers cannot train into the pool: tcp://127.0.0.1:")
    assert "sees another folder, perhaps a copy, in /proc/self/cwd/pool" in text
    assert "does not see /proc/self/cwd/pool (No such file or directory)" in text
    assert pool.missing("batch") == [0, 1, 2, 3]
    assert not list(pool.path.glob(".seen*"))


def test_a_model_that_a_worker_put_elsewhere_is_not_taken_for_trained(
    two_workers: Dask, tmp_path: Path, unshared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a worker joins after the check, or its disk goes."""
    pool, data = make(tmp_path / "pool", arms=["batch"], epochs=1)
    for folder in two_workers.folders:
        shutil.rmtree(folder / "pool", ignore_errors=True)
        shutil.copytree(pool.path, folder / "pool")
    monkeypatch.setattr(cluster, "_check_workers", lambda *rest: None)
    monkeypatch.setattr(Path, "resolve", lambda path: unshared)
    receipts = train_pool(pool, data, scheduler=two_workers.address)
    assert [receipt.outcome for receipt in receipts] == ["failed"] * 4
    assert all(re.match("a worker says .*000. is not here: .* every worker must see", r.message) for r in receipts)
    assert pool.missing("batch") == [0, 1, 2, 3]


def test_workers_that_do_not_answer_are_named_and_those_that_leave_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, data = make(tmp_path / "pool")
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0") as here,
        Client(here, set_as_default=False) as client,
    ):
        busy, leaving = (worker.address for worker in here.workers.values())
        work = [client.submit(time.sleep, 1, workers=[worker], pure=False) for worker in (busy, leaving)]
        monkeypatch.setattr(cluster, "CHECK", 0.1)
        with pytest.raises(UserError, match=rf"within 0.1 s, 2 of 2 did not: .*{busy}.*; wait until"):
            train_pool(pool, data, scheduler=here.scheduler_address)
        monkeypatch.setattr(cluster, "CHECK", 60.0)
        threading.Timer(0.2, client.retire_workers, [[leaving]]).start()
        with cluster.dask_backend(here.scheduler_address, pool.path, TrainingData.of(data)):
            assert list(client.nthreads()) == [busy]
        assert work[0].done()
    assert not list(pool.path.glob(".seen*"))


def test_workers_without_the_users_files_are_named(
    two_workers: Dask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text("def train(model, dataset, seed, device): pass\n")
    pool, data = make(tmp_path / "pool", train="own.py:train", arms=["batch"])
    with pytest.raises(UserError, match=r"2 of 2 Dask workers .* lacks something: train: own.py does not exist"):
        train_pool(pool, data, scheduler=two_workers.address)
    assert pool.missing("batch") == [0, 1, 2, 3]


def test_a_scheduler_without_workers_or_with_threads_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "WAIT", 0.5)
    pool, data = make(tmp_path / "pool")
    for workers, message in [(0, "must have workers, found none in 0.5 s"), (1, r"must have one thread each.*\(2\)")]:
        here = LocalCluster(n_workers=workers, threads_per_worker=2, processes=False, dashboard_address=":0")
        with here, pytest.raises(UserError, match=message):
            train_pool(pool, data, scheduler=here.scheduler_address)


def test_a_wait_for_workers_that_ends_in_dasks_own_error_is_one_line_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NotTheBuiltinOne(Exception):
        """What asyncio.TimeoutError is on Python 3.10."""

    def wait(*rest: Any, **options: Any) -> None:
        raise NotTheBuiltinOne

    monkeypatch.setattr("distributed.TimeoutError", NotTheBuiltinOne)
    client = SimpleNamespace(wait_for_workers=wait)
    with pytest.raises(UserError, match="must have workers, found none"):
        cluster._check_workers(client, "tcp://head:8786", tmp_path)  # type: ignore[arg-type]


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:9", "nowhere", "gopher://127.0.0.1:9"])
def test_no_scheduler_is_one_line(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "WAIT", 0.5)
    with (
        pytest.raises(UserError, match=rf"no Dask scheduler answers at {address} \(.+\); start one") as caught,
        cluster.dask_backend(address, tmp_path, None),  # type: ignore[arg-type]
    ):
        pass
    assert "\n" not in str(caught.value)


def test_without_distributed_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with (
        pytest.raises(UserError, match=r"pip install 'mia-audit\[dask\]'"),
        cluster.dask_backend("tcp://127.0.0.1:9", tmp_path, None),  # type: ignore[arg-type]
    ):
        pass


def train_range(folder: Path, indices: range) -> list[str]:
    """What the receipts of a process that was given these indices say."""
    pool, data = make(folder)
    return [receipt.outcome for receipt in train_pool(pool, data, workers=1, indices=indices)]


def test_two_processes_with_disjoint_indices_make_one_whole_pool(tmp_path: Path) -> None:
    folder = tmp_path / "pool"
    make(folder)
    parts = [Child(train_range, folder, indices) for indices in (range(2), range(2, 4))]
    assert [part.result() for part in parts] == [["trained"] * 4] * 2
    found = verify_pool(open_pool(folder))
    assert (found.checked, found.missing, found.leftovers, found.sound) == (8, 0, 0, True)
    alone, data = make(tmp_path / "alone")
    train_here(alone, data)
    assert contents(folder) == contents(alone.path)


def test_a_worker_killed_in_the_middle_loses_nothing_and_doubles_nothing(two_workers: Dask, tmp_path: Path) -> None:
    pool, data = make(tmp_path / "cluster", arms=["batch"], epochs=60)

    def kill_one(progress: Progress) -> None:
        if progress.done == 1:
            os.kill(two_workers.workers[0].pid, signal.SIGKILL)

    receipts = train_pool(pool, data, scheduler=two_workers.address, on_progress=kill_one)
    assert Counter(receipt.unit.index for receipt in receipts) == Counter(range(4))
    # Present: committed by the worker that was ended before it could say so.
    assert {receipt.outcome for receipt in receipts} <= {"trained", "present"}
    found = verify_pool(pool)
    assert (found.checked, found.missing, found.leftovers, found.sound) == (4, 0, 0, True)
    alone, data = make(tmp_path / "alone", arms=["batch"], epochs=60)
    train_here(alone, data)
    assert contents(pool.path) == contents(alone.path)


@pytest.mark.slow
def test_a_model_that_kills_its_workers_is_given_up_and_the_rest_goes_on(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(f"import os\n\ndef train(*rest):\n    assert os.getpid() != {os.getpid()}\n    os._exit(9)\n")
    deadly, data = make(tmp_path / "deadly", train=f"{own}:train", arms=["batch"])
    sound, _ = make(tmp_path / "sound")
    with start_dask(tmp_path, workers=1, nanny="--nanny", allowed_failures=0) as dask:
        receipts = train_pool(deadly, data, scheduler=dask.address, indices=range(1))
        assert [receipt.outcome for receipt in receipts] == ["failed"]
        assert "Dask gave it up: KilledWorker" in receipts[0].message
        assert {r.outcome for r in train_pool(sound, data, scheduler=dask.address)} == {"trained"}
