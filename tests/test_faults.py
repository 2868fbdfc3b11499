"""Faults on purpose, with real processes: kills, concurrency, full disks, read-only folders.

The marked run (`pytest -m slow tests/test_faults.py`) trains one pool in two worker processes and kills the parent, a
worker, or both at once, 50 times (17 times the parent, 17 a worker, 16 both). Last run on 2026-11-30, on two busy
cores in 26 minutes: passed, more than 25 of the kills with a model in flight.
"""

import contextlib
import os
import random
import resource
import shutil
import signal
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from pools import contents, tiny_pool, train_here
from processes import Child, alive, train_all, train_with_workers, wait_until, workers_of

from mia_audit.evidence import usable_models
from shadow_pool.prepare import pool_data, prepare_pool
from shadow_pool.store.pool import open_pool
from shadow_pool.store.repair import verify_pool
from shadow_pool.train.job import TrainingData
from shadow_pool.train.unit import Unit, train_units


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A trained pool of both arms, n 6, to copy the source of and to compare with."""
    pool, data = tiny_pool(tmp_path_factory.mktemp("undisturbed") / "pool", {"n": 6})
    train_here(pool, data)
    return pool


def fresh(undisturbed, folder, n=6):
    """The same pool, untrained."""
    changes = {"n": n, "data": {"source": undisturbed.spec.data.source}}
    return tiny_pool(folder, changes)[0]


def kill_while_training(pool, times, rng):
    """Train, killed at a random moment each time; how often something was in flight."""
    in_flight = 0
    for _ in range(times):
        child = Child(train_all, pool.path)
        child.started()
        if rng.random() < 0.8:
            wait_until(lambda child=child: list(pool.path.rglob("*.tmp")) or not child.running)
        time.sleep(rng.uniform(0.0, 0.3))
        child.kill()
        in_flight += bool(list(pool.path.rglob("*.tmp")))
        assert not verify_pool(pool).models
        if not any(pool.missing(arm) for arm in pool.spec.arms):
            shutil.rmtree(pool.entry("batch", rng.randrange(pool.spec.n)))
    return in_flight


def check_whole(pool, undisturbed):
    train_all(pool.path)
    verify_pool(pool, repair=True)
    assert not list(pool.path.rglob("*.tmp"))
    assert verify_pool(pool).sound
    assert contents(pool.path) == contents(undisturbed.path)


def test_killed_at_random_moments_a_rerun_gives_the_pool_of_an_undisturbed_run(undisturbed, tmp_path):
    pool = fresh(undisturbed, tmp_path / "pool")
    kill_while_training(pool, 5, random.Random(1))
    check_whole(pool, undisturbed)


LONGER = {"n": 6, "recipe": {"epochs": 40}}
"""Models of about a second, so that they are in flight when something is killed."""


@pytest.fixture(scope="module")
def undisturbed_longer(tmp_path_factory):
    pool, data = tiny_pool(tmp_path_factory.mktemp("undisturbed") / "pool", LONGER)
    train_here(pool, data)
    return pool


def in_flight(pool):
    return list(pool.path.glob("arms/*/.*.tmp"))


def kill_among_workers(pool, kinds, rng):
    """Train in two worker processes; kill the parent, one worker, or both at once; kills with a model in flight."""
    found = 0
    for kind in kinds:
        child = Child(train_with_workers, pool.path)
        wait_until(lambda child=child: in_flight(pool) or not child.running)
        time.sleep(rng.uniform(0.0, 1.0))
        workers = workers_of(child.pid)
        victims = {"parent": [child.pid], "worker": [], "both": [child.pid]}[kind]
        victims += rng.sample(workers, 1) if workers and kind != "parent" else []
        found += bool(in_flight(pool))
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        outcomes = child.result()
        if kind == "worker":
            # Its model is tried again; one that it had committed, but had not said so, is present.
            assert {outcome for *_, outcome in outcomes} <= {"trained", "chance", "present"}
            assert not any(pool.missing(arm) for arm in pool.spec.arms)
        assert wait_until(lambda workers=workers: not any(map(alive, workers)), timeout=20)
        assert not verify_pool(pool).models
        for arm in pool.spec.arms:
            for index in rng.sample(range(pool.spec.n), 3) if len(pool.missing(arm)) < 2 else ():
                shutil.rmtree(pool.entry(arm, index), ignore_errors=True)
    return found


def test_parent_and_worker_killed_at_once_a_rerun_gives_the_undisturbed_pool(undisturbed_longer, tmp_path):
    source = {"source": undisturbed_longer.spec.data.source}
    pool = tiny_pool(tmp_path / "pool", {**LONGER, "data": source})[0]
    assert kill_among_workers(pool, ["both"], random.Random(1)) == 1
    check_whole(pool, undisturbed_longer)


@pytest.mark.slow
def test_killed_50_times_a_rerun_gives_the_pool_of_an_undisturbed_run(undisturbed_longer, tmp_path):
    source = {"source": undisturbed_longer.spec.data.source}
    pool = tiny_pool(tmp_path / "pool", {**LONGER, "data": source})[0]
    kinds = [("parent", "worker", "both")[turn % 3] for turn in range(50)]
    assert kill_among_workers(pool, kinds, random.Random(2)) > 25
    check_whole(pool, undisturbed_longer)


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_share_a_pool_and_no_model_is_trained_twice(undisturbed, tmp_path, processes):
    pool = fresh(undisturbed, tmp_path / "pool")
    children = [Child(train_all, pool.path) for _ in range(processes)]
    outcomes = [outcome for child in children for outcome in child.result()]
    made = [(arm, index) for arm, index, outcome in outcomes if outcome in ("trained", "chance")]
    assert sorted(made) == sorted((arm, index) for arm in pool.spec.arms for index in range(6))
    assert {outcome for *_, outcome in outcomes} <= {"trained", "chance", "present"}
    check_whole(pool, undisturbed)


def create(folder, source, n):
    return tiny_pool(Path(folder), {"n": n, "data": {"source": source}})[0].spec.n


def test_a_pool_created_and_grown_by_several_processes_at_once_is_one_pool(undisturbed, tmp_path):
    source = undisturbed.spec.data.source
    children = [Child(create, tmp_path / "pool", source, n) for n in (4, 4, 4)]
    assert [child.result() for child in children] == [4, 4, 4]
    growing = [Child(grow, tmp_path / "pool", n) for n in (6, 8, 6, 10)]
    grown = [child.result() for child in growing]
    assert open_pool(tmp_path / "pool").spec.n == max(grown) == 10
    assert np.array_equal(open_pool(tmp_path / "pool").membership[:6], undisturbed.membership)


def grow(folder, n):
    try:
        return prepare_pool(folder, {"n": n})[0].spec.n
    except ValueError:  # another process grew it further meanwhile
        return 0


def test_readers_see_finished_models_only_while_training_and_growing_go_on(undisturbed, tmp_path):
    pool = fresh(undisturbed, tmp_path / "pool", n=4)
    child = Child(train_all, pool.path)
    counts, notes = [], set()
    while child.running:
        reader = open_pool(pool.path)
        good, bad = reader.scan("batch")
        assert not bad
        if good:
            assert np.isfinite(reader.phi("batch", np.array(sorted(good)))).all()
        counts.append(len(good))
        notes.update(usable_models(reader, "batch")[1])
        assert reader.membership.shape[0] == reader.spec.n
        if len(counts) == 5:
            prepare_pool(pool.path, {"n": 6})
    assert counts == sorted(counts)
    assert any("models are not trained yet" in note for note in notes)
    assert child.result() is not None


def test_a_model_in_training_elsewhere_is_busy_and_waited_for(undisturbed, tmp_path):
    pool = fresh(undisturbed, tmp_path / "pool")
    lean = TrainingData.of(pool_data(pool))
    child = Child(hold, pool.path)
    child.started()
    while train_units([Unit(pool.path, "batch", 0)], lean)[0].outcome != "busy":
        shutil.rmtree(pool.entry("batch", 0), ignore_errors=True)
    assert train_units([Unit(pool.path, "batch", 0, wait=True)], lean)[0].outcome in ("trained", "chance")
    assert child.result() == "held"


def hold(folder):
    from shadow_pool.store.entry import entry_lock

    with entry_lock(open_pool(folder).entry("batch", 0), wait=True):
        time.sleep(3)
    return "held"


# ------------------------------------------------------------------ disks


def train_with_small_files(folder, limit):
    """Writing a file beyond ``limit`` bytes fails as on a full disk (EFBIG in place of ENOSPC)."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        return train_all(folder)
    except OSError as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize("limit", [64, 3_000, 20_000])
