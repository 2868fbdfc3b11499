"""A model's forward in training on a processor, with BatchNorm, sum, ReLU and 2x2 pooling as single operations.

A step of a small network is mostly memory traffic: for each of these operations torch reads and writes whole maps,
forward and backward. As one they read each map twice and write it once (kernels.cpp).
"""

from __future__ import annotations

import copy
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from shadow_pool import seeds
from shadow_pool.models import kernels
from shadow_pool.models.graph import besides_tensors, has_hooks, trace
from shadow_pool.models.norms import Affine, Shift
from shadow_pool.models.outputs import logits_of
from shadow_pool.models.pooling import halve

_SUMS = {operator.add, torch.add, "add"}
_SUMS_IN_PLACE = {operator.iadd, "add_"}
_RELUS = {F.relu, torch.relu, "relu"}
_RELUS_IN_PLACE = {F.relu_, torch.relu_, "relu_"}
_POOLS = {F.max_pool2d, torch.max_pool2d, halve}
_NOISE = 0.05


def fuse(model: nn.Module, x: Tensor) -> nn.Module:
    """What computes, for maps in channels-last order, what ``model`` does in train mode, by the same parameters.

    ``model`` itself where there is no library of kernels, nothing to fuse, or a forward that a trace does not repeat:
    one whose path depends on values, that draws at random, or that keeps something in plain attributes.

    Args:
        x: inputs [N, ...] to try that on, N >= 2; the model is left untouched.
    """
    if kernels.library() is None:
        return model
    try:
        graph = trace(copy.deepcopy(model).train(), lambda layer: isinstance(layer, (Affine, Shift)))
        if not _repeats(graph, model, x):
            return model
    except Exception:  # a stranger's forward may raise anything when it meets a symbolic tensor
        return model
    fused = fx.GraphModule(model, graph)
    return fused if _rewrite(fused) else model


def _repeats(graph: fx.Graph, model: nn.Module, x: Tensor) -> bool:
    """Whether copies of the model give the same logits and gradients to the bit as they are and by the trace."""
    found = []
    with torch.enable_grad(), seeds.torch_stream(0):
        own = copy.deepcopy(model).train()
        for p in own.parameters():  # a branch that starts from zero would hide a difference
            p.data.add_(torch.empty_like(p).uniform_(-_NOISE, _NOISE))
        traced = fx.GraphModule(copy.deepcopy(own), graph)
        before = besides_tensors([own])
        for module in (own, traced):
            logits = logits_of(module(x))
            logits.square().mean().backward()
            gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
            found.append({"": logits.detach()} | gradients)
        if besides_tensors([own]) != before:
            return False
    mine, its = found
    return mine.keys() == its.keys() and all(torch.equal(mine[name], its[name]) for name in mine)


# ------------------------------------------------------------------ what can be one operation


@dataclass(frozen=True)
class _Run:
    """Operations one after another on ``x``, nothing else reading what is between, and the layer that does them."""

    nodes: list[fx.Node]
    layer: Fused
    x: fx.Node
    other: fx.Node | None


def _rewrite(module: fx.GraphModule) -> bool:
    """Put one node in the place of each run; whether there is one."""
    taken: set[fx.Node] = set()
    for node in list(module.graph.nodes):
        run = None if node in taken else _run_from(node, module)
        if run is None:
            continue
        name = f"fused_{len(taken)}"
        module.add_module(name, run.layer)
        with module.graph.inserting_after(run.nodes[-1]):
            new = module.graph.call_module(name, (run.x, run.other))
        run.nodes[-1].replace_all_uses_with(new)
        for old in reversed(run.nodes):
            module.graph.erase_node(old)
        taken.update(run.nodes)
    module.recompile()
    return bool(taken)


