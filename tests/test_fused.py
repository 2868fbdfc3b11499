"""Fused operations against torch in float64; which forwards are fused; machines without a compiler."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from shadow_pool.models import kernels
from shadow_pool.models.fused import Fused, fuse
from shadow_pool.models.resolve import build_model

compiled = pytest.mark.skipif(kernels.library() is None, reason="no C++ compiler here")
LAST = torch.channels_last
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def norm_of(channels: int, generator: torch.Generator, center: float = 0.0) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels, momentum=0.3)
    with torch.no_grad():
        norm.weight.normal_(generator=generator)
        norm.bias.normal_(generator=generator)
    return norm


def plainly(norm: nn.BatchNorm2d | None, x: Tensor, other: Tensor | None, relu: bool, pool: bool) -> Tensor:
    y = x if norm is None else norm(x)
    y = y if other is None else y + other
    y = F.max_pool2d(y, 2) if pool else y
    return F.relu(y) if relu else y


def undecided(norm: nn.BatchNorm2d | None, x: Tensor, other: Tensor | None, relu: bool, pool: bool) -> bool:
    """Whether rounding may decide what is zero, or which of a square is the largest."""
    y = plainly(None if norm is None else copy.deepcopy(norm), x, other, False, False).detach()
    gaps = [y.abs().min()] if relu else []
    if pool:
        best = F.unfold(y.flatten(0, 1)[:, None], 2, stride=2).topk(2, dim=1).values
        gaps += [(best[:, 0] - best[:, 1]).min(), best[:, 0].abs().min()]
    return min(gaps, default=torch.tensor(1.0)).item() < 1e-4


def results(
    function: Callable[[Tensor, Tensor | None], Tensor], norm: nn.BatchNorm2d | None, x: Tensor, other: Tensor | None
) -> list[Tensor]:
    """Values, gradients of all that has one, and running statistics, in float64."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, other) if t is not None]
    z = function(leaves[0], leaves[1] if len(leaves) > 1 else None)
    weight = torch.linspace(-1, 1, z.numel(), dtype=torch.float64).view(z.shape)
    (z.double() * weight).sum().backward()
    found = [z, *(leaf.grad for leaf in leaves)]
    if norm is not None:
        found += [norm.weight.grad, norm.bias.grad, *norm.buffers()]
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
    relu=st.booleans(),
    pool=st.booleans(),
    summed=st.booleans(),
    normalized=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
def test_values_gradients_and_statistics_are_torchs(size, relu, pool, summed, normalized, dtype, seed):
    n, blocks, height, width = size
    summed = summed and not pool
    normalized = normalized or not (relu and (pool or summed))
    assume(n * height * width > 1 and (not pool or min(height, width) > 1))
    generator = torch.Generator().manual_seed(seed)
    shape = (n, 8 * blocks, height, width)
    x = torch.randn(shape, generator=generator).to(dtype).contiguous(memory_format=LAST)
    other = torch.randn(shape, generator=generator).to(dtype).contiguous(memory_format=LAST) if summed else None
    norm = norm_of(8 * blocks, generator) if normalized else None
    exact, torchs = (None, None) if norm is None else (copy.deepcopy(norm).double(), copy.deepcopy(norm))
    doubles = x.double(), None if other is None else other.double()
    assume(not undecided(exact, *doubles, relu, pool))
    layer = Fused(norm, relu=relu, pool=pool)
    assert layer._fits(x, other)
    found = results(layer, norm, x, other)
    expected = results(lambda x, other: plainly(exact, x, other, relu, pool), exact, *doubles)
    its = results(lambda x, other: plainly(torchs, x, other, relu, pool), torchs, x, other)
    check_close(found, expected, TOLERANCE[dtype], its)


@compiled
@pytest.mark.parametrize("rows", [2, 63, 64, 65, 4097])
@pytest.mark.parametrize("channels", [8, 24, 136, 1032])
def test_every_row_of_every_block_is_there(rows, channels):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, channels, 1, 1, generator=generator).contiguous(memory_format=LAST)
    norm = norm_of(channels, generator)
    exact = copy.deepcopy(norm).double()
    found = results(Fused(norm, relu=False, pool=False), norm, x, None)
    check_close(found, results(lambda x, _: exact(x), exact, x.double(), None), 1e-4)


