"""Outliers made on purpose: records with a wrong label, and records with an input from another source."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from shadow_pool import seeds
from shadow_pool.data.images import resize, with_channels
from shadow_pool.data.records import Records
from shadow_pool.data.shipped import photographs
from shadow_pool.data.sources import SUFFIXES, open_source
from shadow_pool.errors import UserError
from shadow_pool.spec import DataSpec

_CANDIDATES = 4


def add_outliers(
    records: Records, spec: DataSpec, *, seed: int, data_root: Path | None = None, download: bool = False
) -> Records:
    """Records of which disjoint random shares are made outliers; pure in (records, spec, seed).

    ``round(spec.mislabeled * N)`` records get a uniformly drawn other class. ``round(spec.ood * N)`` records get a
    real input from another source with a uniformly drawn label: pictures of ``spec.ood_from``, brought to the
    records' size and channels, or by default patches of the two photographs that scikit-learn ships. Only records
    of subset ``clean`` are chosen. ``subset``, ``subset_source`` and ``original_label`` say what was done.

    Raises:
        UserError: too few clean records, or features without an ``ood_from`` of as many features.
    """
    count = {name: round(getattr(spec, name) * len(records)) for name in ("mislabeled", "ood")}
    if not any(count.values()):
        return records
    clean = np.flatnonzero(records.subset == "clean")
    if sum(count.values()) > len(clean):
        raise UserError(
            f"mislabeled + ood ask for {sum(count.values())} outliers, but only {len(clean)} of the {len(records)} "
            "records are clean; lower them"
        )
    # From both ends of one permutation: changing one share leaves the other set as it was.
    chosen = seeds.stream(seed, "outliers").permutation(clean)
    wrong, foreign = chosen[: count["mislabeled"]], chosen[len(chosen) - count["ood"] :]
    label, subset, subset_source = records.label.copy(), records.subset.copy(), records.subset_source.copy()
    classes = len(records.classes)
    shift = seeds.stream(seed, "mislabeled").integers(1, classes, size=len(wrong))
    label[wrong] = (label[wrong] + shift) % classes
    label[foreign] = seeds.stream(seed, "ood-labels").integers(0, classes, size=len(foreign))
    subset[wrong], subset[foreign] = "mislabeled", "ood"
    subset_source[wrong] = subset_source[foreign] = "injected"
    x = records.x
    if len(foreign):
        x = x.copy()
        x[foreign] = _foreign_inputs(records, len(foreign), spec, seed, data_root, download)
    return replace(records, x=x, label=label, subset=subset, subset_source=subset_source)


def _foreign_inputs(
    records: Records, count: int, spec: DataSpec, seed: int, data_root: Path | None, download: bool
) -> np.ndarray:
    """[count, ...] in the records' shape, dtype and range of values."""
    rng = seeds.stream(seed, "ood")
    if spec.ood_from is None:
        if not records.is_image:
            raise UserError(
                "ood records of features need a real source with the same features; give one with --ood-from, "
                "or use --ood 0"
            )
        return _in_range_of(records.x, _photo_patches(rng, count, records.x.shape[1:]))
    # Its labels are not used, but a table's label column must be known, so as not to become a feature.
    label = spec.label if spec.ood_from.endswith(SUFFIXES) else None
    asked = DataSpec(source=spec.ood_from, label=label)
    other = open_source(asked, data_root=data_root, download=download).x
    if other.ndim != records.x.ndim or (other.ndim == 2 and other.shape[1] != records.x.shape[1]):
        raise UserError(
            f"ood-from {spec.ood_from} holds inputs of shape {other.shape[1:]}, the records have "
            f"{records.x.shape[1:]}; give a source of the same kind"
        )
    if count > len(other):
        raise UserError(f"ood-from {spec.ood_from} holds {len(other)} inputs, {count} are needed; lower --ood")
    drawn = other[np.sort(rng.choice(len(other), size=count, replace=False))][rng.permutation(count)]
    if not records.is_image:
        return drawn
    channels, height, width = records.x.shape[1:]
    return _in_range_of(records.x, with_channels(resize(drawn, height, width), channels))


def _photo_patches(rng: np.random.Generator, count: int, shape: tuple[int, ...]) -> np.ndarray:
    """uint8 [count, C, H, W]: random crops of scikit-learn's two photographs, enlarged where these are smaller.

    Each is the one of most contrast among :data:`_CANDIDATES`: flat crops of sky and blur are all alike, and inputs
    that are alike under different labels cannot be told apart, let alone memorized.
    """
    channels, height, width = shape
    photos = []
    for photo in photographs():
        x = np.ascontiguousarray(photo.transpose(2, 0, 1))[None]
        scale = max(height / x.shape[2], width / x.shape[3], 1.0)
        x = resize(x, max(height, round(x.shape[2] * scale)), max(width, round(x.shape[3] * scale)))
        photos.append(with_channels(x, channels)[0])
    patches = np.empty((count, *shape), dtype=np.uint8)
    for patch in patches:
        crops = []
        for _ in range(_CANDIDATES):
            photo = photos[rng.integers(len(photos))]
            top = rng.integers(photo.shape[1] - height + 1)
            left = rng.integers(photo.shape[2] - width + 1)
            crops.append(photo[:, top : top + height, left : left + width])
        patch[...] = max(crops, key=np.std)
    return patches


def _in_range_of(x: np.ndarray, other: np.ndarray) -> np.ndarray:
    """``other`` in the dtype of ``x``; between uint8 and float, 0..255 corresponds to the floats' range."""
    if other.dtype == x.dtype:
        return other
    if x.dtype == np.uint8:
        low, high = float(other.min()), float(other.max())
        return np.round((other - low) * (255 / max(high - low, 1e-12))).astype(np.uint8)
    low, high = float(x.min()), float(x.max())
    return (low + other.astype(np.float32) * ((high - low) / 255)).astype(np.float32)
