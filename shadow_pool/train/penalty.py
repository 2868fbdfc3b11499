"""The remedy: a penalty on gamma/sigma of BatchNorm, soft or hard, for any training loop.

gamma/sigma above one amplifies steps of the margin (arXiv 2605.24420); the penalty keeps gamma near or below
``target`` times the running standard deviation, which it takes as given.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shadow_pool.errors import UserError


def penalty(model: nn.Module, *, target: float = 1.0) -> Tensor:
    """A scalar to add to the loss, times a strength: ``loss + strength * penalty(model)``.

    The mean over channels of relu(abs(gamma) / sqrt(running_var + eps) - target)^2 per BatchNorm layer, summed over
    layers. Running variances are constants; the gradient reaches gamma alone.

    Raises:
        UserError: the model has no BatchNorm layer with a gamma that trains and running statistics.
    """
    layers = _layers(model)
    # One long vector, so that the cost does not grow with the number of layers.
    gamma = torch.cat([layer.weight for layer in layers])
    variance = torch.cat([_variance(layer) for layer in layers])
    share = torch.cat([layer.weight.new_full(layer.weight.shape, 1 / layer.num_features) for layer in layers])
    excess = torch.relu(gamma.abs() * variance.rsqrt() - target)
    return (share * excess).dot(excess)


@torch.no_grad()
def project_(model: nn.Module, *, target: float = 1.0) -> None:
    """The hard form, in place after each optimizer step: abs(gamma) at most target * sqrt(running_var + eps).

    Raises:
        UserError: the model has no BatchNorm layer with a gamma that trains and running statistics.
    """
    for layer in _layers(model):
        bound = target * _variance(layer).sqrt()
        layer.weight.clamp_(-bound, bound)


def _variance(layer: nn.modules.batchnorm._BatchNorm) -> Tensor:
    assert layer.running_var is not None
    return layer.running_var + layer.eps


def _layers(model: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    found = [
        layer
        for layer in model.modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm)
        and isinstance(layer.weight, nn.Parameter)
        and layer.weight.requires_grad
        and layer.running_var is not None
    ]
    if not found:
        raise UserError(
            f"{type(model).__name__} has no BatchNorm layer with a gamma that trains and running statistics to "
            "penalize; train the batch arm without a penalty"
        )
    return found
