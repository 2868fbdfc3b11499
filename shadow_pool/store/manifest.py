"""pool.json: what a pool is, with a checksum of its own. Protocol 1.

Bump ``PROTOCOL`` when a reader of the old layout would misread the new one; adding a key is no bump. A pool of
another protocol is refused by name, never guessed at.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from shadow_pool.errors import UserError
from shadow_pool.queries import View
from shadow_pool.spec import PoolSpec, from_dict, to_dict

PROTOCOL = 1


@dataclass(frozen=True)
class Manifest:
    """The content of pool.json. ``files`` maps membership.npy and records.parquet to their sha256."""

    spec: PoolSpec
    fingerprint: str
    input_shape: tuple[int, ...]
    views: tuple[View, ...]
    files: dict[str, str]
    warnings: tuple[str, ...]
    software: dict[str, str]
    created: str

    def write(self, path: Path) -> None:
        """Write pool.json under a temporary name and rename it into place."""
        body = {"protocol": PROTOCOL, **dataclasses.asdict(self), "spec": to_dict(self.spec)}
        body["sha256"] = _checksum(body)
        write_atomically(path, (json.dumps(body, indent=2) + "\n").encode())


def read_manifest(path: Path) -> Manifest:
    """Read pool.json. Raises :class:`UserError` where it is missing, edited, or of another protocol."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"no pool in {path.parent}: pool.json is missing; make one with mia-audit train-shadows"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not readable: {' '.join(str(error).split())}; restore it from a copy") from None
    if not isinstance(body, dict) or body.get("protocol") != PROTOCOL:
        found = body.get("protocol") if isinstance(body, dict) else type(body).__name__
        raise UserError(f"{path}: protocol must be {PROTOCOL}, got {found!r}; use the mia-audit that wrote this pool")
    stated = body.pop("sha256", None)
    if stated != _checksum(body):
        raise UserError(f"{path} was changed after it was written (checksum differs); restore it from a copy")
    return Manifest(
        spec=from_dict(body["spec"], where=str(path)),
        fingerprint=body["fingerprint"],
        input_shape=tuple(body["input_shape"]),
        views=tuple(View(**view) for view in body["views"]),
        files=body["files"],
        warnings=tuple(body["warnings"]),
        software=body["software"],
        created=body["created"],
    )


def training_digest(spec: PoolSpec) -> str:
    """sha256 of all in a spec that decides what one model is: everything but n and the list of arms."""
    values = {key: value for key, value in to_dict(spec).items() if key not in ("n", "arms")}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def software_versions() -> dict[str, str]:
    """Versions of what decides a model's bits, and of this package."""
    packages = ("mia-audit", "torch", "torchvision", "numpy", "scipy")
    return {"python": platform.python_version(), "machine": _processor()} | {name: version(name) for name in packages}


def now() -> str:
    """The current time, UTC, ISO 8601 to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def file_sha256(path: Path) -> str:
    """sha256 (hex) of a file's bytes."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(content)
    temporary.replace(path)


def _processor() -> str:
    """Architecture and processor name: bits of float arithmetic are promised on one type only."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{platform.machine()} {names[0] if names else platform.processor()}".strip()


def _checksum(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
