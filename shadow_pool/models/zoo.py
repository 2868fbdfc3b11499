"""The zoo: small classifiers of the literature, always built with BatchNorm.

Other arms are made from these by :func:`shadow_pool.models.norms.to_norm`, the way they are made from a
stranger's module, so that shared layers start from the same weights in every arm. A layer followed by
BatchNorm has no bias of its own; the conversion to ``none`` gives it one. Forwards are written twice where
:mod:`shadow_pool.models.fused` is called: TorchScript passes no modules to functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shadow_pool.errors import UserError
from shadow_pool.models.fused import activate, pooled
from shadow_pool.models.pooling import halve

Shape = tuple[int, ...]


def _image(arch: str, input_shape: Shape, smallest: int) -> Shape:
    """(C, H, W) of an image of at least ``smallest`` pixels a side, or an error naming the architecture."""
    if len(input_shape) != 3:
        raise UserError(
            f"arch {arch} needs images [C, H, W], the records have shape {list(input_shape)}; "
            "use --arch mlp for features"
        )
    if min(input_shape[1:]) < smallest:
        raise UserError(
            f"arch {arch} needs images of at least {smallest}x{smallest}, the records have shape {list(input_shape)}; "
            "use --image-size or --arch mlp"
        )
    return input_shape


def _he_init(model: nn.Module) -> None:
    """Normal weights of variance 2 / fan_in for convolutions (He et al. 2015, arXiv 1502.01852, equation 10).

    It keeps the scale of the signal without any normalization; by fan_out a DenseNet without norms explodes.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")


