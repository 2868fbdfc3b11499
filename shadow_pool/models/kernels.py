"""activations.cpp and pooled.cpp: compiled on first use by whatever C++ compiler the machine has, and called."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shadow_pool.processor import cpuinfo

_HERE = Path(__file__).parent
_SOURCES = [_HERE / "activations.cpp", _HERE / "pooled.cpp"]
_HEADER = _HERE / "norms.h"
_FLAGS = ["-std=c++14", "-O3", "-march=native", "-fno-exceptions", "-fno-rtti", "-shared", "-fPIC"]
_SECONDS = 120
LANES = 8
"""Channels of activations must be a multiple of it."""
RECORDS = 16
"""Records of pooled maps are padded to a multiple of it."""
TALLEST = 6
"""Channels whose gradients of weights are summed together."""
MOST = 8192
"""Channels of activations; records, channels, sides of pooled maps: they have a few numbers for each on the stack."""
DTYPES = {torch.float32: "float", torch.bfloat16: "bf16"}


@functools.cache
def loaded() -> ctypes.CDLL | None:
    """The compiled kernels; None where there is no compiler or it fails, and torch's own operations must do.

    Kept under ``$XDG_CACHE_HOME/mia-audit``, by default ``~/.cache/mia-audit``, by the hashes of what it is made from
    and of itself; compiling takes five seconds.
    """
    try:
        compiler = _compiler()
        folder, key = _folder(), _key(compiler)
        for made in folder.glob(f"kernels-{key}-*.so"):
            if made.stem.endswith(_hash(made.read_bytes())):  # a damaged one would end the process
                return ctypes.CDLL(str(made))
        with tempfile.TemporaryDirectory(dir=folder) as own:
            new = Path(own) / "kernels.so"
            command = [compiler, *_FLAGS, "-o", str(new), *map(str, _SOURCES)]
            subprocess.run(command, check=True, capture_output=True, timeout=_SECONDS)
            return ctypes.CDLL(str(new.rename(folder / f"kernels-{key}-{_hash(new.read_bytes())}.so")))
    except Exception:  # whatever a strange machine has in the place of a compiler or a home
        return None


@functools.cache
def pooled_is_fast() -> bool:
    """Whether the kernels are loaded and the processor has the vectors that pooled.cpp is written for."""
    kernels = loaded()
    return kernels is not None and bool(ctypes.c_long.in_dll(kernels, "pooled_is_fast").value)


def made_by() -> str:
    """The compiler, its version, and a hash of the sources, or "none"; with others a model has other last digits."""
    if loaded() is None:
        return "none"
    compiler = next(iter(_version(_compiler()).splitlines()), "unknown")
    return f"{compiler}, sources {_hash(_sources().encode())[:8]}"


def _compiler() -> str:
    for name in ("c++", "g++", "clang++"):
        found = shutil.which(name)
        if found is not None:
            return found
    raise FileNotFoundError("no C++ compiler")


@functools.cache
def _version(compiler: str) -> str:
    told = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=_SECONDS).stdout
    return told.decode("utf-8", errors="replace")


def _folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(cache) / "mia-audit"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def _key(compiler: str) -> str:
    parts = [_sources(), *_FLAGS, _version(compiler), _processor()]
    return _hash("\0".join(parts).encode())


@functools.cache
def _sources() -> str:
    return "\0".join(path.read_text(encoding="utf-8") for path in (_HEADER, *_SOURCES))


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _processor() -> str:
    told = [line for line in cpuinfo().splitlines() if line.startswith(("model name", "flags", "Features"))]
    return "\n".join([platform.machine(), platform.processor(), *sorted(set(told))])


class _Norm(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("gamma", "beta", "running_mean", "running_var")),
        ("momentum", ctypes.c_double),
        ("eps", ctypes.c_double),
    ]


class _Shape(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_long)
        for name in (
            *("records", "padded", "groups", "channels", "out_channels", "height", "width"),
            *("kernel_height", "kernel_width", "pad", "out_height", "out_width"),
        )
    ]


def norm(layer: nn.BatchNorm2d | None, bias: Tensor | None = None) -> _Norm:
    """What the kernels need to know of a layer; ``bias`` is added where there is none."""
    if layer is None:
        return _Norm() if bias is None else _Norm(beta=bias.data_ptr())
    held = [layer.weight, layer.bias, *map(layer.get_buffer, ("running_mean", "running_var"))]
    return _Norm(*(tensor.data_ptr() for tensor in held), layer.momentum, layer.eps)


def shape(layer: nn.Conv2d, x: Tensor) -> _Shape:
    """A convolution of maps [N, C, H, W], of stride 1 and one padding; channels are those of one of its groups."""
    n, c, *size = x.shape
    groups, pad = layer.groups, int(layer.padding[0])
    out = [side + 2 * pad - kernel + 1 for side, kernel in zip(size, layer.kernel_size, strict=True)]
    padded = -(-n // RECORDS) * RECORDS
    return _Shape(n, padded, groups, c // groups, layer.out_channels // groups, *size, *layer.kernel_size, pad, *out)


def rows(x: Tensor) -> tuple[int, int]:
    """(rows, channels) of [N, C, H, W]."""
    return x.numel() // x.shape[1], x.shape[1]


def call(kernel: str, x: Tensor, *arguments: Any) -> None:
    """Run a kernel of ``x``'s type; tensors are passed as they lie in memory."""
    kernels = loaded()
    assert kernels is not None
    getattr(kernels, f"{kernel}_{DTYPES[x.dtype]}")(*map(_passed, (x, *arguments)))


def _passed(argument: Any) -> Any:
    if argument is None:
        return ctypes.c_void_p()
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, ctypes.Structure):
        return ctypes.byref(argument)
    return ctypes.c_long(argument)
