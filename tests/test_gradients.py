"""Per-record gradients against one backward pass per record."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mia_audit.gradients import RecordGradients, batch_gradients, eval_gradients
from shadow_pool import seeds
from shadow_pool.errors import UserError
from shadow_pool.models.norms import to_norm
from shadow_pool.models.zoo import MLP, ZOO, LeNet

SHAPE = (1, 12, 12)


class Squared(nn.BatchNorm1d):
    """A BatchNorm subclass with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) ** 2 / 4


class Stranger(nn.Module):
    """What users bring: frozen, affine-free, subclassed BatchNorm, dropout, a shared layer, a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(144, 16)
        self.frozen = nn.BatchNorm1d(16)
        self.frozen.requires_grad_(False)
        self.shared = nn.Linear(16, 16)
        self.plain = nn.BatchNorm1d(16, affine=False)
        self.squared = Squared(16)
        self.dropout = nn.Dropout(0.5)
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = F.relu(self.frozen(self.first(x.flatten(1))))
        x = F.relu(self.plain(self.shared(x)))
        x = self.dropout(self.squared(self.shared(x)))
        return {"logits": self.head(self.scale * x)}


def preprocess(x: Tensor) -> Tensor:
    return x.double() / 64 - 2


def build(make: Callable[[], nn.Module]) -> nn.Module:
    """A float64 model whose running statistics and scales are not the initial ones."""
    with seeds.torch_stream(3):
        model = make().double()
        for name, parameter in model.named_parameters():
            if "norm" in name or "squared" in name or "frozen" in name:
                parameter.data.uniform_(0.4, 1.8)
    x, _ = records(64, seed=9)
    with torch.no_grad():
        model.train()(preprocess(torch.from_numpy(x)))
    return model


def records(count: int, seed: int = 0, classes: int = 4) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, *SHAPE), dtype=np.uint8), rng.integers(0, classes, count)


def logits(output: Tensor | dict[str, Tensor]) -> Tensor:
    return output if isinstance(output, Tensor) else output["logits"]


def one_by_one(model: nn.Module, losses: Callable[[int], Tensor], rows: range) -> RecordGradients:
    """The slow oracle: one ordinary backward for each record, .grad read afterwards."""
    values, norms, gammas = [], [], []
    for row in rows:
        model.zero_grad()
        loss = losses(row)
        loss.backward()
        values.append(float(loss.detach()))
        slopes = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        norms.append(float(torch.cat([slope.flatten() for slope in slopes.values()]).norm()))
        layers = [name for name, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        gammas.append({layer: slopes[f"{layer}.weight"].numpy() for layer in layers if f"{layer}.weight" in slopes})
    model.zero_grad()
    return RecordGradients(
        np.array(values), np.array(norms), {layer: np.stack([g[layer] for g in gammas]) for layer in gammas[0]}
    )


def assert_equal(found: RecordGradients, expected: RecordGradients) -> None:
    np.testing.assert_allclose(found.loss, expected.loss, rtol=1e-9)
    np.testing.assert_allclose(found.norm, expected.norm, rtol=1e-8)
    assert list(found.gamma) == list(expected.gamma)
    for layer, slope in expected.gamma.items():
        np.testing.assert_allclose(found.gamma[layer], slope, rtol=1e-7, atol=1e-10)


def lenet(norm: str) -> Callable[[], nn.Module]:
    return lambda: to_norm(LeNet(4, SHAPE), norm)


MODELS = {
    "stranger": Stranger,
    "mlp": lambda: MLP(4, SHAPE, width=16),
    **{f"lenet-{norm}": lenet(norm) for norm in ("batch", "none", "group", "affine")},
    "resnet8": lambda: ZOO["resnet8"](4, SHAPE, width=4),
    "densenet": lambda: ZOO["densenet22"](4, SHAPE, growth=4),
}


@pytest.mark.parametrize("name", MODELS)
def test_eval_gradients_are_one_by_one(name):
    model = build(MODELS[name])
    x, label = records(70)
    found = eval_gradients(model, x, label, preprocess=preprocess)
    model.eval()
    expected = one_by_one(
        model,
        lambda row: F.cross_entropy(
            logits(model(preprocess(torch.from_numpy(x[row : row + 1])))), torch.from_numpy(label[row : row + 1])
        ),
        range(70),
    )
    assert_equal(found, expected)


@pytest.mark.parametrize("name", MODELS)
def test_batch_gradients_are_one_by_one_and_leave_the_model(name):
    model = build(MODELS[name])
    x, label = records(12)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.eval()
    found = batch_gradients(model, x, label, np.array([0, 5, 11]), preprocess=preprocess)
    assert not any(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0)

    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.eval()

    def loss(row: int) -> Tensor:
        out = logits(model(preprocess(torch.from_numpy(x))))
        return F.cross_entropy(out, torch.from_numpy(label), reduction="none")[row]

    expected = one_by_one(model, loss, range(12))
    rows = [0, 5, 11]
    gamma = {layer: slopes[rows] for layer, slopes in expected.gamma.items()}
    assert_equal(found, RecordGradients(expected.loss[rows], expected.norm[rows], gamma))


def test_in_float32_both_are_within_1e_5_of_one_by_one():
    model = build(lenet("batch")).float()
    single = lambda x: preprocess(x).float()  # noqa: E731
    x, label = records(32)
    found = eval_gradients(model, x, label, preprocess=single)
    within = batch_gradients(model, x, label, np.arange(32), preprocess=single)
    model.eval()
    expected = one_by_one(
        model,
        lambda row: F.cross_entropy(
            model(single(torch.from_numpy(x[row : row + 1]))), torch.from_numpy(label[row : row + 1])
        ),
        range(32),
    )
    np.testing.assert_allclose(found.norm, expected.norm, rtol=1e-5)
    model.train()
    expected = one_by_one(
        model,
        lambda row: F.cross_entropy(model(single(torch.from_numpy(x))), torch.from_numpy(label), reduction="none")[row],
        range(32),
    )
    np.testing.assert_allclose(within.norm, expected.norm, rtol=1e-5)


class Branching(nn.Module):
    """A forward that asks for a value, and BatchNorm that keeps no statistics: no vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3)
        self.untracked = nn.BatchNorm2d(4, track_running_stats=False)
        self.head = nn.Linear(400, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.untracked(self.first(x))
        if float(x.detach().sum()) > 1e9:
            raise AssertionError
        return self.head(F.relu(x).flatten(1))


def untracked() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, track_running_stats=False), nn.Flatten(), nn.Linear(400, 4)
    )


