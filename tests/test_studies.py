"""The studies on small pools: rows against what the pool itself says, verdicts from intervals, resuming."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from mia_audit.attacks import pool_scores
from mia_audit.gradients import eval_gradients
from mia_audit.metrics import roc
from mia_audit.report.html import write_study_report
from mia_audit.studies import gradient_units, networks
from mia_audit.studies import leakage as leakage_module
from mia_audit.studies import theory as theory_module
from mia_audit.studies.judge import verdict_above
from mia_audit.studies.registry import STUDIES
from mia_audit.studies.result import StudyResult, StudyRow
from mia_audit.studies.setup import StudySetup, evaluation_epochs
from shadow_pool.errors import UserError
from shadow_pool.models.norms import ratios
from shadow_pool.prepare import pool_data
from shadow_pool.store.pool import open_pool
from shadow_pool.train.requery import stored_model
from shadow_pool.train.shadows import preprocess_of

SMALL: dict[str, Any] = {
    "n": 4,
    "arch": "mlp(width=16, depth=1)",
    "precision": "fp32",
    "data": {"mislabeled": 0.1, "ood": 0.1, "holdout": 0.6},
    "recipe": {"epochs": 6, "lr": 0.1},
}


def run(name: str, out: Path, **changes: Any) -> StudyResult:
    return STUDIES[name](StudySetup(out, {**SMALL, **changes}, workers=1))


def find(result: StudyResult, **wanted: Any) -> StudyRow:
    """The one row with these fields; ``claim`` and ``metric`` by their beginning."""
    rows = [
        row
        for row in result.rows
        if all(
            str(getattr(row, key)).startswith(value) if key in ("claim", "metric") else getattr(row, key) == value
            for key, value in wanted.items()
        )
    ]
    assert len(rows) == 1, f"{len(rows)} rows with {wanted}"
    return rows[0]


def t_interval(pairs: np.ndarray) -> tuple[float, float]:
    return stats.t.interval(0.95, len(pairs) - 1, loc=pairs.mean(), scale=stats.sem(pairs))


def fitted(out: Path, arm: str, subset: str) -> np.ndarray:
    """Accuracy on the members of a subset by each model of a study's pool, from its stored predictions."""
    pool = open_pool(out / "memorization-pool")
    label, kind = pool.records["label"].to_numpy(), pool.records["subset"].to_numpy()
    return np.array(
        [
            (pool.signals(arm, i).predicted == label)[pool.membership[i] & (kind == subset)].mean()
            for i in range(pool.spec.n)
        ]
    )


@pytest.fixture(scope="module")
def memorization(tmp_path_factory) -> tuple[StudyResult, Path]:
    out = tmp_path_factory.mktemp("memorization")
    return run("memorization", out, n=6), out


def test_memorization_rows_are_what_the_pool_says(memorization):
    result, out = memorization
    ours, theirs = (fitted(out, arm, "mislabeled") for arm in ("batch", "none"))
    level = find(result, arm="batch", subset="mislabeled", metric="accuracy", at=6)
    assert level.value == pytest.approx(ours.mean())
    difference = (ours - theirs).reshape(-1, 2).mean(axis=1)
    row = find(result, claim="with BatchNorm outliers are fitted further", subset="mislabeled")
    assert row.value == pytest.approx(difference.mean())
    assert row.ci == pytest.approx(t_interval(difference))
    assert row.verdict == verdict_above(row.ci, 0)
    clean = (fitted(out, "batch", "clean") - fitted(out, "none", "clean")).reshape(-1, 2).mean(axis=1)
    more = find(result, claim="BatchNorm adds more", subset="mislabeled", at=6)
    assert more.value == pytest.approx((difference - clean).mean())


def test_memorization_tells_when_a_level_is_reached_or_never(memorization):
    result, out = memorization
    pool = open_pool(out / "memorization-pool")
    first = []
    for i in range(6):
        history = pool.history("batch", i)
        chosen = history[
            (history["metric"] == "accuracy") & (history["subset"] == "clean") & history["member"].eq(True)
        ]
        first.append(chosen[chosen["value"] >= 0.5]["epoch"].min())
    assert find(result, arm="batch", subset="clean", metric="epochs to fit 50 %").value == np.median(first)
    assert find(result, arm="batch", subset="clean", metric="share of models that fit 50 %").value == 1
    never = find(result, arm="none", subset="ood", metric="epochs to fit 90 %")
    share = find(result, arm="none", subset="ood", metric="share of models that fit 90 %")
    assert (never.value, share.value) == (None, 0)


def test_a_study_run_again_trains_nothing_and_says_the_same(memorization):
    result, out = memorization
    trained: list[object] = []
    again = STUDIES["memorization"](StudySetup(out, {**SMALL, "n": 6}, workers=1, on_progress=trained.append))
    assert trained == []
    assert replace(again, created="", figures=()) == replace(result, created="", figures=())


