"""From whatever a training script saved to a plain state dict, and from its names to a model's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shadow_pool.errors import UserError, few

State = dict[str, torch.Tensor]

WRAPPERS = ("module", "_orig_mod", "_module", "model")
CONTAINERS = ("state_dict", "model_state_dict", "model_state", "model", "net", "network", "ema", "ema_state_dict")
_TRAINING = ("optim", "sched", "scaler", "callbacks", "loops", "hyper_parameters", "hparams", "rng")


class Found(NamedTuple):
    """A state dict, the keys that lead to it, the module it belongs to where one was saved, and others beside it."""

    state: State
    keys: tuple[str, ...] = ()
    module: nn.Module | None = None
    others: tuple[str, ...] = ()


def find_state(where: str, value: Any) -> Found:
    """The state dict inside what torch.save was given.

    A mapping with tensors is one, unless it holds another mapping with tensors: the first of the usual container
    names (``state_dict``, ``model_state_dict``, ``model``, ``net``, ``ema``, ...) or else the only one that is not an
    optimizer's, a scheduler's or the like. Entries that are no tensors are left out.

    Raises:
        UserError: there is none, or several and no way to choose.
    """
    if isinstance(value, nn.Module):
        return Found(value.state_dict(), (), value)
    if isinstance(value, (list, tuple)):
        value = {str(index): item for index, item in enumerate(value)}
    if not isinstance(value, Mapping):
        raise UserError(f"{where} holds a {type(value).__name__}; expected the state dict of a model")
    inside = {str(key): item for key, item in value.items() if not isinstance(item, torch.Tensor) and _weighs(item)}
    candidates = [key for key in inside if not key.lower().startswith(_TRAINING)]
    usual = [key for key in CONTAINERS if key in inside]
    if len(candidates) > 1 and not usual:
        raise UserError(
            f"{where} holds several state dicts ({few(candidates)}); save the one to audit in a file of its own"
        )
    if candidates:
        chosen = (usual or candidates)[0]
        found = find_state(where, inside[chosen])
        others = tuple(key for key in candidates if key != chosen)
        return found._replace(keys=(chosen, *found.keys), others=(*others, *found.others))
    state = {str(key): item for key, item in value.items() if isinstance(item, torch.Tensor)}
    if not state:
        raise UserError(
            f"{where} holds no weights (found {few(map(str, value)) or 'nothing'}); save model.state_dict(), of a "
            "program before it is frozen"
        )
    return Found(state)


def strip_prefixes(names: Iterable[str]) -> dict[str, str]:
    """Name -> name without what wrappers left in front of every name, in any order and nesting.

    The wrappers are DataParallel and DistributedDataParallel (``module.``), torch.compile (``_orig_mod.``), Opacus
    (``_module.``) and Lightning (``model.``).
    """
    stripped = {name: name for name in names}
    while True:
        first = {name.partition(".")[0] for name in stripped.values()}
        if len(first) != 1 or not first <= set(WRAPPERS) or not all("." in name for name in stripped.values()):
            return stripped
        stripped = {name: short.partition(".")[2] for name, short in stripped.items()}


def plain_tensors(where: str, state: State, allowed_bytes: int) -> tuple[State, tuple[str, ...]]:
    """Dense CPU tensors, floating-point ones in float32, without gradients; and notes.

    Raises:
        UserError: the tensors declare more than ``allowed_bytes``, or hold no data.
    """
    for name, tensor in state.items():
        if tensor.is_meta or is_lazy(tensor):
            raise UserError(f"{where}: {name} holds no data; save the model after loading or training its weights")
    declared = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    if declared > allowed_bytes:
        raise UserError(
            f"{where} declares {declared} bytes of tensors, far more than the file holds: it is damaged or made to "
            "exhaust memory"
        )
    plain, cast, broken = {}, set(), []
    for name, tensor in state.items():
        value = tensor.detach()
        value = value.dequantize() if value.is_quantized else value
        value = value.to_dense() if value.layout != torch.strided else value
        if value.is_floating_point():
            if value.dtype != torch.float32:
                cast.add(str(value.dtype).removeprefix("torch."))
            value = value.float()
            # A sum is finite only if every term is, and takes a tenth of the time; finite terms may overflow it.
            if not torch.isfinite(value.sum()) and not torch.isfinite(value).all():
                broken.append(name)
        plain[name] = value.cpu().contiguous()
    notes = []
    if cast:
        notes.append(f"weights in {', '.join(sorted(cast))} were cast to float32")
    if broken:
        notes.append(f"{len(broken)} tensors hold NaN or infinity ({few(broken)})")
    return plain, tuple(notes)


def match_names(found: Iterable[str], expected: Iterable[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Model's name -> state's name, and the state's names that the model does not expect.

    Names match when they are equal once wrappers are taken out wherever they stand, or failing that once one prefix
    common to all is. Where the model's names all stand under one prefix, names elsewhere are of other things (a
    Lightning module's loss) and not unexpected.
    """
    found, expected = list(found), list(expected)
    by_name, wanted = {_bare(name): name for name in found}, {_bare(name): name for name in expected}
    if len(by_name) < len(found) or len(wanted) < len(expected):
        by_name, wanted = {name: name for name in found}, {name: name for name in expected}
    needed = [bare for bare, name in wanted.items() if is_needed(name)]
    prefixes = [""] if all(bare in by_name for bare in needed) else _common_prefixes(by_name, needed)
    prefix = prefixes[0] if len(prefixes) == 1 else ""
    matched = {name: by_name[prefix + bare] for bare, name in wanted.items() if prefix + bare in by_name}
    taken = set(matched.values())
    unexpected = tuple(name for name in found if name not in taken)
    outer = {key.removesuffix(name) if key.endswith("." + name) else "" for name, key in matched.items()}
    if len(outer) == 1 and len(prefixes) == 1:
        unexpected = tuple(name for name in unexpected if name.startswith(min(outer)))
    return matched, unexpected


def is_needed(name: str) -> bool:
    """Whether a model cannot do without the entry: old BatchNorm layers saved no count of batches."""
    return not name.endswith("num_batches_tracked")


def misfit(state: State, model: State, matched: Mapping[str, str], unexpected: tuple[str, ...]) -> str:
    """What keeps a state dict from fitting a model, in one line; empty where it fits."""
    missing = [name for name in model if name not in matched and is_needed(name)]
    shapes = [
        f"{name} is {list(state[key].shape)}, expected {list(model[name].shape)}"
        for name, key in matched.items()
        if state[key].shape != model[name].shape
    ]
    parts = []
    if missing:
        parts.append(f"{len(missing)} of {len(model)} expected keys are missing ({few(missing)})")
    if unexpected:
        parts.append(f"{len(unexpected)} keys are unexpected ({few(unexpected)})")
    if shapes:
        parts.append(f"{len(shapes)} keys have another shape ({few(shapes)})")
    return "; ".join(parts)


def _bare(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _common_prefixes(by_name: Mapping[str, str], needed: list[str]) -> list[str]:
    """The dotted prefixes under which every needed name stands."""
    if not needed:
        return []
    candidates = [name.removesuffix(needed[0]) for name in by_name if name.endswith("." + needed[0])]
    return [prefix for prefix in candidates if all(prefix + bare in by_name for bare in needed)]


def _weighs(value: Any, depth: int = 4) -> bool:
    """Whether a value is or holds tensors; not deeper than ``depth``, since a file can make a cycle."""
    if isinstance(value, Mapping) and depth:
        return any(_weighs(item, depth - 1) for item in value.values())
    return isinstance(value, (torch.Tensor, nn.Module))
