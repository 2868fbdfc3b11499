"""``--train FILE.py:FUNC``: a user's own training in place of our loop."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pools import write_digits
from torch.utils.data import DataLoader

from shadow_pool.data.preprocess import Scale
from shadow_pool.data.records import PoolData
from shadow_pool.errors import UserError
from shadow_pool.prepare import prepare_pool
from shadow_pool.spec import from_dict
from shadow_pool.store.pool import Pool
from shadow_pool.train.job import TrainingData
from shadow_pool.train.target import train_target
from shadow_pool.train.unit import Receipt, Unit, train_units
from shadow_pool.train.usertrain import HalfDataset

OWN = """
import copy
import torch
from torch.utils.data import DataLoader

def train(model, dataset, seed, device):
    assert torch.get_num_threads() == 1
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(8):
        for x, y in DataLoader(dataset, batch_size=16, shuffle=True):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step()

def copied(model, dataset, seed, device):
    model = copy.deepcopy(model)
    train(model, dataset, seed, device)
    return model

def wrapped(model, dataset, seed, device):
    averaged = torch.optim.swa_utils.AveragedModel(torch.nn.DataParallel(model))
    train(model, dataset, seed, device)
    averaged.update_parameters(averaged.module)
    averaged.module.module.load_state_dict(model.state_dict())
    return averaged

def diverged(model, dataset, seed, device):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))

def broken(model, dataset, seed, device):
    if len(dataset):
        torch.zeros(2, 3) @ torch.zeros(2, 3)

def leaves(model, dataset, seed, device):
    raise SystemExit(2)

def other(model, dataset, seed, device):
    return torch.nn.Linear(2, 2)

def number(model, dataset, seed, device):
    return 3

def nothing(model):
    pass
"""


def make(folder: Path, function: str, **changes: Any) -> tuple[Pool, PoolData]:
    (folder / "own.py").write_text(OWN)
    source = write_digits(folder / "digits.npz", 160)
    spec = {"n": 4, "arms": ["batch"], "data": {"source": str(source)}, "train": f"{folder / 'own.py'}:{function}"}
    return prepare_pool(folder / function, {**spec, **changes})


def train(pool: Pool, data: PoolData, arm: str = "batch", index: int = 0) -> Receipt:
    return train_units([Unit(pool.path, arm, index)], TrainingData.of(data))[0]


def test_it_trains_every_arm_and_the_target(tmp_path: Path) -> None:
    pool, data = make(tmp_path, "train", arms=["batch", "none"])
    before = torch.random.get_rng_state()
    for arm in ("batch", "none"):
        receipt = train(pool, data, arm)
        assert receipt.outcome == "trained", receipt.message
        info = pool.info(arm, 0)
        assert info.member_accuracy is not None
        assert info.member_accuracy > 0.8
        history = pool.history(arm, 0)
        assert set(history["epoch"]) == {1}
        assert "training_loss" not in set(history["metric"])
        stored = history.query("metric == 'loss' and subset == 'all' and member")["value"].item()
        assert info.loss == pytest.approx(stored, rel=1e-6)
    target = train_target(pool, data, arm="none", out=tmp_path / "target.pt")
    assert target.loss < 0.5
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_same_seed_gives_the_same_bits_in_place_or_returned(tmp_path: Path) -> None:
    files = []
    for function in ("train", "copied", "wrapped"):
        pool, data = make(tmp_path, function)
        torch.manual_seed(len(files))  # the caller's stream has no say
        receipt = train(pool, data)
        assert receipt.outcome == "trained", receipt.message
        files.append((pool.entry("batch", 0) / "phi.parquet").read_bytes())
    assert files[0] == files[1] == files[2]


@pytest.mark.filterwarnings("error")
def test_a_training_that_diverges_is_said_to_without_more_ado(tmp_path: Path) -> None:
    assert train(*make(tmp_path, "diverged")).outcome == "diverged"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("broken", r"RuntimeError: .*\(own.py, line 34\)"),
        ("leaves", r"SystemExit: 2 \(own.py, line 37\)"),
        ("other", r"must return a model with the state dict of the one it was given: .*"),
        ("number", r"must return the trained torch.nn.Module, or None .*, got int"),
    ],
)
def test_its_failures_are_in_the_receipt_with_file_and_line(tmp_path: Path, function: str, message: str) -> None:
    pool, data = make(tmp_path, function)
    receipt = train(pool, data)
    assert receipt.outcome == "failed"
    assert "\n" not in receipt.message
    assert re.search(message, receipt.message), receipt.message
    assert pool.missing("batch") == [0, 1, 2, 3]


def test_what_cannot_be_called_is_refused_before_a_pool_is_made(tmp_path: Path) -> None:
    for function, message in [
        ("nothing", r"must take \(model, dataset, seed, device\)"),
        ("OWN", "unknown name in .*own.py 'OWN'"),
        ("torch", "got a module"),
    ]:
        with pytest.raises(UserError, match=message):
            make(tmp_path, function)
        assert not (tmp_path / function).exists()


@pytest.mark.parametrize("arm", ["none+fit", "batch+penalty(1)", "none+dp(8)"])
def test_arms_that_belong_to_our_loop_are_refused(arm: str) -> None:
    with pytest.raises(UserError, match=r"belong to our training loop"):
        from_dict({"arms": ["batch", arm], "train": "own.py:train"})


def test_the_dataset_is_a_map_style_one(tmp_path: Path) -> None:
    x = np.arange(5 * 4, dtype=np.uint8).reshape(5, 1, 2, 2)
    dataset = HalfDataset(x, np.arange(5), Scale(mean=(0.5,), std=(0.25,)))
    assert len(dataset) == 5
    image, label = dataset[-1]
    assert (image.dtype, image.shape, label, type(label)) == (torch.float32, (1, 2, 2), 4, int)
    torch.testing.assert_close(image, (torch.from_numpy(x[4]) / 255 - 0.5) / 0.25)
    assert [label for _, label in dataset] == [0, 1, 2, 3, 4]
    whole, labels = next(iter(DataLoader(dataset, batch_size=5)))
    torch.testing.assert_close(whole[4], image)
    assert labels.tolist() == [0, 1, 2, 3, 4]
