"""The gamma/sigma penalty: value, derivative, projection, and what it does in a user's own loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shadow_pool.errors import UserError
from shadow_pool.models.norms import ratios
from shadow_pool.models.zoo import ZOO
from shadow_pool.train.penalty import penalty, project_


def model_with_ratios() -> nn.Module:
    """Three penalized layers of different widths and eps, in float64, and two that hold no gamma to penalize."""
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(
        nn.BatchNorm1d(5, eps=0.1),
        nn.BatchNorm2d(2),
        nn.BatchNorm1d(1, eps=1e-3),
        nn.BatchNorm1d(4, affine=False),
        nn.BatchNorm1d(4, track_running_stats=False),
    ).double()
    with torch.no_grad():
        for layer in model[:3]:
            layer.weight.copy_(torch.randn(layer.num_features, generator=generator, dtype=torch.float64) * 2)
            layer.running_var.copy_(torch.rand(layer.num_features, generator=generator, dtype=torch.float64) + 0.2)
    return model


@pytest.mark.parametrize("target", [0.0, 0.5, 1.0, 1.7])
def test_value_and_derivative_in_closed_form(target: float) -> None:
    model = model_with_ratios()
    found = penalty(model, target=target)
    found.backward()
    value = 0.0
    for layer in model[:3]:
        gamma, sigma = layer.weight.detach().numpy(), np.sqrt(layer.running_var.numpy() + layer.eps)
        excess = np.maximum(np.abs(gamma) / sigma - target, 0)
        value += np.mean(excess**2)
        derivative = 2 * excess * np.sign(gamma) / sigma / len(gamma)
        np.testing.assert_allclose(layer.weight.grad.numpy(), derivative, rtol=1e-12, atol=1e-15)
        assert layer.bias.grad is None
        assert layer.running_var.grad is None
    assert found.item() == pytest.approx(value, rel=1e-12)
    assert model[4].weight.grad is None


def test_derivative_agrees_with_finite_differences() -> None:
    model = model_with_ratios()
    gamma = model[0].weight.detach().clone().requires_grad_()

    def value(gamma: torch.Tensor) -> torch.Tensor:
        del model[0].weight
        model[0].weight = nn.Parameter(gamma.detach())
        return penalty(model) + 0 * gamma.sum()

    model[0].weight.grad = None
    penalty(model).backward()
    analytic = model[0].weight.grad.clone()
    step = 1e-6
    for channel in range(5):
        bump = torch.zeros(5, dtype=torch.float64)
        bump[channel] = step
        slope = (value(gamma + bump) - value(gamma - bump)).item() / (2 * step)
        assert slope == pytest.approx(analytic[channel].item(), abs=1e-7)


@pytest.mark.parametrize("target", [0.5, 1.0])
def test_projection_bounds_the_ratio_and_touches_nothing_else(target: float) -> None:
    model = model_with_ratios()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = ratios(model)
    project_(model, target=target)
    for name, ratio in ratios(model).items():
        if model[int(name)].affine:
            np.testing.assert_allclose(ratio, np.minimum(found[name], target), rtol=1e-12)
    for key, value in model.state_dict().items():
        if not key.endswith("weight"):
            assert torch.equal(value, before[key])
        assert torch.equal(value.sign(), before[key].sign())
    assert penalty(model, target=target).item() == pytest.approx(0, abs=1e-24)


def test_a_frozen_gamma_is_left_alone() -> None:
    model = model_with_ratios()
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    project_(model, target=0.01)
    assert torch.equal(model[0].weight, before)
    assert max(ratios(model)["1"].max(), ratios(model)["2"].max()) <= 0.01 + 1e-9


def test_in_a_training_loop_both_forms_keep_ratios_down() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(64, 1, 8, 8, generator=generator), torch.randint(0, 10, (64,), generator=generator)
    largest = {}
    for form in ("free", "penalty", "projection"):
        torch.manual_seed(0)
        model = ZOO["lenet"](10, (1, 8, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(30):
            loss = F.cross_entropy(model(x), y)
            if form == "penalty":
                loss = loss + penalty(model)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if form == "projection":
                project_(model)
        largest[form] = max(ratio.max() for ratio in ratios(model).values())
    assert largest["projection"] <= 1 + 1e-5
    assert largest["penalty"] < largest["free"] / 1.5


def test_a_model_without_batchnorm_is_refused() -> None:
    for call in (penalty, project_):
        with pytest.raises(UserError, match="Linear has no BatchNorm layer with a gamma"):
            call(nn.Linear(2, 2))
