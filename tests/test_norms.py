"""Conversion between arms, ratios, and the test for coupling."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torchvision
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import FrozenBatchNorm2d

from shadow_pool.arms import NORMS
from shadow_pool.errors import UserError
from shadow_pool.models.norms import (
    Affine,
    Shift,
    batchnorm_without_running_stats,
    couples_batch,
    coupling_layer,
    groups_of,
    has_batchnorm,
    norm_layers,
    ratios,
    ratios_from_state,
    to_norm,
)
from shadow_pool.models.zoo import ZOO


class OwnBatchNorm(nn.BatchNorm2d):
    """A user's subclass that behaves like its parent."""


class Wrapped(nn.BatchNorm2d):
    """A subclass with a forward of its own that normalizes and then activates, as timm's."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.act = nn.SiLU()

    def forward(self, input: Tensor) -> Tensor:
        return self.act(super().forward(input))


class Scaled(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Branching(nn.Module):
    """Control flow that depends on data: it cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = x + 1
        return self.head(self.norm(self.conv(x)).mean((2, 3)))


class CentredOnBatch(nn.Module):
    """Couples the batch without being called a norm, behind a gain that starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x - self.gain * x.mean(0, keepdim=True)


def conv_net(norm: nn.Module, channels: int = 6) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, bias=False),
        norm,
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, 2),
    )


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(6),
        nn.BatchNorm2d(6, affine=False),
        nn.BatchNorm2d(6, track_running_stats=False),
        nn.BatchNorm2d(6).requires_grad_(False).eval(),
        nn.SyncBatchNorm(6),
        FrozenBatchNorm2d(6),
        OwnBatchNorm(6),
    ],
    ids=lambda norm: type(norm).__name__,
)
def test_every_kind_of_batchnorm_goes_out(norm: nn.Module) -> None:
    model = conv_net(norm)
    assert has_batchnorm(model)
    none = to_norm(model, "none")
    assert norm_layers(none) == {}
    assert none[0].bias is not None
    assert not none[0].bias.any()
    assert norm_layers(to_norm(model, "group")) == norm_layers(to_norm(model, "layer")) == {"GroupNorm": 1}
    assert isinstance(to_norm(model, "affine")[1], Affine)
    assert model[0].bias is None
    assert model[1] is norm
    x = torch.randn(4, 3, 8, 8)
    for arm in ("none", "group", "layer", "affine"):
        assert not couples_batch(to_norm(model, arm), x)


def test_batch_is_as_given_and_a_copy() -> None:
    model = conv_net(nn.BatchNorm2d(6))
    twin = to_norm(model, "batch")
    assert twin is not model
    assert norm_layers(twin) == {"BatchNorm2d": 1}
    assert all(torch.equal(a, b) for a, b in zip(twin.state_dict().values(), model.state_dict().values(), strict=True))


def test_an_activation_inside_a_batchnorm_subclass_stays() -> None:
    none = to_norm(conv_net(Wrapped(6)), "none")
    assert [type(m) for m in none[1]] == [nn.Identity, nn.SiLU]


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (conv_net(Scaled(6)), r"layer 1 \(Scaled\) does more"),
        (
            conv_net(nn.InstanceNorm2d(6, track_running_stats=True)),
            r"layer 1 \(InstanceNorm2d\) keeps running statistics",
        ),
    ],
)
def test_layers_without_a_twin_are_named(model: nn.Module, named: str) -> None:
    with pytest.raises(UserError, match=named):
        to_norm(model, "none")


def test_batch_norm_called_as_a_function_is_refused() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            return F.batch_norm(self.norm(x), None, None, training=True)

    with pytest.raises(UserError, match="calls batch_norm as a function"):
        to_norm(Functional(), "group")


@pytest.mark.parametrize("name", ["resnet18", "densenet121", "mobilenet_v2"])
def test_torchvision_models_convert_and_share_their_weights(name: str) -> None:
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, weights=None, num_classes=5)
    weights = model.state_dict()
    for arm in ("none", "group", "affine"):
        twin = to_norm(model, arm)
        assert not has_batchnorm(twin)
        assert twin(torch.zeros(1, 3, 32, 32)).isfinite().all()
        zeroed = 0
        for key, layer in twin.named_modules():
            if isinstance(layer, nn.Conv2d):
                same = torch.equal(layer.weight, weights[f"{key}.weight"])
                zeroed += not same and not layer.weight.any()
                assert same or not layer.weight.any()
        residual = {"resnet18": 8, "densenet121": 0, "mobilenet_v2": 10}[name]
        assert zeroed == (0 if arm == "group" else residual)


def test_where_no_layer_feeds_the_norm_a_shift_stays() -> None:
    none = to_norm(ZOO["densenet22"](10, (3, 8, 8)), "none")
    # The first norm of each of the three blocks is fed by a convolution, the others by several joined maps.
    assert sum(isinstance(layer, Shift) for layer in none.modules()) == 18
    preactivation = nn.Sequential(nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2, bias=False))
    assert isinstance(to_norm(preactivation, "none")[0], Shift)


def test_a_module_that_cannot_be_traced_goes_by_registration_order() -> None:
    none = to_norm(Branching(), "none")
    assert none.conv.bias is not None
    assert none.head.bias is not None
    assert isinstance(none.norm, nn.Identity)


def test_one_norm_used_under_two_names_has_one_stand_in() -> None:
    shared = nn.BatchNorm1d(3)
    twin = to_norm(nn.Sequential(nn.Linear(3, 3), shared, nn.Linear(3, 3), shared), "group")
    assert twin[1] is twin[3]
    assert isinstance(to_norm(nn.BatchNorm1d(8), "layer"), nn.GroupNorm)


@pytest.mark.parametrize("channels", [1, 2, 6, 7, 16, 20, 72])
@pytest.mark.parametrize("dimensions", [1, 2])
def test_group_norm_passes_a_signal_at_any_width(channels: int, dimensions: int) -> None:
    layer = nn.BatchNorm1d(channels) if dimensions == 1 else nn.BatchNorm2d(channels)
    model = to_norm(layer, "group")
    a, b = (torch.randn(2, channels, *[3] * (2 * (dimensions - 1))) for _ in range(2))
    assert not torch.allclose(model(a), model(b))


@given(st.integers(1, 2048))
def test_groups_divide_the_channels_and_hold_several(channels: int) -> None:
    groups = groups_of(channels)
    assert channels % groups == 0
    assert groups <= 32
    assert groups == 1 or channels // groups >= 4


def test_ratios_in_closed_form() -> None:
    model = nn.Sequential(
        nn.BatchNorm1d(2, eps=0.5), nn.BatchNorm1d(2, affine=False), nn.BatchNorm1d(2, track_running_stats=False)
    )
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([-3.0, 1.0]))
        model[0].running_var.copy_(torch.tensor([1.75, 8.5]))
        model[1].running_var.copy_(torch.tensor([4.0, 0.25]))
    found = ratios(model)
    assert list(found) == ["0", "1"]
    assert found["0"].dtype == np.float64
    np.testing.assert_allclose(found["0"], [2.0, 1 / 3], rtol=1e-12)
    np.testing.assert_allclose(found["1"], [0.5, 2.0], rtol=1e-4)
    assert batchnorm_without_running_stats(model) == ["2"]
    from_state = ratios_from_state(model.state_dict(), eps=0.5)
    np.testing.assert_array_equal(from_state["0"], found["0"])
    assert list(ratios_from_state(model[0].state_dict())) == [""]


def test_ratios_of_a_frozen_batchnorm() -> None:
    layer = FrozenBatchNorm2d(3, eps=0.0)
    layer.weight.fill_(2.0)
    np.testing.assert_array_equal(ratios(nn.Sequential(layer))["0"], [2.0, 2.0, 2.0])


@pytest.mark.parametrize(
    ("layers", "coupled"),
    [
        ([nn.BatchNorm1d(4)], "1"),
        ([nn.BatchNorm1d(4, affine=False)], "1"),
        ([nn.Identity(), nn.Sequential(nn.ReLU(), CentredOnBatch())], "2.1"),
        ([nn.GroupNorm(2, 4), nn.Dropout(0.5)], None),
        ([nn.LayerNorm(4)], None),
        ([FrozenBatchNorm2d(4)], None),
    ],
)
def test_coupling_is_found_by_what_layers_do(layers: list[nn.Module], coupled: str | None) -> None:
    shape = (4, 1, 1) if isinstance(layers[0], FrozenBatchNorm2d) else (4,)
    model = nn.Sequential(nn.Identity(), *layers, nn.Flatten(), nn.Linear(4, 2))
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(6, *shape)
    assert coupling_layer(model, x) == coupled
    assert couples_batch(model, x) is (coupled is not None)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: torch.cumsum(x, 0),  # the first record meets nobody
        lambda x: x.flip(0).cumsum(0).flip(0),  # nor here the last
        lambda x: x + x.roll(1, 0),  # one neighbour each
    ],
    ids=["before", "after", "neighbour"],
)
def test_a_coupling_of_some_records_is_found(mix: Callable[[Tensor], Tensor]) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(mix(x))

    assert coupling_layer(Mixed(), torch.randn(6, 3)) == "Mixed"


def test_a_coupling_behind_a_zeroed_branch_is_found() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.norm = nn.BatchNorm1d(3)
            nn.init.zeros_(self.norm.weight)
            nn.init.zeros_(self.norm.bias)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.norm(self.linear(x))

    assert coupling_layer(Residual(), torch.randn(4, 3)) == "norm"


def test_coupling_needs_peers() -> None:
    with pytest.raises(ValueError, match="at least 2 records, got 1"):
        couples_batch(nn.Linear(2, 2), torch.zeros(1, 2))


def test_conversion_and_probes_leave_the_global_generator_alone() -> None:
    model = conv_net(Wrapped(6))
    state = torch.get_rng_state()
    for arm in NORMS:
        couples_batch(to_norm(model, arm), torch.ones(4, 3, 8, 8))
    assert torch.equal(torch.get_rng_state(), state)


def test_unknown_norm_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"did you mean 'group'.*affine, batch, group, layer, none"):
        to_norm(nn.Linear(1, 1), "grop")


def trained(model: nn.Module) -> nn.Module:
    """The model in eval mode, with BatchNorm's scale, shift and statistics as after training: none of them trivial."""
    generator = torch.Generator().manual_seed(1)
    for layer in model.modules():
        for name, low, high in (
            ("weight", 0.5, 1.5),
            ("bias", -0.5, 0.5),
            ("running_mean", -1, 1),
            ("running_var", 1, 4),
        ):
            tensor = getattr(layer, name, None)
            if isinstance(layer, nn.modules.batchnorm._BatchNorm | FrozenBatchNorm2d) and tensor is not None:
                tensor.data.uniform_(low, high, generator=generator)
    return model.eval()