def test_a_study_writes_json_parquet_and_a_report(memorization, tmp_path):
    result, _ = memorization
    result.write(tmp_path)
    write_study_report(result, tmp_path)
    body = json.loads((tmp_path / "study.json").read_text())
    assert (body["kind"], body["name"], len(body["rows"])) == ("study", "memorization", len(result.rows))
    page = (tmp_path / "report.html").read_text()
    assert "fitted further" in page
    assert "rank correlations over records, taken as independent though the same models measured them" in page
    assert "fewer than five non-member cells" in page
    assert {path.name for path in tmp_path.iterdir()} == {"study.json", "study.parquet", "report.html"}


def test_gradients_are_those_of_the_stored_models(tmp_path, monkeypatch):
    monkeypatch.setattr(gradient_units, "BATCHES", 1)
    result = run("gradients", tmp_path, recipe={"epochs": 3, "lr": 0.1})
    pool = open_pool(tmp_path / "gradients-pool")
    records = pool_data(pool).records
    means = []
    for i in range(4):
        rows = np.flatnonzero(pool.membership[i] & (records.subset == "ood"))
        model = stored_model(pool, "batch", i)
        norms = eval_gradients(model, records.x[rows], records.label[rows], preprocess=preprocess_of(pool)).norm
        means.append(norms.mean())
    last = find(result, arm="batch", subset="ood", metric="eval norm", at=3)
    assert last.value == pytest.approx(np.mean(means), rel=1e-6)

    claim = "early in training outliers' gradients are larger"
    ratio = find(result, claim=claim, subset="mislabeled", metric="batch norm ratio")
    assert ratio.value is not None
    assert ratio.ci is not None
    assert ratio.ci[0] < ratio.value < ratio.ci[1]
    assert ratio.verdict == verdict_above(ratio.ci, 1)
    trained: list[object] = []
    changes = {**SMALL, "recipe": {"epochs": 3, "lr": 0.1}}
    STUDIES["gradients"](StudySetup(tmp_path, changes, workers=1, on_progress=trained.append))
    assert trained == []


def test_leakage_is_the_pool_audited(tmp_path):
    result = run("leakage", tmp_path, n=8, arms=["batch", "none", "none+fit", "affine"])
    (folder,) = tmp_path.glob("leakage-pool-*")
    pool = open_pool(folder)
    subset = pool.records["subset"].to_numpy() == "ood"
    member = pool.membership[:, subset]
    auc = {}
    for arm in ("batch", "none", "none+fit"):
        score = pool_scores("lira-online", pool.phi(arm, np.arange(8)), pool.membership)[:, subset]
        auc[arm] = roc(member, score).auc
    assert find(result, claim="what the attack finds", arm="batch", subset="ood", metric="auc").value == auc["batch"]
    for matched, arm in (("epochs", "none"), ("fit", "none+fit")):
        row = find(result, claim=f"BatchNorm adds leakage at equal {matched}", subset="ood", metric="auc")
        assert row.value == pytest.approx(auc["batch"] - auc[arm])
        assert row.verdict == verdict_above(row.ci, 0)
    excess = find(result, claim="more than half of the difference", subset="ood")
    assert excess.value == pytest.approx(2 * auc["none+fit"] - auc["none"] - auc["batch"])
    assert {row.arm for row in result.rows if row.claim == leakage_module.CONTROL} == {"affine - none"}


def test_leakage_shares_give_way_to_the_users(tmp_path):
    shares = lambda data: leakage_module._shares(StudySetup(tmp_path, {"data": data}))  # noqa: E731
    assert list(shares({})) == ["0", "0.01", "0.05"]
    assert shares({"mislabeled": 0.2}) == {
        "0.2+0": {"mislabeled": 0.2, "ood": 0.0},
        "0.2+0.01": {"mislabeled": 0.2, "ood": 0.01},
        "0.2+0.05": {"mislabeled": 0.2, "ood": 0.05},
    }
    assert shares({"mislabeled": 0.2, "ood": 0.2}) == {"0.2": {"mislabeled": 0.2, "ood": 0.2}}


def test_mitigation_recommends_the_least_leaking_of_the_accurate(tmp_path):
    result = run("mitigation", tmp_path, n=8, arms=["batch", "batch+penalty(1)", "none"])
    accuracy = {
        arm: find(result, claim="test accuracy", arm=arm).value for arm in ("batch", "batch+penalty(1)", "none")
    }
    auc = {arm: find(result, claim="what the attack", arm=arm, subset="all", metric="auc").value for arm in accuracy}
    within = [arm for arm, value in accuracy.items() if value >= accuracy["batch"] - 0.01]
    best = min(within, key=lambda arm: auc[arm])
    assert f"Recommended: {best}, " in result.summary or (best == "batch" and "nothing" in result.summary)
    pool = open_pool(tmp_path / "mitigation-pool")
    expected = np.mean([info.population_accuracy for info in pool.scan("none")[0].values()])
    assert accuracy["none"] == pytest.approx(expected)
    difference = find(result, claim="the remedy leaks less", arm="batch - none", subset="ood", metric="auc")
    assert difference.verdict == verdict_above(difference.ci, 0)
    ratio = {arm: find(result, claim="gamma/sigma", arm=arm).value for arm in ("batch", "batch+penalty(1)")}
    assert ratio["batch+penalty(1)"] < ratio["batch"]


