"""Real processes for tests of crashes and concurrency, forked from a server that has imported torch once."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pools import train_here

from shadow_pool.prepare import pool_data
from shadow_pool.store.pool import open_pool
from shadow_pool.train.schedule import train_pool

_SERVER = multiprocessing.get_context("forkserver")
# Not the modules of tests/, which the server does not find, but all that they import.
_SERVER.set_forkserver_preload(["sklearn.datasets", "pandas", "mia_audit.evidence", "shadow_pool.prepare"])


class Child:
    """A process running ``function(*arguments)``; ``result()`` waits for what it returned, or None if it died."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._ours, theirs = _SERVER.Pipe(duplex=False)
        self._process = _SERVER.Process(target=_run, args=(theirs, function, arguments))
        self._process.start()
        theirs.close()

    def started(self) -> None:
        """Wait until the function is about to be called."""
        assert self._ours.recv() == "started"

    def kill(self) -> None:
        """kill -9"""
        self._process.kill()
        self._process.join()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.is_alive()

    def result(self, timeout: float = 300) -> Any:
        try:
            while self._ours.poll(timeout):
                message = self._ours.recv()
                if message != "started":
                    return message
            raise TimeoutError("the child is still running")
        except EOFError:
            return None
        finally:
            self._process.join(10)


def _run(pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    pipe.send("started")
    pipe.send(function(*arguments))
    # At once: a child of a fork server runs no exit handlers, and would wait for idle workers that nobody ends.
    os._exit(0)


def train_all(folder: Path) -> list[tuple[str, int, str]]:
    """Train what the pool lacks, in this process: (arm, index, outcome) of each model."""
    pool = open_pool(folder)
    return [(r.unit.arm, r.unit.index, r.outcome) for r in train_here(pool, pool_data(pool))]


def train_with_workers(folder: Path) -> str | list[tuple[str, int, str]]:
    """Train what the pool lacks in two workers, in a session of its own, as a command in a terminal is."""
    os.setsid()
    pool = open_pool(folder)
    try:
        receipts = train_pool(pool, pool_data(pool), workers=2)
    except KeyboardInterrupt:
        return "interrupted"
    return [(r.unit.arm, r.unit.index, r.outcome) for r in receipts]


def workers_of(parent: int) -> list[int]:
    """Process ids of loky's workers."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if int((path / "stat").read_text().rpartition(")")[2].split()[1]) != parent:
                continue
            if b"popen_loky_posix" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
        except OSError:
            continue
    return found


def in_session(session: int) -> list[int]:
    """Process ids of those that run in a session, zombies aside."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if state != "Z" and int(its) == session:
            found.append(int(path.parent.name))
    return found


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool], timeout: float = 120) -> bool:
    """Whether ``condition`` came true in time."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return condition()