@compiled
def test_values_far_from_zero_keep_their_variance():
    x = (1000 + torch.randn(64, 8, 6, 6)).contiguous(memory_format=LAST)
    norm, torchs = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
    exact = nn.BatchNorm2d(8).double()
    mine, true = Fused(norm, relu=False, pool=False)(x).double(), exact(x.double())
    assert (mine - true).abs().max() <= 2 * (torchs(x).double() - true).abs().max() + 1e-4
    torch.testing.assert_close(norm.running_var.double(), exact.running_var, rtol=1e-4, atol=0)


@compiled
@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_a_number_is_not_lost(pool, bad, dtype):
    x = torch.randn(4, 8, 4, 4).to(dtype).contiguous(memory_format=LAST)
    x[1, 3, 2, 1] = bad
    for norm in (nn.BatchNorm2d(8), None):
        if norm is None and not pool:
            continue
        z = Fused(norm, relu=True, pool=pool)(x)
        bad_channels = (~z.isfinite()).flatten(2).any(2).any(0)
        assert bad_channels.tolist() == [channel == 3 for channel in range(8)]


@compiled
@pytest.mark.parametrize("gamma", [0.0, -2.0])
def test_a_constant_channel_and_any_sign_of_gamma(gamma):
    x = torch.randn(4, 8, 4, 4).contiguous(memory_format=LAST)
    x[:, 2] = 5.0
    norm = nn.BatchNorm2d(8)
    nn.init.constant_(norm.weight, gamma)
    exact = copy.deepcopy(norm).double()
    found = results(Fused(norm, relu=False, pool=False), norm, x, None)
    check_close(found, results(lambda x, _: exact(x), exact, x.double(), None), 1e-4)


# ------------------------------------------------------------------ which forwards are fused


class Net(nn.Module):
    """conv -> norm -> what ``forward`` of a case does -> head; 8 maps."""

    def __init__(self, body: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.relu, self.pool, self.dropout = nn.ReLU(inplace=True), nn.MaxPool2d(2, 2), nn.Dropout(0.1)
        self.wide, self.ceil = nn.MaxPool2d(3, 2), nn.MaxPool2d(2, ceil_mode=True)
        self.head = nn.Linear(8, 4)
        self.seen = 0
        self.body = [body]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body[0](self, x).mean((2, 3)))


def added(net: Net, x: Tensor) -> Tensor:
    a = net.conv(x)
    b = net.norm2(net.conv2(net.relu(net.norm(a))))
    b += a
    return net.relu(b)


def added_elsewhere(net: Net, x: Tensor) -> Tensor:
    a = net.conv(x)
    a += net.norm(a)
    return F.relu(a)


def added_in_place(net: Net, x: Tensor) -> Tensor:
    a = net.conv(x)
    b = net.conv2(a)
    b += a
    return F.relu(b)


def seen_after_the_sum(net: Net, x: Tensor) -> Tensor:
    a = net.conv(x)
    b = net.conv2(a)
    b += a
    return F.relu(b) + b


def relu_of_a_keyword(net: Net, x: Tensor) -> Tensor:
    return net.pool(F.relu(input=net.norm(net.conv(x))))


def summand_written_to(net: Net, x: Tensor) -> Tensor:
    a, b = net.conv(x), net.conv2(net.conv(x))
    c = a + b
    F.relu(b, True)
    return F.relu(c) + b


def seen_before(net: Net, x: Tensor) -> Tensor:
    y = net.norm(net.conv(x))
    return F.relu(y) + y


def written_to_meanwhile(net: Net, x: Tensor) -> Tensor:
    a = net.conv(x)
    b = net.norm(a)
    a.mul_(2)
    return F.relu(b) + a


def counted(net: Net, x: Tensor) -> Tensor:
    net.seen += 1
    return F.relu(net.norm(net.conv(x)))


