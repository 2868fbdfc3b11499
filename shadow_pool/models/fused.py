"""BatchNorm, sum, ReLU and 2x2 max pooling in training on a processor as one operation.

A step of a small network is mostly memory traffic: for each of them torch reads and writes whole maps, forward and
backward. As one they read each map twice and write it once (kernels.cpp).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
    """Let :func:`activate` fuse in this thread: for the forward of a training step, of which nobody asks more than
    first gradients."""
    before = _is_fusing()
    _state.fusing = kernels.loaded() is not None
    try:
        yield
    finally:
        _state.fusing = before


def _is_fusing() -> bool:
    return getattr(_state, "fusing", False)


def activate(norm: nn.Module, x: Tensor, *, other: Tensor | None = None, pool: bool = False) -> Tensor:
    """ReLU of ``norm(x)``, plus ``other``, or pooled 2x2; inside :func:`fusing` as one operation where that is faster.

    That is for maps in channels-last order and the layers that most networks have: a plain BatchNorm, or none. The
    results differ by rounding.

    Args:
        norm: called with ``x`` otherwise, hooks and all.
        x: [N, C, H, W].
        other: [N, C, H, W], added before ReLU; not together with ``pool``.
    """
    if _is_fusing() and _fits(norm, x, other, pool):
        layer: nn.BatchNorm2d | None = None
        weights: tuple[Tensor | None, Tensor | None] = (None, None)
        if isinstance(norm, nn.BatchNorm2d):
            layer, weights = norm, (norm.weight, norm.bias)
            layer.get_buffer("num_batches_tracked").add_(1)
        fused: Tensor = _Pooled.apply(x, *weights, layer) if pool else _Normalized.apply(x, other, *weights, layer)
        return fused
    y = norm(x)
    if pool:  # ReLU commutes with max pooling and is cheaper on the pooled map
        y = halve(y)
    return F.relu(y if other is None else y + other)


def _fits(norm: nn.Module, x: Any, other: Any, pool: bool) -> bool:
    return (
        type(x) is Tensor  # else it is a symbol, of which nothing can be asked
        and (_is_plain(norm) or (type(norm) is nn.Identity and (pool or other is not None)))
        and x.ndim == 4
        and x.dtype in kernels.DTYPES
        and x.device.type == "cpu"
        and x.shape[1] % kernels.LANES == 0
        and x.shape[1] <= kernels.MOST_CHANNELS
        and x.numel() > x.shape[1]
        and _is_last(x)
        and (other is None or (other.shape == x.shape and other.dtype == x.dtype and _is_last(other)))
        and (not pool or min(x.shape[2:]) > 1)
    )


def _is_plain(norm: nn.Module) -> bool:
    """Whether a layer is a BatchNorm that does what its definition says for training, and nothing else."""
    if type(norm) is not nn.BatchNorm2d:
        return False
    held = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
    return (
        norm.training
        and norm.track_running_stats
        and norm.momentum is not None
        and norm.num_batches_tracked is not None
        and all(t is not None and t.dtype == torch.float32 and t.is_contiguous() for t in held)
        and not has_hooks(norm)
        and "forward" not in vars(norm)
    )


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
    def forward(ctx: Any, x: Tensor, gamma: Tensor | None, beta: Tensor | None, norm: nn.BatchNorm2d | None) -> Tensor:
        size = (x.shape[0], x.shape[1], x.shape[2] // 2, x.shape[3] // 2)
        z = torch.empty(size, dtype=x.dtype, memory_format=_LAST)
        which = torch.empty(size, dtype=torch.uint8, memory_format=_LAST)
        largest, kept = torch.empty_like(z), _floats(4, x)
        kernels.call("pool_forward", x, z, largest, which, kernels.squares(x), kernels.norm(norm), kept)
        ctx.save_for_backward(x, largest, which, kept)
        ctx.normalized = norm is not None
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, largest, which, kept = ctx.saved_tensors
        to_x, sums = torch.empty_like(x), _floats(2, x)
        arguments = (x, largest, which, to_x, kernels.squares(x), kept, ctx.normalized, sums[0], sums[1])
        kernels.call("pool_backward", _like(gradient, x), *arguments)
        return (to_x, sums[0], sums[1], None) if ctx.normalized else (to_x, None, None, None)


def _floats(rows: int, x: Tensor) -> Tensor:
    return torch.empty(rows, x.shape[1], dtype=torch.float32)


def _like(gradient: Tensor, x: Tensor) -> Tensor:
    return gradient.to(x.dtype).contiguous(memory_format=_LAST)
