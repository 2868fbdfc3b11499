"""Data sets known by name: scikit-learn's digits, torchvision's image sets, Debian's Fashion-MNIST."""

from __future__ import annotations

import gzip
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from shadow_pool.data import shipped
from shadow_pool.data.arrays import Source
from shadow_pool.errors import UserError

DEFAULT_ROOT = Path("data")
DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")

_IDX_STEMS = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
_IDX_FOLDERS = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST", "kmnist": "KMNIST"}
_OTHER_FILES = {
    "cifar10": "cifar-10-batches-py",
    "cifar100": "cifar-100-python",
    "svhn": "train_32x32.mat and test_32x32.mat",
}
_FASHION = "T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot"

NAMES = ("digits", *_IDX_FOLDERS, *_OTHER_FILES)


def read_named(name: str, *, data_root: Path | None, download: bool) -> Source:
    """One of :data:`NAMES`, uint8 images [N, C, H, W].

    All but ``digits`` have a test split of their own and are looked for in ``data_root`` (default
    :data:`DEFAULT_ROOT`) laid out as torchvision does; ``fashion-mnist`` without a root also where Debian's
    package puts it. Downloads, with torchvision, only when ``download`` is set and files are missing.

    Raises:
        UserError: files are missing or damaged; names the folder that was searched.
    """
    if name == "digits":
        return _digits()
    root = DEFAULT_ROOT if data_root is None else data_root
    if name in _IDX_FOLDERS:
        return _idx_set(name, root, debian=data_root is None, download=download)
    return _torchvision_set(name, root, download)


def _digits() -> Source:
    data, label = shipped.digits()
    pixels = np.round(data[:, None] * 255 / 16).astype(np.uint8)
    return Source(pixels, label, classes=tuple("0123456789"))


def _idx_set(name: str, root: Path, *, debian: bool, download: bool) -> Source:
    folders = [root / _IDX_FOLDERS[name] / "raw", root / _IDX_FOLDERS[name], root]
    if debian and name == "fashion-mnist":
        folders.append(DEBIAN_FASHION_MNIST)
    found = next((folder for folder in folders if all(_idx_path(folder, stem) for stem in _IDX_STEMS)), None)
    if found is None and download:
        _torchvision_class(name)(str(root), download=True)
        found = folders[0]
    if found is None:
        raise _missing(name, root, "train-images-idx3-ubyte and three more, plain or .gz")
    train_x, train_y, test_x, test_y = (_read_idx(found, stem) for stem in _IDX_STEMS)
    for images, labels in ((train_x, train_y), (test_x, test_y)):
        if images.ndim != 3 or labels.shape != images.shape[:1]:
            raise UserError(
                f"{name} in {found}: images {images.shape} and labels {labels.shape} do not match; fetch the files anew"
            )
    return Source(
        np.concatenate([train_x, test_x])[:, None],
        np.concatenate([train_y, test_y]).astype(np.int64),
        classes=tuple(_FASHION.split(",")) if name == "fashion-mnist" else tuple("0123456789"),
        test=np.arange(len(train_y) + len(test_y)) >= len(train_y),
    )


def _idx_path(folder: Path, stem: str) -> Path | None:
    candidates = (folder / f"{stem}-ubyte", folder / f"{stem}-ubyte.gz")
    return next((path for path in candidates if path.is_file()), None)


def _read_idx(folder: Path, stem: str) -> np.ndarray:
    """An IDX file of unsigned bytes: magic 0, 0, 8, ndim, then ndim big-endian sizes, then the bytes."""
    path = _idx_path(folder, stem)
    assert path is not None
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError) as error:
        raise UserError(f"{path} is not readable: {error}; fetch it anew") from None
    ndim = content[3] if content[:3] == b"\0\0\x08" and len(content) > 3 else 0
    start = 4 + 4 * ndim
    shape = tuple(int(size) for size in np.frombuffer(content[4:start], dtype=">u4"))
    if ndim == 0 or len(shape) != ndim or len(content) - start != math.prod(shape):
        raise UserError(f"{path} is not a whole IDX file of bytes ({len(content)} bytes); fetch it anew")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


def _torchvision_set(name: str, root: Path, download: bool) -> Source:
    from scipy.io.matlab import MatReadError

    make = _torchvision_class(name)
    try:
        if name == "svhn":
            parts = [make(str(root), split=split, download=download) for split in ("train", "test")]
        else:
            parts = [make(str(root), train=train, download=download) for train in (True, False)]
    except (RuntimeError, OSError, MatReadError) as error:
        if download:
            raise UserError(f"{name} could not be fetched into {root}: {error}; try again") from None
        raise _missing(name, root, _OTHER_FILES[name]) from None
    sizes = [len(part.data) for part in parts]
    x = np.empty((sum(sizes), 3, 32, 32), dtype=np.uint8)
    for part, rows in zip(parts, (slice(sizes[0]), slice(sizes[0], None)), strict=True):
        x[rows] = part.data if name == "svhn" else part.data.transpose(0, 3, 1, 2)
    labels = [np.asarray(part.labels if name == "svhn" else part.targets, dtype=np.int64) for part in parts]
    return Source(
        x,
        np.concatenate(labels),
        classes=tuple("0123456789") if name == "svhn" else tuple(parts[0].classes),
        test=np.arange(len(x)) >= sizes[0],
    )


def _torchvision_class(name: str) -> Callable:
    from torchvision import datasets

    attribute = {"fashion-mnist": "FashionMNIST"}.get(name, name.upper())
    found: Callable = getattr(datasets, attribute)
    return found


def _missing(name: str, root: Path, files: str) -> UserError:
    return UserError(
        f"{name} was not found whole in {root.absolute()} (expected {files}); give the folder that holds it with "
        "--data-root, or add --download to fetch it there"
    )
