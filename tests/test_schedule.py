import os
import signal
import subprocess
import sys
from collections import Counter
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from itertools import chain

import pytest
from pools import contents, tiny_pool, train_here
from processes import Child, alive, train_with_workers, wait_until, workers_of

from shadow_pool.errors import UserError
from shadow_pool.models.stack import STACK
from shadow_pool.store.entry import temporary_path
from shadow_pool.train import schedule, workers
from shadow_pool.train.job import TrainingData
from shadow_pool.train.schedule import train_pool
from shadow_pool.train.unit import Receipt, Unit, train_units
from shadow_pool.train.workers import run_in_workers, start_workers


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    pool, data = tiny_pool(tmp_path_factory.mktemp("schedule") / "pool", {"arms": ["batch", "none", "none+fit"]})
    train_here(pool, data)
    return pool, data


@pytest.fixture
def fresh(trained, tmp_path):
    source = {"data": {"source": trained[0].spec.data.source}}
    return tiny_pool(tmp_path / "pool", {"arms": ["batch", "none", "none+fit"], **source})


class Workers:
    """Stands in for worker processes: ``deadly`` units kill their worker, and so break the round, when they start."""

    def __init__(self, deadly, cost=1):
        self.deadly, self.cost, self.rounds = set(deadly), cost, []

    def run(self, function, calls, *, workers):
        blocks = [units for units, _ in calls]
        self.rounds.append((workers, [(u.arm, u.index) for units in blocks for u in units]))
        while blocks:
            together, blocks = blocks[:workers], blocks[workers:]
            if any((u.arm, u.index) in self.deadly for units in together for u in units):
                for u in chain.from_iterable(together):
                    temporary_path(u.entry).parent.mkdir(parents=True, exist_ok=True)
                    temporary_path(u.entry).mkdir()
                raise BrokenProcessPool
            yield from ([Receipt(u, "trained") for u in units] for units in together)


def outcomes(receipts):
    return {(r.unit.arm, r.unit.index): r.outcome for r in receipts}


def test_long_models_start_early_and_in_one_round_with_the_others(fresh, monkeypatch):
    workers = Workers([])
    monkeypatch.setattr(schedule, "run_in_workers", workers.run)
    seen = []
    train_pool(*fresh, workers=2, on_progress=lambda p: seen.append((p.done, p.total)))
    ((_, units),) = workers.rounds
    assert [arm for arm, _ in units] == ["batch"] * 4 + ["none"] * 4 + ["none+fit"] * 4
    assert sorted(units) == [(arm, index) for arm in ("batch", "none", "none+fit") for index in range(4)]
    assert seen == [(i, 12) for i in range(1, 13)]


@pytest.mark.parametrize("size", [1, STACK])
def test_models_of_arms_that_take_long_are_not_left_to_the_end(tmp_path, size):
    sizes = dict.fromkeys(("none", "none+fit", "group+dp(8)", "batch"), size)
    units = [Unit(tmp_path, arm, i) for arm in sizes for i in range(2 * size)]
    arms = [unit.arm for unit in schedule._in_order(units, sizes, 1)]
    expected = ["batch"] * 2 + ["none"] + ["group+dp(8)"] * 2 + ["none+fit"] * 2 + ["none"]
    assert arms == [arm for arm in expected for _ in range(size)]
    assert schedule._in_order([], {}, 4) == []


def test_a_fit_model_is_put_off_until_its_batch_model_is_there(fresh):
    pool, data = fresh
    lean = TrainingData.of(data)
    unit = Unit(pool.path, "none+fit", 1)
    assert train_units([unit], lean)[0].outcome == "busy"
    failed = train_units([replace(unit, wait=True)], lean)[0]
    assert failed.outcome == "failed"
    assert "needs model 1 of the batch arm" in failed.message
    assert train_units([unit.follows], lean)[0].outcome in ("trained", "chance")
    assert train_units([unit], lean)[0].outcome in ("trained", "chance")


