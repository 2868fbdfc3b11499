"""The data that scikit-learn ships, read from its files: importing scikit-learn takes a second, at every command."""

from __future__ import annotations

import gzip
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from shadow_pool.errors import UserError


def digits() -> tuple[np.ndarray, np.ndarray]:
    """scikit-learn's ``load_digits``: float64 [1797, 8, 8] from 0 to 16, and labels int64 [1797]."""
    with gzip.open(_file("data/digits.csv.gz"), "rt") as lines:
        table = np.loadtxt(lines, delimiter=",")
    return table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(np.int64)


def photographs() -> tuple[np.ndarray, np.ndarray]:
    """scikit-learn's ``load_sample_images``, a temple in China and a flower: uint8 [427, 640, 3] each."""
    from PIL import Image

    china, flower = (np.asarray(Image.open(_file(f"images/{name}.jpg"))) for name in ("china", "flower"))
    return china, flower


def _file(name: str) -> Path:
    package = find_spec("sklearn")
    folders = package.submodule_search_locations if package is not None else None
    path = Path(folders[0] if folders else "sklearn") / "datasets" / name
    if not path.is_file():
        raise UserError(f"scikit-learn must ship {path}, found no such file; install scikit-learn 1 anew")
    return path
