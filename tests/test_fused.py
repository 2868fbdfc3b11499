"""What follows a convolution, as one operation, against torch in float64; when it is used."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from layers import LAST, SHAPES, calls, check_close, check_statistics, compiled, fresh, norm_of, vectorized
from torch import Tensor, fx, nn
from torch.nn import functional as F

from shadow_pool.models.fused import _fits, activate, fusing, pooled
from shadow_pool.models.resolve import build_model

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def plainly(norm: nn.Module, x: Tensor, other: Tensor | None) -> Tensor:
    y = norm(x)
    return F.relu(y if other is None else y + other)


def undecided(norm: nn.Module, x: Tensor, other: Tensor | None) -> bool:
    """Whether rounding may decide what is zero."""
    y = copy.deepcopy(norm)(x).detach()
    return float((y if other is None else y + other).abs().min()) < 1e-4


def fused(norm: nn.Module, x: Tensor, other: Tensor | None = None) -> Tensor:
    assert _fits(norm, x, other)
    with fusing():
        return activate(norm, x, other=other)


def results(function: Callable[..., Tensor], norm: nn.Module, x: Tensor, other: Tensor | None) -> list[Tensor]:
    """Values, gradients of all that has one, and running statistics, in float64."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, other) if t is not None]
    z = function(norm, leaves[0], leaves[1] if len(leaves) > 1 else None)
    weight = torch.linspace(-1, 1, z.numel(), dtype=torch.float64).view(z.shape)
    (z.double() * weight).sum().backward()
    found = [z, *(leaf.grad for leaf in leaves), *(p.grad for p in norm.parameters()), *norm.buffers()]
    return [t.detach().double() for t in found if t is not None]


@compiled
@settings(max_examples=60, deadline=None)
@given(
    size=st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 7), st.integers(1, 7)),
    summed=st.booleans(),
    normalized=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
def test_values_gradients_and_statistics_are_torchs(size, summed, normalized, dtype, seed):
    n, blocks, height, width = size
    normalized = normalized or not summed
    assume(n * height * width > 1)
    generator = torch.Generator().manual_seed(seed)
    shape = (n, 8 * blocks, height, width)
    x = torch.randn(shape, generator=generator).to(dtype).contiguous(memory_format=LAST)
    other = torch.randn(shape, generator=generator).to(dtype).contiguous(memory_format=LAST) if summed else None
    norm = norm_of(8 * blocks, generator) if normalized else nn.Identity()
    exact, torchs = copy.deepcopy(norm).double(), copy.deepcopy(norm)
    doubles = x.double(), None if other is None else other.double()
    assume(not undecided(exact, *doubles))
    found = results(fused, norm, x, other)
    check_close(found, results(plainly, exact, *doubles), TOLERANCE[dtype], results(plainly, torchs, x, other))


@compiled
@pytest.mark.parametrize("rows", [2, 63, 64, 65, 4097])
@pytest.mark.parametrize("channels", [8, 24, 136, 1032])
def test_every_row_of_every_block_is_there(rows, channels):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, channels, 1, 1, generator=generator).contiguous(memory_format=LAST)
    norm = norm_of(channels, generator)
    exact = copy.deepcopy(norm).double()
    found = results(fused, norm, x, None)
    check_close(found, results(plainly, exact, x.double(), None), 2e-3)


@compiled
@pytest.mark.parametrize("kind", SHAPES)
def test_statistics_are_as_exact_as_torchs(kind):
    torch.manual_seed(0)
    x = SHAPES[kind](torch.randn(1024, 8, 8, 8)).contiguous(memory_format=LAST)
    norm, torchs, exact = (nn.BatchNorm2d(8, momentum=1.0) for _ in range(3))
    exact.double()
    true = F.relu(exact(x.double())).detach()
    mine, its = fused(norm, x).double(), F.relu(torchs(x)).double()
    scale = float(true.abs().max())
    assert (mine - true).abs().max() <= 2 * (its - true).abs().max() + 1e-5 * scale
    check_statistics(norm, torchs, exact)


@compiled
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_a_number_is_not_lost(bad, dtype):
    x = torch.randn(4, 8, 4, 4).to(dtype).contiguous(memory_format=LAST)
    x[1, 3, 2, 1] = bad
    for norm in (nn.BatchNorm2d(8), nn.Identity()):
        z = fused(norm, x, torch.zeros_like(x))
        bad_channels = (~z.isfinite()).flatten(2).any(2).any(0)
        assert bad_channels.tolist() == [channel == 3 for channel in range(8)]


@compiled
@pytest.mark.parametrize("gamma", [0.0, -2.0])
def test_any_sign_of_gamma(gamma):
    norm, x = fresh()
    nn.init.constant_(norm.weight, gamma)
    nn.init.constant_(norm.bias, 0.5)
    exact = copy.deepcopy(norm).double()
    check_close(results(fused, norm, x, None), results(plainly, exact, x.double(), None), 1e-4)


def strided(norm: nn.BatchNorm2d) -> None:
    norm.weight = nn.Parameter(torch.rand(8, 2)[:, 0])


def untracked_later(norm: nn.BatchNorm2d) -> None:
    norm.track_running_stats = False


def replaced(norm: nn.BatchNorm2d) -> None:
    norm.forward = lambda x: 2 * x  # type: ignore[method-assign]


