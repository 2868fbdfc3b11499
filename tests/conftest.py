"""Shared fixtures: commands run in this process; one small pool on real digits, trained once a session."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pools import train_here, write_digits

from mia_audit_cli.main import main
from shadow_pool.data.records import PoolData
from shadow_pool.prepare import pool_data as find_data
from shadow_pool.prepare import prepare_pool
from shadow_pool.store.pool import Pool, open_pool

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="session", autouse=True)
def _state_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What is noted of the user's own pools is noted elsewhere, here and in processes that tests start."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="session")
def pool_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pool of arms batch, none and none+fit, 8 models each, all trained, on 340 digits. Read it only: it is shared.

    Processes of pytest-xdist train it together.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if base.name.startswith("popen-") else base) / "shared-pool"
    folder.mkdir(exist_ok=True)
    spec = {
        "n": 8,
        "arms": ["batch", "none", "none+fit"],
        "precision": "fp32",
        "data": {"source": str(write_digits(folder / "digits.npz", 400)), "mislabeled": 0.05, "ood": 0.05},
        "recipe": {"optimizer": "adamw", "lr": 0.005, "batch_size": 16, "epochs": 6},
    }
    pool, data = prepare_pool(folder / "pool", spec)
    receipts = train_here(pool, data)
    assert {receipt.outcome for receipt in receipts} <= {"trained", "present"}, receipts
    return folder / "pool"


@pytest.fixture(scope="session")
def pool(pool_folder: Path) -> Pool:
    """The shared pool, open."""
    return open_pool(pool_folder)


@pytest.fixture(scope="session")
def pool_data(pool: Pool) -> PoolData:
    """The records of the shared pool."""
    return find_data(pool)


@pytest.fixture(autouse=True)
def no_workers_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands in this process start workers where they have work for them, and these outlive them."""
    monkeypatch.setattr("shadow_pool.train.workers.start_workers", lambda workers: None)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Run]:
    """Run a command in this process, in an empty folder: (exit status, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mia_audit_cli.main.leave", sys.exit)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mia-audit", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        found = capsys.readouterr()
        return int(exit_.value.code or 0), found.out, found.err

    yield call
    for number, handler in before.items():
        signal.signal(number, handler)
