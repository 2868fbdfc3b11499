"""``train-shadows --plan``: what a pool will cost here and what it will resolve."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pools import write_digits
from typer.testing import CliRunner

from mia_audit import plan
from mia_audit.plan import make_plan
from mia_audit_cli.main import app
from shadow_pool.prepare import PlannedPool, plan_pool
from shadow_pool.spec import to_dict
from shadow_pool.store.pool import Pool
from shadow_pool.train.loop import Training


def planned(pool: Pool, **changes: Any) -> PlannedPool:
    """The plan of a pool like the shared one, in a folder of its own that is never made."""
    return plan_pool(Path("nowhere"), {**to_dict(pool.spec), **changes})


def test_the_estimate_is_of_the_right_size(pool: Pool) -> None:
    found = make_plan(Path("nowhere"), planned(pool), workers=2)
    assert all(0 < arm.seconds <= arm.at_most for arm in found.arms)
    # Other tests of the session keep twins and signals in query mode batch in this pool; they are no part of a plan.
    files = (path for path in (pool.path / "arms").rglob("*") if path.is_file() and "-batch." not in path.name)
    stored = [path.stat().st_size for path in files]
    assert sum(stored) / 1.3 < found.disk < sum(stored) * 1.3
    assert 2e8 < found.memory < 2e10
    assert not Path("nowhere").exists()


class Clock:
    """Stands in for the time that training takes: so much a run, so much a step of 16 records; asking takes 1 s."""

    asking = 1.0

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fixed: float, per_step: float) -> None:
        self.now = 0.0

        def train(trainings: list[Training], halves: Any, **options: Any) -> None:
            for own in trainings:
                self.now += fixed + per_step * own.job.recipe.epochs * len(own.x) / 16

        def train_own(reference: str, model: Any, x: np.ndarray, label: Any, job: Any, **options: Any) -> None:
            self.now += fixed + per_step * len(x) / 16

        def ask(*rest: Any, **options: Any) -> None:
            self.now += self.asking

        monkeypatch.setattr(plan, "train_side_by_side", train)
        monkeypatch.setattr(plan, "train_by_user", train_own)
        monkeypatch.setattr(plan, "compute_signals", ask)
        monkeypatch.setattr(plan.time, "perf_counter", lambda: self.now)


@pytest.mark.parametrize("train", [None, "own.py:train"])
@pytest.mark.parametrize("fixed", [0.0, 7.0])
@pytest.mark.parametrize("batch_size", [16, 1024])
def test_what_a_run_costs_once_is_not_multiplied(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, train: str | None, fixed: float, batch_size: int
) -> None:
    clock = Clock(monkeypatch, fixed=fixed, per_step=0.5)
    clock.asking = 0.0
    settled = planned(pool, arms=["none"], recipe={"epochs": 30, "batch_size": batch_size})
    settled = replace(settled, spec=replace(settled.spec, train=train))
    (cost,) = make_plan(Path("nowhere"), settled, workers=1).arms
    epoch = 0.5 * 170 / 16 if batch_size == 1024 or train else 0.5 * 11
    assert cost.seconds == pytest.approx(fixed + epoch * (1 if train else 30))


def test_a_run_that_something_held_up_is_not_the_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    took, now = iter([50.0, 0.01, 9.0]), [0.0]

    def run() -> None:
        now[0] += next(took)

    monkeypatch.setattr(plan.time, "perf_counter", lambda: now[0])
    assert plan._timed(run) == pytest.approx(0.01)


def test_time_grows_with_epochs_evaluations_queries_and_models(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, fixed=100.0, per_step=0.5)
    recipe = {"epochs": 10, "batch_size": 16, "evaluate_epochs": [1, 5]}
    settled = planned(pool, arms=["batch", "none+fit"], queries=4, recipe=recipe)
    records, population = len(settled.data.records), len(settled.data.population)
    steps = 10 * -(-(records // 2) // 16)
    batch, fit = make_plan(Path("nowhere"), settled, workers=1).arms
    queries = clock.asking * (records + population) / 32 * (4 + 3)
    assert batch.seconds == batch.at_most == pytest.approx(100 + steps / 2 + queries)
    assert (fit.seconds, fit.at_most) == pytest.approx((100 + steps / 2 + queries, 100 + 10 * steps / 2 + queries))
    whole = make_plan(Path("nowhere"), settled, workers=4)
    assert whole.models == 16
    assert whole.seconds == pytest.approx(8 * (batch.seconds + fit.seconds) / 4)
    one = make_plan(Path("nowhere"), settled, workers=4, indices=range(1, 2))
    assert one.seconds == pytest.approx((batch.seconds + fit.seconds) / 2)


def test_what_is_trained_already_costs_nothing_more(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_timed", lambda run: 1.0)
    settled = plan_pool(pool.path, {"n": 12, "arms": ["group"]})
    found = make_plan(pool.path, settled, workers=1)
    assert {arm.arm: arm.models for arm in found.arms} == {"batch": 4, "none": 4, "none+fit": 4, "group": 12}


def test_a_users_function_is_timed_on_two_and_four_batches(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("seen = []\n\ndef train(model, data, seed, device):\n    seen.append(len(data))\n")
    settled = planned(pool, arms=["batch"], train=f"{tmp_path / 'own.py'}:train")
    found = make_plan(Path("nowhere"), settled, workers=1)
    from shadow_pool.usercode import load_object

    seen = load_object(f"{tmp_path / 'own.py'}:seen", what="test")
    assert set(seen) == {32, 64}
    assert len(seen) <= 2 * (1 + plan._RUNS)
    assert found.seconds > 0


def test_an_fpr_is_resolved_where_five_nonmembers_are_expected(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_timed", lambda run: 1.0)
    settled = planned(pool, arms=["batch"])
    found = make_plan(Path("nowhere"), replace(settled, spec=replace(settled.spec, n=4)), workers=1)
    half = len(settled.data.records) // 2
    assert half == 170
    expected = {("pool", fpr): (4 * half, fpr * 4 * half >= 5) for fpr in (0.001, 0.01, 0.1)}
    expected |= {("target", fpr): (half, fpr * half >= 5) for fpr in (0.001, 0.01, 0.1)}
    assert {(row.scope, row.fpr): (row.nonmembers, row.resolved) for row in found.resolution} == expected
    assert {row.resolved for row in found.resolution} == {True, False}


def test_the_command_prints_it_and_writes_nothing(tmp_path: Path) -> None:
    source = write_digits(tmp_path / "digits.npz", 120)
    options = ["--data", str(source), "--arms", "batch,none+fit", "--epochs", "2", "--workers", "2", "--plan"]
    command = ["train-shadows", "--pool", str(tmp_path / "pool"), *options]
    elsewhere = CliRunner().invoke(app, [*command, "--scheduler", "tcp://head:8786"])
    assert "cores like this machine's; --workers says how many workers the scheduler has" in elsewhere.output
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "scheduler" not in result.output
    assert "all 128 models on 2 workers" in result.output
    assert "not resolved" in result.output
    assert {path.name for path in tmp_path.iterdir()} == {"digits.npz"}
