"""Pools whose models start from given weights: stored, checked, the same for every arm, target and twin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pools import write_digits
from safetensors.torch import load_file
from torch import nn

from mia_audit.initial import initial_weights
from shadow_pool.errors import UserError
from shadow_pool.models.resolve import build_model
from shadow_pool.prepare import prepare_pool
from shadow_pool.queries import PLAIN
from shadow_pool.signals import compute_signals
from shadow_pool.store.pool import Pool, open_pool
from shadow_pool.store.repair import verify_pool
from shadow_pool.store.twins import twin_pool
from shadow_pool.train.job import TrainingData
from shadow_pool.train.requery import stored_model
from shadow_pool.train.shadows import preprocess_of, starting_model
from shadow_pool.train.target import train_target
from shadow_pool.train.unit import Unit, train_units

STILL = {"optimizer": "sgd", "lr": 1e-9, "weight_decay": 0.0, "epochs": 1}
"""A recipe that moves no weight by more than rounding: what a pool's models are is where they started."""


def given_model() -> nn.Module:
    """A LeNet whose BatchNorm layers have seen data and learned: as one arm differs from another if it is ignored."""
    model = build_model("lenet", "batch", classes=10, input_shape=(1, 8, 8), seed=5)
    generator = torch.Generator().manual_seed(0)
    for layer in model.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.running_mean.uniform_(-0.5, 0.5, generator=generator)  # type: ignore[union-attr]
            layer.running_var.uniform_(1, 3, generator=generator)  # type: ignore[union-attr]
            layer.weight.data.uniform_(0.5, 1.5, generator=generator)
    return model


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The given model's checkpoint, saved from inside a DataParallel."""
    torch.save({f"module.{name}": value for name, value in given_model().state_dict().items()}, tmp_path / "base.pt")
    return tmp_path / "base.pt"


def make(folder: Path, base: Path | None, **changes: Any) -> Pool:
    source = write_digits(folder / "digits.npz", 120)
    spec = {"n": 4, "precision": "fp32", "data": {"source": str(source)}, "recipe": STILL, **changes}
    values = spec if base is None else {**spec, "init": str(base)}
    return prepare_pool(folder / "pool", values, initial=initial_weights(values))


def phi(model: nn.Module, pool: Pool, x: np.ndarray, label: np.ndarray) -> np.ndarray:
    return compute_signals(model, x, label, preprocess=preprocess_of(pool), views=(PLAIN,)).phi[:, 0]


def test_every_arm_starts_as_the_given_function(tmp_path: Path, base: Path) -> None:
    pool, data = make(tmp_path, base, arms=["batch", "none", "affine", "group"])
    assert load_file(tmp_path / "pool" / "init.safetensors").keys() == given_model().state_dict().keys()
    x, label = data.records.x, data.records.label
    expected = phi(given_model(), pool, x, label)
    for arm in ("batch", "none", "affine"):
        np.testing.assert_allclose(phi(starting_model(pool, arm, seed=1), pool, x, label), expected, atol=1e-3)
    assert not np.allclose(phi(starting_model(pool, "group"), pool, x, label), expected, atol=0.1)
    assert any("group and layer" in text for text in pool.manifest.warnings)


def test_shadows_targets_and_twins_start_there(tmp_path: Path, base: Path) -> None:
    pool, data = make(tmp_path, base, arms=["none"])
    member = np.arange(len(data.records)) % 2 == 0
    twins = twin_pool(pool, member, count=2, arms=("none",))
    for part in (pool, twins):
        for index in range(2):
            receipt = train_units([Unit(part.path, "none", index)], TrainingData.of(data))[0]
            assert receipt.outcome == "chance", receipt  # untouched random weights know nothing of the labels
    target = train_target(pool, data, arm="none", out=tmp_path / "target.pt")
    start = starting_model(pool, "none").state_dict()
    found = [stored_model(part, "none", index).state_dict() for part in (pool, twins) for index in range(2)]
    for state in (*found, torch.load(target.model, weights_only=True)):
        for name, value in start.items():
            torch.testing.assert_close(state[name], value, atol=1e-5, rtol=0)


def test_a_rerun_uses_what_is_stored_and_refuses_another_file(tmp_path: Path, base: Path) -> None:
    pool, _ = make(tmp_path, base)
    base.rename(tmp_path / "moved.pt")
    again, _ = make(tmp_path, None)
    assert again.manifest == pool.manifest
    assert again.initial is not None
    other = tmp_path / "other.pt"
    torch.save(build_model("lenet", "batch", classes=10, input_shape=(1, 8, 8), seed=6).state_dict(), other)
    with pytest.raises(UserError, match=r"made with init = 'base.pt.*asked for 'other.pt"):
        make(tmp_path, other)


def test_a_pool_made_without_refuses_given_weights(tmp_path: Path, base: Path) -> None:
    make(tmp_path, None)
    with pytest.raises(UserError, match=r"made with init = None, asked for 'base.pt"):
        make(tmp_path, base)


def test_damaged_weights_are_named_and_mended_from_the_file(tmp_path: Path, base: Path) -> None:
    pool, _ = make(tmp_path, base)
    path = pool.path / "init.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-4] + b"\0\0\0\1")
    with pytest.raises(UserError, match=r"init.safetensors .*does not match its sha256.*--init .*base.pt"):
        _ = open_pool(pool.path).initial
    assert "init.safetensors" in verify_pool(open_pool(pool.path)).tables[0]
    make(tmp_path, base)
    assert path.read_bytes() == whole
    assert verify_pool(open_pool(pool.path)).sound


def test_weights_that_do_not_fit_are_refused_before_anything_is_written(tmp_path: Path, base: Path) -> None:
    with pytest.raises(UserError, match=r"base.pt does not fit MLP"):
        make(tmp_path, base, arch="mlp")
    torch.save(build_model("lenet", "batch", classes=7, input_shape=(1, 8, 8), seed=0).state_dict(), tmp_path / "7.pt")
    with pytest.raises(UserError, match=r"head.weight is \[7, 84\], expected \[10, 84\].*its new head included"):
        make(tmp_path, tmp_path / "7.pt")
    assert not (tmp_path / "pool").exists()


def test_a_whole_module_is_opened_only_with_trust(tmp_path: Path) -> None:
    torch.save(given_model(), tmp_path / "whole.pt")
    with pytest.raises(UserError, match="--trust"):
        initial_weights({"init": str(tmp_path / "whole.pt")})
    found = initial_weights({"init": str(tmp_path / "whole.pt")}, trust=True)
    assert found is not None
    model = build_model("lenet", "batch", classes=10, input_shape=(1, 8, 8), seed=1)
    found.load(model)
    assert torch.equal(model.head.weight, given_model().head.weight)
