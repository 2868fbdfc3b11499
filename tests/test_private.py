"""DP-SGD arms: what is refused, what is spent, and that a run can be repeated."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from shadow_pool.arms import parse_arm
from shadow_pool.errors import UserError
from shadow_pool.models.resolve import build_model
from shadow_pool.spec import Recipe
from shadow_pool.train import private
from shadow_pool.train.job import TrainingJob
from shadow_pool.train.loop import Training, train_model
from shadow_pool.train.private import DELTA, epsilon_spent, noise_multiplier, refuse_unprivate


class CentredOnBatch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)


class InPlace(nn.Module):
    """Works in place after a layer, as torchvision's residual blocks do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.head = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        out = self.second(self.first(x))
        out += x
        return self.head(out)


def job(arm: str = "none+dp(8)", **recipe: object) -> TrainingJob:
    return TrainingJob(parse_arm(arm), Recipe(**{"epochs": 2, "batch_size": 16} | recipe), seed=5, index=1)


def features(n: int = 60) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((n, 6)).astype(np.float32), rng.integers(0, 3, n)


def train(model: nn.Module, task: TrainingJob, n: int = 60) -> tuple[dict[str, Tensor], object]:
    x, y = features(n)
    outcome = train_model(Training(model, x, y, task), preprocess=lambda batch: batch)
    return {key: value.clone() for key, value in model.state_dict().items()}, outcome


def make(arch: str = "mlp(width=8)", norm: str = "none") -> nn.Module:
    return build_model(arch, norm, classes=3, input_shape=(6,), seed=0)


def test_a_run_can_be_repeated_and_leaves_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    first, outcome = train(make(), job())
    second, _ = train(make(), job())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert outcome.epochs == 2
    assert 7.5 < outcome.epsilon <= 8
    other, _ = train(make(), TrainingJob(parse_arm("none+dp(8)"), job().recipe, seed=6, index=1))
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_one_record_alone_moves_the_sum_by_at_most_the_clipping_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without noise and with every record in every batch, one step moves the weights by lr * clipped mean gradient.
    monkeypatch.setattr(private, "noise_multiplier", lambda *_: 0.0)
    monkeypatch.setattr(private, "epsilon_spent", lambda *_: math.inf)
    x, y = features(20)
    task = job(epochs=1, batch_size=20, lr=1.0, momentum=0.0, weight_decay=0.0, schedule="constant", gradient_clip=0.1)
    model = make()
    initial = {name: value.detach().clone() for name, value in model.named_parameters()}
    expected = {name: torch.zeros_like(value) for name, value in initial.items()}
    for row in range(20):
        loss = F.cross_entropy(model(torch.from_numpy(x[row : row + 1])), torch.from_numpy(y[row : row + 1]))
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norm = torch.sqrt(sum(g.square().sum() for g in gradients))
        for name, g in zip(expected, gradients, strict=True):
            expected[name] += g * min(1.0, 0.1 / norm.item()) / 20
    for parts in (1_000_000, 7 * sum(p.numel() for p in model.parameters())):  # in one piece, and in pieces of seven
        monkeypatch.setattr(private, "_GRADIENT_VALUES", parts)
        model = make()
        train_model(Training(model, x, y, task), preprocess=lambda batch: batch)
        for name, value in model.named_parameters():
            torch.testing.assert_close(initial[name] - value, expected[name], rtol=1e-3, atol=1e-7)


def test_noise_is_gaussian_of_the_stated_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "noise_multiplier", lambda *_: 50.0)
    task = job(epochs=1, batch_size=60, lr=1.0, momentum=0.0, weight_decay=0.0, schedule="constant", gradient_clip=0.5)
    model = make("mlp(width=60, depth=2)")
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    train(model, task)
    moved = (torch.cat([p.detach().flatten() for p in model.parameters()]) - before).numpy()
    # One step, 60 records: noise of 50 x 0.5 / 60, in which the clipped gradients are lost.
    assert stats.kstest(moved, "norm", args=(0, 50 * 0.5 / 60)).pvalue > 0.01


