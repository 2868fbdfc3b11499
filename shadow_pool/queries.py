"""The fixed views of a record that every model is asked about: small shifts and, for photographs, mirror images."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shadow_pool.errors import UserError


@dataclass(frozen=True)
class View:
    """A shift by ``dy``, ``dx`` pixels, mirrored left to right first where ``flip``."""

    dy: int = 0
    dx: int = 0
    flip: bool = False


PLAIN = View()
_SHIFTS = sorted(((dy, dx) for dy in range(-2, 3) for dx in range(-2, 3)), key=lambda s: (s[0] ** 2 + s[1] ** 2, s))


def query_views(count: int, input_shape: tuple[int, ...]) -> tuple[View, ...]:
    """The first ``count`` views for inputs of this shape, the plain record first, nearest shifts next.

    Colour images count as photographs: each shift is followed by its mirror image. Raises
    :class:`UserError` where fewer views exist (25 for grey images, 50 for colour, 1 for features).
    """
    if len(input_shape) != 3:
        views = [PLAIN]
    else:
        flips = (False, True) if input_shape[0] == 3 else (False,)
        views = [View(dy, dx, flip) for dy, dx in _SHIFTS for flip in flips]
    if count > len(views):
        raise UserError(
            f"queries must be at most {len(views)} for inputs of shape {list(input_shape)}, got {count}; "
            f"use --queries {len(views)}"
        )
    return tuple(views[:count])


def apply_view(x: Tensor, view: View) -> Tensor:
    """A batch [N, C, H, W] (or features [N, D], plain view only) as seen through one view; edges repeat."""
    if view == PLAIN:
        return x
    return shift_images(x.flip(-1) if view.flip else x, view.dy, view.dx)


def shift_images(x: Tensor, dy: int, dx: int) -> Tensor:
    """Images [N, C, H, W] moved down by ``dy`` and right by ``dx``; edge pixels repeat."""
    height, width = x.shape[-2:]
    rows = (torch.arange(height, device=x.device) - dy).clamp_(0, height - 1)
    columns = (torch.arange(width, device=x.device) - dx).clamp_(0, width - 1)
    return x.index_select(-2, rows).index_select(-1, columns)
