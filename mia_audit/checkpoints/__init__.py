"""Open a stranger's checkpoint: every tensor in it, nothing in it run."""

from __future__ import annotations

import pickle
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mia_audit.checkpoints.files import EXPORT, LEGACY, SAFETENSORS, TORCH, TORCHSCRIPT, allowed_bytes, recognise
from mia_audit.checkpoints.inert_pickle import Inert, read_inert, refused_names
from mia_audit.checkpoints.state_dicts import (
    CONTAINERS,
    State,
    find_state,
    match_names,
    misfit,
    plain_tensors,
    strip_prefixes,
)
from shadow_pool.errors import UserError, few, one_line
from shadow_pool.store.files import file_sha256
from shadow_pool.usercode import describe, importable


@dataclass(frozen=True)
class Checkpoint:
    """The weights in a file.

    Attributes:
        state: name -> CPU tensor, floating-point ones float32, wrappers' prefixes taken off.
        sha256: of the file, hex.
        path: of the file.
        kind: ``safetensors``, ``state dict``, ``container``, ``module``, ``TorchScript`` or ``torch.export``.
        notes: what was found, cast or left out, in words.
        module: the module itself where the file held a pickled one and was trusted, else None.
    """

    state: State
    sha256: str
    path: Path
    kind: str
    notes: tuple[str, ...] = ()
    module: nn.Module | None = None


def open_checkpoint(path: Path, *, trust: bool = False) -> Checkpoint:
    """The weights in a checkpoint file.

    Reads safetensors, and what torch.save wrote from a state dict or from a container around one, with
    ``weights_only=True``. Where that refuses a class or function that the weights do not need, they are read
    without it. Whole pickled modules, TorchScript and torch.export archives run code when opened, and are opened only
    with ``trust``; :func:`what_would_run` lists that code. Of programs the weights are taken alone.

    Raises:
        UserError: no checkpoint, damaged, without one clear state dict, or in need of ``trust``; one line.
    """
    path = Path(path)
    form = recognise(path)
    names = what_would_run(path) if trust or form in (TORCHSCRIPT, EXPORT) else ()
    if form in (TORCHSCRIPT, EXPORT) and not trust:
        raise _needs_trust(path, f"a {form} archive", names)
    if form == SAFETENSORS:
        return _finish(path, _read_safetensors(path), SAFETENSORS, ())
    if names:
        value = _read_trusted(path, form)
        notes: tuple[str, ...] = (f"trusted to run {_few_names(names)}",)
    else:
        value, notes = _read_torch(path, form)
    return _finish(path, value, form, notes)


def what_would_run(path: Path) -> tuple[str, ...]:
    """The names of the code that opening the file with ``trust`` would run; empty where none is needed."""
    form = recognise(path)
    if form in (TORCHSCRIPT, EXPORT):
        return (f"torch.{'jit' if form == TORCHSCRIPT else 'export'}.load and the program in the file",)
    if form == SAFETENSORS:
        return ()
    try:
        _load_weights_only(path)
    except pickle.UnpicklingError:
        return refused_names(path, legacy=form == LEGACY)
    return ()


def load_into(
    model: nn.Module, checkpoint: Checkpoint, *, remedy: str = "give the architecture it was trained with (--arch)"
) -> tuple[str, ...]:
    """Copy a checkpoint's weights into a model, strictly; returns notes on what was passed over.

    Names may differ by wrappers' prefixes (``module.``, ``model.``, ...), and may stand under one common prefix.
    ``remedy`` ends the error.

    Raises:
        UserError: keys are missing, unexpected or of another shape; names the first of each.
    """
    expected = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    matched, unexpected = match_names(checkpoint.state, expected)
    problem = misfit(checkpoint.state, expected, matched, unexpected)
    if problem:
        raise UserError(f"{checkpoint.path} does not fit {type(model).__name__}: {problem}; {remedy}")
    model.load_state_dict({name: checkpoint.state[key] for name, key in matched.items()}, strict=False)
    passed_over = len(checkpoint.state) - len(matched)
    return (f"{passed_over} tensors outside the model were passed over",) if passed_over else ()


def _read_torch(path: Path, form: str) -> tuple[Any, tuple[str, ...]]:
    """What torch.save was given, read with ``weights_only=True`` or else without what that refuses; and notes."""
    try:
        return _load_weights_only(path), ()
    except pickle.UnpicklingError:
        pass
    if form == LEGACY:
        raise _needs_trust(path, "a file of more than weights", refused_names(path, legacy=True))
    value, names = read_inert(path)
    try:
        found = find_state(str(path), value)
    except UserError:
        found = None
    if found is None or _hides_model(value):
        raise _needs_trust(path, "a whole pickled module or other objects", names)
    return value, (f"left out without running it: {_few_names(names)}",) if names else ()


def _load_weights_only(path: Path) -> Any:
    try:
        with warnings.catch_warnings():
            # What is old or unusual about the file is said by our notes or errors.
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise
    except Exception as error:
        reason = one_line(error).partition(". ")[0]
        raise UserError(f"{path} is truncated or damaged: {reason}; save or fetch it again") from None


def _read_safetensors(path: Path) -> State:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(
            f"{path} is truncated or damaged safetensors: {one_line(error)}; save or fetch it again"
        ) from None


def _read_trusted(path: Path, form: str) -> Any:
    try:
        if form == TORCHSCRIPT:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # torch would rather have .pt2
                return torch.jit.load(path, map_location="cpu").state_dict()
        if form == EXPORT:
            return torch.export.load(path).state_dict
        with importable(path.resolve().parent), importable(Path.cwd()):
            return torch.load(path, map_location="cpu", weights_only=False)
    except (AttributeError, ImportError) as error:
        raise UserError(
            f"{path} needs its classes to be importable: {describe(error)}; run in the folder that holds them, "
            "or save model.state_dict() instead"
        ) from None
    except Exception as error:
        raise UserError(f"{path} cannot be opened as {form}: {describe(error)}") from None


def _hides_model(value: Any) -> bool:
    """Whether what usually holds the weights is an object that was refused, so that other tensors are not the model."""
    return isinstance(value, dict) and any(
        isinstance(value.get(key), Inert) and value[key].origin is not None and not value[key] for key in CONTAINERS
    )


def _needs_trust(path: Path, what: str, names: tuple[str, ...]) -> UserError:
    return UserError(
        f"{path} is {what}, and opening it would run code ({_few_names(names)}); save the weights with "
        "torch.save(model.state_dict(), PATH), or add --trust if you know who made it"
    )


def _few_names(names: tuple[str, ...]) -> str:
    """The names, those outside torch first, the others counted."""
    ordered = sorted(names, key=lambda name: (name.startswith(("torch.", "collections.")), name))
    return ", ".join(ordered[:5]) + (f" and {len(ordered) - 5} more" if len(ordered) > 5 else "")


def _finish(path: Path, value: Any, form: str, notes: tuple[str, ...]) -> Checkpoint:
    found = find_state(str(path), value)
    if found.keys:
        others = f"; passed over: {few(found.others)}" if found.others else ""
        notes += (f"weights taken from the entry {'.'.join(found.keys)}{others}",)
    state, changes = plain_tensors(str(path), found.state, allowed_bytes(path))
    short = strip_prefixes(state)
    kind = form
    if form in (TORCH, LEGACY):
        kind = "module" if found.module is not None else "container" if found.keys else "state dict"
    renamed = {short[name]: tensor for name, tensor in state.items()}
    return Checkpoint(renamed, file_sha256(path), path, kind, notes + changes, found.module)