def test_theory_holds_exactly_and_reports_real_networks(tmp_path, monkeypatch):
    monkeypatch.setattr(theory_module, "LIVE_DRAWS", 4)
    monkeypatch.setattr(theory_module, "COURSE_DRAWS", 4)
    monkeypatch.setattr(theory_module, "COURSE", {"steps": 60, "lr": 0.1, "weight_decay": 5e-4})
    result = run("theory", tmp_path)
    exact = [row for row in result.rows if row.claim == theory_module.CLOSED_FORM]
    assert len(exact) == 6
    assert all(row.value is not None and row.value < 1e-9 and row.verdict == "holds" for row in exact)
    assert find(result, claim="weight decay").value == pytest.approx((1 - 0.1 * 5e-4) ** -60)
    alone = find(result, arm="one position", subset="strength 30", metric="share of the predicted growth, small", at=4)
    assert alone.verdict == "does not hold"
    pool = open_pool(tmp_path / "theory-pool")
    history = [pool.history("batch", i) for i in range(4)]
    last = [h[(h["metric"] == "ratio_mean") & (h["epoch"] == 6)]["value"].item() for h in history]
    row = find(result, claim="in a real network a layer's mean gamma/sigma ends above one")
    assert row.value == pytest.approx(np.mean(last))
    assert row.verdict == verdict_above(row.ci, 1)

    ((layer, _),) = ratios(stored_model(pool, "batch", 0)).items()
    channels = [ratios(stored_model(pool, "batch", i))[layer] for i in range(4)]
    for metric, expected in (
        ("gamma/sigma, 10th percentile", [np.quantile(one, 0.1) for one in channels]),
        ("gamma/sigma, 90th percentile", [np.quantile(one, 0.9) for one in channels]),
        ("amplification (gamma/sigma)^2, median", [np.median(one**2) for one in channels]),
    ):
        row = find(result, claim="gamma/sigma of real networks", subset=layer, metric=metric, at=6)
        assert row.value == pytest.approx(np.mean(expected))
        low, high = t_interval(np.reshape(expected, (-1, 2)).mean(axis=1))
        assert row.ci == pytest.approx((max(low, 0), high))
    titles = [figure.title for figure in result.figures]
    assert "Real networks: gamma/sigma over the channels of a layer" in titles
    assert "Real networks: amplification (gamma/sigma)^2, median of channels" in titles
    line = next(figure for figure in result.figures if figure.title.startswith("One step"))
    off, left_out = re.search(r"furthest lies (\S+) of its value off the line. (\d+) of 200", line.caption).groups()
    assert float(off) < 1e-6
    assert int(left_out) < 20


def test_a_history_without_quantiles_still_has_its_rows_and_figures(monkeypatch):
    old = ("ratio_mean", "ratio_median", "ratio_max", "fraction_above_one")
    rows = [(i, e, m, "norm", 1 + i * e / 10) for i in range(4) for e in (1, 2) for m in old]
    history = pd.DataFrame(rows, columns=["index", "epoch", "metric", "layer", "value"])
    monkeypatch.setattr(networks, "_history", lambda _: history)
    assert {row.metric for row in networks.network_rows(None)} >= {networks.METRICS[metric] for metric in old}
    assert len(networks.network_figures(None)) == 2


@pytest.mark.parametrize("name", STUDIES)
def test_a_missing_arm_is_refused_before_anything_is_trained(name, tmp_path):
    arms = ["none"] if name in ("theory", "mitigation") else ["batch", "affine"]
    with pytest.raises(UserError, match="--arms batch"):
        run(name, tmp_path / "out", arms=arms)
    assert not (tmp_path / "out").exists()


def test_models_that_do_not_train_are_no_reference(tmp_path):
    with pytest.raises(UserError, match="whose models train"):
        run("memorization", tmp_path, recipe={"epochs": 1, "lr": 1e-9})


def test_a_wrong_setting_is_refused_before_anything_is_written(tmp_path):
    setup: Callable[[dict[str, Any]], StudyResult] = lambda changes: STUDIES["theory"](  # noqa: E731
        StudySetup(tmp_path / "out", changes)
    )
    with pytest.raises(UserError, match="did you mean 'epochs'"):
        setup({"recipe": {"epoch": 3}})
    assert not (tmp_path / "out").exists()


def test_evaluation_epochs_hold_the_first_and_the_last():
    assert evaluation_epochs(5) == [1, 2, 3, 4, 5]
    many = evaluation_epochs(300)
    assert (many[0], many[-1], len(many)) == (1, 300, 40)
