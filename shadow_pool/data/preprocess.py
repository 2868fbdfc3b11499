"""What a model sees of a record: from stored inputs to the float32 batch, as ``--normalize`` says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from shadow_pool.errors import UserError
from shadow_pool.usercode import describe, is_reference, load_object

Preprocess = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Scale:
    """uint8 -> 0..1, floats untouched; then (x - mean) / std per channel or feature, where given."""

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __call__(self, batch: torch.Tensor) -> torch.Tensor:
        x = batch.float().div_(255) if batch.dtype == torch.uint8 else batch.float()
        if not self.mean:
            return x
        shape = (1, -1) + (1,) * (x.ndim - 2)
        mean = torch.tensor(self.mean, device=x.device).view(shape)
        return (x - mean).div_(torch.tensor(self.std, device=x.device).view(shape))


@dataclass(frozen=True)
class UserFunction:
    """A user's function, found again by its name in whatever process calls it."""

    reference: str

    def __call__(self, batch: torch.Tensor) -> torch.Tensor:
        function = load_object(self.reference, what="normalize")
        shape = tuple(batch.shape)
        try:
            x = function(batch)
        except Exception as error:
            raise UserError(f"normalize {self.reference} failed on a batch {shape}: {describe(error)}") from error
        if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.ndim < 2 or len(x) != len(batch):
            found = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
            raise UserError(
                f"normalize {self.reference} must return a float tensor with one row for each of the {len(batch)} "
                f"records, got {found} for {batch.dtype} {shape}"
            )
        return x.float()


def parse_normalize(text: str, input_shape: tuple[int, ...]) -> Preprocess:
    """The function that ``--normalize TEXT`` stands for; it pickles, and is rebuilt from its text anywhere.

    Args:
        text: ``none``, ``MEAN/STD`` (one number for all channels, or one per channel separated by commas),
            or ``FILE.py:FUNCTION``. Means and deviations of uint8 images are on the scale 0..1.
        input_shape: of one stored record, (C, H, W) or (D,).

    Returns:
        uint8 or float32 [N, *input_shape] -> float32 [N, ...]. The user's function gets the batch as stored.

    Raises:
        UserError: the text is none of these, or holds another number of values, or a deviation is not above 0.
    """
    if text == "none":
        return Scale()
    if is_reference(text):
        load_object(text, what="normalize")
        return UserFunction(text)
    try:
        mean, std = (tuple(float(value) for value in side.split(",")) for side in text.split("/"))
    except ValueError:
        raise UserError(
            f"normalize must be none, MEAN/STD with numbers, or FILE.py:FUNCTION, got {text!r}; "
            "e.g. --normalize 0.5/0.25 or 0.49,0.48,0.45/0.25,0.24,0.26"
        ) from None
    if not {len(mean), len(std)} <= {1, input_shape[0]}:
        raise UserError(
            f"normalize must have 1 or {input_shape[0]} means and deviations, one per channel, "
            f"got {len(mean)} and {len(std)}"
        )
    if not np.isfinite([*mean, *std]).all() or min(std) <= 0:
        raise UserError(f"normalize must have finite means and deviations above 0, got {text!r}")
    return Scale(mean, std)


def model_input_shape(text: str, x: np.ndarray) -> tuple[int, ...]:
    """The shape of one record as a model sees it under ``--normalize TEXT``, found by trying the first records of x.

    A user's function may change it (grey to colour, a crop). Raises :class:`UserError` as :func:`parse_normalize`
    does, and where the function fails.
    """
    return tuple(parse_normalize(text, x.shape[1:])(torch.from_numpy(x[:2])).shape[1:])


def measured_normalize(x: np.ndarray) -> str:
    """``MEAN/STD`` of records [N, C, H, W] or [N, D], per channel or feature, to six significant digits.

    uint8 images are measured on the scale 0..1. Features that hold only 0 and 1 are left as they are; where all
    features are such, or standardized already, the answer is ``none``.
    """
    axes = (0,) if x.ndim == 2 else (0, 2, 3)
    count = x.size // x.shape[1]
    mean = np.sum(x, axis=axes, dtype=np.float64) / count
    square = np.zeros(x.shape[1])
    for row in range(0, len(x), 1024):
        block = x[row : row + 1024].astype(np.float64) - mean.reshape((1, -1) + (1,) * (x.ndim - 2))
        square += np.sum(block * block, axis=axes)
    std = np.sqrt(square / count)
    if x.dtype == np.uint8:
        mean, std = mean / 255, std / 255
    # A constant channel carries nothing; dividing by 1 keeps it finite.
    std[std <= 1e-8 * np.maximum(np.abs(mean), 1)] = 1
    if x.ndim == 2:
        binary = ((x == 0) | (x == 1)).all(axis=0)
        if np.all(binary | ((np.abs(mean) < 0.1) & (np.abs(std - 1) < 0.2))):
            return "none"
        mean[binary], std[binary] = 0, 1
    return "/".join(",".join(f"{value:.6g}" for value in side) for side in (mean, std))