def _run_from(node: fx.Node, module: fx.GraphModule) -> _Run | None:
    nodes, kinds, other = [node], [_kind(node, module)], None
    while kinds[-1] is not None and len(nodes[-1].users) == 1:
        following = next(iter(nodes[-1].users))
        kind = _kind(following, module)
        if kind in (None, "norm", *kinds) or (kind == "pool" and "sum" in kinds):
            break
        if kind == "sum":
            other = _other_summand(following, nodes[-1])
            if other is None or kinds != ["norm"]:
                break
        nodes.append(following)
        kinds.append(kind)
    x = nodes[0].args[0] if nodes[0].args else None
    if not isinstance(x, fx.Node) or (kinds[0] != "norm" and {*kinds} not in ({"relu", "pool"}, {"sum", "relu"})):
        return None
    if kinds[0] == "sum":
        other = _other_summand(node, x)
        if other is None or (node.target in _SUMS_IN_PLACE and len(x.users) > 1):
            return None
    other = other if "sum" in kinds else None
    if any(_is_in_place(user, module) for source in (x, other) if source for user in source.users.keys() - {*nodes}):
        return None
    norm = module.get_submodule(str(node.target)) if kinds[0] == "norm" else None
    assert norm is None or isinstance(norm, nn.BatchNorm2d)
    return _Run(nodes, Fused(norm, relu="relu" in kinds, pool="pool" in kinds), x, other)


def _kind(node: fx.Node, module: fx.GraphModule) -> str | None:
    """``norm``, ``sum``, ``relu``, ``pool``, or None for what cannot be fused."""
    target: Any = node.target
    if node.op == "call_module":
        layer = module.get_submodule(target)
        if has_hooks(layer) or node.kwargs or len(node.args) != 1:
            return None
        if type(layer) is nn.BatchNorm2d and layer.affine and layer.momentum is not None:
            return "norm"
        if type(layer) is nn.MaxPool2d and _halves(layer.kernel_size, **{k: vars(layer)[k] for k in _POOLING}):
            return "pool"
        return "relu" if type(layer) is nn.ReLU else None
    if node.op not in ("call_function", "call_method"):
        return None
    if target in _SUMS | _SUMS_IN_PLACE:
        return "sum"
    if target in _RELUS | _RELUS_IN_PLACE:
        return "relu"
    if target is halve or (target in _POOLS and _halves(*node.args[1:], **node.kwargs)):
        return "pool"
    return None


_POOLING = ("stride", "padding", "dilation", "ceil_mode", "return_indices")


def _halves(
    kernel_size: Any = None,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: Any = False,
    return_indices: Any = False,
) -> bool:
    """Whether these arguments of max pooling ask for squares of 2x2 side by side."""
    return (
        kernel_size in (2, (2, 2))
        and stride in (None, 2, (2, 2))
        and padding in (0, (0, 0))
        and dilation in (1, (1, 1))
        and not ceil_mode
        and not return_indices
    )


def _other_summand(node: fx.Node, one: fx.Node) -> fx.Node | None:
    """What a sum adds to ``one``; None for another kind of sum, and where it would be written to."""
    if len(node.args) != 2 or node.kwargs or node.args[0] is node.args[1]:
        return None
    first, second = node.args
    if first is not one and node.target in _SUMS_IN_PLACE:
        return None
    other = second if first is one else first
    return other if isinstance(other, fx.Node) else None


def _is_in_place(node: fx.Node, module: fx.GraphModule) -> bool:
    """Whether an operation may write to what it reads."""
    if node.op == "call_module":
        return bool(getattr(module.get_submodule(str(node.target)), "inplace", False))
    if node.target in _SUMS_IN_PLACE or node.kwargs.get("inplace", False):
        return True
    if node.target is F.relu:
        return node.args[1:] == (True,)
    return str(getattr(node.target, "__name__", node.target)).endswith("_")


# ------------------------------------------------------------------ as one operation


