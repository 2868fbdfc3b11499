"""The zoo: published parameter counts, small images, and arms that train."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from shadow_pool.errors import UserError
from shadow_pool.models.norms import to_norm
from shadow_pool.models.resolve import build_model
from shadow_pool.models.zoo import ZOO, DenseNet


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("arch", "norm", "shape", "count"),
    [
        ("lenet", "none", (1, 32, 32), 61_706),  # LeCun 1998 with full connections
        ("lenet", "none", (1, 28, 28), 61_706),
        ("resnet20", "batch", (3, 32, 32), 272_474),  # He 2016, table 6: 0.27 M
        ("resnet18", "batch", (3, 32, 32), 11_173_962),  # the common CIFAR variant: 11.17 M
        ("densenet40", "batch", (3, 32, 32), 1_019_722),  # Huang 2017, table 2: 1.0 M
    ],
)
def test_published_parameter_counts(arch: str, norm: str, shape: tuple[int, ...], count: int) -> None:
    assert parameters(build_model(arch, norm, classes=10, input_shape=shape, seed=0)) == count


def test_densenet_bc_has_the_published_parameters() -> None:
    # Huang 2017, table 2: DenseNet-BC, depth 100, growth 12: 0.8 M.
    assert parameters(DenseNet(10, (3, 32, 32), depth=100, growth=12, bottleneck=True)) == 769_162


@pytest.mark.parametrize("arch", ZOO)
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 13, 9), (3, 32, 32)])
def test_every_architecture_takes_small_grey_and_colour_images(arch: str, shape: tuple[int, ...]) -> None:
    model = ZOO[arch](7, shape)
    with torch.no_grad():
        assert model(torch.zeros(2, *shape)).shape == (2, 7)


def test_mlp_takes_features() -> None:
    assert ZOO["mlp"](2, (30,), width=8, depth=1)(torch.zeros(4, 30)).shape == (4, 2)


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(UserError, match=r"resnet8 needs images .* \[30\]"):
        ZOO["resnet8"](2, (30,))
    with pytest.raises(UserError, match=r"lenet needs images of at least 4x4, .* \[1, 3, 8\]"):
        ZOO["lenet"](2, (1, 3, 8))
    with pytest.raises(UserError, match="depth must be 4 plus a multiple of 6, got 23"):
        DenseNet(2, (1, 8, 8), depth=23, bottleneck=True)


def test_layers_before_a_norm_have_no_bias_of_their_own() -> None:
    for arch in ZOO:
        model = ZOO[arch](10, (3, 32, 32))
        biased = [name for name, layer in model.named_modules() if getattr(layer, "bias", None) is not None]
        assert all(
            name == "head" or isinstance(model.get_submodule(name), nn.modules.batchnorm._BatchNorm) for name in biased
        )


@pytest.mark.parametrize(
    ("arch", "norm"), [("resnet8", "none"), ("resnet20", "affine"), ("densenet22(growth=4)", "none")]
)
def test_deep_networks_without_normalization_train(arch: str, norm: str) -> None:
    digits = load_digits()
    x = torch.from_numpy((digits.images[:64, None] / 8 - 1).astype(np.float32))
    y = torch.from_numpy(digits.target[:64])
    model = build_model(arch, norm, classes=10, input_shape=(1, 8, 8), seed=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    losses = []
    for _ in range(40):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] < 4
    assert np.mean(losses[-4:]) < 0.5


def test_a_residual_network_without_norm_starts_as_its_shortcuts() -> None:
    model = ZOO["resnet8"](10, (3, 8, 8))
    for norm in ("none", "affine"):
        block = to_norm(model, norm).get_submodule("blocks.0")
        x = torch.rand(2, 16, 8, 8)
        assert torch.equal(block(x), x)
    assert to_norm(model, "group").get_submodule("blocks.0.conv2").weight.any()
