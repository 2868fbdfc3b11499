"""Several small models as one: the layers of each are groups of one larger layer.

A step of a small model is mostly overhead: every operation has its price in Python, and torch's convolutions of six
maps fill a third of the processor's vectors. Four small networks side by side take half to two thirds of the time that
they take one after another, LeNets, whose convolutions are our own, .75 to .85, each with the weights, records and
gradients it has alone.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from shadow_pool import seeds
from shadow_pool.models.graph import has_hooks, trace
from shadow_pool.models.norms import Affine, Shift
from shadow_pool.models.outputs import logits_of

STACK = 4
"""Models that train side by side. Eight are no faster: what a step reads and writes then leaves the caches."""
_VECTOR = 16
_SMALL = 150_000
_PROBE, _NOISE, _SCALES = 4, 0.05, (1, 100)


def is_wide(model: nn.Module) -> bool:
    """Whether a convolution makes more maps than a vector of the processor holds float32 values.

    Below that, the channels-last order and bf16 cost more in the other layers than they gain in convolutions.
    """
    convolutions = [module for module in model.modules() if isinstance(module, nn.modules.conv._ConvNd)]
    return any(module.out_channels > _VECTOR for module in convolutions)


def is_small(model: nn.Module) -> bool:
    """Whether models like this one gain by being stacked.

    Four multilayer perceptrons of 85 k parameters took .65 to 1 of the time of one after another, of 170 k as long, of
    1.1 M 1.8 times as long.
    """
    return not is_wide(model) and sum(p.numel() for p in model.parameters()) <= _SMALL


class Stack:
    """``models`` and ``joint``, the one module that computes all of them; of a single model, itself.

    In ``joint`` every parameter and running statistic is the models' own, one after another along the first dimension,
    and the models' are views of it: they can be run and asked at any time.
    """

    def __init__(self, models: Sequence[nn.Module], joint: nn.Module) -> None:
        self.models, self.joint = models, joint

    @classmethod
    def of(cls, models: Sequence[nn.Module], input_shape: Sequence[int]) -> Stack | None:
        """The stack of models of one architecture; None where it would not compute what each computes alone.

        That is tried on copies, in train mode: logits and gradients for random inputs, in float64, where whatever
        differs by more than rounding is a difference.

        Args:
            models: on the CPU; their parameters become views of the stack's.
            input_shape: of what one record's input is to them.
        """
        if not _agrees([copy.deepcopy(model).double() for model in models], input_shape):
            return None
        joint = _joined(models)
        assert joint is not None
        stack = cls(models, joint)
        own = [_blocks(model) for model in models]
        for name, whole in _blocks(joint).items():
            for blocks, part in zip(own, whole.data.chunk(len(models)), strict=True):
                blocks[name].data = part
        return stack

    def logits(self, inputs: Sequence[Tensor], *, jointly: bool = True) -> list[Tensor]:
        """The logits [N, C] of each model for its own inputs [N, ...]; batches of unequal sizes are not run jointly."""
        if not jointly or len(inputs) == 1:
            return [logits_of(model(x)) for model, x in zip(self.models, inputs, strict=True)]
        x = torch.cat(list(inputs), dim=1)
        if x.ndim == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        return list(logits_of(self.joint(x)).chunk(len(inputs), dim=1))

    def gather_gradients(self) -> None:
        """Hand gradients of the models, where they were run one by one, to ``joint``."""
        if self.joint is self.models[0]:
            return
        parameters = [dict(model.named_parameters()) for model in self.models]
        for name, whole in self.joint.named_parameters():
            parts = [own[name].grad for own in parameters]
            found = [part for part in parts if part is not None]
            if len(found) < len(parts):
                continue
            gradient = torch.cat(found, out=torch.empty_like(whole))
            whole.grad = gradient if whole.grad is None else whole.grad + gradient
            for own in parameters:
                own[name].grad = None

    def release(self, position: int) -> None:
        """Give a model tensors of its own: what it is now stays."""
        if self.joint is self.models[0]:
            return
        model = self.models[position]
        for tensor in _blocks(model).values():
            tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
        steps = dict(self.joint.named_buffers())
        for name, buffer in model.named_buffers():
            if name.endswith(_STEPS):
                buffer += steps[name]


_STEPS = "num_batches_tracked"


class _Linears(nn.Module):
    """Linear layers of ``models`` models on their features [N, models x D], one model's after another's."""

    def __init__(self, layer: nn.Linear, models: int) -> None:
        super().__init__()
        self.models = models
        self.weight = nn.Parameter(layer.weight.detach().repeat(models, 1))
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().repeat(models))

    def forward(self, x: Tensor) -> Tensor:
        own = x.view(len(x), self.models, -1).transpose(0, 1)
        weight = self.weight.view(self.models, -1, self.weight.shape[1]).transpose(1, 2)
        if self.bias is None:
            y = torch.bmm(own, weight)
        else:
            y = torch.baddbmm(self.bias.view(self.models, 1, -1), own, weight)
        return y.transpose(0, 1).reshape(len(x), -1)


def _joined(models: Sequence[nn.Module]) -> nn.Module | None:
    """One module of the models' layers, each its own group; None where a layer cannot be that."""
    joint = copy.deepcopy(models[0])
    names = [name for name, _ in joint.named_parameters(remove_duplicate=False)]
    if len(names) > len(list(joint.parameters())):
        return None  # tied weights
    for name, layer in list(joint.named_modules()):
        held = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
        if has_hooks(layer):
            return None
        if held:
            wide = _layer(layer, len(models))
            if wide is None or not name:
                return None
            joint.set_submodule(name, wide)

    own = [_blocks(model) for model in models]
    joint.to(next(models[0].parameters()).dtype).to(memory_format=torch.channels_last)
    with torch.no_grad():
        for name, whole in _blocks(joint).items():
            whole.copy_(torch.cat([blocks[name] for blocks in own]))
            whole.requires_grad_(own[0][name].requires_grad)
    return joint


