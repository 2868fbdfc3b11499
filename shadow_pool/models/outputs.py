"""What a model's forward returns, as logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from shadow_pool.errors import UserError


def logits_of(output: Any) -> Tensor:
    """The logits [N, C] in what a model's forward returned ([N, 1] from a single-logit model).

    Takes a tensor, an object or dict with ``logits``, a dict of one tensor, or a tuple or list whose first
    entry is the tensor.

    Raises:
        UserError: anything else, named as it was found.
    """
    found = output
    if not isinstance(found, Tensor):
        if hasattr(found, "logits"):
            found = found.logits
        elif isinstance(found, Mapping):
            found = found["logits"] if "logits" in found else next(iter(found.values())) if len(found) == 1 else found
        elif isinstance(found, (tuple, list)) and found:
            found = found[0]
    if not isinstance(found, Tensor) or found.ndim != 2:
        raise UserError(
            f"the model must return logits [N, C] (a tensor, or a tuple, dict or object holding them as first entry "
            f"or `logits`), got {_describe(output)}; wrap it in a module that does"
        )
    return found


def _describe(output: Any) -> str:
    if isinstance(output, Tensor):
        return f"a tensor of shape {list(output.shape)}"
    if isinstance(output, Mapping):
        return f"a dict with keys {', '.join(map(str, output))}"
    if isinstance(output, (tuple, list)):
        return f"a {type(output).__name__} of {', '.join(type(entry).__name__ for entry in output) or 'nothing'}"
    return type(output).__name__
