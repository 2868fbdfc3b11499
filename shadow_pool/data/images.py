"""Pictures: decoding files to one size and mode, and resizing or recolouring arrays of images."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from shadow_pool.errors import UserError

_GREY_MODES = ("1", "L", "LA", "I", "I;16", "I;16B", "I;16L", "F")
_CHUNK = 1024
_MAX_BYTES = 16 * 2**30
Picture = tuple[str, Path | Callable[[], bytes]]


def decode_pictures(where: str, pictures: Sequence[Picture], size: int | None) -> tuple[np.ndarray, tuple[str, ...]]:
    """Decode pictures to uint8 [N, C, H, W] of one size and mode.

    Args:
        where: the source, for warnings.
        pictures: (name, path or function that returns the file's bytes) of each picture.
        size: side to resize to, as a square; None for the most frequent size found.

    Returns:
        The pixels, grey (C = 1) where all pictures are grey and RGB otherwise, and warnings that count what
        was resized unasked and what was converted.

    Raises:
        UserError: a picture cannot be read (it is named), or the pictures need more than 16 GiB.
    """
    shapes, modes = zip(*(_header(picture) for picture in pictures), strict=True)
    height, width = (size, size) if size is not None else Counter(sorted(shapes)).most_common(1)[0][0]
    mode = "L" if all(found in _GREY_MODES for found in modes) else "RGB"
    shape = (len(pictures), 1 if mode == "L" else 3, height, width)
    if np.prod(shape, dtype=np.float64) > _MAX_BYTES:
        raise UserError(f"{where}: {len(pictures)} pictures of {width} x {height} do not fit; give --image-size")
    x = np.empty(shape, dtype=np.uint8)
    for row, picture in zip(x, pictures, strict=True):
        row[...] = resize(_decode(picture, mode)[None], height, width)[0]
    return x, _conversions(where, shapes, modes, mode, None if size is not None else (height, width))


def resize(x: np.ndarray, height: int, width: int) -> np.ndarray:
    """Images [N, C, H, W] at another size (bilinear, antialiased), in their own dtype.

    The sides are scaled on their own: a picture that is not square is not cropped.
    """
    import torch

    if x.shape[2:] == (height, width):
        return x
    out = np.empty((*x.shape[:2], height, width), dtype=x.dtype)
    for start in range(0, len(x), _CHUNK):
        block = torch.from_numpy(np.array(x[start : start + _CHUNK])).float()  # a copy: x may be read-only
        block = torch.nn.functional.interpolate(block, (height, width), mode="bilinear", antialias=True)
        out[start : start + _CHUNK] = (block.round_().clamp_(0, 255) if x.dtype == np.uint8 else block).numpy()
    return out


def with_channels(x: np.ndarray, channels: int) -> np.ndarray:
    """Images [N, C, H, W] with another number of channels, in their own dtype.

    Grey is repeated; colour becomes grey by the luma weights of ITU-R BT.601; other counts repeat the grey.
    """
    if x.shape[1] == channels:
        return x
    if x.shape[1] == 3:
        luma = np.tensordot(np.array([0.299, 0.587, 0.114], dtype=np.float32), x.astype(np.float32), (0, 1))
    else:
        luma = x.astype(np.float32).mean(axis=1)
    grey = (luma.round() if x.dtype == np.uint8 else luma).astype(x.dtype)[:, None]
    return np.repeat(grey, channels, axis=1)


def _header(picture: Picture) -> tuple[tuple[int, int], str]:
    with _opened(picture) as image:
        return (image.height, image.width), image.mode


def _decode(picture: Picture, mode: str) -> np.ndarray:
    """uint8 [C, H, W]; 16-bit grey keeps its upper eight bits, transparency is dropped."""
    with _opened(picture) as image:
        try:
            if image.mode.startswith("I"):
                pixels = (np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)
                return np.repeat(pixels[None], 1 if mode == "L" else 3, axis=0)
            pixels = np.asarray(image.convert(mode))
        except Exception as error:
            raise _unreadable(picture, error) from None
    return pixels[None] if mode == "L" else pixels.transpose(2, 0, 1)


def _opened(picture: Picture):  # type: ignore[no-untyped-def]
    from PIL import Image

    source = picture[1]
    try:
        return Image.open(source if isinstance(source, Path) else io.BytesIO(source()))
    except Exception as error:
        raise _unreadable(picture, error) from None


def _unreadable(picture: Picture, error: Exception) -> UserError:
    reason = "not a picture that Pillow knows" if type(error).__name__ == "UnidentifiedImageError" else error
    return UserError(f"picture {picture[0]} cannot be read: {reason}; repair or remove it")


def _conversions(
    where: str,
    shapes: Sequence[tuple[int, int]],
    modes: Sequence[str],
    mode: str,
    chosen: tuple[int, int] | None,
) -> tuple[str, ...]:
    warnings = []
    resized = 0 if chosen is None else sum(shape != chosen for shape in shapes)
    if chosen is not None and resized:
        warnings.append(
            f"{where}: {resized} of {len(shapes)} pictures were resized to {chosen[1]} x {chosen[0]}, the most "
            "frequent size; give --image-size to choose another"
        )
    converted = Counter(found for found in modes if found != mode)
    if converted:
        kinds = ", ".join(f"{count} {name}" for name, count in sorted(converted.items()))
        warnings.append(f"{where}: {converted.total()} of {len(modes)} pictures were converted to {mode} ({kinds})")
    return tuple(warnings)
