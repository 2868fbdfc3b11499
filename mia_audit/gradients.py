"""Per-record gradients: the influence of each record on a training step, as arXiv 2605.24420 measures it.

Two definitions, which differ in what BatchNorm does and must be named wherever a number appears:

``eval``: the record alone, BatchNorm on its running statistics: one function of one record, for all records.
``batch``: the record's own loss inside a real training batch, through the batch's statistics: what the record
adds to that training step (times the batch size). A sample of records, one backward each.

Both are of the plain cross-entropy of a record, over all parameters that require a gradient. Whatever has no running
statistics is in evaluation mode: dropout is off wherever the mode turns it off.

``eval`` takes chunks of records at once by ``vmap(grad)``, or one backward each where a model does not allow that.
Opacus's per-sample and ghost norms refuse every layer with buffers, BatchNorm first of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from shadow_pool.errors import UserError
from shadow_pool.models.norms import batchnorm_layers
from shadow_pool.models.outputs import logits_of
from shadow_pool.train.recipe import cross_entropy
from shadow_pool.usercode import describe

_CHUNK = 64
_CHUNK_FLOATS = 2**25
_Part = tuple[Tensor, Tensor, dict[str, Tensor]]
"""Losses [n], norms [n] and slopes [n, channels] by layer of some records."""


@dataclass(frozen=True)
class RecordGradients:
    """Gradients of N records' own losses.

    Attributes:
        loss: float64 [N], the losses themselves.
        norm: float64 [N], l2 norm over all parameters that require a gradient.
        gamma: layer -> float64 [N, channels], the derivative of the loss by each BatchNorm scale. Negative: a
            gradient step on this record raises gamma.
    """

    loss: np.ndarray
    norm: np.ndarray
    gamma: dict[str, np.ndarray]


def eval_gradients(
    model: nn.Module, x: np.ndarray, label: np.ndarray, *, preprocess: Callable[[Tensor], Tensor], device: str = "cpu"
) -> RecordGradients:
    """Gradients by the definition ``eval``. At most 128 MiB of gradients exist at a time, or one record's.

    Args:
        model: any module; moved to ``device``, its mode is restored. One that vmap cannot run, since its forward
            branches on values, is slower.
        x: [N, ...] inputs as stored; label: int64 [N].
        preprocess: stored batch -> what the model sees.

    Raises:
        ValueError: no parameter requires a gradient, or label is not [N].
        UserError: the model cannot be asked about one record alone.
    """
    _check(model, x, label)
    model.to(device)
    size = sum(p.numel() for p in model.parameters() if p.requires_grad)
    chunk = max(1, min(_CHUNK, _CHUNK_FLOATS // size))
    parts: list[_Part] = []
    at_once = True
    with _mode(model, train=False):
        for start in range(0, len(x), chunk):
            inputs = preprocess(torch.from_numpy(np.array(x[start : start + chunk])).to(device))
            target = torch.from_numpy(np.array(label[start : start + chunk])).to(device)
            try:
                parts += [_at_once(model, inputs, target)] if at_once else _one_by_one(model, inputs, target)
            except (RuntimeError, ValueError):
                if not at_once:
                    raise
                at_once = False
                parts += _one_by_one(model, inputs, target)
    return _gather(parts, list(_gammas(model)))


def batch_gradients(
    model: nn.Module,
    x: np.ndarray,
    label: np.ndarray,
    rows: np.ndarray,
    *,
    preprocess: Callable[[Tensor], Tensor],
    device: str = "cpu",
) -> RecordGradients:
    """Gradients by the definition ``batch`` of the records at ``rows`` of one training batch.

    The model's BatchNorm is in training mode meanwhile; running buffers and mode are left as they were.

    Args:
        model: any module; moved to ``device``.
        x: [B, ...] the batch's inputs as stored; label: int64 [B].
        rows: integers [R] in 0 .. B-1.
        preprocess: stored batch -> what the model sees.

    Raises:
        ValueError: no parameter requires a gradient, or label is not [B].
    """
    _check(model, x, label)
    model.to(device)
    # In-place updates of running statistics go to the copies.
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    with _mode(model, train=True):
        logits = logits_of(functional_call(model, buffers, (preprocess(torch.from_numpy(x).to(device)),)))
        target = torch.from_numpy(label).to(device)
        losses = (cross_entropy(logits[row : row + 1], target[row : row + 1]) for row in rows)
        return _gather([_backward(model, loss, retain=True) for loss in losses], list(_gammas(model)))


def _at_once(model: nn.Module, inputs: Tensor, target: Tensor) -> _Part:
    parameters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    gammas = _gammas(model)

    def loss(chosen: dict[str, Tensor], one: Tensor, label: Tensor) -> Tensor:
        return cross_entropy(logits_of(functional_call(model, chosen, (one[None],))), label[None])

    def measure(one: Tensor, label: Tensor) -> _Part:
        slope, value = grad_and_value(loss)(parameters, one, label)
        return value, _norm(slope.values()), {layer: slope[name] for layer, name in gammas.items()}

    found: _Part = vmap(measure)(inputs, target)
    return found


def _one_by_one(model: nn.Module, inputs: Tensor, target: Tensor) -> list[_Part]:
    parts = []
    for one, label in zip(inputs.split(1), target.split(1), strict=True):
        try:
            loss = cross_entropy(logits_of(model(one)), label)
        except (RuntimeError, ValueError) as error:
            raise UserError(
                f"the gradient of a record alone must be taken through a batch of one in evaluation mode, on which "
                f"{type(model).__name__} fails: {describe(error)}; let its forward take one"
            ) from error
        parts.append(_backward(model, loss))
    return parts


def _backward(model: nn.Module, loss: Tensor, *, retain: bool = False) -> _Part:
    """One record's loss, norm and slopes of gammas, each with an axis of length 1 before."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, list(parameters.values()), retain_graph=retain, materialize_grads=True)
    slope = dict(zip(parameters, found, strict=True))
    chosen = {layer: slope[name][None] for layer, name in _gammas(model).items()}
    return loss.detach()[None], _norm(slope.values())[None], chosen


