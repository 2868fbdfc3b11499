"""Normalization: the twin of a module in another arm, gamma/sigma ratios, and whether a batch is coupled.

BatchNorm (Ioffe and Szegedy 2015, arXiv 1502.03167) is what this package is about; the twins put nothing, a
GroupNorm (Wu and He 2018, arXiv 1803.08494), a LayerNorm or a bare scale and shift in its place.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shadow_pool import seeds
from shadow_pool.arms import NORMS
from shadow_pool.errors import UserError, unknown_name
from shadow_pool.models.graph import Wiring, outputs_of, read_wiring
from shadow_pool.models.outputs import logits_of

_STOCK_FORWARDS = {
    kind.forward for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LazyBatchNorm2d)
}
_OTHER_NORMS = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.LocalResponseNorm, nn.modules.instancenorm._InstanceNorm)
_LEAST_PER_GROUP = 4


class Affine(nn.Module):
    """A learned scale and shift per channel of [N, C, ...]: what BatchNorm keeps when it stops normalizing."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        shape = (-1, *[1] * (x.ndim - 2))
        return torch.addcmul(self.bias.view(shape), x, self.weight.view(shape))


class Shift(nn.Module):
    """A learned shift per channel of [N, C, ...], where no convolution or linear layer can hold it as its bias.

    ``scale`` [C] multiplies the input first; it is fixed: what is left of a trained BatchNorm's.
    """

    scale: Tensor | None

    def __init__(self, channels: int, *, scale: Tensor | None = None) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        shape = (-1, *[1] * (x.ndim - 2))
        if self.scale is None:
            return x + self.bias.view(shape)
        return torch.addcmul(self.bias.view(shape), x, self.scale.view(shape))


def is_batchnorm(module: nn.Module) -> bool:
    """Whether a layer is BatchNorm: torch's, a subclass, SyncBatchNorm, or a FrozenBatchNorm2d by that name."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm) or any(
        kind.__name__ == "FrozenBatchNorm2d" for kind in type(module).__mro__
    )


def batchnorm_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, layer) of each BatchNorm layer, in registration order."""
    return ((name, layer) for name, layer in model.named_modules() if is_batchnorm(layer))


def has_batchnorm(model: nn.Module) -> bool:
    """Whether the model has a BatchNorm layer."""
    return any(True for _ in batchnorm_layers(model))


def batchnorm_without_running_stats(model: nn.Module) -> list[str]:
    """Names of BatchNorm layers that keep no running statistics: they use the batch's even in eval mode."""
    return [name for name, layer in batchnorm_layers(model) if getattr(layer, "running_var", None) is None]


def norm_layers(model: nn.Module) -> dict[str, int]:
    """Count of normalization layers by kind, e.g. ``{"BatchNorm2d": 2}``."""
    return dict(
        Counter(
            type(layer).__name__ for layer in model.modules() if is_batchnorm(layer) or isinstance(layer, _OTHER_NORMS)
        )
    )


def to_norm(model: nn.Module, norm: str, *, trained: bool = False) -> nn.Module:
    """The twin of a module in another arm; the module itself stays as it is.

    Every layer but the BatchNorm ones keeps its weights, so arms start paired.

    - ``batch``: as given.
    - ``none``: BatchNorm out. The convolution or linear layer it normalized gets a zero bias where it had none;
      where there is no such layer (pre-activation networks) a learned shift stays in its place.
    - ``group``: GroupNorm with :func:`groups_of` groups. ``layer``: LayerNorm over (C, H, W), as one group.
    - ``affine``: a scale and shift per channel without statistics.

    In ``none`` and ``affine`` the last convolution of each residual branch that had BatchNorm is set to zero:
    the network starts as its shortcuts and trains without normalization (Zhang et al. 2019, arXiv 1901.09321).
    Branches are found by tracing; a module that cannot be traced keeps its initial weights there.

    With ``trained`` the weights are not fresh, and nothing is zeroed. ``none`` and ``affine`` then compute what the
    module computes in eval mode: BatchNorm's running statistics, scale and shift are folded into the layer before it
    (Jacob et al. 2018, arXiv 1712.05877, section 3.2), or stay as a fixed scale and a learned shift where that is not
    possible. ``group`` and ``layer`` take over BatchNorm's gamma and beta alone, so they start as another function.

    Raises:
        UserError: unknown norm, or a layer that cannot be converted, named.
    """
    if norm not in NORMS:
        raise unknown_name("norm", norm, NORMS)
    twin = copy.deepcopy(model)
    if norm == "batch":
        return twin
    _refuse_foreign_statistics(twin)
    if not has_batchnorm(twin):
        return twin
    wiring = read_wiring(twin, is_batchnorm)
    if wiring.functional_batch_norm:
        raise UserError(
            f"{type(model).__name__} calls batch_norm as a function in its forward, which cannot be taken out; "
            "use nn.BatchNorm layers, or audit with --arms batch"
        )
    if norm in ("none", "affine") and not trained:
        for layer in wiring.branch_ends:
            nn.init.zeros_(layer.weight)  # type: ignore[arg-type]
    return _replace(twin, norm, wiring, trained)