class LeNet(nn.Module):
    """LeNet-5 (LeCun et al. 1998) with ReLU and max pooling; BatchNorm after convolutions and hidden layers.

    61,706 parameters in the arm ``none`` on 32x32 grey images. Convolutions of small images are padded: the
    first below 32 pixels a side (28x28 is the 32x32 of the original with its border), the second below 16.
    """

    def __init__(self, classes: int, input_shape: Shape) -> None:
        super().__init__()
        channels, height, width = _image("lenet", input_shape, 4)
        side = min(height, width)
        first, second = (0 if side >= 32 else 2), (0 if side >= 16 else 2)
        self.conv1 = nn.Conv2d(channels, 6, 5, padding=first, bias=False)
        self.norm1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 16, 5, padding=second, bias=False)
        self.norm2 = nn.BatchNorm2d(16)
        pooled = [((size + 2 * first - 4) // 2 + 2 * second - 4) // 2 for size in (height, width)]
        self.linear1 = nn.Linear(16 * pooled[0] * pooled[1], 120, bias=False)
        self.norm3 = nn.BatchNorm1d(120)
        self.linear2 = nn.Linear(120, 84, bias=False)
        self.norm4 = nn.BatchNorm1d(84)
        self.head = nn.Linear(84, classes)

    def forward(self, x: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            x = F.relu(halve(self.norm1(self.conv1(x))))
            x = F.relu(halve(self.norm2(self.conv2(x))))
        else:
            x = pooled(self.conv1, self.norm1, x)
            x = pooled(self.conv2, self.norm2, x)
        x = F.relu(self.norm3(self.linear1(x.flatten(1))))
        x = F.relu(self.norm4(self.linear2(x)))
        return self.head(x)


class MLP(nn.Module):
    """Multilayer perceptron on flat features (images are flattened); BatchNorm after each hidden layer."""

    def __init__(self, classes: int, input_shape: Shape, *, width: int = 256, depth: int = 2) -> None:
        super().__init__()
        features = int(torch.Size(input_shape).numel())
        layers: list[nn.Module] = []
        for _ in range(depth):
            layers += [nn.Linear(features, width, bias=False), nn.BatchNorm1d(width), nn.ReLU()]
            features = width
        self.hidden = nn.Sequential(*layers)
        self.head = nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(x.flatten(1)))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, a 1x1 convolution where the shape changes."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, width, 1, stride, bias=False),
                nn.BatchNorm2d(width),
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(x)
        out = self.conv2(F.relu(self.norm1(out)) if torch.jit.is_scripting() else activate(self.norm1, out))
        if torch.jit.is_scripting():
            return F.relu(self.norm2(out) + self.shortcut(x))
        return activate(self.norm2, out, other=self.shortcut(x))


class ResNet(nn.Module):
    """ResNet with a 3x3 stem for small images (He et al. 2016, arXiv 1512.03385, section 4.2).

    One stage per entry of ``blocks``; each stage doubles the width and, from the second on, halves the side.
    Without normalization (arms ``none`` and ``affine``) the conversion zeroes the last convolution of each
    branch, so that the network starts as its shortcuts and trains (Zhang et al. 2019, arXiv 1901.09321).
    """

    def __init__(self, arch: str, classes: int, input_shape: Shape, *, blocks: Sequence[int], width: int) -> None:
        super().__init__()
        channels, _, _ = _image(arch, input_shape, 4)
        self.conv = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        layers: list[nn.Module] = []
        channels = width
        for stage, count in enumerate(blocks):
            for position in range(count):
                layers.append(BasicBlock(channels, width << stage, stride=2 if stage and not position else 1))
                channels = width << stage
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(channels, classes)
        _he_init(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        x = self.blocks(F.relu(self.norm(x)) if torch.jit.is_scripting() else activate(self.norm, x))
        return self.head(x.mean((2, 3)))


class DenseLayer(nn.Module):
    """Norm, ReLU, 3x3 convolution of ``growth`` channels, appended to the input; with or without bottleneck."""

    def __init__(self, channels: int, growth: int, bottleneck: bool) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels)
        self.reduce: nn.Module = nn.Identity()
        if bottleneck:
            self.reduce = nn.Sequential(
                nn.Conv2d(channels, 4 * growth, 1, bias=False), nn.BatchNorm2d(4 * growth), nn.ReLU()
            )
            channels = 4 * growth
        self.conv = nn.Conv2d(channels, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.norm1(x)) if torch.jit.is_scripting() else activate(self.norm1, x)
        return torch.cat([x, self.conv(self.reduce(active))], 1)


class Transition(nn.Module):
    """Norm, ReLU, 1x1 convolution, 2x2 average pooling."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.conv = nn.Conv2d(channels, width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(x)) if torch.jit.is_scripting() else activate(self.norm, x)
        return F.avg_pool2d(self.conv(x), 2)


class DenseNet(nn.Module):
    """DenseNet of three blocks for small images (Huang et al. 2017, arXiv 1608.06993, section 3).

    ``depth`` counts convolutions and the head. ``bottleneck`` makes it DenseNet-BC: 1x1 bottlenecks, and
    transitions that halve the channels. Depth 40 with growth 12 has 1.0 M parameters, BC of depth 100 0.8 M.
    """

    def __init__(
        self, classes: int, input_shape: Shape, *, depth: int = 40, growth: int = 12, bottleneck: bool = False
    ) -> None:
        super().__init__()
        channels, _, _ = _image("densenet", input_shape, 4)
        per_layer = 2 if bottleneck else 1
        if depth < 7 or (depth - 4) % (3 * per_layer):
            raise UserError(
                f"densenet depth must be 4 plus a multiple of {3 * per_layer}, got {depth}: it has three equal blocks"
            )
        width = 2 * growth if bottleneck else 16
        self.conv = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        layers: list[nn.Module] = []
        for stage in range(3):
            if stage:
                layers.append(Transition(width, width // per_layer))
                width //= per_layer
            for _ in range((depth - 4) // (3 * per_layer)):
                layers.append(DenseLayer(width, growth, bottleneck))
                width += growth
        self.blocks = nn.Sequential(*layers)
        self.norm = nn.BatchNorm2d(width)
        self.head = nn.Linear(width, classes)
        _he_init(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.conv(x))
        x = F.relu(self.norm(x)) if torch.jit.is_scripting() else activate(self.norm, x)
        return self.head(x.mean((2, 3)))


def resnet8(classes: int, input_shape: Shape, *, width: int = 16) -> ResNet:
    """CIFAR-style ResNet of 8 layers, 78 k parameters."""
    return ResNet("resnet8", classes, input_shape, blocks=(1, 1, 1), width=width)


def resnet20(classes: int, input_shape: Shape, *, width: int = 16) -> ResNet:
    """CIFAR-style ResNet of 20 layers, 0.27 M parameters."""
    return ResNet("resnet20", classes, input_shape, blocks=(3, 3, 3), width=width)


def resnet18(classes: int, input_shape: Shape, *, width: int = 64) -> ResNet:
    """ResNet-18 with a 3x3 stem and no first pooling, 11.17 M parameters."""
    return ResNet("resnet18", classes, input_shape, blocks=(2, 2, 2, 2), width=width)


def densenet22(classes: int, input_shape: Shape, *, growth: int = 8, bottleneck: bool = False) -> DenseNet:
    """DenseNet of 22 layers."""
    return DenseNet(classes, input_shape, depth=22, growth=growth, bottleneck=bottleneck)


def densenet40(classes: int, input_shape: Shape, *, growth: int = 12, bottleneck: bool = False) -> DenseNet:
    """DenseNet of 40 layers, 1.0 M parameters."""
    return DenseNet(classes, input_shape, depth=40, growth=growth, bottleneck=bottleneck)


ZOO: dict[str, Callable[..., nn.Module]] = {
    "lenet": LeNet,
    "mlp": MLP,
    "resnet8": resnet8,
    "resnet20": resnet20,
    "resnet18": resnet18,
    "densenet22": densenet22,
    "densenet40": densenet40,
}
"""Name -> factory(classes, input_shape, **options); input_shape is (C, H, W) of an image or (D,) of features."""
