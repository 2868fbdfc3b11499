"""shadow_pool.models.pooling: torch's 2x2 max pooling, to the bit, and its gradients."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch.func import grad, vmap
from torch.nn import functional as F

from shadow_pool.models.pooling import halve
from shadow_pool.models.resolve import build_model
from shadow_pool.seeds import torch_stream

SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 7), st.integers(2, 9), st.integers(2, 9))


def drawn(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    with torch_stream(seed):
        return torch.randn(shape)


def slope(pool, x: torch.Tensor) -> torch.Tensor:
    """Gradient of a weighted sum of the pooled values, every weight another."""
    return grad(lambda x: (pool(x).square() * torch.arange(1, pool(x).numel() + 1).view(pool(x).shape)).sum())(x)


def torchs(x: torch.Tensor) -> torch.Tensor:
    return F.max_pool2d(x, 2)


@settings(deadline=None)
@given(SHAPES, st.integers(0, 1000))
def test_values_and_gradients_are_torchs_to_the_bit(shape, seed):
    x = drawn(shape, seed)
    assert torch.equal(halve(x), torchs(x))
    assert torch.equal(slope(halve, x), slope(torchs, x))
    with torch.no_grad():
        assert torch.equal(halve(x), torchs(x))


@settings(deadline=None)
@given(SHAPES, st.integers(0, 1000), st.integers(1, 3))
def test_of_equals_one_gets_the_gradient(shape, seed, values):
    """Few distinct values, so that squares tie in every pattern."""
    x = torch.from_numpy(np.random.default_rng(seed).integers(1, values + 1, (*shape[:2], 6, 4))).float()
    squares = lambda t: t.unfold(2, 2, 2).unfold(3, 2, 2).flatten(-2)  # noqa: E731
    received = squares(slope(halve, x))
    assert ((received != 0).sum(-1) == 1).all()
    assert torch.equal((squares(x) * (received != 0)).sum(-1), halve(x))
    assert torch.equal(received.sum(-1), squares(slope(torchs, x)).sum(-1))


def test_background_that_ties_everywhere_goes_where_torch_sends_it():
    x = torch.zeros(2, 3, 8, 8)
    x[:, :, 2:5, 3:7] = 1.0
    assert torch.equal(slope(halve, x + 1), slope(torchs, x + 1))


@pytest.mark.parametrize(
    "change",
    [lambda x: x.to(memory_format=torch.channels_last), lambda x: x.double(), lambda x: x.bfloat16(), lambda x: x[:0]],
    ids=["channels-last", "float64", "bf16", "no records"],
)
def test_any_order_and_type(change):
    x = change(drawn((4, 3, 6, 7)))
    ours, theirs = halve(x), torchs(x)
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours, theirs)


def test_a_map_too_small_to_halve_is_refused_as_torch_refuses_it():
    with pytest.raises(RuntimeError, match="Output size is too small"):
        halve(torch.zeros(2, 3, 1, 4))


def test_not_a_number_is_passed_on():
    x = drawn((1, 1, 4, 4))
    x[0, 0, 2, 3] = torch.nan
    assert torch.equal(halve(x).isnan(), torchs(x).isnan())


def test_record_by_record_under_vmap():
    x = drawn((5, 2, 3, 7, 6))
    each = vmap(grad(lambda one: halve(one).square().sum()))(x)
    assert torch.equal(each, torch.stack([slope_of_squares(one) for one in x]))


def slope_of_squares(x: torch.Tensor) -> torch.Tensor:
    return grad(lambda one: torchs(one).square().sum())(x)


def test_gradients_of_gradients():
    x = drawn((2, 3, 5, 6)).double().requires_grad_()
    assert torch.autograd.gradgradcheck(halve, x)
    assert torch.autograd.gradcheck(halve, x)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["script", "trace", "export"])
def test_a_program_made_of_a_model_that_halves(form):
    model = build_model("lenet", "batch", classes=10, input_shape=(1, 28, 28), seed=0).eval()
    x = drawn((4, 1, 28, 28))
    program = {
        "script": lambda: torch.jit.script(model),
        "trace": lambda: torch.jit.trace(model, x),
        "export": lambda: torch.export.export(model, (x,)).module(),
    }[form]()
    torch.testing.assert_close(program(x), model(x))
