"""Audits of a target and of a pool, end to end on a small real pool."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from pools import tiny_pool, train_here
from torch import nn

from mia_audit.audit import audit_pool, audit_target
from mia_audit.audit.cautions import accuracy_warnings, borrowed_warnings
from mia_audit.audit.rows import FEWEST_NONMEMBERS, headline_of, target_row
from mia_audit.evidence import load_evidence, reference_arms, subset_masks, usable_models
from mia_audit.metrics.jackknife import jackknife_pool
from mia_audit.results import ATTACKS, FPRS, AuditResult
from shadow_pool.data.records import PoolData
from shadow_pool.errors import UserError
from shadow_pool.store.files import read_sealed, write_sealed
from shadow_pool.store.pool import Pool, open_pool
from shadow_pool.train.shadows import starting_model
from shadow_pool.train.target import TrainedTarget, train_target


@pytest.fixture(scope="module")
def target(pool: Pool, pool_data: PoolData, tmp_path_factory: pytest.TempPathFactory) -> TrainedTarget:
    return train_target(pool, pool_data, out=tmp_path_factory.mktemp("target") / "model.pt", seed=3)


@pytest.fixture(scope="module")
def target_result(pool: Pool, pool_data: PoolData, target: TrainedTarget) -> AuditResult:
    return audit_target(target.model, pool, pool_data)


@pytest.fixture(scope="module")
def pool_result(pool: Pool) -> AuditResult:
    return audit_pool(pool)


def test_the_smallest_pool_judges_a_target_and_says_what_it_cannot(tmp_path: Path) -> None:
    few, data = tiny_pool(tmp_path / "pool", {"n": 4, "arms": ["batch"], "recipe": {"epochs": 8}})
    train_here(few, data)
    result = audit_target(train_target(few, data, out=tmp_path / "model.pt", seed=0).model, few, data)
    assert {row.attack for row in result.attacks} == set(ATTACKS)
    assert all(row.epsilon_lower is None for row in result.attacks if "lira" in row.attack)
    assert set(result.records["false_positive_rate"]) == {1.0}
    assert any("train-shadows --n 6" in text for text in result.warnings)


def test_models_that_the_reference_arm_lacks_are_counted(
    pool_folder: Path, pool_data: PoolData, target: TrainedTarget, tmp_path: Path
) -> None:
    shutil.copytree(pool_folder, tmp_path / "pool")
    for index in ("0006", "0007"):
        shutil.rmtree(tmp_path / "pool" / "arms" / "none" / index)
    result = audit_target(target.model, open_pool(tmp_path / "pool"), pool_data)
    assert any("arm none: 2 of 8 models are not trained yet" in text for text in result.warnings)


def test_members_among_the_population_stand_outside_of_rmias(
    pool: Pool, pool_data: PoolData, target: TrainedTarget
) -> None:
    listed = pd.read_parquet(target.members)
    ids = [*listed.loc[listed["member"], "id"], *pool.population["id"][:20]]
    members = target.model.with_name("with-population.txt")
    members.write_text("\n".join(ids))
    result = audit_target(target.model, pool, pool_data, members=members)
    assert any("20 of the pool's" in text and "RMIA's population" in text for text in result.warnings)
    usual = audit_target(target.model, pool, pool_data)
    assert not any("RMIA's population" in text for text in usual.warnings)
    assert not result.records["rmia"].equals(usual.records["rmia"])
    assert result.records["lira-online"].equals(usual.records["lira-online"])


def test_a_target_has_a_row_for_each_attack_and_subset(target_result: AuditResult) -> None:
    found = [(row.attack, row.subset) for row in target_result.attacks]
    assert found == [(attack, subset) for attack in ATTACKS for subset in ("all", "clean", "mislabeled", "ood")]
    for row in target_result.attacks:
        assert tuple(point.fpr for point in row.tpr_at_fpr) == FPRS
        if row.auc is not None and row.auc_ci is not None:
            assert row.auc_ci[0] <= row.auc <= row.auc_ci[1]


def test_resolved_is_five_expected_nonmembers(target_result: AuditResult, pool_result: AuditResult) -> None:
    rows = [row for row in (*target_result.attacks, *pool_result.attacks) if row.nonmembers >= FEWEST_NONMEMBERS]
    assert len(rows) > 20
    for row in rows:
        for point in row.tpr_at_fpr:
            assert point.resolved == (point.fpr * row.nonmembers >= 5)


def test_the_headline_is_the_lowest_resolved_fpr_of_lira_online(target_result: AuditResult) -> None:
    headline = target_result.headline
    assert headline is not None
    row = next(r for r in target_result.attacks if (r.attack, r.subset) == ("lira-online", "all"))
    lowest = next(point for point in row.tpr_at_fpr if point.resolved)
    assert (headline.attack, headline.fpr, headline.tpr) == ("lira-online", lowest.fpr, lowest.tpr)


def test_mislabeled_members_of_batchnorm_models_are_found(pool_result: AuditResult) -> None:
    rows = {row.subset: row for row in pool_result.attacks if (row.attack, row.arm) == ("lira-online", "batch")}
    assert rows["mislabeled"].auc is not None
    assert rows["clean"].auc is not None
    assert rows["mislabeled"].auc > max(0.8, rows["clean"].auc)


def test_members_come_from_the_sidecar_and_only_coins_give_an_epsilon(
    pool: Pool, pool_data: PoolData, target: TrainedTarget, target_result: AuditResult, tmp_path: Path
) -> None:
    overall = [row for row in target_result.attacks if row.subset == "all"]
    assert all(row.epsilon_lower is not None and row.epsilon_lower >= 0 for row in overall)
    assert all(row.epsilon_lower is None for row in target_result.attacks if row.subset != "all")
    listed = pd.read_parquet(target.members)
    listed[listed["member"]].to_csv(tmp_path / "members.csv", index=False)
    named = audit_target(target.model, pool, pool_data, members=tmp_path / "members.csv")
    assert all(row.epsilon_lower is None for row in named.attacks)
    pd.testing.assert_series_equal(named.records["member"], target_result.records["member"])
    pd.testing.assert_series_equal(named.records["lira-online"], target_result.records["lira-online"])


def test_unknown_members_give_scores_and_rates_but_no_rows(
    pool: Pool, pool_data: PoolData, target: TrainedTarget, target_result: AuditResult, tmp_path: Path
) -> None:
    alone = tmp_path / "alone.pt"
    alone.write_bytes(target.model.read_bytes())
    result = audit_target(alone, pool, pool_data)
    assert result.attacks == ()
    assert result.headline is None
    assert result.records["member"].isna().all()
    for column in (*ATTACKS, "false_positive_rate"):
        pd.testing.assert_series_equal(result.records[column], target_result.records[column])
    assert any("members are unknown" in text for text in result.warnings)


def test_without_nonmembers_thresholds_come_from_the_pool(
    pool: Pool, pool_data: PoolData, target: TrainedTarget, tmp_path: Path
) -> None:
    members = tmp_path / "all.txt"
    members.write_text("\n".join(pool_data.records.id))
    result = audit_target(target.model, pool, pool_data, members=members)
    row = next(r for r in result.attacks if (r.attack, r.subset) == ("lira-online", "all"))
    assert (row.auc, row.auc_ci, row.nonmembers) == (None, None, 0)
    evidence = load_evidence(pool, "batch")
    from mia_audit.attacks import pool_scores

    cells = pool_scores("lira-online", evidence.phi, evidence.membership)[~evidence.membership]
    score = result.records["lira-online"].to_numpy()
    for point in row.tpr_at_fpr:
        # The lowest threshold that lets at most the allowed share of cells through.
        threshold = min(t for t in np.unique(cells) if (cells > t).mean() <= point.fpr)
        assert point.tpr == pytest.approx((score > threshold).mean())
        assert point.ci is not None
        assert point.ci[0] <= point.tpr <= point.ci[1]
    assert any("only 0 non-members" in text for text in result.warnings)


def test_false_positive_rates_are_honest_on_nonmembers(target_result: AuditResult) -> None:
    table = target_result.records
    rates = table.loc[~table["member"].astype(bool), "false_positive_rate"]
    # Binomial bounds of four standard errors around what an exact test would give.
    for level in (0.1, 0.5):
        bound = level + 4 * np.sqrt(level * (1 - level) / len(rates))
        assert (rates <= level).mean() < bound


def test_a_record_keeps_its_score_when_the_file_is_reordered(
    pool: Pool, pool_data: PoolData, target: TrainedTarget, target_result: AuditResult
) -> None:
    assert list(target_result.records["id"]) == list(pool_data.records.id)
    assert list(target_result.records["label"]) == list(pool_data.records.label)


def test_a_pool_judges_every_arm_and_measures_the_effect(pool_result: AuditResult, pool: Pool) -> None:
    assert {row.arm for row in pool_result.attacks} == set(pool.spec.arms)
    cells = pool.spec.n * pool_result.pool.records
    overall = next(r for r in pool_result.attacks if (r.attack, r.arm, r.subset) == ("lira-online", "batch", "all"))
    assert overall.members == overall.nonmembers == cells // 2
    effect = {(row.matched, row.subset, row.metric): row for row in pool_result.effect if row.attack == "lira-online"}
    for (matched, subset, metric), row in effect.items():
        assert row.difference == pytest.approx(row.with_bn - row.without_bn)
        assert row.reference == {"epochs": "none", "fit": "none+fit"}[matched]
        assert row.scope == "recipe"
        source = next(r for r in pool_result.attacks if (r.attack, r.arm, r.subset) == ("lira-online", "batch", subset))
        if metric == "auc":
            assert row.with_bn == pytest.approx(source.auc)
    assert effect["epochs", "all", "auc"].difference > 0
    assert {layer.layer for layer in pool_result.layers} == {"norm1", "norm2", "norm3", "norm4"}


def test_records_of_a_pool_have_in_and_out_means(pool_result: AuditResult) -> None:
    table = pool_result.records
    assert (table["lira-online_in"].mean() > table["lira-online_out"].mean()).all()
    assert table["vulnerability"].between(0, 1).all()
    assert table["memorization"].between(-1, 1).all()
    assert table["member"].isna().all()
    by_subset = table.groupby("subset")["memorization"].mean()
    assert by_subset["mislabeled"] > by_subset["clean"]


def test_written_files_are_what_the_result_says(target_result: AuditResult, tmp_path: Path) -> None:
    target_result.write(tmp_path / "audit")
    body = json.loads((tmp_path / "audit" / "audit.json").read_text())
    assert body == target_result.to_dict()
    assert body["kind"] == "target"
    assert body["protocol"] == 1
    table = pd.read_parquet(tmp_path / "audit" / "records.parquet")
    assert list(table.columns) == list(target_result.records.columns)
    frame = target_result.to_frame()
    assert len(frame) == len(target_result.attacks) * len(FPRS)


def test_shuffled_pairs_of_membership_rows_score_chance(pool: Pool) -> None:
    evidence = load_evidence(pool, "batch")
    masks = subset_masks(pool.records["subset"].to_numpy(object))
    rows = np.arange(len(evidence.membership)).reshape(-1, 2)
    moved = evidence.membership[np.roll(rows, 1, axis=0).ravel()]
    found = jackknife_pool("lira-online", evidence.phi, moved, {"all": masks["all"]}, metrics=("auc",))
    low, high = found.interval()
    assert low[0, 0] <= 0.5 <= high[0, 0]


def test_an_arm_that_the_pool_lacks_is_named(pool: Pool, pool_data: PoolData, target: TrainedTarget) -> None:
    with pytest.raises(UserError, match="has no arm group: it has batch, none"):
        audit_target(target.model, pool, pool_data, arm="group")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attacks": ("lyra",)}, "unknown attack 'lyra'"),
        ({"subsets": "some"}, "unknown subsets 'some'"),
        ({"query_mode": "train"}, "unknown query mode 'train'"),
        ({"arm": "batched"}, "unknown arm 'batched'"),
    ],
)
def test_unknown_names_list_the_known_ones(
    pool: Pool, pool_data: PoolData, target: TrainedTarget, options: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        audit_target(target.model, pool, pool_data, **options)  # type: ignore[arg-type]
    if {"subsets", "query_mode"} & set(options):
        with pytest.raises(UserError, match=message):
            audit_pool(pool, **options)  # type: ignore[arg-type]


def test_a_target_with_nan_weights_is_refused(
    pool: Pool, pool_data: PoolData, target: TrainedTarget, tmp_path: Path
) -> None:
    state = torch.load(target.model, weights_only=True)
    state["norm1.weight"][0] = float("nan")
    torch.save(state, tmp_path / "nan.pt")
    with pytest.raises(UserError, match="non-finite logits on"):
        audit_target(tmp_path / "nan.pt", pool, pool_data)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["pickled", "half", "program", "exported"])
def test_modules_and_programs_are_judged_as_their_weights_are(
    pool: Pool, pool_data: PoolData, target: TrainedTarget, target_result: AuditResult, tmp_path: Path, form: str
) -> None:
    model, path = starting_model(pool, "batch").eval(), tmp_path / ("m.pt2" if form == "exported" else "m.pt")
    model.load_state_dict(torch.load(target.model, weights_only=True))
    example = torch.zeros(2, *pool.manifest.model_shape)
    if form in ("pickled", "half"):
        torch.save(model.half() if form == "half" else model, path)
    elif form == "exported":
        torch.export.save(torch.export.export(model, (example,)), path)
    else:
        torch.jit.save(torch.jit.script(model), path)
    with pytest.raises(UserError, match="--trust"):
        audit_target(path, pool, pool_data, attacks=("loss",))
    found = audit_target(path, pool, pool_data, attacks=("loss",), trust=True, members=target.members)
    assert found.target is not None
    assert target_result.target is not None
    near = 0.1 if form == "half" else 1e-3
    np.testing.assert_allclose(found.records["phi"], target_result.records["phi"], atol=near)
    assert found.target.norm_layers == target_result.target.norm_layers
    assert [row.layer for row in found.layers] == [row.layer for row in target_result.layers]


def test_a_module_that_does_not_fit_the_records_is_refused(pool: Pool, pool_data: PoolData, tmp_path: Path) -> None:
    torch.save(nn.Sequential(nn.Flatten(), nn.Linear(64, 7)), tmp_path / "m.pt")
    with pytest.raises(UserError, match=r"must give logits of shape \[2, 10\] .* got \[2, 7\]"):
        audit_target(tmp_path / "m.pt", pool, pool_data, trust=True, arm="none")


def test_query_mode_batch_is_another_signal_and_is_kept(pool: Pool, pool_data: PoolData, target: TrainedTarget) -> None:
    first = audit_target(target.model, pool, pool_data, query_mode="batch", attacks=("lira-online",))
    again = audit_target(target.model, pool, pool_data, query_mode="batch", attacks=("lira-online",))
    assert first.target is not None
    assert first.target.query_mode == "batch"
    pd.testing.assert_series_equal(first.records["lira-online"], again.records["lira-online"])
    plain = audit_target(target.model, pool, pool_data, attacks=("lira-online",))
    assert not np.allclose(first.records["phi"], plain.records["phi"])


def test_references_are_the_arms_without_batchnorm(pool: Pool) -> None:
    found, notes = reference_arms(pool)
    assert found == [("epochs", "none"), ("fit", "none+fit")]
    assert notes == ()
    assert usable_models(pool, "batch")[0] == list(range(pool.spec.n))


def test_where_none_does_not_train_group_is_the_reference(tmp_path: Path) -> None:
    def ended(arm: str, status: str) -> Pool:
        for index in range(4):
            path = pool.entry(arm, index) / "model.json"
            write_sealed(path, {**read_sealed(path, advice=""), "status": status})
        return open_pool(pool.path)

    pool, data = tiny_pool(tmp_path / "pool", {"arms": ["batch", "none"]})
    assert reference_arms(pool) == ([], ())
    train_here(pool, data)
    ended("batch", "trained")
    assert reference_arms(ended("none", "trained")) == ([("epochs", "none")], ())
    found, notes = reference_arms(ended("none", "chance"))
    assert found == []
    assert "arm none does not train here" in notes[0]
    assert "train-shadows --arms group" in notes[0]
    pool, _ = tiny_pool(tmp_path / "pool", {"arms": ["group"]})
    assert [note.split(",")[0] for note in reference_arms(pool)[1]] == [
        "arm none does not train here",
        "arm group is not trained yet",
    ]
    train_here(pool, data)
    found, notes = reference_arms(ended("group", "trained"))
    assert found == [("epochs", "group")]
    assert notes == ("arm none does not train here, so it is not the reference for BatchNorm's effect",)


def test_twins_measure_the_effect_on_the_checkpoint(pool: Pool, pool_data: PoolData, target: TrainedTarget) -> None:
    result = audit_target(target.model, pool, pool_data, attacks=("lira-online",), twins=2)
    rows = [row for row in result.effect if row.scope == "checkpoint" and (row.subset, row.metric) == ("all", "auc")]
    assert [(row.matched, row.reference) for row in rows] == [
        ("epochs", "none"),
        ("fit", "none+fit"),
        ("epochs", "batch"),
    ]
    overall = next(r for r in result.attacks if r.subset == "all")
    for row in rows:
        assert row.with_bn == pytest.approx(overall.auc)
        assert row.ci is not None
        assert row.ci[0] <= row.difference <= row.ci[1]
    control = rows[-1]
    assert control.ci is not None
    # The control differs from the target by training randomness alone; its interval is wide, not far from 0.
    assert control.ci[0] < 0.1
    assert control.ci[1] > -0.1


@pytest.mark.parametrize(
    ("shadows", "accuracy", "warned"),
    [
        ((0.68, 0.70, 0.71, 0.81, 0.71, 0.76, 0.71, 0.93), 1.00, True),
        ((0.68, 0.70, 0.71, 0.81, 0.71, 0.76, 0.71, 0.93), 0.94, False),
        ((1.0,) * 8, 0.99, False),
        ((1.0,) * 8, 0.97, True),
        ((0.90, 0.91, 0.92, 0.93), 0.94, False),
        ((0.90, 0.91, 0.92, 0.93), 0.40, True),
    ],
)
def test_a_target_that_fits_unlike_its_shadows_is_said_to(
    pool: Pool, target_result: AuditResult, shadows: tuple[float, ...], accuracy: float, warned: bool
) -> None:
    evidence, info = load_evidence(pool, "batch"), target_result.target
    assert info is not None
    infos = tuple(replace(evidence.infos[0], member_accuracy=value) for value in shadows)
    found = accuracy_warnings(replace(info, member_accuracy=accuracy), replace(evidence, infos=infos))
    assert [("--normalize" in text, "--classes" in text, "--init" in text) for text in found] == [(True,) * 3] * warned


def test_shadows_of_the_targets_own_recipe_are_seldom_said_to_be_unlike_it(
    pool: Pool, target_result: AuditResult
) -> None:
    evidence, info = load_evidence(pool, "batch"), target_result.target
    assert info is not None
    rng = np.random.default_rng(0)
    alarms = 0
    for _ in range(400):
        drawn = rng.binomial(150, 0.8, size=9) / 150
        infos = tuple(replace(evidence.infos[0], member_accuracy=value) for value in drawn[:8])
        alarms += bool(accuracy_warnings(replace(info, member_accuracy=drawn[8]), replace(evidence, infos=infos)))
    assert alarms < 0.08 * 400


@pytest.mark.parametrize(
    ("nonmembers", "imitated", "resolves"), [(0, True, True), (0, False, False), (7, True, False), (19, True, False)]
)
def test_thresholds_of_the_pool_resolve_nothing_against_the_targets_own(
    nonmembers: int, imitated: bool, resolves: bool
) -> None:
    member = np.arange(40 + nonmembers) < 40
    pool_scores = np.random.default_rng(0).normal(size=10_000)
    row = target_row("lira-online", "batch", "ood", member, member + 3.0, pool_scores, imitated=imitated)
    assert (row.auc, row.nonmembers) == (None, nonmembers)
    assert all(point.tpr is not None and point.ci is not None for point in row.tpr_at_fpr)
    assert all(point.resolved is resolves for point in row.tpr_at_fpr)
    headline = headline_of([replace(row, subset="all")], "lira-online", "batch")
    assert (headline is not None) is resolves
    assert bool(borrowed_warnings([row], imitated)) is bool(row.subset != "all")
    assert bool(borrowed_warnings([replace(row, subset="all")], imitated)) is (not imitated and not nonmembers)
