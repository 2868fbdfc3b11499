import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pools import tiny_pool

from mia_audit.audit.target import open_target
from shadow_pool.errors import UserError
from shadow_pool.membership import draw_coins
from shadow_pool.models.resolve import build_model
from shadow_pool.train.shadows import starting_model
from shadow_pool.train.target import read_facts, train_target


def test_the_target_is_a_plain_state_dict_with_its_members_beside_it(pool, pool_data, tmp_path):
    made = train_target(pool, pool_data, arm="batch", seed=3, out=tmp_path / "deep" / "model.pt")
    assert made.members == tmp_path / "deep" / "model.members.parquet"
    state = torch.load(made.model, weights_only=True)
    model = build_model("lenet", "batch", classes=10, input_shape=(1, 8, 8), seed=0)
    model.load_state_dict(state)
    members = pd.read_parquet(made.members)
    assert members["id"].tolist() == pool_data.records.id.tolist()
    assert np.array_equal(members["member"], draw_coins(3, len(members)))
    facts = read_facts(made.members)
    assert (facts["arm"], facts["drawn"], facts["seed"]) == ("batch", "coins", "3")
    assert sorted(path.name for path in made.model.parent.iterdir()) == ["model.members.parquet", "model.pt"]


def test_equal_seeds_give_equal_weights_and_members_and_others_do_not(pool, pool_data, tmp_path):
    states = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        made = train_target(pool, pool_data, arm="none", seed=seed, out=tmp_path / f"{name}.pt")
        states.append(torch.load(made.model, weights_only=True))
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert not all(torch.equal(states[0][key], states[2][key]) for key in states[0])


def test_a_fit_target_reaches_the_usual_loss_of_the_pools_batch_models(pool, pool_data, tmp_path):
    usual = np.median([info.loss for info in pool.scan("batch")[0].values()])
    made = train_target(pool, pool_data, arm="none+fit", out=tmp_path / "model.pt")
    assert made.loss <= usual


def test_a_target_that_diverges_writes_nothing(tmp_path):
    pool, data = tiny_pool(tmp_path / "p", {"recipe": {"optimizer": "sgd", "lr": 1e5, "epochs": 3}})
    with pytest.raises(UserError, match="diverged in epoch"):
        train_target(pool, data, arm="none", out=tmp_path / "model.pt")
    assert not (tmp_path / "model.pt").exists()
    with pytest.raises(UserError, match="none; train them first"):
        train_target(pool, data, arm="none+fit", out=tmp_path / "model.pt")


def test_members_too_few_to_train_on_are_refused(tmp_path):
    pool, data = tiny_pool(tmp_path / "p", x=np.zeros((5, 8, 8), np.uint8), y=np.array([0, 1, 0, 1, 0]))
    seed = next(seed for seed in range(100) if draw_coins(seed, 4).sum() < 2)
    with pytest.raises(UserError, match="at least 2 are needed; use another --seed"):
        train_target(pool, data, seed=seed, out=tmp_path / "model.pt")


def test_facts_of_files_that_hold_none_are_empty(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"not parquet")
    assert read_facts(tmp_path / "a.parquet") == {}
    assert read_facts(tmp_path / "missing.parquet") == {}
    for metadata in ({}, {b"mia_audit": b"{"}, {b"mia_audit": b"[1]"}, {b"mia_audit": b"[" * 10**5}):
        pq.write_table(pa.table({"id": ["a"]}).replace_schema_metadata(metadata), tmp_path / "b.parquet")
        assert read_facts(tmp_path / "b.parquet") == {}
    fine = {b"mia_audit": json.dumps({"arm": "none"}).encode()}
    pq.write_table(pa.table({"id": ["a"]}).replace_schema_metadata(fine), tmp_path / "b.parquet")
    assert read_facts(tmp_path / "b.parquet") == {"arm": "none"}


OWN = """
from torch import nn


def plain(classes):
    norm = nn.BatchNorm1d(8, track_running_stats=False)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), norm, nn.ReLU(), nn.Linear(8, classes))
"""


@pytest.mark.parametrize(
    ("arch", "arms", "arm"),
    [
        ("lenet", ["none", "batch"], "batch"),
        ("lenet", ["batch", "group", "none"], "none"),
        ("lenet", ["batch", "none", "group"], "group"),
        ("lenet", ["batch", "affine"], "affine"),
        ("own.py:plain", ["batch", "none"], "batch"),
        ("own.py:plain", ["batch", "none"], "none"),
    ],
)
def test_the_arm_is_told_from_the_weights(tmp_path, monkeypatch, arch, arms, arm):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    pool, data = tiny_pool(tmp_path / "pool", {"arch": arch, "arms": arms})
    torch.save(starting_model(pool, arm, seed=1).state_dict(), "model.pt")
    assert open_target(tmp_path / "model.pt", pool, data).arm == arm


def test_weights_that_fit_no_arm_are_named(tmp_path):
    pool, data = tiny_pool(tmp_path / "pool", {"arms": ["batch"]})
    torch.save({"head.weight": torch.ones(2, 3)}, tmp_path / "model.pt")
    with pytest.raises(UserError, match=r"does not fit LeNet: .* \(head.weight is \[2, 3\]"):
        open_target(tmp_path / "model.pt", pool, data)
