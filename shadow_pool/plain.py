"""Plain values, as TOML and JSON give them, into frozen dataclasses, each checked against its field's annotation."""

from __future__ import annotations

import dataclasses
import functools
import reprlib
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from shadow_pool.errors import UserError, unknown_name

T = TypeVar("T")
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 60


def build(cls: type[T], values: Any, where: str, *, unknown: str = "refuse") -> T:
    """A ``cls`` of ``values``; integers pass for floats, lists for tuples, and a missing key takes its default.

    Args:
        where: what the values came from, for errors.
        unknown: ``refuse`` keys that are no fields, or ``ignore`` them; in tables within they are refused.

    Raises:
        UserError: naming the key, what was expected and what was found; also what ``cls`` itself refuses.
    """
    if not isinstance(values, Mapping):
        raise UserError(f"{where} must be a table of settings, got {type(values).__name__}")
    hints = _hints(typing.cast(Any, cls))
    fields = {f.name: f for f in dataclasses.fields(typing.cast(Any, cls))}
    if unknown == "refuse":
        for key in values:
            if key not in fields:
                raise unknown_name(f"key in {where}", str(key), fields)
    arguments = {}
    for name, f in fields.items():
        if name in values:
            arguments[name] = _typed(hints[name], values[name], where, name)
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise UserError(f"{where} must have a key {name!r}, found none")
    return cls(**arguments)


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def short(value: object) -> str:
    """``value`` as Python writes it, cut to what fits in a line."""
    try:
        return _REPR.repr(value)
    except ValueError:  # an integer of more digits than Python prints
        return f"a very long {type(value).__name__}"


def _typed(annotation: Any, value: Any, where: str, name: str) -> Any:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return build(annotation, value, f"{where}, table [{name}]")
    if origin is types.UnionType:
        return None if value is None else _typed(arguments[0], value, where, name)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise _refused(where, name, f"a list of {arguments[0].__name__}", value)
        return tuple(_typed(arguments[0], item, where, name) for item in value)
    if origin is dict:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise _refused(where, name, "a table", value)
        return {key: _typed(arguments[1], item, where, f"{name}.{key}") for key, item in value.items()}
    if annotation is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 1000:
        return float(value)
    if not isinstance(value, annotation) or (isinstance(value, bool) and annotation is not bool):
        raise _refused(where, name, annotation.__name__, value)
    return value


def _refused(where: str, name: str, expected: str, value: object) -> UserError:
    return UserError(f"{where}: {name} must be {expected}, got {short(value)}")
