"""A user's own functions and classes, named on the command line as ``module:name`` or ``path/file.py:name``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from shadow_pool.errors import UserError, unknown_name

_REFERENCE = re.compile(r"(?P<where>.+\.py|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):(?P<name>[A-Za-z_]\w*)")


def is_reference(text: str) -> bool:
    """Whether ``text`` has the form ``module:name`` or ``path/file.py:name``."""
    return _REFERENCE.fullmatch(text) is not None


def load_object(text: str, *, what: str) -> Any:
    """The object that ``module:name`` or ``path/file.py:name`` names; runs the module, as importing does.

    A file is run once per version of it, with its own folder importable, and a module with the working
    folder importable. ``what`` names the object's purpose in errors, e.g. ``"normalize"``.

    Raises:
        UserError: the text has another form, or the module or the name is missing, or running it fails.
    """
    match = _REFERENCE.fullmatch(text)
    if match is None:
        raise UserError(f"{what} must be module:name or path/file.py:name, got {text!r}")
    where, name = match["where"], match["name"]
    module = _run_file(Path(where), what) if where.endswith(".py") else _import_module(where, what)
    if not hasattr(module, name):
        raise unknown_name(f"name in {where}", name, (key for key in vars(module) if not key.startswith("_")))
    return getattr(module, name)


def code_version(text: str) -> str:
    """What tells one state of the code that ``module:name`` or ``path/file.py:name`` names from another.

    The sha256 (hex) of its file; ``installed`` for a module that is not in the working folder, ``missing`` where
    there is no file. Nothing is run, and what the file imports is not looked at.
    """
    where, _, _ = text.rpartition(":")
    path = Path(where) if where.endswith(".py") else _module_file(where)
    if path is None:
        return "installed"
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return "missing"


def describe(error: BaseException, *, within: Path | None = None) -> str:
    """An exception as one line: its type, its text, and the file and line it was raised at.

    Where the trace passes through the file ``within``, its last line there is named instead of what that called.
    """
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    places = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    own = [place for place in places if place[0] == within] or places
    at = f" ({own[-1][0].name}, line {own[-1][1]})" if own else ""
    return " ".join(text.split()) + at


def _import_module(name: str, what: str) -> ModuleType:
    try:
        with importable(Path.cwd()):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name + ".").startswith(error.name + "."):
            raise UserError(
                f"{what}: no module named {name!r} is installed or in {Path.cwd()}; "
                "give path/file.py:name for a file elsewhere"
            ) from None
        raise UserError(f"{what}: importing {name} failed: {describe(error)}") from error
    except Exception as error:
        raise UserError(f"{what}: importing {name} failed: {describe(error)}") from error


def _module_file(name: str) -> Path | None:
    """The file of a module of the working folder, found without importing the packages it is in; else None."""
    parts, folders, origin = name.split("."), [str(Path.cwd())], ""
    for depth in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:depth]), folders)
        if spec is None:
            return None if depth == 1 else Path(folders[0])
        folders, origin = list(spec.submodule_search_locations or [""]), spec.origin or ""
    return Path(origin)


def _run_file(path: Path, what: str) -> ModuleType:
    if not path.is_file():
        raise UserError(f"{what}: {path} does not exist; give the path of a Python file")
    path = path.resolve()
    version = f"{path}\0{path.stat().st_mtime_ns}\0{path.stat().st_size}"
    # Objects of the module may be pickled to workers by its name, so the name is the same in every process.
    name = f"mia_audit_user_{path.stem}_{hashlib.sha256(version.encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    loader = SourceFileLoader(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with importable(path.parent):
            # From its text: a compiled copy beside it may be a stranger's.
            exec(loader.source_to_code(path.read_bytes(), str(path)), vars(module))
    except Exception as error:
        del sys.modules[name]
        raise UserError(f"{what}: running {path.name} failed: {describe(error)}") from error
    return module


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Modules in ``folder`` can be imported, before all others, within the block."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
