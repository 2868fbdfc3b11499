"""What leakage and mitigation make of audited arms, on jackknives written by hand; what studies refuse beforehand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mia_audit.metrics import Jackknife
from mia_audit.results import METRICS
from mia_audit.studies import leakage as leakage_module
from mia_audit.studies import mitigation as mitigation_module
from mia_audit.studies import setup as beginning
from mia_audit.studies.audits import Difference, level_rows, unresolved_warnings
from mia_audit.studies.registry import STUDIES
from mia_audit.studies.result import StudyRow
from mia_audit.studies.setup import StudyPool, StudySetup, finish, study_pool
from shadow_pool.errors import UserError
from shadow_pool.spec import from_dict

SUBSETS = ("all", "ood")
NOISE = np.random.default_rng(0).normal(0, 0.002, (6, 2, 3))
"""What deleting a pair does, in every arm alike."""


def arm(auc: float, *, noise: float = 0.0, records: tuple[int, int] = (2000, 60), seed: int = 1) -> Jackknife:
    """12 models of 6 pairs; ``noise`` is what an arm has of its own."""
    estimate = np.broadcast_to([auc, auc / 2, auc / 4], (2, 3)).copy()
    own = np.random.default_rng(seed).normal(0, 1, (6, 2, 3)) * noise
    scores = np.zeros((12, records[0]))
    return Jackknife(SUBSETS, METRICS, scores, np.array(records), estimate, estimate + NOISE + own)


def still(found: Jackknife) -> Jackknife:
    """Every pair the same but for rounding."""
    rounding = 1e-16 * np.arange(6)[:, None, None]
    return replace(found, replicates=found.estimate * (1 + rounding))


def find(rows: list[StudyRow], **wanted: Any) -> StudyRow:
    (row,) = (row for row in rows if all(getattr(row, key) == value for key, value in wanted.items()))
    return row


def test_a_tpr_of_too_few_non_members_has_no_interval_anywhere():
    found, other = arm(0.8, noise=0.01), arm(0.7, noise=0.01, seed=2)
    rows = level_rows(found, "batch", None)
    # 6 models are non-members of each record: 12,000 and 360 cells.
    told = {(row.subset, row.metric): row.ci is not None for row in rows}
    assert told == {
        ("all", "auc"): True,
        ("all", "tpr@0.01"): True,
        ("all", "tpr@0.001"): True,
        ("ood", "auc"): True,
        ("ood", "tpr@0.01"): False,
        ("ood", "tpr@0.001"): False,
    }
    assert all(row.value is not None for row in rows)
    effects = leakage_module._effect_rows({"epochs": Difference.between(found, other, "batch - none")}, found, "0.05")
    less = mitigation_module._difference_rows(
        {"batch": found, "none": other}, {"batch": np.ones(12), "none": np.ones(12)}, "none"
    )
    for row in (*effects, *less):
        if row.metric in METRICS:
            assert (row.ci is not None) == told[row.subset, row.metric]
    (warning,) = unresolved_warnings(found)
    assert warning.startswith("tpr@0.01 (ood) and tpr@0.001 (ood): fewer than 5 non-member cells")
    assert unresolved_warnings(arm(0.8, records=(2000, 2000))) == []


@pytest.mark.parametrize(
    ("none", "fit", "noise", "verdict"),
    [
        (0.60, 0.78, 0.001, "holds"),  # 18 of 20 points vanish
        (0.60, 0.62, 0.001, "does not hold"),
        (0.60, 0.78, 0.1, "not resolved"),
        (0.80, 0.80, 0.001, "not resolved"),  # there is no difference to explain
        (0.85, 0.95, 0.001, "not resolved"),  # BatchNorm leaks less: 2 fit - none - batch is above 0 all the same
    ],
)
def test_a_difference_is_mostly_fit_only_where_there_is_one(none: float, fit: float, noise: float, verdict: str):
    found = {
        "batch": arm(0.8, noise=noise),
        "none": arm(none, noise=noise, seed=2),
        "none+fit": arm(fit, noise=noise, seed=3),
    }
    epochs = Difference.between(found["batch"], found["none"], "")
    rows = leakage_module._fit_rows({"epochs": "none", "fit": "none+fit"}, found, epochs, "0")
    row = find(rows, subset="all")
    assert row.verdict == verdict
    assert row.value == pytest.approx(2 * fit - none - 0.8)
    if epochs.interval(0, 0) is None or epochs.low[0, 0] <= 0:
        assert row.ci is None


def recommend(accuracy: dict[str, float], *, spread: float = 0.001, **arms: Jackknife) -> str:
    rng = np.random.default_rng(3)
    return mitigation_module._recommendation(arms, {name: accuracy[name] + rng.normal(0, spread, 12) for name in arms})


def test_the_recommended_arm_has_a_resolved_gain_and_its_cost_is_told():
    arms = {"batch": arm(0.8, noise=0.001), "group": arm(0.7, noise=0.001, seed=2), "none": arm(0.6, seed=3)}
    said = recommend({"batch": 0.90, "group": 0.899, "none": 0.8}, **arms)
    assert said.startswith("Recommended: group, the least leaking arm within one point")
    assert "AUC −0.100 [−0.1" in said
    assert "at most a point is resolved" in said
    unsure = recommend({"batch": 0.90, "group": 0.899, "none": 0.8}, spread=0.05, **arms)
    assert "at most a point is not resolved" in unsure


def test_nothing_is_recommended_where_no_gain_is_resolved():
    arms = {"batch": arm(0.8, noise=0.1), "group": arm(0.78, noise=0.1, seed=2)}
    said = recommend({"batch": 0.90, "group": 0.9}, **arms)
    assert said.startswith("Recommended: nothing, since no gain is resolved. Candidate: group, ")
    assert recommend({"batch": 0.90, "group": 0.8}, **arms).startswith("Recommended: nothing tried here leaks less")
    blind = {name: still(one) for name, one in {"batch": arm(0.8), "group": arm(0.7)}.items()}
    assert "nothing, since no gain is resolved" in recommend({"batch": 0.90, "group": 0.9}, **blind)


def test_epsilon_is_told_with_its_delta():
    assert "delta 1e-05" in mitigation_module.EPSILON


OWN = """
import torch
from torch import nn