class BetweenNorms(nn.Module):
    """Norms that cannot be folded: one used twice, one after a ReLU, one of two on the same convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.other = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 1)
        self.first, self.second = nn.BatchNorm2d(6), nn.BatchNorm2d(6, affine=False)
        self.twice, self.frozen = nn.BatchNorm2d(6), FrozenBatchNorm2d(6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        y = self.first(y) + self.second(y)
        return self.frozen(self.other(self.twice(self.twice(y).relu()))).flatten(1)


@pytest.mark.parametrize("norm", ["none", "affine"])
@pytest.mark.parametrize(
    "build",
    [
        lambda: torchvision.models.resnet18(num_classes=5),
        lambda: torchvision.models.mobilenet_v2(num_classes=5),
        lambda: ZOO["densenet22"](10, (3, 8, 8)),
        lambda: ZOO["lenet"](10, (3, 8, 8)),
        BetweenNorms,
        Branching,
        lambda: nn.Sequential(nn.ConvTranspose2d(3, 4, 2), nn.BatchNorm2d(4), Wrapped(4)),
    ],
)
def test_without_batchnorm_a_trained_network_starts_as_the_same_function(
    build: Callable[[], nn.Module], norm: str
) -> None:
    torch.manual_seed(0)
    model = trained(build())
    twin = to_norm(model, norm, trained=True).eval()
    x = torch.randn(4, 3, 8, 8)
    assert not has_batchnorm(twin)
    with torch.no_grad():
        torch.testing.assert_close(twin(x), model(x), rtol=1e-3, atol=1e-4)


def test_group_norm_takes_over_what_a_trained_batchnorm_learned() -> None:
    model = trained(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8, affine=False)))
    twin = to_norm(model, "group", trained=True)
    assert torch.equal(twin[1].weight, model[1].weight)
    assert torch.equal(twin[1].bias, model[1].bias)
    assert torch.equal(twin[0].weight, model[0].weight)
    assert not twin[3].affine


def test_a_trained_network_folds_into_the_layer_before_where_it_can() -> None:
    twin = to_norm(trained(ZOO["lenet"](10, (1, 8, 8))), "none", trained=True)
    assert not any(isinstance(layer, Shift) for layer in twin.modules())
    assert sum(isinstance(layer, Shift) for layer in to_norm(BetweenNorms(), "none", trained=True).modules()) == 3
