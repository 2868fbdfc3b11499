"""Sources that are a user's function: ``module:factory`` or ``path/file.py:factory``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shadow_pool.data.arrays import Source, from_arrays
from shadow_pool.errors import UserError
from shadow_pool.usercode import describe, load_object

_REREAD = 16


def read_factory(text: str) -> Source:
    """Call the factory without arguments and read what it returns.

    It may return a map-style torch Dataset of (x, y), arrays or tensors (x, y), or a mapping with the keys of an
    .npz source (x, y and optionally id, group, subset).

    Raises:
        UserError: the factory is missing, fails, or returns something else.
    """
    factory = load_object(text, what="data")
    try:
        made = factory()
        if isinstance(made, tuple) and len(made) == 2:
            made = dict(zip("xy", made, strict=True))
        elif not isinstance(made, Mapping) and hasattr(made, "__getitem__") and hasattr(made, "__len__"):
            made = dict(zip("xy", _stack(text, made), strict=True))
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"data {text} failed: {describe(error)}") from error
    if not isinstance(made, Mapping) or not {"x", "y"} <= made.keys():
        raise UserError(
            f"data {text} must return a torch Dataset of (x, y), arrays (x, y) or a dict with x and y, "
            f"got {type(made).__name__}"
        )
    arrays = {key: _array(made[key]) for key in ("x", "y", "id", "group", "subset") if key in made}
    return from_arrays(text, arrays.pop("x"), arrays.pop("y"), **arrays)


def _stack(text: str, dataset: Any) -> tuple[np.ndarray, np.ndarray]:
    """All items of a Dataset, read once, in order, into one array for x and one for y."""
    x: np.ndarray | None = None
    label = []
    for row in range(len(dataset)):
        item = dataset[row]
        if not isinstance(item, (tuple, list)) or len(item) < 2:
            raise UserError(f"data {text}: each item must be (x, y), got {type(item).__name__}")
        value = _array(item[0])
        if x is None:
            x = np.empty((len(dataset), *value.shape), dtype=value.dtype)
        if value.shape != x.shape[1:] or value.dtype != x.dtype:
            raise UserError(
                f"data {text}: item {row} is {value.dtype} {value.shape}, the first is {x.dtype} {x.shape[1:]}; "
                "bring all items to one shape and dtype"
            )
        x[row] = value
        label.append(np.asarray(item[1]).item())
    if x is None:
        raise UserError(f"data {text}: the Dataset is empty; expected at least one item")
    if any(x[row].tobytes() != _array(dataset[row][0]).tobytes() for row in range(min(len(x), _REREAD))):
        raise UserError(
            f"data {text}: an item read twice differs; return records without random augmentation, which belongs to "
            "training (recipe.augmentation, or --train)"
        )
    return x, np.array(label)


def _array(value: Any) -> np.ndarray:
    import torch

    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
