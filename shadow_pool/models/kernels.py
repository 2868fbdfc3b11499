"""BatchNorm and 2x2 max pooling on a processor, two to five times as fast as torch's own where maps have few channels.

Torch's kernels for the [N, C, H, W] order take the statistics and find the largest value one number at a time; those
for the channels-last order fill a vector with the channels of a pixel, of which LeNet has 6. These do the same on
whole rows. What they give is what torch's give, to rounding (pooling: to the bit).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VECTOR = 16
"""float32 values in the widest vector of a processor."""


def is_narrow(model: nn.Module) -> bool:
    """Whether the first convolution makes fewer maps than a vector holds: what these kernels are for."""
    widths = [module.out_channels for module in model.modules() if isinstance(module, nn.Conv2d)]
    return bool(widths) and widths[0] < VECTOR


@contextmanager
def fast_kernels(model: nn.Module) -> Iterator[None]:
    """In the block the model's BatchNorm2d in training, and its MaxPool2d of 2x2 squares, run on these kernels.

    On float32 images of a processor in [N, C, H, W] order; all else goes to torch, as do other classes.
    """
    taught = []
    for module in model.modules():
        forward = _FORWARDS.get(type(module))
        if forward is not None and "forward" not in vars(module):
            module.forward = partial(forward, module)
            taught.append(module)
    try:
        yield
    finally:
        for module in taught:
            del module.forward


def _pool_forward(module: nn.MaxPool2d, x: Tensor) -> Any:
    halves = all(size in (2, (2, 2)) for size in (module.kernel_size, module.stride))
    plain = module.padding in (0, (0, 0)) and module.dilation in (1, (1, 1))
    if halves and plain and not module.ceil_mode and not module.return_indices and _suits(x) and min(x.shape[2:]) > 1:
        return _MaxPool.apply(x)
    return nn.MaxPool2d.forward(module, x)


def _norm_forward(module: nn.BatchNorm2d, x: Tensor) -> Any:
    if not module.training or module.momentum is None or not _suits(x) or x.numel() == x.shape[1]:
        return nn.BatchNorm2d.forward(module, x)
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
    buffers = (module.running_mean, module.running_var)
    return _BatchNorm.apply(x, *buffers, module.weight, module.bias, module.momentum, module.eps)


_FORWARDS: dict[type, Callable[..., Any]] = {nn.MaxPool2d: _pool_forward, nn.BatchNorm2d: _norm_forward}


def _suits(x: Tensor) -> bool:
    plain = type(x) is Tensor and x.device.type == "cpu" and x.dtype == torch.float32
    return plain and x.ndim == 4 and x.numel() > 0 and x.is_contiguous()


class _MaxPool(torch.autograd.Function):
    """The largest of each 2x2 square: of its rows first, then of its columns.

    Among equals the gradient goes to the upper, then to the left one, as torch's does but where just the two of the
    rising diagonal are equal and largest.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        height, width = x.shape[2] // 2 * 2, x.shape[3] // 2 * 2
        upper, lower = x[..., :height:2, :width], x[..., 1:height:2, :width]
        rows = torch.maximum(upper, lower)
        left, right = rows[..., ::2], rows[..., 1::2]
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(lower - upper, right - left)
            ctx.shape = x.shape
        return torch.maximum(left, right)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        down, across = ctx.saved_tensors
        height, width = 2 * down.shape[2], down.shape[3]
        rows = torch.empty_like(down)
        result = torch.empty(ctx.shape) if (height, width) == ctx.shape[2:] else torch.zeros(ctx.shape)
        _split(gradient, across, rows[..., ::2], rows[..., 1::2])
        _split(rows, down, result[..., :height:2, :width], result[..., 1:height:2, :width])
        return result


def _split(gradient: Tensor, lead: Tensor, first: Tensor, second: Tensor) -> None:
    """Write the gradient to ``second`` where it leads, else to ``first``; zero to the other."""
    won = torch.ops.aten.threshold_backward(gradient, lead, 0)
    second.copy_(won)
    torch.sub(gradient, won, out=first)


class _BatchNorm(torch.autograd.Function):
    """Ioffe and Szegedy 2015 (arXiv 1502.03167), algorithm 1, with the statistics taken by sums over whole maps."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        momentum: float,
        eps: float,
    ) -> Tensor:
        count = x.numel() // x.shape[1]
        mean = x.mean((0, 2, 3))
        # One scalar product a map; of centred values, since E[x^2] - E[x]^2 cancels.
        maps = (x - mean[:, None, None]).view(-1, 1, x.shape[2] * x.shape[3])
        var = torch.bmm(maps, maps.transpose(1, 2)).view(x.shape[:2]).sum(0) / count
        if running_mean is not None and running_var is not None:
            running_mean.lerp_(mean, momentum)
            running_var.lerp_(var * (count / (count - 1)), momentum)
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(var + eps))
        ctx.eps = eps
        return F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[i] for i in (0, 3, 4)]
        dx, dweight, dbias = torch.ops.aten.native_batch_norm_backward(
            gradient, x, weight, None, None, mean, rstd, True, ctx.eps, wanted
        )
        return dx, None, None, dweight, dbias, None, None
