"""``train-shadows --plan``: what a pool will cost here and what it will resolve."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pools import write_digits
from typer.testing import CliRunner

from mia_audit import plan
from mia_audit.plan import make_plan
from mia_audit_cli.main import app
from shadow_pool.prepare import PlannedPool, plan_pool
from shadow_pool.spec import to_dict
from shadow_pool.store.pool import Pool


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


def test_time_grows_with_epochs_evaluations_queries_and_models(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_timed", lambda run: 1.0)
    recipe = {"epochs": 10, "batch_size": 16, "evaluate_epochs": [1, 5]}
    settled = planned(pool, arms=["batch", "none+fit"], queries=4, recipe=recipe)
    records, population = len(settled.data.records), len(settled.data.population)
    steps = 10 * -(-(records // 2) // 16)
    batch, fit = make_plan(Path("nowhere"), settled, workers=1).arms
    queries = (records + population) / 32 * (4 + 3)
    assert batch.seconds == batch.at_most == pytest.approx(steps / 2 + queries)
    assert (fit.seconds, fit.at_most) == pytest.approx((steps / 2 + queries, 10 * steps / 2 + queries))
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


def test_a_users_function_is_timed_on_two_batches(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("seen = []\n\ndef train(model, data, seed, device):\n    seen.append(len(data))\n")
    settled = planned(pool, arms=["batch"], train=f"{tmp_path / 'own.py'}:train")
    found = make_plan(Path("nowhere"), settled, workers=1)
    from shadow_pool.usercode import load_object

    assert load_object(f"{tmp_path / 'own.py'}:seen", what="test") == [32, 32]
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
    result = CliRunner().invoke(app, ["train-shadows", "--pool", str(tmp_path / "pool"), *options])
    assert result.exit_code == 0, result.output
    assert "all 128 models on 2 workers" in result.output
    assert "not resolved" in result.output
    assert {path.name for path in tmp_path.iterdir()} == {"digits.npz"}
