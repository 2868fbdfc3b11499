"""What ``--precision auto`` means on this machine."""

from __future__ import annotations

import re

import torch
from torch import nn

from shadow_pool.errors import UserError
from shadow_pool.models.stack import is_wide
from shadow_pool.processor import cpuinfo


def check_device(device: str) -> None:
    """Raise :class:`UserError` where torch has no such device here."""
    if re.fullmatch(r"cpu|cuda(:\d+)?", device) is None:
        raise UserError(f"device must be cpu, cuda or cuda:N, got {device!r}")
    parsed = torch.device(device)
    if parsed.type == "cuda" and (parsed.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"device {device} must be one of the {torch.cuda.device_count()} GPUs that torch finds here; "
            "use --device cpu, or a torch built for this GPU"
        )


def settle_precision(precision: str, device: str, model: nn.Module) -> str:
    """``auto`` as ``bf16`` where the device multiplies bf16 in hardware and the model gains by it, else ``fp32``.

    Emulated bf16 is slower than float32, so a processor without AVX-512 BF16 or AMX gets float32. So does, on any
    processor, a model without wide convolutions (:func:`~shadow_pool.models.stack.is_wide`): with AMX, bf16 took LeNet
    1.15 and the MLP 1.2 times as long as float32, ResNet-8 and DenseNet-22 .5 and .7 times. Other values than ``auto``
    stay.
    """
    if precision != "auto":
        return precision
    if device != "cpu":
        known = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
        return "bf16" if known else "fp32"
    if not is_wide(model):
        return "fp32"
    flags = cpuinfo()
    return "bf16" if "avx512_bf16" in flags or "amx_bf16" in flags else "fp32"
