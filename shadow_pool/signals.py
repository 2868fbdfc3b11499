"""What a model says about records: logits -> phi, prediction, energy.

phi is the signal of every attack here (Carlini et al. 2022, arXiv 2112.03570, section IV, the logit-scaled
confidence), kept from logits in float64: float32 probabilities would make half of all phi of an overfit
model infinite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shadow_pool.models.resolve import logits_of
from shadow_pool.queries import View, apply_view

QUERY_MODES = ("eval", "batch")
_BATCH = 256


def two_columns(logits: np.ndarray) -> np.ndarray:
    """Logits [N, C] with a single-logit model's [N, 1] spelled out as the columns [0, z]."""
    return np.concatenate([np.zeros_like(logits), logits], axis=1) if logits.shape[1] == 1 else logits


def phi_from_logits(logits: Any, labels: Any) -> np.ndarray:
    """phi = z_y - logsumexp(z_c, c != y), without epsilon or clamp.

    Args:
        logits: [N, C] array or tensor of floats; [N, 1] means the two columns [0, z].
        labels: [N] integers in 0 .. C-1.

    Returns:
        float64 [N].

    Raises:
        ValueError: shapes do not fit, or a label is outside 0 .. C-1.
    """
    z, y = _as_float64(logits), np.asarray(labels)
    if z.ndim != 2 or z.shape[1] < 1:
        raise ValueError(f"logits must be [N, C], got shape {z.shape}")
    z = two_columns(z)
    if y.shape != (len(z),) or y.dtype.kind not in "iu":
        raise ValueError(f"labels must be integers [{len(z)}], got {y.dtype} {y.shape}")
    if len(y) and (y.min() < 0 or y.max() >= z.shape[1]):
        raise ValueError(f"labels must be in 0 .. {z.shape[1] - 1}, got {y.min()} .. {y.max()}")
    rows = np.arange(len(z))
    others = z.copy()
    others[rows, y] = -np.inf
    return z[rows, y] - _logsumexp(others)


def _as_float64(values: Any) -> np.ndarray:
    if isinstance(values, Tensor):
        values = values.detach().cpu().to(torch.float64).numpy()
    return np.asarray(values, dtype=np.float64)


def _logsumexp(z: np.ndarray) -> np.ndarray:
    top = z.max(axis=1)
    shift = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        return np.log(np.exp(z - shift[:, None]).sum(axis=1)) + shift


@dataclass(frozen=True)
class Signals:
    """One model's signals on N records.

    Attributes:
        phi: float64 [N, Q], one column per query; column 0 is the plain record.
        predicted: int64 [N], the predicted class of the plain record.
        predicted_probability: float32 [N], its softmax probability.
        energy: float32 [N], -logsumexp(logits) (Liu et al. 2020, arXiv 2010.03759, equation 4).
    """

    phi: np.ndarray
    predicted: np.ndarray
    predicted_probability: np.ndarray
    energy: np.ndarray


def compute_signals(
    model: nn.Module,
    x: np.ndarray,
    label: np.ndarray,
    *,
    preprocess: Callable[[Tensor], Tensor],
    views: Sequence[View],
    device: str = "cpu",
    query_mode: str = "eval",
) -> Signals:
    """Ask ``model`` about every record under every view, in float32.

    Query mode ``eval`` uses running statistics; ``batch`` lets BatchNorm use the statistics of fixed batches of
    consecutive records (the model's buffers are left as they were). Costs N x Q forward passes.

    Args:
        model: the classifier; moved to ``device``, its mode is restored.
        x: [N, ...] inputs as stored; label: int64 [N].
    """
    if not len(x):
        none = np.empty(0, np.float32)
        return Signals(np.empty((0, len(views))), np.empty(0, np.int64), none, none)
    with _query_mode(model.to(device), query_mode), torch.no_grad():
        logits = [_logits(model, x, preprocess, view, device) for view in views]
    plain = logits[0].astype(np.float64)
    total = _logsumexp(plain)
    predicted = plain.argmax(axis=1)
    top = plain[np.arange(len(plain)), predicted]
    return Signals(
        phi=np.stack([phi_from_logits(z, label) for z in logits], axis=1),
        predicted=predicted,
        predicted_probability=np.exp(top - total).astype(np.float32),
        energy=(-total).astype(np.float32),
    )


def _logits(
    model: nn.Module, x: np.ndarray, preprocess: Callable[[Tensor], Tensor], view: View, device: str
) -> np.ndarray:
    parts = []
    # Equal parts, so that no last batch of one record meets batch statistics.
    bounds = np.linspace(0, len(x), -(-len(x) // _BATCH) + 1).astype(int)
    for start, stop in pairwise(bounds):
        batch = apply_view(torch.from_numpy(np.array(x[start:stop])).to(device), view)
        parts.append(logits_of(model(preprocess(batch))).float().cpu().numpy())
    return two_columns(np.concatenate(parts))


@contextmanager
def _query_mode(model: nn.Module, query_mode: str) -> Iterator[None]:
    if query_mode not in QUERY_MODES:
        raise ValueError(f"query_mode must be one of {QUERY_MODES}, got {query_mode!r}")
    modes = {module: module.training for module in model.modules()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.eval()
    if query_mode == "batch":
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.train()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
        if query_mode == "batch":
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