def test_a_full_disk_is_raised_leaves_the_pool_intact_and_training_resumes(undisturbed, tmp_path, limit):
    pool = fresh(undisturbed, tmp_path / "pool")
    kind, text = Child(train_with_small_files, pool.path, limit).result()
    assert (kind, "File too large" in text) == ("OSError", True)
    assert not list(pool.path.rglob("*.tmp"))
    assert verify_pool(pool).sound
    check_whole(pool, undisturbed)


def grow_with_small_files(folder, n, limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        return prepare_pool(folder, {"n": n})[0].spec.n
    except OSError as error:
        return str(error)


@pytest.mark.parametrize("limit", [100, 1_200])
def test_a_pool_that_could_not_grow_for_want_of_space_is_the_pool_it_was(undisturbed, tmp_path, limit):
    pool = fresh(undisturbed, tmp_path / "pool")
    before = (pool.path / "pool.json").read_bytes()
    assert "File too large" in Child(grow_with_small_files, pool.path, 40, limit).result()
    assert (pool.path / "pool.json").read_bytes() == before
    assert verify_pool(open_pool(pool.path)).sound
    assert not list(pool.path.rglob("*.tmp"))
    assert prepare_pool(pool.path, {"n": 40})[0].membership.shape[0] == 40


def use_read_only(folder):
    """Read and try to write as a user without the right to."""
    # Everything imports what it needs while it still may read Python's own files, wherever those are.
    warm = open_pool(folder)
    pool_data(warm)
    verify_pool(warm)
    if os.geteuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    pool = open_pool(folder)
    read = (pool.phi("batch", np.arange(6)).shape, verify_pool(pool).sound, len(pool.records), pool.missing("none"))
    refused = []
    for write in (lambda: train_all(folder), lambda: prepare_pool(folder, {"n": 8})):
        try:
            write()
        except OSError as error:
            refused.append(error.strerror)
    return *read, refused


def test_a_read_only_pool_is_read_and_writing_says_so(undisturbed):
    base = Path(tempfile.mkdtemp())
    try:
        source = shutil.copy(undisturbed.spec.data.source, base / "digits.npz")
        pool = tiny_pool(base / "pool", {"n": 6, "data": {"source": str(source)}})[0]
        train_here(pool, pool_data(pool))
        shutil.rmtree(pool.entry("none", 0))
        (pool.entry("none", 0).with_name(".0000.tmp")).mkdir()
        for path in [base, *base.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        shape, sound, records, missing, refused = Child(use_read_only, pool.path).result()
        assert (shape, sound, records, missing) == ((6, 102, 1), True, 102, [0])
        assert refused == ["Permission denied"] * 2
    finally:
        for path in [base, *base.rglob("*")]:
            path.chmod(0o755)
        shutil.rmtree(base)