def groups_of(channels: int) -> int:
    """Groups of a GroupNorm: the largest power of two up to 32 that divides the channels into groups of four or more.

    Smaller groups would normalize single values away where the map is 1x1. 7 -> 1, 20 -> 4, 72 -> 8, 256 -> 32.
    """
    groups = math.gcd(32, channels)
    while groups > 1 and channels // groups < _LEAST_PER_GROUP:
        groups //= 2
    return groups


def _replace(model: nn.Module, norm: str, wiring: Wiring, trained: bool) -> nn.Module:
    made: dict[nn.Module, nn.Module] = {}
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        if not is_batchnorm(layer):
            continue
        if layer not in made:
            after = _children_after(name, layer)
            if trained:
                new = _trained_stand_in(layer, norm, wiring.foldable.get(name))
            else:
                new = _stand_in(layer, norm, wiring.feeders.get(name))
            made[layer] = nn.Sequential(new, *after) if after else new
        if not name:
            return made[layer]
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, made[layer])
    return model


def _stand_in(layer: nn.Module, norm: str, feeder: nn.Module | None) -> nn.Module:
    channels = _channels(layer)
    learned = getattr(layer, "bias", None) is not None
    if norm == "none":
        if feeder is None:
            return Shift(channels) if learned else nn.Identity()
        if feeder.bias is None:
            feeder.bias = nn.Parameter(torch.zeros(outputs_of(feeder)))
        return nn.Identity()
    # A single feature per record has nothing to be normalized by.
    if norm == "affine" or (channels == 1 and isinstance(layer, nn.BatchNorm1d)):
        return Affine(channels)
    return nn.GroupNorm(groups_of(channels) if norm == "group" else 1, channels, affine=learned)


@torch.no_grad()
def _trained_stand_in(layer: nn.Module, norm: str, feeder: nn.Module | None) -> nn.Module:
    """What takes the place of a trained BatchNorm; ``feeder`` is a layer that it can be folded into."""
    scale, shift = _in_eval_mode(layer)
    new: Any = Shift(len(scale), scale=scale) if norm == "none" else _stand_in(layer, norm, None)
    if isinstance(new, Affine):
        new.weight.copy_(scale)
        new.bias.copy_(shift)
    elif isinstance(new, nn.GroupNorm):
        for name in ("weight", "bias") if new.affine else ():
            getattr(new, name).copy_(getattr(layer, name))
    elif feeder is not None:
        weight, bias = feeder.get_parameter("weight"), getattr(feeder, "bias", None)
        weight.mul_(scale.view(-1, *[1] * (weight.ndim - 1)))
        feeder.bias = nn.Parameter(shift if bias is None else shift + scale * bias)
        return nn.Identity()
    else:
        new.bias.copy_(shift)
    return new


def _in_eval_mode(layer: nn.Module) -> tuple[Tensor, Tensor]:
    """(scale, shift) per channel: what BatchNorm does in eval mode, 1 and 0 where affine or statistics are off."""
    names = ("weight", "bias", "running_mean", "running_var")
    weight, bias, mean, var = (getattr(layer, name, None) for name in names)
    scale = torch.ones(_channels(layer)) if weight is None else weight.clone()
    shift = torch.zeros_like(scale) if bias is None else bias.clone()
    if mean is not None and var is not None:
        scale /= torch.sqrt(var + _eps(layer))
        shift -= mean * scale
    return scale, shift


def _channels(layer: nn.Module) -> int:
    if isinstance(layer, nn.modules.batchnorm._BatchNorm):
        return layer.num_features
    return len(layer.get_buffer("running_var"))


def _refuse_foreign_statistics(model: nn.Module) -> None:
    for name, layer in model.named_modules():
        kept = {key for key, buffer in layer.named_buffers(recurse=False) if buffer is not None}
        if "running_var" in kept and not is_batchnorm(layer):
            raise UserError(
                f"layer {name} ({type(layer).__name__}) keeps running statistics but is no nn.BatchNorm, so there is "
                "no twin without it; use nn.BatchNorm, or audit with --arms batch"
            )


def _children_after(name: str, layer: nn.Module) -> list[nn.Module]:
    """The modules that a BatchNorm subclass runs after normalizing (an activation, as timm's do).

    A subclass with a forward of its own is run once in eval mode: it must do what BatchNorm and then its
    children do, or there is no telling what to leave in place.
    """
    after = list(layer.children())
    if type(layer).forward in _STOCK_FORWARDS:
        return after
    probe = copy.deepcopy(layer).eval()
    size = {nn.BatchNorm1d: (), nn.BatchNorm3d: (2, 2, 2)}
    trailing = next((shape for kind, shape in size.items() if isinstance(layer, kind)), (2, 2))
    x = torch.from_numpy(seeds.stream(0, "norm-probe").standard_normal((4, _channels(layer), *trailing))).float()
    mean, var = getattr(probe, "running_mean", None), getattr(probe, "running_var", None)
    weight, bias = getattr(probe, "weight", None), getattr(probe, "bias", None)
    with torch.no_grad():
        expected = F.batch_norm(x, mean, var, weight, bias, training=mean is None, eps=_eps(layer))
        for child in probe.children():
            expected = child(expected)
        try:
            same = torch.allclose(probe(x), expected, atol=1e-4)
        except Exception:  # a stranger's forward may raise anything
            same = False
    if not same:
        raise UserError(
            f"layer {name} ({type(layer).__name__}) does more than BatchNorm, so it cannot be taken out; "
            "use nn.BatchNorm, or audit with --arms batch"
        )
    return after