@pytest.mark.parametrize("make", [Branching, untracked], ids=["branching", "untracked"])
def test_what_vmap_cannot_run_is_taken_one_by_one(make):
    model = build(make)
    x, label = records(6)
    found = eval_gradients(model, x, label, preprocess=preprocess)
    model.eval()
    expected = one_by_one(
        model,
        lambda row: F.cross_entropy(
            model(preprocess(torch.from_numpy(x[row : row + 1]))), torch.from_numpy(label[row : row + 1])
        ),
        range(6),
    )
    assert_equal(found, expected)


def test_a_model_that_takes_no_record_alone_is_refused():
    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 4), nn.BatchNorm1d(4, track_running_stats=False)).double()
    x, label = records(4)
    with pytest.raises(UserError, match="a batch of one in evaluation mode, on which Sequential fails: ValueError"):
        eval_gradients(model, x, label, preprocess=preprocess)


class Attending(nn.Module):
    """Dropout that is no layer: probabilities handed on by attention, a recurrent layer and the forward itself."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 2, dropout=dropout, batch_first=True)
        self.norm = nn.BatchNorm1d(12)
        self.recurrent = nn.GRU(12, 6, num_layers=2, dropout=dropout, batch_first=True)
        self.dropout = dropout
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.attention(x[:, 0], x[:, 0], x[:, 0])
        x, _ = self.recurrent(self.norm(x))
        return self.head(F.dropout(x[:, -1], self.dropout, self.training))


def test_dropout_is_off_wherever_it_is_written():
    x, label = records(10)
    rows = np.arange(10)
    with_dropout, without = (build(lambda p=p: Attending(p)) for p in (0.6, 0.0))
    without.load_state_dict(with_dropout.state_dict())
    for measure in (eval_gradients, lambda *a, **ask: batch_gradients(*a, rows, **ask)):
        found, expected = (measure(model, x, label, preprocess=preprocess) for model in (with_dropout, without))
        assert_equal(found, expected)
    assert not np.allclose(
        eval_gradients(without, x, label, preprocess=preprocess).norm,
        batch_gradients(without, x, label, rows, preprocess=preprocess).norm,
    )
    assert all(module.training for module in with_dropout.modules())


def test_layers_that_a_model_keeps_frozen_stay_so():
    class Frozen(nn.Sequential):
        def train(self, mode: bool = True) -> Frozen:
            super().train(mode)
            self[1].eval()
            return self

    model = build(lambda: Frozen(nn.Flatten(), nn.BatchNorm1d(144), nn.Linear(144, 4)))
    x, label = records(8)
    alone = eval_gradients(model, x, label, preprocess=preprocess)
    assert_equal(batch_gradients(model, x, label, np.arange(8), preprocess=preprocess), alone)


def test_the_two_definitions_differ_through_batchnorm_only():
    x, label = records(16)
    for norm, same in (("batch", False), ("group", True)):
        model = build(lenet(norm))
        alone = eval_gradients(model, x, label, preprocess=preprocess).norm
        within = batch_gradients(model, x, label, np.arange(16), preprocess=preprocess).norm
        assert np.allclose(alone, within, rtol=1e-9) is same


def test_a_step_on_a_record_moves_gamma_against_its_slope():
    model = build(lenet("batch"))
    x, label = records(1)
    slope = eval_gradients(model, x, label, preprocess=preprocess).gamma["norm2"][0]

    def loss() -> float:
        with torch.no_grad():
            out = model.eval()(preprocess(torch.from_numpy(x)))
            return float(F.cross_entropy(out, torch.from_numpy(label)))

    before, step = loss(), 1e-6
    with torch.no_grad():
        model.norm2.weight -= step * torch.from_numpy(slope)
    assert (before - loss()) / step == pytest.approx((slope**2).sum(), rel=1e-3)


def test_a_single_logit_model():
    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 1)).double()
    x, label = records(3, classes=2)
    found = eval_gradients(model, x, label, preprocess=preprocess).norm
    inputs = preprocess(torch.from_numpy(x)).flatten(1)
    with torch.no_grad():
        residual = torch.sigmoid(model(preprocess(torch.from_numpy(x))))[:, 0] - torch.from_numpy(label)
    np.testing.assert_allclose(found, (residual.abs() * (inputs.square().sum(1) + 1).sqrt()).numpy(), rtol=1e-9)


def test_what_does_not_fit_is_refused():
    model = lenet("batch")()
    x, label = records(4)
    with pytest.raises(ValueError, match=r"label must be \[4\]"):
        eval_gradients(model, x, label[:3], preprocess=preprocess)
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="requires a gradient"):
        batch_gradients(model, x, label, np.arange(1), preprocess=preprocess)