def _check(model: nn.Module, x: np.ndarray, label: np.ndarray) -> None:
    if label.shape != (len(x),):
        raise ValueError(f"label must be [{len(x)}], got {label.shape}")
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("model must have a parameter that requires a gradient, got none")


def _gammas(model: nn.Module) -> dict[str, str]:
    """BatchNorm layer -> the name of its scale, where it is learned."""
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    return {layer: names[id(module.weight)] for layer, module in batchnorm_layers(model) if id(module.weight) in names}


@contextmanager
def _mode(model: nn.Module, *, train: bool) -> Iterator[None]:
    """Evaluation mode, or training mode for what keeps running statistics; restored afterwards.

    All else that tells the modes apart is dropout, in layers or as a probability that attention and recurrent layers
    pass on.
    """
    before = {module: module.training for module in model.modules()}
    model.train(train)  # a model may override it to keep layers frozen
    for module in model.modules():
        if not hasattr(module, "running_mean"):
            module.training = False
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training


def _norm(slopes: Iterable[Tensor]) -> Tensor:
    return torch.stack([slope.square().sum() for slope in slopes]).sum().sqrt()


def _gather(parts: list[_Part], layers: list[str]) -> RecordGradients:
    def array(tensors: list[Tensor]) -> np.ndarray:
        return torch.cat(tensors).detach().cpu().double().numpy() if tensors else np.empty(0)

    return RecordGradients(
        loss=array([loss for loss, _, _ in parts]),
        norm=array([norm for _, norm, _ in parts]),
        gamma={layer: array([slopes[layer] for _, _, slopes in parts]) for layer in layers},
    )