def hooked(norm: nn.BatchNorm2d) -> None:
    norm.register_forward_hook(lambda layer, inputs, output: 2 * output)


def without_beta(norm: nn.BatchNorm2d) -> None:
    norm.bias = None  # type: ignore[assignment]


class Own(nn.BatchNorm2d):
    pass


UNUSUAL: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "eval mode": lambda: (fresh()[0].eval(), fresh()[1]),
    "6 channels": lambda: fresh(channels=6),
    "no affine": lambda: fresh(affine=False),
    "no momentum": lambda: fresh(momentum=None),
    "no statistics": lambda: fresh(track_running_stats=False),
    "another order": lambda: (fresh()[0], fresh()[1].contiguous()),
    "float64": lambda: (fresh()[0].double(), fresh()[1].double()),
    "weights of bf16": lambda: (fresh()[0].bfloat16(), fresh()[1].bfloat16()),
    "a subclass": lambda: (Own(8), fresh()[1]),
    "GroupNorm": lambda: (nn.GroupNorm(2, 8), fresh()[1]),
    "after": lambda: (nn.Sequential(fresh()[0], nn.Tanh()), fresh()[1]),
    **{
        change.__name__: lambda change=change: (change(norm := fresh()[0]) or norm, fresh()[1])  # type: ignore[misc]
        for change in (strided, untracked_later, replaced, hooked, without_beta)
    },
}


@compiled
@pytest.mark.parametrize("name", UNUSUAL)
def test_a_layer_or_maps_that_are_not_the_usual_ones_are_torchs_business(name, monkeypatch):
    norm, x = UNUSUAL[name]()
    own = copy.deepcopy(norm)
    called = calls(monkeypatch)
    with fusing():
        found = activate(norm, x)
    torch.testing.assert_close(found, F.relu(own(x)))
    assert all(torch.equal(mine, its) for mine, its in zip(norm.buffers(), own.buffers(), strict=True))
    assert called == []


@vectorized
def test_hooks_of_a_layer_that_does_nothing_are_called(monkeypatch):
    norm = nn.Identity()
    norm.register_forward_hook(lambda layer, inputs, output: 2 * output)
    x = torch.randn(4, 8, 8, 8).contiguous(memory_format=LAST)
    called = calls(monkeypatch)
    conv = nn.Conv2d(8, 8, 3)
    with fusing():
        torch.testing.assert_close(activate(norm, x, other=x), F.relu(3 * x))
        torch.testing.assert_close(pooled(conv, norm, x), F.relu(F.max_pool2d(norm(conv(x)), 2)))
    assert called == []


@vectorized
def test_it_is_used_within_fusing_alone_in_one_thread_and_never_while_tracing(monkeypatch):
    norm, x = fresh()
    called = calls(monkeypatch)
    activate(norm, x)
    with fusing():
        with fusing():
            pass
        with ThreadPoolExecutor(1) as elsewhere:
            elsewhere.submit(activate, norm, x).result()
        assert called == []
        activate(norm, x)
        pooled(nn.Conv2d(8, 8, 3, bias=False), norm, x)
        assert called == ["forward", "pooled_forward"]
        model = build_model("resnet8", "batch", classes=3, input_shape=(3, 8, 8), seed=0)
        targets = {node.target for node in fx.Tracer().trace(model).nodes}
    assert {"norm", "blocks.0.norm1", "blocks.2.norm2", F.relu} <= targets
    activate(norm, x)
    pooled(nn.Conv2d(8, 8, 3, bias=False), norm, x)
    assert called == ["forward", "pooled_forward"]


@compiled
def test_torchs_default_type_does_not_matter():
    norm, x = fresh()
    x.requires_grad_()
    torch.set_default_dtype(torch.float64)
    try:
        with fusing():
            activate(norm, x).sum().backward()
    finally:
        torch.set_default_dtype(torch.float32)
    exact, double = copy.deepcopy(norm).double(), x.detach().double().requires_grad_()
    F.relu(exact(double)).sum().backward()
    torch.testing.assert_close(x.grad.double(), double.grad, atol=1e-5, rtol=0)


@vectorized
@pytest.mark.parametrize(("arch", "count"), [("lenet", 2), ("resnet8", 7), ("resnet20", 19), ("densenet22", 21)])
@pytest.mark.parametrize("arm", ["batch", "none"])
def test_the_zoo_trains_by_it_as_by_torch(arch, count, arm, monkeypatch):
    shape = (1, 28, 28) if arch == "lenet" else (3, 32, 32)
    torch.manual_seed(0)
    model = build_model(arch, arm, classes=10, input_shape=shape, seed=0).train()
    model.to(memory_format=LAST)
    own, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    x = torch.randn(16, *shape).contiguous(memory_format=LAST)
    called = calls(monkeypatch)
    with fusing():
        logits = model(x)
    pooled_or_summed = {"lenet": 2, "densenet22": 0}.get(arch, (count - 1) // 2)
    assert len(called) == (count if arm == "batch" else pooled_or_summed)
    true = exact(x.double()).detach()
    for found in (logits, own(x)):
        torch.testing.assert_close(found.double(), true, rtol=0, atol=1e-3 * float(true.abs().max()))
    for mine, its in zip(model.buffers(), own.buffers(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-4)