def plain(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, num_classes))

def train(model, dataset, seed, device):
    raise AssertionError("nothing is to be trained")
"""
SMALL: dict[str, Any] = {"n": 6, "arch": "mlp(width=8, depth=1)", "precision": "fp32", "data": {"holdout": 0.6}}


def refused(name: str, out: Path, *, query_mode: str = "eval", **changes: Any) -> str:
    with pytest.raises(UserError) as raised:
        STUDIES[name](StudySetup(out, {**SMALL, **changes}, workers=1, query_mode=query_mode))
    assert not out.exists()
    return str(raised.value)


@pytest.mark.parametrize("name", ["memorization", "gradients", "theory"])
def test_a_study_of_the_course_of_training_refuses_a_users_training_and_query_modes(name, tmp_path):
    source = tmp_path / "own.py"
    source.write_text(OWN)
    assert "leave --train out" in refused(name, tmp_path / "out", train=f"{source}:train")
    said = refused(name, tmp_path / "out", query_mode="batch")
    assert "--query-mode must be eval for this study" in said
    assert "leakage and mitigation" in said


@pytest.mark.parametrize("name", ["leakage", "mitigation"])
def test_a_study_of_trained_models_takes_both(name, tmp_path, monkeypatch):
    asked = []

    def stop(setup: StudySetup, values: dict[str, Any], folder: str, **_: Any) -> StudyPool:
        asked.append(from_dict(values).train)
        raise InterruptedError

    monkeypatch.setattr(leakage_module, "study_pool", stop)
    monkeypatch.setattr(mitigation_module, "study_pool", stop)
    changes = {**SMALL, "train": "own.py:train", "arms": ["batch", "none"]}
    with pytest.raises(InterruptedError):
        STUDIES[name](StudySetup(tmp_path / "out", changes, query_mode="batch"))
    assert asked == ["own.py:train"]


def test_an_unknown_query_mode_is_refused(tmp_path):
    with pytest.raises(UserError, match="unknown query mode 'batches': did you mean 'batch'"):
        StudySetup(tmp_path, query_mode="batches")


@pytest.mark.parametrize("name", ["memorization", "gradients", "leakage", "theory"])
def test_an_architecture_without_batchnorm_is_refused_before_anything_is_written(name, tmp_path):
    source = tmp_path / "own.py"
    source.write_text(OWN)
    said = refused(name, tmp_path / "out", arch=f"{source}:plain")
    assert "must have a BatchNorm layer" in said
    assert "--arch" in said


def test_mitigation_without_held_out_records_is_refused_before_anything_is_written(tmp_path):
    assert "use --holdout .15" in refused("mitigation", tmp_path / "out", data={"holdout": 0.0})


def stub_pool(path: Path, ood: float, *warnings: str) -> StudyPool:
    spec = from_dict({"n": 4, "data": {"ood": ood}})
    return StudyPool(SimpleNamespace(spec=spec, path=path), None, warnings)  # type: ignore[arg-type]


def test_settings_and_warnings_of_several_pools_tell_them_apart(tmp_path):
    pools = [stub_pool(tmp_path / "a", 0.0, "both", "one"), stub_pool(tmp_path / "b", 0.05, "both")]
    found = finish("leakage", [], [], pools, {"mode": "eval"}, warnings=["late"])
    assert found.settings["data"]["ood"] == [0.0, 0.05]
    assert (found.settings["data"]["mislabeled"], found.settings["n"]) == (0.0, 4)
    assert found.settings["mode"] == "eval"
    assert found.warnings == ("both", "a: one", "late")


def test_a_fit_arm_that_missed_its_loss_is_warned_about(pool, pool_data, tmp_path, monkeypatch):
    info = pool.info("none+fit", 3)
    short = pool.scan("none+fit")[0] | {3: SimpleNamespace(**{**vars(info), "reached": False})}
    scan = type(pool).scan
    monkeypatch.setattr(type(pool), "scan", lambda self, name: (short, {}) if name == "none+fit" else scan(self, name))
    monkeypatch.setattr(beginning, "prepare_pool", lambda *_, **__: (pool, pool_data))
    monkeypatch.setattr(beginning, "train_pool", lambda *_, **__: [])
    found = study_pool(StudySetup(tmp_path), {}, "x", check=lambda planned: None)
    missed = sum(one.reached is False for one in short.values())
    assert any(f"arm none+fit: {missed} of 8 models did not reach" in text for text in found.warnings)


@pytest.mark.parametrize("study", ["leakage", "mitigation"])
def test_too_few_models_to_audit_are_refused_before_anything_is_written(study: str, tmp_path: Path) -> None:
    assert "takes at least 6 models an arm, got n = 4; use --n 8" in refused(study, tmp_path / "out", n=4)