@pytest.mark.parametrize("fault", ["busy", "dies once", "dies"])
def test_whatever_holds_a_batch_model_up_its_fit_model_is_asked_to_wait_only_after_its_end(fresh, monkeypatch, fault):
    ended, asked = set(), Counter()

    def run(function, calls, *, workers):
        for unit in chain.from_iterable(units for units, _ in calls):
            asked[unit] += 1
            if unit.arm == "batch" and unit.index == 1 and asked[unit] < {"busy": 2, "dies once": 2, "dies": 9}[fault]:
                if fault == "busy":
                    yield [Receipt(unit, "busy")]
                    continue
                temporary_path(unit.entry).mkdir(parents=True)
                raise BrokenProcessPool
            if unit.follows is not None and unit.follows not in ended:
                yield [Receipt(unit, "failed" if unit.wait else "busy")]
                continue
            ended.add(unit)
            yield [Receipt(unit, "trained")]

    monkeypatch.setattr(schedule, "run_in_workers", run)
    found = outcomes(train_pool(*fresh, workers=2))
    lost = {("batch", 1), ("none+fit", 1)} if fault == "dies" else set()
    assert {unit for unit, outcome in found.items() if outcome == "failed"} == lost
    assert len(found) == 12
    assert asked[Unit(fresh[0].path, "none+fit", 1)] <= 2


def test_only_what_is_missing_and_asked_for_is_trained(fresh, monkeypatch):
    pool, data = fresh
    pool.entry("batch", 1).mkdir(parents=True)
    workers = Workers([])
    monkeypatch.setattr(schedule, "run_in_workers", workers.run)
    receipts = train_pool(pool, data, workers=2, indices=range(1, 3))
    assert set(outcomes(receipts)) == {("batch", 2), ("none", 1), ("none", 2), ("none+fit", 1), ("none+fit", 2)}
    assert train_pool(pool, data, workers=2, indices=range(40, 50)) == []


@pytest.mark.parametrize(("size", "together"), [(1, 4), (STACK, 12)])
def test_a_model_that_kills_its_worker_is_found_out_and_costs_no_other(fresh, monkeypatch, size, together):
    pool, data = fresh
    monkeypatch.setattr(schedule, "block_size", lambda *asked: size)
    workers = Workers([("batch", 2)])
    monkeypatch.setattr(schedule, "run_in_workers", workers.run)
    found = outcomes(train_pool(pool, data, workers=4))
    assert found.pop(("batch", 2)) == "failed"
    assert len(found) == 11
    assert set(found.values()) == {"trained"}
    # Together with its neighbours, by half the workers, then alone in a worker of its own.
    suspects = [units for _, units in workers.rounds if ("batch", 2) in units]
    assert [len(units) for units in suspects] == [12, together, 1]
    assert not list(pool.path.rglob("*.tmp"))


def test_a_leftover_of_an_earlier_run_puts_no_model_under_suspicion(fresh, monkeypatch):
    pool, data = fresh
    stale = temporary_path(pool.entry("none", 3))
    stale.mkdir(parents=True)
    workers = Workers([("batch", 0)])
    monkeypatch.setattr(schedule, "block_size", lambda *asked: 1)
    monkeypatch.setattr(schedule, "run_in_workers", workers.run)
    train_pool(pool, data, workers=2)
    assert not stale.exists()
    assert [units for _, units in workers.rounds[1:] if ("none", 3) in units] == [workers.rounds[1][1]]


def test_workers_that_die_before_they_train_anything_end_the_run(fresh, monkeypatch):
    def die(function, calls, *, workers):
        raise BrokenProcessPool
        yield

    monkeypatch.setattr(schedule, "run_in_workers", die)
    with pytest.raises(UserError, match=r"died 3 times before they trained anything.*fewer --workers"):
        train_pool(*fresh, workers=2)


def test_a_busy_model_is_waited_for_after_the_others(fresh, monkeypatch):
    asked = []

    def run(function, calls, *, workers):
        for unit in chain.from_iterable(units for units, _ in calls):
            asked.append((unit.arm, unit.index, unit.wait))
            yield [Receipt(unit, "busy" if unit == Unit(unit.pool, "batch", 1) and not unit.wait else "trained")]

    monkeypatch.setattr(schedule, "run_in_workers", run)
    receipts = train_pool(*fresh, workers=2)
    assert len(receipts) == 12
    assert asked.index(("batch", 1, True)) == 12


