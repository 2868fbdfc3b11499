"""Layers that are fused, and results compared with those in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from shadow_pool.models import kernels

compiled = pytest.mark.skipif(kernels.loaded() is None, reason="no C++ compiler here")
vectorized = pytest.mark.skipif(not kernels.pooled_is_fast(), reason="no compiler or no AVX2 here")
LAST = torch.channels_last


def norm_of(channels: int, generator: torch.Generator, center: float = 0.0) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels, momentum=0.3)
    with torch.no_grad():
        norm.weight.normal_(generator=generator)
        norm.bias.normal_(generator=generator)
    return norm


def check_close(
    found: list[Tensor], expected: list[Tensor], tolerance: float, torchs: list[Tensor] | None = None
) -> None:
    """As close as the type allows; where a variance is next to nothing, not much further than torch is."""
    assert len(found) == len(expected)
    for mine, true, its in zip(found, expected, torchs or expected, strict=True):
        assert mine.shape == true.shape
        allowed = tolerance * max(1.0, float(true.abs().max())) + 4 * float((its - true).abs().max())
        torch.testing.assert_close(mine, true, rtol=0, atol=allowed)


def check_statistics(norm: nn.Module, torchs: nn.Module, exact: nn.Module) -> None:
    """A layer's running statistics, as close to those in float64 as torch's are."""
    for name in ("running_mean", "running_var"):
        wanted = getattr(exact, name)
        error, torchs_error = ((getattr(layer, name).double() - wanted).abs().max() for layer in (norm, torchs))
        assert error <= 2 * torchs_error + 1e-5 * float(wanted.abs().max())


def but_for_the_first_pixel(x: Tensor) -> Tensor:
    constant = torch.zeros_like(x)
    constant[0, :, 0, 0] = 100 * x[0, :, 0, 0]
    return constant


SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "far from zero": lambda x: x + 1000,
    "constant but for the first pixel": but_for_the_first_pixel,
    "constant": lambda x: torch.full_like(x, 5.0),
    "growing": lambda x: x + torch.arange(len(x)).view(-1, 1, 1, 1),
    "tiny": lambda x: 1e-4 * x,
}


def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that are called from here on."""
    found: list[str] = []
    call = kernels.call
    monkeypatch.setattr(kernels, "call", lambda kernel, *rest: (found.append(kernel), call(kernel, *rest)))
    return found


def fresh(**changes: object) -> tuple[nn.BatchNorm2d, Tensor]:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(int(changes.pop("channels", 8)), **changes)  # type: ignore[arg-type]
    return norm, torch.randn(4, norm.num_features, 4, 4).contiguous(memory_format=LAST)
