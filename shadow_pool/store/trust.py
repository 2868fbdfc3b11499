"""Whose word the code that a pool names runs on: the user's.

A pool may come from a stranger, and its spec may name code (``arch = "net.py:Net"``). Such code runs where the user
names it in the same command, where the user made the pool here and the code's file is as it was, or with ``--trust``.
As direnv does with ``.envrc``, the user's own folder of state keeps an empty file for each code of each pool made
here, named by a hash of what decides the pool's models and of the code; nothing that travels with a pool can add one.

What a named file imports is not looked at, nor is an installed module: installing it was the user's word.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shadow_pool.errors import UserError
from shadow_pool.plain import short
from shadow_pool.spec import PoolSpec, to_dict
from shadow_pool.usercode import code_version, is_reference

if TYPE_CHECKING:
    from shadow_pool.store.manifest import Manifest
    from shadow_pool.store.pool import Pool

MODEL_FIELDS = ("arch", "train", "data.normalize")
"""The fields whose code decides what a model is; what the others' gives is checked by the fingerprint."""
FIELDS = (*MODEL_FIELDS, "data.source", "data.ood_from")
# Arguments can make a library's builder open files: timm's checkpoint_path unpickles one.
_HARMLESS_ARCH = re.compile(r"[^:]*|(torchvision|timm):[^:(]*")
_ARCH_CODE = re.compile(r"(.*?\.py:\w+|[^(]*)", re.DOTALL)


def named_code(values: Mapping[str, Any]) -> dict[str, str]:
    """Field -> code, as ``module:name`` or ``file.py:name``, that a spec (nested plain values) names."""
    found = {}
    for field in FIELDS:
        table, _, key = field.rpartition(".")
        text = (values.get(table, {}) if table else values).get(key)
        if text is None:
            continue
        if field == "arch":
            match = _ARCH_CODE.match(text.strip())
            if match is not None and not _HARMLESS_ARCH.fullmatch(text.strip()):
                found[field] = match[1]
        elif is_reference(text):
            found[field] = text
    return found


def code_versions(spec: PoolSpec, fields: Iterable[str] = FIELDS) -> dict[str, str]:
    """Code -> its version (:func:`~shadow_pool.usercode.code_version`), of what ``fields`` of a spec name."""
    code = named_code(to_dict(spec))
    return {code[field]: code_version(code[field]) for field in fields if field in code}


def vouch(manifest: Manifest) -> None:
    """Note that the user made this pool here with its code as it is; without a writable home nothing is noted."""
    with contextlib.suppress(OSError):
        for text, version in code_versions(manifest.spec).items():
            note = _note(manifest, text, version)
            note.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            note.touch()


def check_code(pool: Pool, fields: Iterable[str] = FIELDS) -> None:
    """Refuse to run the code that ``fields`` of the pool's spec name, unless the user's word covers it.

    Raises:
        UserError: the pool was made elsewhere, or the code has changed since; and the pool is not ``trusted``.
    """
    if pool.trusted:
        return
    for text, version in code_versions(pool.spec, fields).items():
        if os.path.exists(_note(pool.manifest, text, version)):  # False where this user may not look
            continue
        before = pool.manifest.code.get(text, version)
        if os.path.exists(_note(pool.manifest, text, before)):
            raise UserError(
                f"{short(text)} has changed since you made the pool {pool.path} (version {before[:12]} then, "
                f"{version[:12]} now); bring the old file back, or run it as it is with --trust"
            )
        raise UserError(
            f"the pool {pool.path} names code to run, {short(text)}, and nothing in {notes_folder()} says that "
            "you made it here with this code: read that code, then allow it with --trust"
        )


def refuse_changed_code(pool: Pool) -> None:
    """Raise :class:`UserError` where models trained now would be others than those the pool was made for."""
    for text, version in code_versions(pool.spec, MODEL_FIELDS).items():
        before = pool.manifest.code.get(text, version)
        if before != version:
            raise UserError(
                f"{short(text)} has changed since the pool {pool.path} was made (version {before[:12]} then, "
                f"{version[:12]} now), so its models would not be of one kind; bring the old file back, choose another "
                "--pool, or mix them with --trust"
            )


def _note(manifest: Manifest, text: str, version: str) -> Path:
    name = hashlib.sha256(json.dumps([manifest.digest, text, version]).encode()).hexdigest()
    return notes_folder() / name


def notes_folder() -> Path:
    """$XDG_STATE_HOME/mia-audit/pools, by default under ~/.local/state."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not state.is_absolute():
        try:
            state = Path.home() / ".local" / "state"
        except RuntimeError:
            state = Path("/nonexistent")
    return state / "mia-audit" / "pools"
