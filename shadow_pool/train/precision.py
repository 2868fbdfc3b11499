"""What ``--precision auto`` means on this machine."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from shadow_pool.errors import UserError
from shadow_pool.models.kernels import is_narrow


def check_device(device: str) -> None:
    """Raise :class:`UserError` where torch has no such device here."""
    try:
        parsed = torch.device(device)
    except RuntimeError:
        raise UserError(f"device must be cpu, cuda or cuda:N, got {device!r}") from None
    if parsed.type == "cuda" and (parsed.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"device {device} must be one of the {torch.cuda.device_count()} GPUs that torch finds here; "
            "use --device cpu, or a torch built for this GPU"
        )


def settle_precision(precision: str, device: str, model: nn.Module) -> str:
    """``auto`` as ``bf16`` where the device multiplies bf16 in hardware, else ``fp32``; other values stay.

    Emulated bf16 is slower than float32, so a processor without AVX-512 BF16 or AMX gets float32. So does a narrow
    ``model`` on any: its convolutions gain nothing, and :mod:`shadow_pool.models.kernels` are for float32.
    """
    if precision != "auto":
        return precision
    if device != "cpu":
        return "bf16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "fp32"
    if is_narrow(model):
        return "fp32"
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return "fp32"
    return "bf16" if "avx512_bf16" in flags or "amx_bf16" in flags else "fp32"
