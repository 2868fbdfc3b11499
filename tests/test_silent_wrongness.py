"""Mistakes made on purpose that give a plausible, wrong result, and what catches each.

| mistake | caught by |
|---|---|
| swapped in and out: members of the target | run time: AUC below .5; phi of members against the shadows' |
| swapped in and out: membership of the pool | run time: sha256 in pool.json; in code: AUC of the loss below .5 |
| the pair not left out | test: on noise the AUC is not .5 (here and test_lira_null.py) |
| training mode while querying | run time: a stored model asked again in other company |
| labels shifted: of the records | run time: fingerprint in pool.json |
| labels shifted: class order of the target | run time: accuracy against the shadows', members known or not |
| members file in another order | run time: phi of members against the shadows'; refused where two orders fit |
| augmentation on at query time | run time: a stored model asked again |
| phi of another arm or model | run time: sha256, arm and index in model.json; in code: a stored model asked again |
| members of another model (``cp other.pt model.pt``) | run time: sha256 of the model in its sidecar |

Run-time checks that are no hash are in mia_audit/audit/doubts.py and cautions.py.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from pools import tiny_pool, train_here, write_digits

from mia_audit.attacks import pool_scores
from mia_audit.attacks.shadows import Shadows
from mia_audit.audit import audit_pool, audit_target
from mia_audit.audit.doubts import fit_doubts
from mia_audit.audit.target import open_target
from mia_audit.evidence import load_evidence
from mia_audit.members import read_members
from mia_audit.metrics import roc
from mia_audit.results import AuditResult
from shadow_pool import signals
from shadow_pool.data.records import PoolData
from shadow_pool.errors import UserError
from shadow_pool.membership import draw_membership
from shadow_pool.prepare import pool_data as find_data
from shadow_pool.store.pool import Pool, open_pool
from shadow_pool.train.target import TrainedTarget, train_target

ORDER = "is the file of members another model's"
EXCHANGED = "are members and non-members exchanged?"
AGAIN = "gives another phi than was stored"
CLASSES = "another class order (--classes)"
CLASSES_UNKNOWN = "is its class order (--classes) or its preprocessing"


@pytest.fixture(scope="module")
def target(pool: Pool, pool_data: PoolData, tmp_path_factory: pytest.TempPathFactory) -> TrainedTarget:
    return train_target(pool, pool_data, out=tmp_path_factory.mktemp("target") / "model.pt", seed=3)


@pytest.fixture(scope="module")
def members(target: TrainedTarget) -> np.ndarray:
    return pd.read_parquet(target.members)["member"].to_numpy()


def audit(pool: Pool, data: PoolData, model: Path, **options: object) -> AuditResult:
    return audit_target(model, pool, data, attacks=("lira-online", "loss"), subsets="none", **options)  # type: ignore[arg-type]


def warned(result: AuditResult) -> set[str]:
    """Which of the warnings of this file a result has."""
    known = (ORDER, EXCHANGED, AGAIN, CLASSES, CLASSES_UNKNOWN)
    return {words for words in known if any(words in text for text in result.warnings)}


def test_nothing_is_said_where_nothing_is_wrong(pool: Pool, pool_data: PoolData, target: TrainedTarget) -> None:
    assert warned(audit(pool, pool_data, target.model)) == set()
    assert warned(audit_pool(pool, data=pool_data, subsets="none")) == set()
    alone = target.model.with_name("alone.pt")
    shutil.copy(target.model, alone)
    assert warned(audit(pool, pool_data, alone)) == set()


def test_other_targets_of_the_recipe_draw_no_doubt(pool: Pool, pool_data: PoolData, tmp_path: Path) -> None:
    evidence = load_evidence(pool, "batch")
    doubted = 0
    for seed in range(10, 22):
        made = train_target(pool, pool_data, out=tmp_path / f"{seed}.pt", seed=seed)
        doubted += bool(fit_doubts(open_target(made.model, pool, pool_data), pool_data.records.label, evidence))
    assert doubted <= 1


# ------------------------------------------------------------------ swapped in and out


def test_exchanged_members_of_a_target(
    pool: Pool, pool_data: PoolData, target: TrainedTarget, members: np.ndarray, tmp_path: Path
) -> None:
    np.save(tmp_path / "m.npy", ~members)
    result = audit(pool, pool_data, target.model, members=tmp_path / "m.npy")
    assert {EXCHANGED, ORDER} <= warned(result)
    assert all(row.auc is not None and row.auc < 0.45 for row in result.attacks)


def test_exchanged_membership_of_a_pool(pool_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(pool_folder, tmp_path / "pool")
    path = tmp_path / "pool" / "membership.npy"
    np.save(path, ~np.load(path))
    with pytest.raises(UserError, match=r"membership\.npy does not match its sha256"):
        audit_pool(open_pool(tmp_path / "pool"))
    monkeypatch.setattr(Pool, "membership", ~open_pool(pool_folder).membership)
    result = audit_pool(open_pool(pool_folder), subsets="none")
    assert EXCHANGED in warned(result)
    assert all(row.auc is not None and row.auc < 0.45 for row in result.attacks if row.attack == "loss")


# ------------------------------------------------------------------ the pair not left out


def test_a_pair_that_is_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def mean_auc() -> float:
        found = []
        for seed in range(8):
            membership = draw_membership(seed, 8, 1000)
            phi = np.random.default_rng(seed).standard_normal((8, 1000))
            scores = pool_scores("lira-online", phi, membership, spread="moderated")
            found.append(roc(membership, scores).auc)
        return float(np.mean(found))

    assert abs(mean_auc() - 0.5) < 0.01
    groups = Shadows.groups
    monkeypatch.setattr(Shadows, "groups", lambda self, leave_out: groups(self, "one"))
    assert mean_auc() < 0.48


# ------------------------------------------------------------------ how models are asked


def ask_in_training_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(self: torch.nn.Module) -> torch.nn.Module:
        return self.train()

    monkeypatch.setattr(torch.nn.Module, "eval", train)


def ask_about_augmented_records(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = torch.Generator().manual_seed(0)

    def shifted(batch: torch.Tensor, view: object) -> torch.Tensor:
        by = torch.randint(-1, 2, (len(batch),), generator=rng).tolist()
        return torch.stack([record.roll(pixels, dims=-1) for record, pixels in zip(batch, by, strict=True)])

    monkeypatch.setattr(signals, "apply_view", shifted)


@pytest.mark.parametrize("mistake", [ask_in_training_mode, ask_about_augmented_records])
def test_models_asked_otherwise_than_those_stored(
    pool: Pool, pool_data: PoolData, target: TrainedTarget, monkeypatch: pytest.MonkeyPatch, mistake: object
) -> None:
    mistake(monkeypatch)  # type: ignore[operator]
    assert AGAIN in warned(audit(pool, pool_data, target.model))
    assert AGAIN in warned(audit_pool(pool, data=pool_data, subsets="none"))


@pytest.mark.parametrize("mistake", [ask_in_training_mode, ask_about_augmented_records])
def test_a_pool_whose_own_models_were_asked_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: object
) -> None:
    mistake(monkeypatch)  # type: ignore[operator]
    pool, data = tiny_pool(tmp_path / "pool", {"n": 6, "arms": ["batch"], "recipe": {"epochs": 12}})
    train_here(pool, data)
    assert AGAIN in warned(audit_pool(pool, data=data, subsets="none"))


# ------------------------------------------------------------------ labels


def test_shifted_labels_of_the_records(tmp_path: Path) -> None:
    pool, data = tiny_pool(tmp_path / "pool")
    with np.load(tmp_path / "pool.npz") as archive:
        shifted = (archive["y"] + 1) % 10
    write_digits(tmp_path / "pool.npz", 120, y=shifted)
    with pytest.raises(UserError, match="the records do not match the pool"):
        find_data(pool)
    assert len(data.records) == 102


@pytest.mark.parametrize("known", [True, False])
def test_another_order_of_classes_in_the_target(
    pool: Pool, pool_data: PoolData, target: TrainedTarget, members: np.ndarray, tmp_path: Path, known: bool
) -> None:
    state = torch.load(target.model, weights_only=True)
    moved = {name: value.roll(1, dims=0) if name.startswith("head") else value for name, value in state.items()}
    torch.save(moved, tmp_path / "moved.pt")
    np.save(tmp_path / "m.npy", members)
    result = audit(pool, pool_data, tmp_path / "moved.pt", members=tmp_path / "m.npy" if known else None)
    assert (CLASSES if known else CLASSES_UNKNOWN) in warned(result)


# ------------------------------------------------------------------ members


def test_members_in_another_order(
    pool: Pool, pool_data: PoolData, target: TrainedTarget, members: np.ndarray, tmp_path: Path
) -> None:
    np.save(tmp_path / "m.npy", np.random.default_rng(0).permutation(members))
    result = audit(pool, pool_data, target.model, members=tmp_path / "m.npy")
    assert ORDER in warned(result)
    headline = next(row for row in result.attacks if row.attack == "lira-online")
    assert headline.auc == pytest.approx(0.5, abs=0.08)  # it would say that nothing leaks


def test_bools_that_fit_the_order_of_records_and_of_the_source_are_refused(tmp_path: Path) -> None:
    """No record is held out, and ids stand in another order than the source's rows."""
    records = pd.DataFrame({"id": list("abcd"), "source_index": [3, 2, 1, 0], "role": ["record"] * 4})
    np.save(tmp_path / "m.npy", np.array([True, False, False, False]))
    with pytest.raises(UserError, match="4 bools fit both the order of the records and that of the source's rows"):
        read_members(tmp_path / "m.npy", records)
    same = records.assign(source_index=[0, 1, 2, 3])
    assert read_members(tmp_path / "m.npy", same).tolist() == [True, False, False, False]


