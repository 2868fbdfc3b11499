"""gamma/sigma per BatchNorm layer, of one model or over the models of a pool, as rows of audit.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from safetensors import safe_open
from torch import nn

from mia_audit.results import LayerRatio
from shadow_pool.models.norms import batchnorm_layers, ratios

if TYPE_CHECKING:
    from mia_audit.evidence import ArmEvidence
    from shadow_pool.store.pool import Pool


def layer_ratios(
    models: Sequence[Mapping[str, np.ndarray]], *, kinds: Mapping[str, str] | None = None
) -> list[LayerRatio]:
    """One row per layer, over the channels of all models.

    Args:
        models: each model's layer -> ratio [channels], as :func:`shadow_pool.models.norms.ratios` gives them; the
            layers and channels of all models are the same.
        kinds: layer -> class name of the layer (default ``BatchNorm``, where only a state dict is known).

    Returns:
        Rows in the order of the layers; amplification is the ratio squared (arXiv 2605.24420).

    Raises:
        ValueError: models differ in layers or channels.
    """
    rows = []
    for layer in models[0] if models else ():
        if any(set(model) != set(models[0]) or model[layer].shape != models[0][layer].shape for model in models):
            raise ValueError(f"models must have the same BatchNorm layers, got others at layer {layer}")
        ratio = np.concatenate([model[layer] for model in models])
        rows.append(
            LayerRatio(
                layer=layer,
                kind=(kinds or {}).get(layer, "BatchNorm"),
                channels=len(models[0][layer]),
                ratio_median=float(np.median(ratio)),
                ratio_mean=float(ratio.mean()),
                ratio_max=float(ratio.max()),
                fraction_above_one=float((ratio > 1).mean()),
                amplification_median=float(np.median(ratio**2)),
            )
        )
    return rows


def layer_kinds(model: nn.Module) -> dict[str, str]:
    """Layer -> class name of each BatchNorm layer of a model."""
    return {name: type(layer).__name__ for name, layer in batchnorm_layers(model)}


def pool_ratios(pool: Pool, evidence: ArmEvidence) -> list[LayerRatio]:
    """The rows of an arm, over the channels of all its models; empty where its layers are no BatchNorm.

    Reads the BatchNorm tensors alone, not whole weights. Raises :class:`UserError` where they do not fit.
    """
    # Here, since inspecting a checkpoint needs no pool and should not wait for what reads one.
    from shadow_pool.store.entry import check_file
    from shadow_pool.store.files import readable
    from shadow_pool.train.shadows import starting_model

    model = starting_model(pool, evidence.arm)
    kinds = layer_kinds(model)
    if not kinds:
        return []
    wanted = [name for name in model.state_dict() if name.startswith(tuple(f"{layer}." for layer in kinds))]
    found = []
    for info in evidence.infos:
        path = check_file(pool.entry(info.arm, info.index), info, "weights.safetensors")
        with readable(path), safe_open(path, framework="pt") as weights:
            model.load_state_dict({name: weights.get_tensor(name) for name in wanted}, strict=False)
        found.append(ratios(model))
    return layer_ratios(found, kinds=kinds)
