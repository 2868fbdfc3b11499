"""What is in a checkpoint, told from its weights: layers, normalization, gamma/sigma ratios. Needs no pool."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mia_audit.batchnorm.ratios import layer_kinds, layer_ratios
from mia_audit.checkpoints import Checkpoint, load_into, open_checkpoint
from mia_audit.checkpoints.state_dicts import State
from mia_audit.results import LayerRatio, plain
from shadow_pool.errors import UserError
from shadow_pool.models.norms import ratios, ratios_from_state
from shadow_pool.models.resolve import build_model

_SIDES = (32, 28, 224, 64, 8, 16, 96, 299)
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True)
class LayerInfo:
    """A layer: its name, its kind (guessed from shapes where no architecture is given), its weight's shape."""

    layer: str
    kind: str
    shape: tuple[int, ...]
    parameters: int


@dataclass(frozen=True)
class Inspection:
    """What a checkpoint holds. ``batchnorm`` has one row per BatchNorm layer; ``summary`` is one sentence on it."""

    path: str
    sha256: str
    kind: str
    parameters: int
    layers: tuple[LayerInfo, ...]
    norm_layers: dict[str, int]
    batchnorm: tuple[LayerRatio, ...]
    summary: str
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {name: plain(value) for name, value in asdict(self).items()}


def inspect_checkpoint(path: Path, *, arch: str | None = None, trust: bool = False) -> Inspection:
    """Look into a checkpoint without any data.

    Args:
        path: the file; see :func:`~mia_audit.checkpoints.open_checkpoint` for what is read.
        arch: the architecture, as ``--arch``; the weights must fit it. Without it, kinds of layers are told from
            names and shapes, and BatchNorm's eps is taken to be torch's default 1e-5.
        trust: run the code in the file, where it holds any.

    Raises:
        UserError: the file cannot be opened, or does not fit ``arch``.
    """
    checkpoint = open_checkpoint(path, trust=trust)
    model, notes = checkpoint.module, checkpoint.notes
    if model is None and arch is not None:
        model = _fitted_model(arch, checkpoint)
    if model is None:
        layers = _layers_from_state(checkpoint.state)
        found, kinds = ratios_from_state(checkpoint.state), {layer.layer: layer.kind for layer in layers}
    else:
        layers = _layers_of(model)
        found, kinds = ratios(model), layer_kinds(model)
    rows = tuple(layer_ratios([found], kinds=kinds)) if found else ()
    return Inspection(
        path=str(path),
        sha256=checkpoint.sha256,
        kind=checkpoint.kind,
        parameters=sum(layer.parameters for layer in layers),
        layers=layers,
        norm_layers=dict(Counter(layer.kind for layer in layers if "Norm" in layer.kind)),
        batchnorm=rows,
        summary=_summary(rows),
        notes=notes,
    )


def _fitted_model(arch: str, checkpoint: Checkpoint) -> nn.Module:
    """The architecture with the checkpoint's weights, for the first size of input that fits them."""
    weights = [tensor for tensor in checkpoint.state.values() if tensor.ndim in (2, 4)]
    if not weights:
        raise UserError(f"{checkpoint.path} holds no weights of linear or convolution layers to fit {arch} to")
    first, classes = weights[0], max(int(weights[-1].shape[0]), 2)
    shapes = [(first.shape[1],)] if first.ndim == 2 else [(first.shape[1], side, side) for side in _SIDES]
    norm = "batch" if ratios_from_state(checkpoint.state) else "none"
    misfit: UserError | None = None
    for shape in shapes:
        try:
            model = build_model(arch, norm, classes=classes, input_shape=shape, seed=0, check=False)
            load_into(model, checkpoint)
            return model
        except UserError as error:
            misfit = misfit or error
    assert misfit is not None
    raise misfit


def _layers_of(model: nn.Module) -> tuple[LayerInfo, ...]:
    layers = []
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if own or "Norm" in type(module).__name__:
            shape = tuple(own[0].shape) if own else ()
            layers.append(LayerInfo(name, type(module).__name__, shape, sum(p.numel() for p in own)))
    return tuple(layers)


def _layers_from_state(state: State) -> tuple[LayerInfo, ...]:
    groups: dict[str, State] = {}
    for key, tensor in state.items():
        layer, _, name = key.rpartition(".")
        groups.setdefault(layer, {})[name] = tensor
    layers = []
    for layer, tensors in groups.items():
        own = {name: tensor for name, tensor in tensors.items() if name not in _STATISTICS}
        weight = own.get("weight", next(iter(own.values()), torch.empty(0)))
        count = sum(tensor.numel() for tensor in own.values() if tensor.is_floating_point())
        layers.append(LayerInfo(layer, _guessed_kind(tensors), tuple(weight.shape), count))
    return tuple(layers)


def _guessed_kind(tensors: State) -> str:
    """The likely kind of a layer from the names and shapes of its tensors."""
    if "running_var" in tensors:
        return "BatchNorm"
    weight = tensors.get("weight")
    if weight is None:
        return "parameters"
    kinds = {
        1: "scale" if "bias" not in tensors else "Norm without statistics",
        2: "Linear",
        3: "Conv1d",
        4: "Conv2d",
        5: "Conv3d",
    }
    return kinds.get(weight.ndim, "parameters")


def _summary(rows: tuple[LayerRatio, ...]) -> str:
    if not rows:
        return (
            "No BatchNorm statistics: nothing here amplifies outliers by gamma/sigma; what the model leaks for other "
            "reasons takes a pool to say."
        )
    top = max(rows, key=lambda row: row.amplification_median)
    channels = sum(row.channels for row in rows)
    above = sum(row.fraction_above_one * row.channels for row in rows) / channels
    strength = f"{above:.0%} of {channels} BatchNorm channels have gamma/sigma above 1"
    if above < 0.05:
        return f"{strength}: BatchNorm hardly amplifies margins here, so little of a leak would be its doing."
    return (
        f"{strength}, most in {top.layer} (median amplification {top.amplification_median:.2g} of the margin's growth "
        "per step): outliers are prone to be memorized; train-shadows and score measure whether they are."
    )