def branching(net: Net, x: Tensor) -> Tensor:
    y = net.norm(net.conv(x))
    return F.relu(y) if y.sum() > 0 else y


FORWARDS: dict[str, tuple[int, Callable[[Net, Tensor], Tensor]]] = {
    "norm": (1, lambda net, x: net.norm(net.conv(x))),
    "norm, relu": (1, lambda net, x: F.relu(net.norm(net.conv(x)))),
    "norm, relu in place": (1, lambda net, x: net.relu(net.norm(net.conv(x)))),
    "norm, method relu": (1, lambda net, x: net.norm(net.conv(x)).relu_()),
    "norm, relu, pool": (1, lambda net, x: net.pool(net.relu(net.norm(net.conv(x))))),
    "norm, pool, relu": (1, lambda net, x: F.relu(F.max_pool2d(net.norm(net.conv(x)), 2))),
    "relu, pool": (1, lambda net, x: F.max_pool2d(F.relu(net.conv2(net.conv(x))), (2, 2), stride=2)),
    "pool, relu": (1, lambda net, x: torch.relu(F.max_pool2d(net.conv(x), kernel_size=2))),
    "two": (2, lambda net, x: net.norm2(net.conv2(net.pool(net.relu(net.norm(net.conv(x))))))),
    "sum": (2, added),
    "sum, relu": (1, lambda net, x: net.relu((a := net.conv(x)) + net.conv2(a))),
    "sum in place, relu": (1, added_in_place),
    "sum in place seen after it": (0, seen_after_the_sum),
    "summand written to": (0, summand_written_to),
    "relu of a keyword": (1, relu_of_a_keyword),
    "norm, sum, pool": (1, lambda net, x: net.pool((a := net.conv(x)) + net.norm(a))),
    "norm, other pools": (1, lambda net, x: net.ceil(net.wide(net.relu(net.norm(net.conv(x)))))),
    "norm twice": (2, lambda net, x: net.norm2(net.norm(net.conv(x)))),
    "one layer twice": (2, lambda net, x: net.norm(net.conv2(net.norm(net.conv(x))))),
    "norm, sum with a number": (1, lambda net, x: F.relu(net.norm(net.conv(x)) + 1)),
    "norm, sum with itself": (1, lambda net, x: (y := net.norm(net.conv(x))) + y),
    "norm, added in place elsewhere": (0, added_elsewhere),
    "norm seen before relu": (1, seen_before),
    "norm, written to meanwhile": (0, written_to_meanwhile),
    "relu alone": (0, lambda net, x: F.relu(net.conv(x))),
    "pool alone": (0, lambda net, x: net.pool(net.conv(x))),
    "draws": (0, lambda net, x: net.dropout(F.relu(net.norm(net.conv(x))))),
    "counts": (0, counted),
    "branches": (0, branching),
}


@compiled
@pytest.mark.parametrize("name", FORWARDS)
def test_a_fused_forward_is_the_models_own(name):
    count, body = FORWARDS[name]
    torch.manual_seed(0)
    model = Net(body).to(memory_format=LAST).train()
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(4, 3, 6, 6).contiguous(memory_format=LAST)
    generator = torch.random.get_rng_state()
    run = fuse(model, x)
    assert torch.equal(torch.random.get_rng_state(), generator)
    assert (model.seen, all(p.grad is None for p in model.parameters())) == (0, True)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert (run is model) == (count == 0)
    fused = [layer for layer in run.modules() if isinstance(layer, Fused)]
    assert len(fused) == count
    if count:
        own = copy.deepcopy(model)
        for call in (own, run):
            call(x).square().sum().backward()
            call(2 * x).square().sum().backward()
        for mine, its in zip(model.parameters(), own.parameters(), strict=True):
            assert (mine.grad is None) == (its.grad is None)
            if its.grad is not None:
                torch.testing.assert_close(
                    mine.grad, its.grad, rtol=1e-3, atol=1e-5 + 1e-4 * float(its.grad.abs().max())
                )
        for mine, its in zip(model.buffers(), own.buffers(), strict=True):
            torch.testing.assert_close(mine, its)


