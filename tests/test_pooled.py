"""Convolutions that are pooled, as one operation, against torch in float64; when they are used."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from layers import LAST, SHAPES, calls, check_close, check_statistics, norm_of, vectorized
from torch import Tensor, nn
from torch.nn import functional as F

from shadow_pool.models.fused import _fits_pooled, activate, fusing, pooled


def plainly_pooled(conv: nn.Module, norm: nn.Module, x: Tensor) -> Tensor:
    return F.relu(F.max_pool2d(norm(conv(x)), 2))


def fused_pooled(conv: nn.Module, norm: nn.Module, x: Tensor) -> Tensor:
    assert _fits_pooled(conv, norm, x)
    with fusing():
        return pooled(conv, norm, x)


def undecided_pooled(conv: nn.Module, norm: nn.Module, x: Tensor) -> bool:
    """Whether rounding may decide which of a square is the largest, or what is zero."""
    y = copy.deepcopy(norm)(conv(x)).detach()
    best = F.unfold(y.flatten(0, 1)[:, None], 2, stride=2).topk(2, dim=1).values
    return min(float((best[:, 0] - best[:, 1]).min()), float(best[:, 0].abs().min())) < 1e-5


def pooled_results(
    function: Callable[..., Tensor], conv: nn.Module, norm: nn.Module, x: Tensor, *, to_x: bool = True
) -> list[Tensor]:
    """Values, gradients of all that has one, and running statistics, in float64."""
    leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_(to_x)
    z = function(conv, norm, leaf)
    weight = torch.linspace(-1, 1, z.numel(), dtype=torch.float64).view(z.shape)
    (z.double() * weight).sum().backward()
    parameters = [*conv.parameters(), *norm.parameters()]
    found = [z, *([leaf.grad] if to_x else []), *(p.grad for p in parameters), *norm.buffers()]
    return [t.detach().double() for t in found if t is not None]


def layers_of(
    channels: int, out: int, kernel: tuple[int, int], pad: int, groups: int, *, normalized: bool, seed: int
) -> tuple[nn.Conv2d, nn.Module]:
    generator = torch.Generator().manual_seed(seed)
    conv = nn.Conv2d(groups * channels, groups * out, kernel, padding=pad, groups=groups, bias=not normalized)
    with torch.no_grad():
        for p in conv.parameters():
            p.normal_(generator=generator)
    return conv, norm_of(groups * out, generator) if normalized else nn.Identity()


ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "usual": lambda x: x.contiguous(),
    "channels last": lambda x: x.contiguous(memory_format=LAST),
    "records last": lambda x: x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    "every second": lambda x: x.repeat_interleave(2, dim=3)[..., ::2],
}


@vectorized
@settings(max_examples=80, deadline=None)
@given(
    records=st.integers(1, 70),
    channels=st.integers(1, 4),
    out=st.integers(1, 13),
    groups=st.integers(1, 3),
    kernel=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    pad=st.integers(0, 3),
    size=st.tuples(st.integers(2, 9), st.integers(2, 9)),
    normalized=st.booleans(),
    order=st.sampled_from(sorted(ORDERS)),
    seed=st.integers(0, 2**31),
)
def test_a_pooled_convolution_is_torchs(records, channels, out, groups, kernel, pad, size, normalized, order, seed):
    assume(min(side + 2 * pad - k for side, k in zip(size, kernel, strict=True)) >= 1)
    conv, norm = layers_of(channels, out, kernel, pad, groups, normalized=normalized, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    x = ORDERS[order](torch.randn(records, groups * channels, *size, generator=generator))
    exact, torchs = [(copy.deepcopy(conv).to(t), copy.deepcopy(norm).to(t)) for t in (torch.float64, torch.float32)]
    assume(not undecided_pooled(*exact, x.double()))
    found = pooled_results(fused_pooled, conv, norm, x)
    expected = pooled_results(plainly_pooled, *exact, x.double())
    check_close(found, expected, 2e-5, pooled_results(plainly_pooled, *torchs, x))


@vectorized
def test_a_stack_of_pooled_convolutions_passes_their_order_on_and_needs_no_gradient_for_x():
    first, second = (layers_of(*sizes, 4, normalized=True, seed=0) for sizes in ((1, 6, (5, 5), 2), (6, 16, (5, 5), 0)))
    copied = copy.deepcopy((first, second))
    for records in (64, 46):
        x = torch.randn(records, 4, 28, 28)
        found, expected = [], []
        for function, pair, values in ((fused_pooled, (first, second), found), (plainly_pooled, copied, expected)):
            z = function(*pair[1], function(*pair[0], x))
            z.square().mean().backward()
            values += [z, *(p.grad.clone() for layer in (*pair[0], *pair[1]) for p in layer.parameters())]
        assert found[0].permute(1, 2, 3, 0).stride()[-1] == 1
        for mine, its in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, its, rtol=0, atol=1e-3 * float(its.detach().abs().max()))


@vectorized
@pytest.mark.parametrize("kind", SHAPES)
def test_statistics_of_a_convolution_are_as_exact_as_torchs(kind):
    torch.manual_seed(0)
    x = SHAPES[kind](torch.randn(100, 1, 8, 8))
    norm, torchs, exact = (nn.BatchNorm2d(1, momentum=1.0) for _ in range(3))
    conv = nn.Conv2d(1, 1, 1, bias=False)
    nn.init.ones_(conv.weight)
    fused_pooled(conv, norm, x)
    torchs(x)
    exact.double()(x.double())
    check_statistics(norm, torchs, exact)


@vectorized
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_a_number_is_not_lost_in_a_pooled_convolution(bad):
    for normalized in (True, False):
        conv, norm = layers_of(1, 2, (3, 3), 1, 3, normalized=normalized, seed=0)
        x = torch.randn(5, 3, 6, 6)
        x[1, 1, 2, 2] = bad
        z = fused_pooled(conv, norm, x)
        assert (~z.isfinite()).flatten(2).any(2).any(0)[2:4].all() or bad == torch.inf
        assert z[:, [0, 1, 4, 5]].isfinite().all()


def convolution(**changes: object) -> nn.Conv2d:
    return nn.Conv2d(**{"in_channels": 2, "out_channels": 3, "kernel_size": 3, "bias": False, **changes})  # type: ignore[arg-type]


def with_hook(conv: nn.Conv2d) -> nn.Conv2d:
    conv.register_forward_hook(lambda layer, inputs, output: 2 * output)
    return conv


def with_own_forward(conv: nn.Conv2d) -> nn.Conv2d:
    conv.forward = lambda x: 2 * x[..., 2:, 2:].repeat(1, 2, 1, 1)[:, :3]  # type: ignore[method-assign]
    return conv


def with_weight(conv: nn.Conv2d, weight: Tensor) -> nn.Conv2d:
    conv.weight = nn.Parameter(weight)
    return conv


UNUSUAL_CONVOLUTIONS: dict[str, Callable[[], tuple[nn.Module, nn.Module, Tensor]]] = {
    "stride": lambda: (convolution(stride=2), nn.BatchNorm2d(3), torch.randn(4, 2, 8, 8)),
    "dilation": lambda: (convolution(dilation=2), nn.BatchNorm2d(3), torch.randn(4, 2, 8, 8)),
    "two paddings": lambda: (convolution(padding=(1, 0)), nn.BatchNorm2d(3), torch.randn(4, 2, 8, 8)),
    "padding in words": lambda: (convolution(padding="same"), nn.BatchNorm2d(3), torch.randn(4, 2, 8, 8)),
    "reflecting": lambda: (
        convolution(padding=1, padding_mode="reflect"),
        nn.BatchNorm2d(3),
        torch.randn(4, 2, 8, 8),
    ),
    "bias and norm": lambda: (convolution(bias=True), nn.BatchNorm2d(3), torch.randn(4, 2, 8, 8)),
    "hook": lambda: (with_hook(convolution()), nn.BatchNorm2d(3), torch.randn(4, 2, 8, 8)),
    "own forward": lambda: (with_own_forward(convolution()), nn.BatchNorm2d(3), torch.randn(4, 2, 8, 8)),
    "weight norm": lambda: (
        nn.utils.parametrizations.weight_norm(convolution()),
        nn.BatchNorm2d(3),
        torch.randn(4, 2, 8, 8),
    ),
    "another norm": lambda: (convolution(), nn.GroupNorm(1, 3), torch.randn(4, 2, 8, 8)),
    "weight of other maps": lambda: (
        with_weight(convolution(), torch.randn(4, 2, 3, 3)),
        nn.BatchNorm2d(4),
        torch.randn(4, 2, 8, 8),
    ),
    "weight of another size": lambda: (
        with_weight(convolution(), torch.randn(3, 2, 5, 5)),
        nn.BatchNorm2d(3),
        torch.randn(4, 2, 9, 9),
    ),
    "long": lambda: (convolution(in_channels=1), nn.BatchNorm2d(3), torch.randn(1, 1, 20_000, 4)),
    "wide": lambda: (convolution(in_channels=1), nn.BatchNorm2d(3), torch.randn(1, 1, 4, 20_000)),
    "eval": lambda: (convolution(), nn.BatchNorm2d(3).eval(), torch.randn(4, 2, 8, 8)),
    "float64": lambda: (convolution().double(), nn.BatchNorm2d(3).double(), torch.randn(4, 2, 8, 8).double()),
}


@vectorized
@pytest.mark.parametrize("name", UNUSUAL_CONVOLUTIONS)
def test_a_convolution_that_is_not_the_usual_one_is_torchs_business(name, monkeypatch):
    conv, norm, x = UNUSUAL_CONVOLUTIONS[name]()
    own = copy.deepcopy(norm)
    called = calls(monkeypatch)
    with fusing():
        found = pooled(conv, norm, x)
    torch.testing.assert_close(found, plainly_pooled(conv, own, x))
    assert called == []


def of_one_gamma() -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(8)
    norm.weight = nn.Parameter(torch.ones(1))
    return norm


@vectorized
@pytest.mark.parametrize(
    ("conv", "norm"),
    [
        (nn.Conv2d(2, 8, 3, bias=False), nn.BatchNorm2d(2)),
        (nn.Conv2d(2, 8, 3, bias=False), of_one_gamma()),
        (nn.Conv2d(2, 8, 3, bias=False, padding=-1), nn.BatchNorm2d(8)),
    ],
    ids=["few statistics", "one gamma", "negative padding"],
)
def test_layers_that_contradict_themselves_are_refused_by_torch(conv, norm, monkeypatch):
    called = calls(monkeypatch)
    x = torch.randn(4, 2, 8, 8)
    with fusing(), pytest.raises(RuntimeError):
        pooled(conv, norm, x)
    if conv.padding == (0, 0):
        with fusing(), pytest.raises(RuntimeError):
            activate(norm, torch.randn(4, 8, 8, 8).contiguous(memory_format=LAST))
    assert called == []
