"""gamma/sigma per BatchNorm layer, of one model or over the models of a pool, as rows of audit.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mia_audit.results import LayerRatio


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