def _eps(layer: nn.Module) -> float:
    return float(getattr(layer, "eps", 1e-5))


def ratios(model: nn.Module) -> dict[str, np.ndarray]:
    """gamma/sigma of each BatchNorm layer with running statistics, by layer name.

    Returns:
        float64 [channels] each: abs(weight) / sqrt(running_var + eps), weight 1 where affine is off
        (arXiv 2605.24420; its square is the amplification of a margin step).
    """
    return {
        name: _ratio(layer.running_var, getattr(layer, "weight", None), _eps(layer))  # type: ignore[arg-type]
        for name, layer in batchnorm_layers(model)
        if getattr(layer, "running_var", None) is not None
    }


def ratios_from_state(state: Mapping[str, Tensor], *, eps: float = 1e-5) -> dict[str, np.ndarray]:
    """:func:`ratios` from a state dict alone: every ``*.running_var``, with the ``weight`` beside it.

    ``eps`` is not stored in a state dict; torch's default is assumed.
    """
    found = {}
    for key, value in state.items():
        layer, _, leaf = key.rpartition(".")
        if leaf == "running_var":
            found[layer] = _ratio(value, state.get(f"{layer}.weight" if layer else "weight"), eps)
    return found


def _ratio(var: Tensor, weight: Tensor | None, eps: float) -> np.ndarray:
    sigma = np.sqrt(var.detach().cpu().double().numpy() + eps)
    gamma = np.ones_like(sigma) if weight is None else np.abs(weight.detach().cpu().double().numpy())
    return gamma / sigma


def couples_batch(model: nn.Module, x: Tensor) -> bool:
    """Whether, in train mode, the output for one record depends on the other records of its batch.

    Tested, not told by names of layers: the first, a middle and the last record of ``x`` are each run with two
    different sets of batch peers, dropout drawing the same. Parameters that are all zero (a zero-initialized branch)
    would hide what lies behind them and are drawn at random for the test. The model is left untouched.

    Args:
        x: float [N, ...], N >= 2, inputs as the model takes them.
    """
    return coupling_layer(model, x) is not None


def coupling_layer(model: nn.Module, x: Tensor) -> str | None:
    """The name of the innermost module that couples the records of a batch (see :func:`couples_batch`), or None."""
    if len(x) < 2:
        raise ValueError(f"x must hold at least 2 records, got {len(x)}")
    probe, x = copy.deepcopy(model).cpu().train(), x.cpu()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in probe.parameters():
            if not parameter.any():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise / math.sqrt(max(1, noise[:1].numel())))
    initial = copy.deepcopy(probe.state_dict())
    for place in sorted({0, len(x) // 2, len(x) - 1}):
        peers = 3 * torch.randn(x.shape, generator=generator).to(x) + 1
        peers[place] = x[place]
        probe.load_state_dict(initial)
        first = _rows_at(place, probe, x)
        probe.load_state_dict(initial)
        second = _rows_at(place, probe, peers)
        if not _same(first[-1][2], second[-1][2]):
            # Inner modules end before outer ones: the first with equal inputs and different outputs is where they meet.
            return next(
                name
                for (name, x_a, y_a), (_, x_b, y_b) in zip(first, second, strict=True)
                if _same(x_a, x_b) and not _same(y_a, y_b)
            )
    return None


def _rows_at(place: int, model: nn.Module, x: Tensor) -> list[tuple[str, Tensor, Tensor]]:
    """(name, input, output) of the record at ``place`` for each module as it ends, the model and its logits last."""
    rows: list[tuple[str, Tensor, Tensor]] = []

    def keep(name: str, inputs: tuple[object, ...], output: object) -> None:
        pair = [part for part in (*inputs[:1], output) if isinstance(part, Tensor) and part.shape[:1] == x.shape[:1]]
        if len(pair) == 2:
            rows.append((name, pair[0][place].clone(), pair[1][place].clone()))

    handles = [
        module.register_forward_hook(lambda _, inputs, output, name=name: keep(name, inputs, output))
        for name, module in model.named_modules()
        if name
    ]
    with torch.no_grad(), seeds.torch_stream(0):
        logits = logits_of(model(x))
    for handle in handles:
        handle.remove()
    return [*rows, (type(model).__name__, x[place], logits[place])]


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a.float(), b.float(), rtol=1e-5, atol=1e-6, equal_nan=True)
