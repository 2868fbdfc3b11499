"""shadow_pool.models.kernels: BatchNorm and max pooling as torch's, to rounding."""

import copy
import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import nn

from shadow_pool.models.kernels import fast_kernels, is_narrow
from shadow_pool.models.resolve import build_model
from shadow_pool.seeds import torch_stream

SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 7), st.integers(1, 9), st.integers(1, 9))


def run(module: nn.Module, x: torch.Tensor, *, fast: bool, weights_seed: int = 3):
    """Output, gradients of input and parameters for a random loss, and buffers, of a copy of the module."""
    module, x = copy.deepcopy(module), x.clone().requires_grad_()
    if fast:
        with fast_kernels(module):
            out = module(x)
    else:
        out = module(x)
    with torch_stream(weights_seed):
        weights = torch.randn(out.shape)
    (out * weights).sum().backward()
    gradients = [p.grad for p in module.parameters()]
    return out.detach(), x.grad, gradients, [b.clone() for b in module.buffers()]


def random_input(shape: tuple[int, ...], seed: int, *, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
    with torch_stream(seed):
        return torch.randn(shape) * scale + shift


@settings(deadline=None)
@given(SHAPES, st.integers(0, 1000))
def test_pooling_is_torchs_to_the_bit(shape, seed):
    x = random_input((shape[0], shape[1], shape[2] + 1, shape[3] + 1), seed)
    ours, theirs = (run(nn.MaxPool2d(2), x, fast=fast) for fast in (True, False))
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


@settings(deadline=None)
@given(SHAPES, st.integers(0, 1000), st.integers(1, 3))
def test_pooling_of_ties_passes_each_gradient_to_one_of_the_largest(shape, seed, values):
    """Few distinct values, so that squares tie in every pattern."""
    x = torch.from_numpy(np.random.default_rng(seed).integers(0, values, (*shape[:2], 6, 4))).float()
    out, gradient, _, _ = run(nn.MaxPool2d(2), x, fast=True)
    squares = lambda t: t.unfold(2, 2, 2).unfold(3, 2, 2).flatten(-2)  # noqa: E731
    received = squares(gradient) != 0
    assert (received.sum(-1) == 1).all()
    assert torch.equal((squares(x) * received).sum(-1), out)
    torch.testing.assert_close(squares(gradient).sum(-1), squares(run(nn.MaxPool2d(2), x, fast=False)[1]).sum(-1))


@settings(deadline=None)
@given(SHAPES, st.integers(0, 1000), st.sampled_from([(1e-3, 0.0), (1.0, 3.0), (50.0, -400.0)]), st.data())
def test_batch_norm_is_torchs(shape, seed, spread, data):
    if math.prod(shape) == shape[1]:
        shape = (2, *shape[1:])
    norm = nn.BatchNorm2d(
        shape[1],
        affine=data.draw(st.booleans(), "affine"),
        track_running_stats=data.draw(st.booleans(), "tracking"),
        momentum=data.draw(st.sampled_from([0.1, 1.0, None]), "momentum"),
    )
    if norm.affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    scale, shift = spread
    x = random_input(shape, seed, scale=scale, shift=shift)
    ours, theirs = (run(norm, x, fast=fast) for fast in (True, False))
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-3, atol=1e-3)
    for one, other in zip([*ours[2], *ours[3]], [*theirs[2], *theirs[3]], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(ours[1] * scale, theirs[1] * scale, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("shift", [0.0, 100.0])
def test_batch_norm_is_as_near_to_float64_as_torchs(shift):
    x = random_input((32, 6, 14, 14), 0, shift=shift)
    exact = run(nn.BatchNorm2d(6).double(), x.double(), fast=False)
    far = [
        [(mine.double() - true).abs().max() for mine, true in ((r[0], exact[0]), (r[1], exact[1]))]
        for r in (run(nn.BatchNorm2d(6), x, fast=True), run(nn.BatchNorm2d(6), x, fast=False))
    ]
    for ours, theirs in zip(*far, strict=True):
        assert ours <= 4 * theirs + 1e-6


@pytest.mark.parametrize(
    "module",
    [
        nn.MaxPool2d(3),
        nn.MaxPool2d(2, stride=1),
        nn.MaxPool2d(2, padding=1),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.MaxPool2d(2, dilation=2),
        nn.MaxPool2d((2, 1)),
        nn.BatchNorm2d(3).eval(),
    ],
    ids=str,
)
def test_what_these_kernels_do_not_do_is_left_to_torch(module):
    x = random_input((4, 3, 7, 7), 1)
    ours, theirs = (run(module, x, fast=fast) for fast in (True, False))
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("change", [lambda x: x.double(), lambda x: x.to(memory_format=torch.channels_last)])
@pytest.mark.parametrize("module", [nn.MaxPool2d(2), nn.BatchNorm2d(3)], ids=str)
def test_other_types_and_orders_are_left_to_torch(module, change):
    x = change(random_input((4, 3, 6, 6), 1))
    module = module.to(x.dtype)
    ours, theirs = (run(module, x, fast=fast) for fast in (True, False))
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


def test_a_batch_of_one_value_a_channel_is_refused_as_torch_refuses_it():
    with pytest.raises(ValueError, match="more than 1 value"), fast_kernels(norm := nn.BatchNorm2d(3)):
        norm(torch.zeros(1, 3, 1, 1))


def test_a_users_subclass_keeps_its_own_forward():
    class Doubled(nn.BatchNorm2d):
        def forward(self, x):
            return 2 * super().forward(x)

    x = random_input((4, 3, 6, 6), 1)
    ours, theirs = (run(Doubled(3), x, fast=fast) for fast in (True, False))
    assert torch.equal(ours[0], theirs[0])


def test_a_model_is_left_as_it_was_also_after_an_error():
    model = build_model("lenet", "batch", classes=10, input_shape=(1, 28, 28), seed=0)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(RuntimeError), fast_kernels(model), fast_kernels(model):
        model(torch.zeros(2, 5, 28, 28))
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before


def test_gradients_of_frozen_parts_are_not_asked_for():
    norm = nn.BatchNorm2d(3)
    norm.weight.requires_grad_(False)
    with fast_kernels(norm):
        norm(random_input((4, 3, 6, 6), 1)).sum().backward()
    assert norm.weight.grad is None
    assert norm.bias.grad is not None


def test_hooks_see_what_they_would_see():
    seen = []
    norm = nn.BatchNorm2d(3)
    norm.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    with fast_kernels(norm):
        norm(random_input((4, 3, 6, 6), 1))
    assert seen == [(4, 3, 6, 6)]


@pytest.mark.parametrize(
    ("arch", "narrow"), [("lenet", True), ("resnet8", False), ("densenet22", False), ("mlp", False)]
)
def test_narrow_models(arch, narrow):
    assert is_narrow(build_model(arch, "batch", classes=10, input_shape=(3, 32, 32), seed=0)) is narrow
