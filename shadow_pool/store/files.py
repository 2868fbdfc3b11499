"""Files of a pool: written whole or not at all, sealed where they hold facts, locked by what the system releases."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from shadow_pool.errors import UserError, one_line

MAX_JSON_BYTES = 1 << 26
ADVICE = "run mia-audit pool verify --repair on the pool, then train-shadows again"


def damaged(path: Path | str, what: str) -> UserError:
    """The error for a file of a pool that cannot be used as it is."""
    return UserError(f"{path} {what}; {ADVICE}")


@contextmanager
def readable(path: Path | str) -> Iterator[None]:
    """What goes wrong in the block is damage of ``path``: a stranger's file may have the right hash and any content.

    Raises :class:`UserError` that names the file.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise damaged(path, f"is not readable ({one_line(error)})") from None


def file_version(path: Path | str) -> tuple[int, ...] | None:
    """What changes when a file is written anew; None where there is no file to look at."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_ino, found.st_size, found.st_mtime_ns)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old content or the new, never a part; on failure the old one stays."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def file_sha256(path: Path) -> str:
    """sha256 (hex) of a file's bytes."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def write_sealed(path: Path, body: dict[str, Any]) -> None:
    """Write a JSON object with a checksum of itself under the key ``sha256``."""
    write_atomically(path, (json.dumps({**body, "sha256": checksum(body)}, indent=2) + "\n").encode())


def read_sealed(path: Path, *, advice: str) -> dict[str, Any]:
    """The object that :func:`write_sealed` wrote, without its checksum.

    Raises:
        UserError: missing, unreadable, changed since, or above 64 MiB; ``advice`` ends the message.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_JSON_BYTES + 1)
        body = json.loads(content) if len(content) <= MAX_JSON_BYTES else None
    except FileNotFoundError:
        raise UserError(f"{path} is missing; {advice}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not readable ({' '.join(str(error).split())}); {advice}") from None
    if not isinstance(body, dict):
        raise UserError(f"{path} must hold a JSON object of at most {MAX_JSON_BYTES >> 20} MiB; {advice}")
    stated = body.pop("sha256", None)
    if stated != checksum(body):
        raise UserError(f"{path} was changed after it was written (its checksum differs); {advice}")
    return body


def checksum(body: dict[str, Any]) -> str:
    """sha256 (hex) of a JSON object, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


@contextmanager
def file_lock(path: Path, *, wait: bool) -> Iterator[bool]:
    """An exclusive flock on ``path``, released by the system when its holder dies.

    Yields False at once when another process holds it and ``wait`` is False. The file stays behind, empty
    (removing it would race). In a read-only folder an existing lock file serves.
    """
    try:
        handle: BinaryIO = path.open("ab")
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EROFS) or not path.exists():
            raise
        handle = path.open("rb")
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