def test_the_accountant_agrees_with_the_gaussian_mechanism() -> None:
    # At sampling rate 1 and one step the exact bound is known (Balle and Wang 2018, arXiv 1805.06530, theorem 8); the
    # accountant's is looser but not by much.
    noise = 2.0
    epsilon = epsilon_spent(noise, 1.0, 1)
    exact = stats.norm.cdf(0.5 / noise - epsilon * noise) - math.exp(epsilon) * stats.norm.cdf(
        -0.5 / noise - epsilon * noise
    )
    assert DELTA / 30 < exact <= DELTA
    assert epsilon_spent(noise_multiplier(3.0, 0.1, 200), 0.1, 200) == pytest.approx(3.0, abs=0.011)
    assert noise_multiplier(1.0, 0.1, 200) > noise_multiplier(3.0, 0.1, 200)


def test_an_empty_batch_is_a_step_of_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "noise_multiplier", lambda *_: 1.0)
    sizes, gradients = [], private._put_record_gradients

    def keep(model: nn.Module, x: Tensor, labels: Tensor, label_smoothing: float) -> Tensor:
        sizes.append(len(labels))
        return gradients(model, x, labels, label_smoothing)

    monkeypatch.setattr(private, "_put_record_gradients", keep)
    weights, outcome = train(make(), job(epochs=15, batch_size=2), n=8)
    assert len(sizes) == 60
    assert 0 in sizes
    assert np.mean(sizes) == pytest.approx(2, abs=0.6)
    assert all(value.isfinite().all() for value in weights.values())
    assert math.isfinite(outcome.loss)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.BatchNorm1d(6), "0 mixes the records of a batch"),
        (nn.BatchNorm1d(6, affine=False), "0 mixes the records of a batch"),
        (CentredOnBatch(), "0 mixes the records of a batch"),
        (
            nn.Sequential(nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()),
            "buffer 0.1.running_mean is computed from the records",
        ),
    ],
)
def test_models_that_clipping_does_not_bound_are_refused(layer: nn.Module, message: str) -> None:
    with pytest.raises(UserError, match=message):
        train(nn.Sequential(layer, nn.Linear(6, 3)), job())


def test_layers_that_treat_records_alone_pass() -> None:
    frozen = nn.BatchNorm1d(6).eval()
    frozen.train = lambda mode=True: frozen  # type: ignore[method-assign]
    refuse_unprivate(nn.Sequential(frozen, nn.Dropout(), nn.LayerNorm(6), nn.Linear(6, 3)), torch.randn(4, 6), arm="a")


def test_layers_in_place_and_a_single_logit_train() -> None:
    _, outcome = train(InPlace(), job(lr=0.1))
    assert math.isfinite(outcome.loss)
    model = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    x, y = features()
    assert train_model(Training(model, x, y % 2, job()), preprocess=lambda batch: batch).epochs == 2


def test_digits_are_learned_and_epochs_reported() -> None:
    digits = load_digits()
    x = (digits.images[:600, None] / 8 - 1).astype(np.float32)
    model = build_model("mlp(width=32, depth=1)", "group", classes=10, input_shape=(1, 8, 8), seed=0)
    seen: list[int] = []
    training = Training(
        model,
        x,
        digits.target[:600].astype(np.int64),
        job("group+dp(8)", lr=0.3, epochs=6, batch_size=64),
        on_epoch=lambda epoch, trained, loss: seen.append(epoch),
    )
    outcome = train_model(training, preprocess=lambda batch: batch)
    assert seen == [1, 2, 3, 4, 5, 6]
    assert outcome.loss < 1.2
    assert not any(p.grad_sample is not None or p.summed_grad is not None for p in model.parameters())


def test_a_forward_that_branches_on_values_is_refused() -> None:
    class Branching(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if x.sum() > 0 else -x)

    with pytest.raises(UserError, match="cannot take through Branching: RuntimeError"):
        train(Branching(6, 3), job())


def test_an_epsilon_that_no_noise_reaches_is_said() -> None:
    with pytest.raises(UserError, match=r"\+dp\(1e-07\): no noise keeps"):
        noise_multiplier(1e-7, 1.0, 100_000)
