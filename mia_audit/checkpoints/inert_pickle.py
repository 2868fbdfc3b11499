"""Reading the tensors of a torch.save file without calling anything it names.

A pickle can name any function and have it called. Here every name stands for an inert class that does nothing
when called, built or filled, but for the few names that torch.save uses for plain tensors; these make
descriptions, from which the tensors are cut afterwards, within the bounds of the bytes in the file.
"""

from __future__ import annotations

import io
import pickle
import sys
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shadow_pool.errors import UserError, one_line

_DTYPES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


class Inert(dict):
    """Stands for any class or function named in a pickle; keeps the items it is given and does nothing else."""

    origin: str | None = None

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Inert:
        return super().__new__(cls)

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        super().__init__()

    def __setstate__(self, _state: Any) -> None:
        pass

    def __call__(self, *_args: Any, **_kwargs: Any) -> Inert:
        return self

    def append(self, _item: Any) -> None:
        """Nothing: a list's opcodes end here."""

    extend = add = append
    __hash__ = object.__hash__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other


class StorageView(NamedTuple):
    """A tensor not yet made: elements of a storage that the file holds."""

    key: str
    dtype: torch.dtype
    elements: int
    offset: int = 0
    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()


class _Rebuild:
    """The rebuilding functions that torch.save names, without attributes that a pickle could set."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __setstate__(self, _state: Any) -> None:
        raise pickle.UnpicklingError("state for a function")

    def __call__(self, first: Any, *rest: Any) -> StorageView:
        if not isinstance(first, StorageView):
            raise pickle.UnpicklingError(f"{self._name} of something that is no tensor")
        if self._name.startswith("_rebuild_parameter"):
            return first
        offset, size, stride = rest[:3]
        return first._replace(offset=int(offset), size=_whole(size), stride=_whole(stride))


_REBUILD = {
    ("torch._utils", name)
    for name in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_parameter", "_rebuild_parameter_with_state")
}


# The C unpickler's memo is an array as long as the largest index in the file; this one's is a dict.
class _InertUnpickler(pickle._Unpickler):
    def __init__(self, file: io.BufferedIOBase) -> None:
        super().__init__(file, encoding="utf-8")
        self.refused: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if (module, name) in _REBUILD:
            return _Rebuild(name)
        if (module, name) == ("collections", "OrderedDict"):
            return type("OrderedDict", (Inert,), {})
        self.refused.add(f"{module}.{name}")
        return type("Refused", (Inert,), {"origin": f"{module}.{name}"})

    def get_extension(self, code: int) -> Any:
        raise pickle.UnpicklingError(f"extension code {code}")

    def persistent_load(self, pid: Any) -> Any:
        if isinstance(pid, tuple) and len(pid) >= 5 and pid[0] == "storage" and isinstance(pid[1], torch.dtype):
            return StorageView(str(pid[2]), pid[1], int(pid[4]))
        return Inert()


def read_inert(path: Path) -> tuple[Any, tuple[str, ...]]:
    """The object in a zip file of torch.save, its plain tensors on the CPU, and the names that were refused.

    Dicts, lists and tuples are kept; whatever a refused name would have made is an :class:`Inert`.

    Raises:
        UserError: the file is damaged, or a tensor reaches beyond its bytes.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            root = next(name for name in archive.namelist() if name.endswith("/data.pkl")).removesuffix("data.pkl")
            unpickler = _InertUnpickler(io.BytesIO(archive.read(f"{root}data.pkl")))
            loaded = unpickler.load()
            if f"{root}byteorder" in archive.namelist():
                order = archive.read(f"{root}byteorder").decode()
                if order != sys.byteorder:
                    raise ValueError(f"byte order {order}")
            value = _Tensors(archive, root).fill(loaded)
    except Exception as error:
        raise UserError(f"{path} cannot be read safely: {one_line(error)}; save or fetch it again") from None
    return value, tuple(sorted(unpickler.refused))


def refused_names(path: Path, *, legacy: bool) -> tuple[str, ...]:
    """The classes and functions that unpickling the file would use besides plain tensors; nothing is run."""
    if not legacy:
        return read_inert(path)[1]
    with path.open("rb") as file:
        refused: set[str] = set()
        try:
            for _ in range(4):  # magic number, protocol, system, object
                unpickler = _InertUnpickler(file)
                unpickler.load()
                refused |= unpickler.refused
        except Exception:
            refused.add("an object that cannot be read")
    return tuple(sorted(refused))


class _Tensors:
    """Puts tensors in the place of their descriptions, each storage read once."""

    def __init__(self, archive: zipfile.ZipFile, root: str) -> None:
        self.archive, self.root = archive, root
        self.storages: dict[str, torch.Tensor] = {}
        # With the value itself, so that its id is not given to another while this lives.
        self.done: dict[int, tuple[Any, Any]] = {}

    def fill(self, value: Any) -> Any:
        if isinstance(value, StorageView):
            return self.tensor(value)
        if not isinstance(value, (dict, list, tuple)):
            return value
        if id(value) not in self.done:
            # Dicts and lists are filled in place, and known before their items are, so that a cycle ends.
            self.done[id(value)] = (value, value)
            if isinstance(value, dict):
                for key in value:
                    value[key] = self.fill(value[key])
            elif isinstance(value, list):
                value[:] = [self.fill(item) for item in value]
            else:
                self.done[id(value)] = (value, tuple(self.fill(item) for item in value))
        return self.done[id(value)][1]

    def tensor(self, view: StorageView) -> torch.Tensor:
        if view.key not in self.storages:
            content = bytearray(self.archive.read(f"{self.root}data/{view.key}"))
            self.storages[view.key] = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0).byte()
        storage = self.storages[view.key]
        storage = storage[: len(storage) // view.dtype.itemsize * view.dtype.itemsize].view(view.dtype)
        last = view.offset + sum((n - 1) * step for n, step in zip(view.size, view.stride, strict=True))
        if min((view.offset, *view.size, *view.stride)) < 0 or (0 not in view.size and last >= len(storage)):
            raise ValueError(f"a tensor {view.size} reaches beyond the {len(storage)} elements of its storage")
        return storage.as_strided(view.size, view.stride, view.offset)


def _whole(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple) or not all(type(value) is int for value in values):
        raise pickle.UnpicklingError("a size that is no tuple of integers")
    return values
