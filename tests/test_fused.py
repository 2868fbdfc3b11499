"""Fused operations against torch in float64; when they are used; machines without a compiler."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.nn import functional as F

from shadow_pool.models import kernels
from shadow_pool.models.fused import _fits, _fits_pooled, activate, fusing, pooled
from shadow_pool.models.resolve import build_model

compiled = pytest.mark.skipif(kernels.loaded() is None, reason="no C++ compiler here")
vectorized = pytest.mark.skipif(not kernels.pooled_is_fast(), reason="no compiler or no AVX2 here")
LAST = torch.channels_last
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def norm_of(channels: int, generator: torch.Generator, center: float = 0.0) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels, momentum=0.3)
    with torch.no_grad():
        norm.weight.normal_(generator=generator)
        norm.bias.normal_(generator=generator)
    return norm


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


def check_close(
    found: list[Tensor], expected: list[Tensor], tolerance: float, torchs: list[Tensor] | None = None
) -> None:
    """As close as the type allows; where a variance is next to nothing, not much further than torch is."""
    assert len(found) == len(expected)
    for mine, true, its in zip(found, expected, torchs or expected, strict=True):
        assert mine.shape == true.shape
        allowed = tolerance * max(1.0, float(true.abs().max())) + 4 * float((its - true).abs().max())
        torch.testing.assert_close(mine, true, rtol=0, atol=allowed)


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


def but_for_the_first_pixel(x: Tensor) -> Tensor:
    constant = torch.zeros_like(x)
    constant[0, :, 0, 0] = 100 * x[0, :, 0, 0]
    return constant


SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "far from zero": lambda x: x + 1000,
    "constant but for the first pixel": but_for_the_first_pixel,
    "constant": lambda x: torch.full_like(x, 5.0),
    "growing": lambda x: x + torch.arange(len(x)).view(-1, 1, 1, 1),
    "tiny": lambda x: 1e-4 * x,
}


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
    for name in ("running_mean", "running_var"):
        wanted = getattr(exact, name)
        error, torchs_error = ((getattr(layer, name).double() - wanted).abs().max() for layer in (norm, torchs))
        assert error <= 2 * torchs_error + 1e-5 * float(wanted.abs().max())


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


# ------------------------------------------------------------------ convolutions that are pooled


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
    for name in ("running_mean", "running_var"):
        wanted = getattr(exact, name)
        error, torchs_error = ((getattr(layer, name).double() - wanted).abs().max() for layer in (norm, torchs))
        assert error <= 2 * torchs_error + 1e-5 * float(wanted.abs().max())


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


# ------------------------------------------------------------------ when it is used


def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that are called from here on."""
    found: list[str] = []
    call = kernels.call
    monkeypatch.setattr(kernels, "call", lambda kernel, *rest: (found.append(kernel), call(kernel, *rest)))
    return found


def fresh(**changes: object) -> tuple[nn.BatchNorm2d, Tensor]:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(int(changes.pop("channels", 8)), **changes)  # type: ignore[arg-type]
    return norm, torch.randn(4, norm.num_features, 4, 4).contiguous(memory_format=LAST)


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


@vectorized
def test_hooks_of_a_layer_that_does_nothing_are_called(monkeypatch):
    norm = nn.Identity()
    norm.register_forward_hook(lambda layer, inputs, output: 2 * output)
    x = torch.randn(4, 8, 8, 8).contiguous(memory_format=LAST)
    called = calls(monkeypatch)
    conv = nn.Conv2d(8, 8, 3)
    with fusing():
        torch.testing.assert_close(activate(norm, x, other=x), F.relu(3 * x))
        torch.testing.assert_close(pooled(conv, norm, x), plainly_pooled(conv, norm, x))
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


# ------------------------------------------------------------------ machines


@pytest.fixture
def loads_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., bool]:
    """Whether a process that starts with this cache and PATH loads kernels."""

    def find(cache: Path, *path: object) -> bool:
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        if path:
            monkeypatch.setenv("PATH", ":".join(map(str, path)))
        return kernels.loaded.__wrapped__() is not None

    return find


@compiled
def test_it_is_compiled_once_and_again_where_the_file_is_damaged(tmp_path, loads_in):
    assert loads_in(tmp_path)
    (made,) = (tmp_path / "mia-audit").iterdir()
    first, content = made.stat().st_mtime_ns, made.read_bytes()
    assert loads_in(tmp_path)
    assert made.stat().st_mtime_ns == first
    for damaged in (b"", b"not a library", content[: len(content) // 2]):
        made.unlink()
        made.write_bytes(damaged)
        assert loads_in(tmp_path)
        assert [path.read_bytes() for path in made.parent.iterdir()] == [content]


@compiled
def test_a_model_tells_of_the_kernels_it_was_trained_with(monkeypatch):
    before = kernels.made_by()
    assert before == kernels.made_by()
    monkeypatch.setattr(kernels, "_sources", lambda: "others")
    assert kernels.made_by() != before
    monkeypatch.setattr(kernels, "loaded", lambda: None)
    assert kernels.made_by() == "none"


def test_without_a_compiler_or_a_place_for_the_result_torch_does_it_all(tmp_path, loads_in, monkeypatch):
    (tmp_path / "file").write_text("")
    assert not loads_in(tmp_path / "file")
    broken = tmp_path / "c++"
    broken.write_text('#!/bin/sh\necho version\n[ "$1" = --version ]\n')
    broken.chmod(0o755)
    assert not loads_in(tmp_path / "broken", tmp_path, "/usr/bin", "/bin")
    broken.write_bytes(b"#!/bin/sh\nprintf '\\351'\n")
    assert not loads_in(tmp_path / "strange", tmp_path, "/usr/bin", "/bin")
    assert not loads_in(tmp_path / "none", tmp_path / "no compiler")
    monkeypatch.setattr(Path, "home", lambda: 1 / 0)
    assert not loads_in("")
    monkeypatch.setattr(kernels, "loaded", lambda: None)
    norm, x = fresh()
    own = copy.deepcopy(norm)
    with fusing():
        assert torch.equal(activate(norm, x), F.relu(own(x)))
