"""Convolution, BatchNorm, sum, ReLU and 2x2 max pooling in training on a processor as one operation.

A step of a small network is mostly memory traffic: for each of them torch reads and writes whole maps, forward and
backward. :func:`pooled` does all but the sum while a channel's maps are in a cache, the records of a batch side by side
in memory (pooled.cpp). Wide convolutions are torch's; :func:`activate` does what follows them, pixel by pixel in
channels-last order (activations.cpp).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shadow_pool.models import kernels
from shadow_pool.models.graph import has_hooks
from shadow_pool.models.pooling import halve

fx.wrap("halve")  # its choice by the tensor's order cannot be traced

_LAST = torch.channels_last
_state = threading.local()


@contextmanager
def fusing() -> Iterator[None]:
    """Let :func:`pooled` and :func:`activate` fuse in this thread: for the forward of a training step, of which nobody
    asks more than first gradients."""
    before = _is_fusing()
    _state.fusing = kernels.loaded() is not None
    try:
        yield
    finally:
        _state.fusing = before


def _is_fusing() -> bool:
    return getattr(_state, "fusing", False)


def pooled(conv: nn.Module, norm: nn.Module, x: Tensor) -> Tensor:
    """ReLU of the largest values of each 2x2 square of ``norm(conv(x))``; inside :func:`fusing` as one operation.

    That is for narrow convolutions and the layers that most networks have: a plain BatchNorm or, after a bias, none.
    It is in float32, whatever autocast says. The results differ by rounding, and lie in another order in memory.

    Args:
        conv: called with ``x`` otherwise, hooks and all, then ``norm``.
        x: [N, C, H, W].
    """
    if _is_fusing() and kernels.pooled_is_fast() and _fits_pooled(conv, norm, x):
        layer, (gamma, beta) = _counted(norm)
        fused: Tensor = _Pooled.apply(x, conv.weight, gamma, conv.bias if layer is None else beta, conv, layer)
        return fused
    # ReLU commutes with max pooling and is cheaper on the pooled map.
    return F.relu(halve(norm(conv(x))))


def activate(norm: nn.Module, x: Tensor, *, other: Tensor | None = None) -> Tensor:
    """ReLU of ``norm(x)``, plus ``other``; inside :func:`fusing` as one operation where that is faster.

    That is for maps in channels-last order and the layers that most networks have: a plain BatchNorm, or none. The
    results differ by rounding.

    Args:
        norm: called with ``x`` otherwise, hooks and all.
        x: [N, C, H, W].
        other: [N, C, H, W], added before ReLU.
    """
    if _is_fusing() and _fits(norm, x, other):
        layer, weights = _counted(norm)
        fused: Tensor = _Normalized.apply(x, other, *weights, layer)
        return fused
    y = norm(x)
    return F.relu(y if other is None else y + other)


def _counted(norm: nn.Module) -> tuple[nn.BatchNorm2d | None, tuple[Tensor | None, Tensor | None]]:
    """A layer that has seen one more batch, and its weights; nothing where there is none."""
    if not isinstance(norm, nn.BatchNorm2d):
        return None, (None, None)
    norm.get_buffer("num_batches_tracked").add_(1)
    return norm, (norm.weight, norm.bias)


def _fits(norm: nn.Module, x: Any, other: Any) -> bool:
    return (
        type(x) is Tensor  # else it is a symbol, of which nothing can be asked
        and x.ndim == 4
        and (_is_plain(norm, x.shape[1]) or (_is_nothing(norm) and other is not None))
        and x.dtype in kernels.DTYPES
        and x.device.type == "cpu"
        and x.shape[1] % kernels.LANES == 0
        and x.shape[1] <= kernels.MOST
        and x.numel() > x.shape[1]
        and _is_last(x)
        and (other is None or (other.shape == x.shape and other.dtype == x.dtype and _is_last(other)))
    )


def _fits_pooled(conv: nn.Module, norm: nn.Module, x: Any) -> bool:
    if not (
        type(x) is Tensor
        and _is_plain_convolution(conv)
        and ((_is_plain(norm, conv.out_channels) and conv.bias is None) or _is_nothing(norm))
        and x.ndim == 4
        and x.shape[1] == conv.in_channels
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and len(x) > 0
    ):
        return False
    shape = kernels.shape(conv, x)
    size = (shape.out_height, shape.out_width)
    return min(size) > 1 and max(*x.shape, *size) <= kernels.MOST


def _is_plain_convolution(conv: nn.Module) -> TypeGuard[nn.Conv2d]:
    return (
        type(conv) is nn.Conv2d
        and conv.weight.dtype == torch.float32
        and conv.weight.shape == (conv.out_channels, conv.in_channels // conv.groups, *conv.kernel_size)
        and (conv.bias is None or _is_plain_vector(conv.bias, conv.out_channels))
        and conv.padding_mode == "zeros"
        and not isinstance(conv.padding, str)
        and len(set(conv.padding)) == 1
        and min(conv.padding) >= 0
        and set(conv.stride) == set(conv.dilation) == {1}
        and _is_called_alone(conv)
    )


def _is_plain(norm: nn.Module, channels: int) -> bool:
    """Whether a layer is a BatchNorm of so many channels that does what its definition says in training, no more."""
    if type(norm) is not nn.BatchNorm2d:
        return False
    held = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
    return (
        norm.training
        and norm.track_running_stats
        and norm.momentum is not None
        and norm.num_batches_tracked is not None
        and all(t is not None and _is_plain_vector(t, channels) for t in held)
        and _is_called_alone(norm)
    )


def _is_nothing(norm: nn.Module) -> bool:
    return type(norm) is nn.Identity and _is_called_alone(norm)


def _is_called_alone(layer: nn.Module) -> bool:
    return not has_hooks(layer) and "forward" not in vars(layer)


def _is_plain_vector(x: Tensor, size: int) -> bool:
    return x.dtype == torch.float32 and x.shape == (size,) and x.is_contiguous()


def _is_last(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=_LAST)


class _Normalized(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        other: Tensor | None,
        gamma: Tensor | None,
        beta: Tensor | None,
        norm: nn.BatchNorm2d | None,
    ) -> Tensor:
        z, kept = torch.empty_like(x), _floats(4, x)
        kernels.call("forward", x, other, z, *kernels.rows(x), kernels.norm(norm), kept)
        ctx.save_for_backward(x, None if other is None else z, kept)
        ctx.normalized = norm is not None
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, z, kept = ctx.saved_tensors
        gradient = _like(gradient, x)
        if not ctx.normalized:
            passed = torch.ops.aten.threshold_backward(gradient, z, 0)
            return passed, passed, None, None, None
        to_x, to_other, sums = torch.empty_like(x), None if z is None else torch.empty_like(x), _floats(2, x)
        kernels.call("backward", gradient, z, x, to_x, to_other, *kernels.rows(x), kept, sums[0], sums[1])
        return to_x, to_other, sums[0], sums[1], None


class _Pooled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        gamma: Tensor | None,
        beta: Tensor | None,
        conv: nn.Conv2d,
        norm: nn.BatchNorm2d | None,
    ) -> Tensor:
        shape = kernels.shape(conv, x)
        x, weight = _side_by_side(x), weight.contiguous()
        height, width = shape.out_height, shape.out_width
        y = x.new_empty(shape.out_channels if norm is None else conv.out_channels, height, width, shape.padded)
        z = x.new_empty(conv.out_channels, height // 2, width // 2, shape.padded)
        which, kept = torch.empty_like(z, dtype=torch.uint8), x.new_empty(4, conv.out_channels)
        kernels.call("pooled_forward", x, weight, y, z, which, shape, kernels.norm(norm, beta), kept)
        ctx.save_for_backward(x, weight, None if norm is None else y, which, kept)
        ctx.shape = shape
        return _maps(z, shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, y, which, kept = ctx.saved_tensors
        shape, needed = ctx.shape, ctx.needs_input_grad
        to_x, to_weight = torch.empty_like(x) if needed[0] else None, torch.empty_like(weight)
        sums = x.new_empty(2, kept.shape[1])
        room = (
            x.new_empty(shape.out_channels, shape.out_height, shape.out_width, shape.padded),
            x.new_empty(shape.channels, shape.height, shape.width + 2 * shape.pad, shape.padded),
            x.new_empty(kernels.TALLEST, *weight.shape[1:], kernels.RECORDS),
        )
        tensors = (x, weight, y, which, to_x, to_weight, *room)
        kernels.call("pooled_backward", _side_by_side(gradient), *tensors, shape, kept, sums[0], sums[1])
        to_gamma, to_beta = (own if needs else None for own, needs in zip(sums, needed[2:4], strict=True))
        return None if to_x is None else _maps(to_x, shape), to_weight, to_gamma, to_beta, None, None


def _side_by_side(x: Tensor) -> Tensor:
    """[N, C, H, W] as [C, H, W, padded], the records of a batch last and zeros after them."""
    turned, missing = x.permute(1, 2, 3, 0), -len(x) % kernels.RECORDS
    return F.pad(turned, (0, missing)) if missing else turned.contiguous()


def _maps(x: Tensor, shape: Any) -> Tensor:
    """The inverse of :func:`_side_by_side`, a view."""
    return x[..., : shape.records].permute(3, 0, 1, 2)


def _floats(rows: int, x: Tensor) -> Tensor:
    return torch.empty(rows, x.shape[1], dtype=torch.float32)


def _like(gradient: Tensor, x: Tensor) -> Tensor:
    return gradient.to(x.dtype).contiguous(memory_format=_LAST)
