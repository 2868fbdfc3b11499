"""What kind of file a checkpoint is, told from its bytes alone, and whether its sizes can be true."""

from __future__ import annotations

import os
import stat
import zipfile
from pathlib import Path

from shadow_pool.errors import UserError

SAFETENSORS, TORCH, LEGACY, TORCHSCRIPT, EXPORT = (
    "safetensors",
    "torch",
    "torch (legacy)",
    "TorchScript",
    "torch.export",
)

# torch.save before version 1.6 began every file with this number, pickled.
_LEGACY_MAGIC = bytes.fromhex("6cfc9c46f9206aa85019")
_RATIO = 4
_SLACK = 2**20
_HEAD = 512
_REMEDY = "save the weights with torch.save(model.state_dict(), PATH) or as .safetensors"


def recognise(path: Path) -> str:
    """The form of a checkpoint file: one of this module's five constants.

    Raises:
        UserError: missing, a folder, not readable, empty, damaged, declaring more than it can hold, or no
            checkpoint at all; says which.
    """
    head, size = _read_head(path)
    text = head.lstrip().lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        raise UserError(f"{path} is a web page, not a model: the download was a login or error page; fetch it again")
    if text.startswith(b"version https://git-lfs"):
        raise UserError(f"{path} is a Git LFS pointer, not the model itself; run git lfs pull")
    if head.startswith(b"PK"):
        return _recognise_zip(path, size)
    if _LEGACY_MAGIC in head[:64]:
        return LEGACY
    if head[:1] == b"\x80" and len(head) > 1 and head[1] <= 5:
        raise UserError(f"{path} is a bare pickle, which is never opened because that can run code; {_REMEDY}")
    if path.suffix == ".safetensors" or head[8:9] == b"{":
        return SAFETENSORS
    raise UserError(f"{path} is no checkpoint: expected safetensors or a file of torch.save, found other content")


def allowed_bytes(path: Path) -> int:
    """How many bytes of tensors a file can honestly hold: tied tensors count twice, views of few bytes do not."""
    return _RATIO * path.stat().st_size + _SLACK


def _read_head(path: Path) -> tuple[bytes, int]:
    try:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            raise UserError(f"{path} is a folder; give the file of one model")
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path} is not a regular file; give the file of one model")
        with path.open("rb") as file:
            head = file.read(_HEAD)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; give the file of one model") from None
    except PermissionError:
        raise UserError(f"{path} may not be read by this user; change its permissions") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    if not head:
        raise UserError(f"{path} is empty; save or fetch it again")
    return head, status.st_size


def _recognise_zip(path: Path, size: int) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        raise UserError(
            f"{path} is truncated or damaged: its zip directory is missing; save or fetch it again"
        ) from None
    names = [entry.filename for entry in entries]
    inner = {name.partition("/")[2] for name in names}
    if "constants.pkl" in inner or any(name.startswith("code/") for name in inner):
        return TORCHSCRIPT
    if "archive_format" in inner or "serialized_exported_program.json" in names:
        return EXPORT
    if "data.pkl" not in inner:
        kind = "NumPy arrays" if any(name.endswith(".npy") for name in names) else "other files"
        raise UserError(f"{path} is a zip archive of {kind}, not a model; {_REMEDY}")
    # torch.save stores without compression, so what the entries declare must be there byte for byte.
    declared = sum(entry.file_size for entry in entries)
    if declared > size or len(set(names)) < len(names):
        raise UserError(
            f"{path} declares {declared} bytes of content in a file of {size}: it is damaged or made to exhaust "
            "memory; save or fetch it again"
        )
    return TORCH