class Fused(nn.Module):
    """[2x2 max pooling of] [ReLU of] [BatchNorm of] ``x`` [+ ``other``], in train mode."""

    def __init__(self, norm: nn.BatchNorm2d | None, *, relu: bool, pool: bool) -> None:
        super().__init__()
        self.norm, self.relu, self.pool = norm, relu, pool

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        norm = self.norm
        if not self._fits(x, other):
            y = x if norm is None else norm(x)
            y = y if other is None else y + other
            y = F.relu(y) if self.relu else y
            return F.max_pool2d(y, 2) if self.pool else y
        if norm is not None and norm.num_batches_tracked is not None:
            norm.num_batches_tracked.add_(1)
        weights = (None, None) if norm is None else (norm.weight, norm.bias)
        result: Tensor
        if self.pool:
            result = _Pooled.apply(x, *weights, norm, self.relu)
        else:
            result = _Normalized.apply(x, other, *weights, norm, self.relu)
        return result

    def _fits(self, x: Tensor, other: Tensor | None) -> bool:
        norm = self.norm
        return (
            x.ndim == 4
            and x.device.type == "cpu"
            and x.dtype in kernels.DTYPES
            and x.shape[1] % kernels.LANES == 0
            and x.is_contiguous(memory_format=torch.channels_last)
            and x.numel() > x.shape[1]
            and (norm is None or (norm.training and norm.weight.dtype == torch.float32))
            and (other is None or (other.shape == x.shape and other.dtype == x.dtype and _is_last(other)))
            and (not self.pool or min(x.shape[2:]) >= 2)
        )


def _is_last(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last)


class _Normalized(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        other: Tensor | None,
        gamma: Tensor | None,
        beta: Tensor | None,
        norm: nn.BatchNorm2d | None,
        relu: bool,
    ) -> Tensor:
        z, kept = torch.empty_like(x), torch.empty(4, x.shape[1])
        kernels.call("forward", x, other, z, *kernels.rows(x), kernels.norm(norm), kept, relu)
        ctx.save_for_backward(x, z if relu and other is not None else None, kept)
        ctx.summed, ctx.relu, ctx.normalized = other is not None, relu, norm is not None
        return z

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, z, kept = ctx.saved_tensors
        gradient = gradient.to(x.dtype).contiguous(memory_format=torch.channels_last)
        if not ctx.normalized:
            passed = torch.ops.aten.threshold_backward(gradient, z, 0)
            return passed, passed, None, None, None, None
        to_x, sums = torch.empty_like(x), torch.empty(2, x.shape[1])
        to_other = torch.empty_like(x) if ctx.summed and ctx.relu else None
        kernels.call("backward", gradient, z, x, to_x, to_other, *kernels.rows(x), kept, ctx.relu, sums[0], sums[1])
        return to_x, gradient if ctx.summed and not ctx.relu else to_other, sums[0], sums[1], None, None


class _Pooled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gamma: Tensor | None, beta: Tensor | None, norm: nn.BatchNorm2d | None, relu: bool
    ) -> Tensor:
        size = (x.shape[0], x.shape[1], x.shape[2] // 2, x.shape[3] // 2)
        z = torch.empty(size, dtype=x.dtype, memory_format=torch.channels_last)
        largest, kept = torch.empty_like(z), torch.empty(4, x.shape[1])
        which = torch.empty(size, dtype=torch.uint8, memory_format=torch.channels_last)
        kernels.call("pool_forward", x, z, largest, which, kernels.squares(x), kernels.norm(norm), kept, relu)
        ctx.save_for_backward(x, largest, which, kept)
        ctx.normalized = norm is not None
        return z

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, largest, which, kept = ctx.saved_tensors
        gradient = gradient.to(x.dtype).contiguous(memory_format=torch.channels_last)
        to_x, sums = torch.empty_like(x), torch.empty(2, x.shape[1])
        arguments = (gradient, x, largest, which, to_x, kernels.squares(x), kept, ctx.normalized)
        kernels.call("pool_backward", *arguments, sums[0], sums[1])
        return (to_x, sums[0], sums[1], None, None) if ctx.normalized else (to_x, None, None, None, None)
