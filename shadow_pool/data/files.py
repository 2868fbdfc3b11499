"""Sources that are one .npz file or a folder of pictures."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from shadow_pool.data.arrays import Source, from_arrays
from shadow_pool.data.images import Picture, decode_pictures
from shadow_pool.errors import UserError, few, one_line

_TEST_FOLDERS = ("test", "val", "valid", "validation")


def read_npz(path: Path, *, label: str | None, id: str | None, group: str | None) -> Source:
    """An .npz with ``x`` and ``y`` and optionally ``id``, ``subset`` and ``group``; never unpickled.

    ``label``, ``id`` and ``group`` name other arrays than ``y``, ``id`` and ``group``, which must then exist.

    Raises:
        UserError: not a whole .npz, an array that is missing or holds objects, or what
            :func:`~shadow_pool.data.arrays.from_arrays` refuses.
    """
    asked = {"x": "x", "y": label or "y", "id": id or "id", "group": group or "group", "subset": "subset"}
    required = {"x", "y"} | ({"id"} if id else set()) | ({"group"} if group else set())
    arrays: dict[str, np.ndarray] = {}
    try:
        with np.load(path, allow_pickle=False) as archive:
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise UserError(f"{path} is a single array; expected an .npz with x and y")
            for role, key in asked.items():
                if key in archive.files:
                    arrays[role] = archive[key]
                elif role in required:
                    raise UserError(
                        f"{path} has no array {key!r}; it holds {few(archive.files, 20) or 'nothing'}: "
                        "save it with np.savez(PATH, x=images_or_features, y=labels)"
                    )
    except UserError:
        raise
    except Exception as error:  # zipfile, zlib, NumPy and Python's own parser each raise their own
        advice = "save arrays of numbers or strings" if "pickle" in str(error).lower() else "write it anew"
        raise UserError(f"{path} is not a readable .npz: {one_line(error)}; {advice}") from None
    for role, array in arrays.items():
        if not isinstance(array, np.ndarray):  # NumPy gives the bytes of an entry that does not begin as its files do
            raise UserError(f"{path}: {asked[role]!r} must be an array, found other content; write it anew")
    return from_arrays(str(path), arrays.pop("x"), arrays.pop("y"), **arrays)


def read_folder(path: Path, *, image_size: int | None) -> Source:
    """A folder of pictures with one subfolder per class, or with ``train`` and ``test`` that hold such folders.

    Classes are the sorted names of the subfolders; a picture's id is its path inside the folder. Files that
    are not pictures by their suffix are passed over and counted in the warnings.

    Raises:
        UserError: no class folders, no pictures, or a picture that cannot be read.
    """
    splits = _splits(path)
    folders = [(split, folder) for split, root in splits for folder in _subfolders(root)]
    classes = tuple(sorted({folder.name for _, folder in folders}))
    pictures: list[Picture] = []
    label: list[str] = []
    test: list[bool] = []
    passed_over = 0
    for split, folder in folders:
        found, others = _pictures(folder)
        passed_over += others
        pictures += [(file.relative_to(path).as_posix(), file) for file in found]
        label += [folder.name] * len(found)
        test += [split == "test"] * len(found)
    if not pictures:
        raise UserError(f"{path} holds no pictures; expected one subfolder per class, or train and test with such")
    x, warnings = decode_pictures(str(path), pictures, image_size)
    if passed_over:
        warnings += (f"{path}: {passed_over} files that are not pictures were passed over",)
    position = {name: index for index, name in enumerate(classes)}
    return Source(
        x,
        np.array([position[name] for name in label], dtype=np.int64),
        classes=classes,
        id=np.array([name for name, _ in pictures], dtype=object),
        test=np.array(test) if len(splits) == 2 else None,
        warnings=warnings,
    )


def _splits(path: Path) -> list[tuple[str, Path]]:
    held_out = next((path / name for name in _TEST_FOLDERS if (path / name).is_dir()), None)
    # A class may be called train as well; then it holds pictures, not classes.
    if not (path / "train").is_dir() or not _subfolders(path / "train"):
        return [("train", path)]
    return [("train", path / "train")] + ([("test", held_out)] if held_out is not None else [])


def _subfolders(path: Path) -> list[Path]:
    return sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith((".", "__")))


def _pictures(folder: Path) -> tuple[list[Path], int]:
    """The pictures under a folder in order of path, and the number of other files."""
    from PIL import Image

    suffixes = Image.registered_extensions()
    files = [Path(root) / name for root, _, names in os.walk(folder) for name in names if not name.startswith(".")]
    found = sorted(file for file in files if file.suffix.lower() in suffixes)
    return found, len(files) - len(found)