def test_one_worker_is_this_process_and_trains_the_same_bits(fresh, trained):
    receipts = train_pool(*fresh, workers=1)
    assert {receipt.outcome for receipt in receipts} <= {"trained", "chance"}
    assert contents(fresh[0].path) == contents(trained[0].path)


# ------------------------------------------------------------------ real workers; started once, then shared


def test_two_workers_train_the_same_bits_even_if_one_is_killed(fresh, trained):
    pool, data = fresh
    killed = []

    def kill_one(progress):
        if not killed:
            killed.extend(workers_of(os.getpid())[:1])
            os.kill(killed[0], signal.SIGKILL)

    receipts = train_pool(pool, data, workers=2, on_progress=kill_one)
    assert killed
    # Present: committed by a worker that was ended before it could say so.
    assert {receipt.outcome for receipt in receipts} <= {"trained", "chance", "present"}
    assert len(receipts) == 12
    assert not list(pool.path.rglob("*.tmp"))
    assert contents(pool.path) == contents(trained[0].path)


def test_four_workers_train_the_same_bits(fresh, trained):
    receipts = train_pool(*fresh, workers=4)
    assert {receipt.outcome for receipt in receipts} <= {"trained", "chance"}
    assert contents(fresh[0].path) == contents(trained[0].path)


def test_workers_are_deaf_to_ctrl_c():
    asked = "__import__('signal').pthread_sigmask(0, [])"
    assert all(signal.SIGINT in blocked for blocked in list(run_in_workers(eval, [(asked,)] * 3, workers=2)))
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_workers_started_ahead_are_the_ones_that_work():
    start_workers(2)
    ahead = workers_of(os.getpid())
    assert len(ahead) == 2
    assert set(run_in_workers(eval, [("__import__('os').getpid()",)] * 8, workers=2)) <= set(ahead)


def test_no_more_workers_start_ahead_than_there_are_cores(monkeypatch):
    monkeypatch.setattr(workers.joblib, "cpu_count", lambda: 2)
    asked = []
    monkeypatch.setattr(workers, "_results", lambda function, calls, count: asked.append(count))
    for count in (1, 2, 200):
        start_workers(count)
    workers._starting.clear()
    assert asked == [2, 2]


def test_training_imports_no_compiler_and_nothing_else_that_takes_seconds():
    code = """
import sys
import numpy as np
from torch import nn
from shadow_pool.arms import parse_arm
from shadow_pool.spec import Recipe
from shadow_pool.train.job import TrainingJob
from shadow_pool.train.loop import Training, train_model
from shadow_pool.train.unit import train_units
for optimizer in ("sgd", "adamw"):
    job = TrainingJob(arm=parse_arm("batch"), recipe=Recipe(optimizer=optimizer, gradient_clip=1.0), seed=0, index=0)
    x, label = np.zeros((8, 3), np.float32), np.zeros(8, np.int64)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    train_model(Training(model, x, label, job), preprocess=lambda x: x)
heavy = ("torch._dynamo", "torchvision", "pandas", "sklearn", "opacus", "matplotlib", "sympy", "typer")
print([name for name in heavy if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize("how", ["kill", pytest.param("interrupt", marks=pytest.mark.slow)])
def test_workers_end_with_their_parent(trained, tmp_path, how):
    source = {"source": trained[0].spec.data.source}
    pool, _ = tiny_pool(tmp_path / "pool", {"recipe": {"epochs": 5000}, "data": source})
    child = Child(train_with_workers, pool.path)
    assert wait_until(lambda: len(list(pool.path.rglob("*.tmp"))) == 2 * STACK)
    workers = workers_of(child.pid)
    assert len(workers) == 2
    if how == "kill":
        child.kill()
    else:
        os.killpg(child.pid, signal.SIGINT)
        assert child.result() == "interrupted"
    assert wait_until(lambda: not any(map(alive, workers)), timeout=20)
    assert pool.missing("batch") == [0, 1, 2, 3]