@compiled
def test_layers_with_hooks_unusual_statistics_or_of_another_kind_are_left_alone():
    class Own(nn.BatchNorm2d):
        pass

    x = torch.randn(4, 3, 6, 6).contiguous(memory_format=LAST)
    hooked = nn.BatchNorm2d(8)
    hooked.register_forward_hook(lambda *_: None)
    for norm in (hooked, nn.BatchNorm2d(8, momentum=None), nn.BatchNorm2d(8, affine=False), Own(8)):
        model = Net(lambda net, x: F.relu(net.norm(net.conv(x))))
        model.norm = norm
        assert fuse(model, x) is model
    untracked = Net(lambda net, x: F.relu(net.norm(net.conv(x))))
    untracked.norm = nn.BatchNorm2d(8, track_running_stats=False)
    torch.testing.assert_close(fuse(untracked, x)(x), untracked(x), atol=1e-5, rtol=0)


@compiled
@pytest.mark.parametrize("kind", ["order", "channels", "frozen", "float64", "mixed"])
def test_what_does_not_fit_is_done_by_torch(kind):
    channels = 6 if kind == "channels" else 8
    x = torch.randn(4, channels, 4, 4).contiguous(memory_format=LAST)
    norm = nn.BatchNorm2d(channels).train(kind != "frozen")
    other = torch.randn_like(x)
    if kind == "order":
        x = x.contiguous()
    elif kind == "float64":
        x, other, norm = x.double(), other.double(), norm.double()
    elif kind == "mixed":
        other = other.bfloat16()
    layer, own = Fused(norm, relu=True, pool=False), copy.deepcopy(norm)
    assert not layer._fits(x, other)
    assert torch.equal(layer(x, other), F.relu(own(x) + other))
    assert all(torch.equal(mine, its) for mine, its in zip(norm.buffers(), own.buffers(), strict=True))


@compiled
@pytest.mark.parametrize(("arch", "count"), [("lenet", 2), ("resnet8", 9), ("resnet20", 21), ("densenet22", 21)])
def test_the_zoo_is_fused(arch, count):
    shape = (1, 28, 28) if arch == "lenet" else (3, 32, 32)
    model = build_model(arch, "batch", classes=10, input_shape=shape, seed=0)
    x = torch.randn(2, *shape).contiguous(memory_format=LAST)
    assert sum(isinstance(layer, Fused) for layer in fuse(model.to(memory_format=LAST), x).modules()) == count


# ------------------------------------------------------------------ machines


@pytest.fixture
def library_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., bool]:
    """Whether a process that starts with this cache and PATH has a library."""

    def find(cache: Path, *path: object) -> bool:
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        if path:
            monkeypatch.setenv("PATH", ":".join(map(str, path)))
        return kernels.library.__wrapped__() is not None

    return find


@compiled
def test_it_is_compiled_once_and_again_where_the_file_is_damaged(tmp_path, library_in):
    assert library_in(tmp_path)
    (made,) = (tmp_path / "mia-audit").iterdir()
    first = made.stat().st_mtime_ns
    assert library_in(tmp_path)
    assert made.stat().st_mtime_ns == first
    made.unlink()
    made.write_bytes(b"not a library")
    assert library_in(tmp_path)
    assert [path.name for path in made.parent.iterdir()] == [made.name]


def test_without_a_compiler_or_a_place_for_the_result_torch_does_it_all(tmp_path, library_in, monkeypatch):
    (tmp_path / "file").write_text("")
    assert not library_in(tmp_path / "file")
    broken = tmp_path / "c++"
    broken.write_text('#!/bin/sh\necho version\n[ "$1" = --version ]\n')
    broken.chmod(0o755)
    assert not library_in(tmp_path / "broken", tmp_path, "/usr/bin", "/bin")
    assert not library_in(tmp_path / "none", tmp_path / "no compiler")
    monkeypatch.setattr(kernels, "library", lambda: None)
    model = Net(lambda net, x: F.relu(net.norm(net.conv(x))))
    assert fuse(model, torch.randn(4, 3, 6, 6)) is model
