"""pool.json: what a pool is, with a checksum of its own. Protocol 1.

Bump ``PROTOCOL`` when a reader of the old layout would misread the new one; adding a key is no bump. A pool of
another protocol is refused by name, never guessed at.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import platform
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

from shadow_pool.errors import UserError
from shadow_pool.plain import build, short
from shadow_pool.processor import cpuinfo
from shadow_pool.queries import PLAIN, View
from shadow_pool.spec import PoolSpec, to_dict
from shadow_pool.store.files import read_sealed, write_sealed

PROTOCOL = 1
MAX_INPUT = 1 << 26
"""Values of one record: a colour picture of 4,096 x 4,096 has 50 million. A stranger's pool.json may ask for more."""
MAX_SHIFT = 64


@dataclass(frozen=True)
class Manifest:
    """The content of pool.json.

    ``input_shape`` is that of a stored record, ``model_shape`` that of what a model sees of it.
    ``files`` has the sha256 of records.parquet and of the first n rows of membership.npy, so that a reader of the
    old pool.json is not disturbed while the pool grows. ``code`` has the version of the code that the spec names.
    """

    spec: PoolSpec
    fingerprint: str
    input_shape: tuple[int, ...]
    model_shape: tuple[int, ...]
    views: tuple[View, ...]
    files: dict[str, str]
    warnings: tuple[str, ...]
    software: dict[str, str]
    created: str
    code: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("input_shape", "model_shape"):
            shape = getattr(self, name)
            if not shape or min(shape) < 1 or math.prod(shape) > MAX_INPUT:
                raise UserError(f"{name} must be that of an input of 1 to {MAX_INPUT} values, got {short(shape)}")
        shifts = [abs(shift) for view in self.views for shift in (view.dy, view.dx)]
        if len(self.views) != self.spec.queries or self.views[0] != PLAIN or max(shifts) > MAX_SHIFT:
            raise UserError(
                f"views must be the plain one and shifts by at most {MAX_SHIFT} pixels, {self.spec.queries} in all as "
                f"spec.queries says, got {short(self.views)}"
            )

    def write(self, path: Path) -> None:
        """Write pool.json under a temporary name and rename it into place."""
        write_sealed(path, {"protocol": PROTOCOL, **dataclasses.asdict(self), "spec": to_dict(self.spec)})

    @property
    def digest(self) -> str:
        """sha256 of all that decides what model ``i`` of an arm is: the records, and the spec but n and arms."""
        values = {key: value for key, value in to_dict(self.spec).items() if key not in ("n", "arms")}
        return hashlib.sha256(json.dumps([values, self.fingerprint], sort_keys=True).encode()).hexdigest()


def read_manifest(path: Path) -> Manifest:
    """Read pool.json. Raises :class:`UserError` where it is missing, edited, or of another protocol."""
    if not path.exists():
        raise UserError(f"no pool in {path.parent}: pool.json is missing; make one with mia-audit train-shadows")
    body = read_sealed(
        path, advice="restore it from a copy, or remove it and run train-shadows with the pool's options again"
    )
    if body.get("protocol") != PROTOCOL:
        found = short(body.get("protocol"))
        raise UserError(f"{path}: protocol must be {PROTOCOL}, got {found}; use the mia-audit that wrote this pool")
    return build(Manifest, body, str(path), unknown="ignore")


def software_versions(device: str = "cpu") -> dict[str, str]:
    """Versions of what decides a model's bits, and of this package; ``machine`` is what computes on ``device``."""
    return {"python": platform.python_version(), "machine": _processor(device), **_packages()}


@functools.cache
def _packages() -> dict[str, str]:
    return {name: version(name) for name in ("mia-audit", "torch", "torchvision", "numpy", "scipy")}


def now() -> str:
    """The current time, UTC, ISO 8601 to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _processor(device: str) -> str:
    """Architecture and processor name: bits of float arithmetic are promised on one type only."""
    if device != "cpu":
        import torch

        return torch.cuda.get_device_name(device)
    names = [line.split(":", 1)[1].strip() for line in cpuinfo().splitlines() if line.startswith("model name")]
    return f"{platform.machine()} {names[0] if names else platform.processor()}".strip()