def test_members_of_another_model(pool: Pool, pool_data: PoolData, target: TrainedTarget, tmp_path: Path) -> None:
    other = train_target(pool, pool_data, out=tmp_path / "other.pt", seed=4)
    model, sidecar = tmp_path / "model.pt", tmp_path / "model.members.parquet"
    shutil.copy(other.model, model)
    shutil.copy(target.members, sidecar)
    with pytest.raises(UserError, match=r"model\.members\.parquet was written for another model .*--members"):
        audit(pool, pool_data, model)
    result = audit(pool, pool_data, model, members=sidecar)
    assert any("its members are taken as this one's" in text for text in result.warnings)


# ------------------------------------------------------------------ phi of another arm


@pytest.mark.parametrize("what", ["phi.parquet", "the whole model"])
def test_files_of_another_arm_or_model(pool_folder: Path, tmp_path: Path, what: str) -> None:
    shutil.copytree(pool_folder, tmp_path / "pool")
    pool = open_pool(tmp_path / "pool")
    for other in (pool.entry("none", 0), pool.entry("batch", 5)):
        ours = pool.entry("batch", 0)
        shutil.rmtree(ours)
        shutil.copytree(pool_folder / "arms" / "batch" / "0000", ours)
        if what == "phi.parquet":
            shutil.copy(other / what, ours / what)
        else:
            shutil.rmtree(ours)
            shutil.copytree(other, ours)
        with pytest.raises(
            UserError, match=r"phi\.parquet does not match its sha256|belongs to arm (none|batch), model"
        ):
            audit_pool(open_pool(tmp_path / "pool"))


@pytest.mark.parametrize("mistake", ["arm", "model"])
def test_phi_read_of_another_arm_or_model(
    pool: Pool, pool_data: PoolData, target: TrainedTarget, monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    right = Pool.signals

    def wrong(self: Pool, arm: str, index: int, **options: object) -> signals.Signals:
        other = ("none", index) if mistake == "arm" else (arm, index ^ 1)
        return right(self, *other, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Pool, "signals", wrong)
    assert AGAIN in warned(audit(pool, pool_data, target.model))
    assert AGAIN in warned(audit_pool(pool, data=pool_data, subsets="none"))