def _layer(layer: Any, models: int) -> nn.Module | None:
    """A layer of as many groups as there are models, its values yet to be set."""
    kind, given = type(layer), vars(layer)
    if kind is nn.Conv2d:
        same = {name: given[name] for name in ("kernel_size", "stride", "padding", "dilation", "padding_mode")}
        channels = layer.in_channels * models, layer.out_channels * models
        return nn.Conv2d(*channels, groups=layer.groups * models, bias=layer.bias is not None, **same)
    if kind is nn.Linear:
        return _Linears(layer, models)
    # A momentum of None asks for the mean over all steps, and those of a model are not counted here.
    if kind in (nn.BatchNorm1d, nn.BatchNorm2d) and layer.momentum is not None:
        same = {name: given[name] for name in ("eps", "momentum", "affine", "track_running_stats")}
        return kind(layer.num_features * models, **same)
    if kind is nn.GroupNorm:
        return nn.GroupNorm(layer.num_groups * models, layer.num_channels * models, layer.eps, layer.affine)
    if kind is Affine:
        return Affine(len(layer.weight) * models)
    if kind is Shift:
        return Shift(len(layer.bias) * models, scale=None if layer.scale is None else layer.scale.repeat(models))
    return None


def _blocks(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers that a stack has one after another: all but BatchNorm's counts of its steps."""
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: tensor for name, tensor in held.items() if not name.endswith(_STEPS)}


def _agrees(models: list[nn.Module], input_shape: Sequence[int]) -> bool:
    """Whether the models, copies that may be changed, compute the same jointly as one by one, whatever the values.

    So their forward must take one path, draw nothing at random, and keep nothing in plain attributes.
    """
    try:
        with torch.enable_grad(), seeds.torch_stream(0):
            trace(models[0].train(), lambda layer: isinstance(layer, (Affine, Shift)))
            probes = torch.randn(len(models), _PROBE, *input_shape, dtype=torch.float64)
            # Models that all start from one file, or branches that start from zero, would hide a mistake; one that
            # starts with NaN would keep the others from being stacked.
            for p in chain.from_iterable(model.parameters() for model in models):
                p.data.nan_to_num_(0, 0, 0).add_(torch.randn_like(p), alpha=_NOISE)
            joint = _joined(models)
            if joint is None:
                return False
            stack = Stack(models, joint)
            before = _besides_tensors(stack)
            same = all(_same_results(stack, list(scale * probes)) for scale in _SCALES)
            return same and _besides_tensors(stack) == before
    except Exception:  # a stranger's forward may raise anything where its layers are others
        return False


def _same_results(stack: Stack, probes: Sequence[Tensor]) -> bool:
    """Whether logits and gradients are the same jointly and model by model."""
    found: list[list[Tensor]] = []
    for jointly in (False, True):
        for module in (*stack.models, stack.joint):
            module.train()
        logits = stack.logits(probes, jointly=jointly)
        torch.stack([z.square().mean() for z in logits]).sum().backward()
        if not jointly:
            stack.gather_gradients()
        gradients = [p.grad for p in stack.joint.parameters() if p.grad is not None]
        found.append([torch.cat(logits).detach(), *gradients])
        stack.joint.zero_grad()
    alone, together = found
    return len(alone) == len(together) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=1e-6 * float(a.abs().max()) + 1e-12)
        for a, b in zip(alone, together, strict=True)
    )


def _besides_tensors(stack: Stack) -> tuple[object, ...]:
    """What a forward may change besides parameters and buffers: attributes of modules, and torch's generator.

    Not Python's and NumPy's: other threads of whatever runs the process, a Dask worker say, draw from them meanwhile.
    """
    own = vars(nn.Module()).keys()
    attributes = [
        (name, {key: value for key, value in vars(module).items() if key not in own})
        for model in (*stack.models, stack.joint)
        for name, module in model.named_modules()
    ]
    return repr(attributes), torch.random.get_rng_state().tolist()
