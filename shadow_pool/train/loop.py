"""Train one model: plain tensors in memory, one gather per epoch, no loader."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor, nn

from shadow_pool import seeds
from shadow_pool.models.resolve import logits_of
from shadow_pool.train.job import TrainingJob, TrainingOutcome
from shadow_pool.train.penalty import penalty
from shadow_pool.train.precision import is_wide
from shadow_pool.train.private import private_epochs, spent
from shadow_pool.train.recipe import Optimizer, augment_epoch, batch_bounds, cross_entropy, learning_rate

OnEpoch = Callable[[int, nn.Module, float], None]
FIT_LIMIT = 10
"""A +fit arm trains for at most this many times the recipe's epochs."""


def train_model(
    model: nn.Module,
    x: np.ndarray,
    label: np.ndarray,
    job: TrainingJob,
    *,
    preprocess: Callable[[Tensor], Tensor],
    on_epoch: OnEpoch | None = None,
) -> TrainingOutcome:
    """Train ``model`` in place on inputs [N, ...] and labels int64 [N] (the members of one model).

    ``on_epoch(epoch, model, loss)`` is called after every epoch, counted from 1, with the epoch's mean training
    loss; it may put the model in any mode but must not touch its weights. Training that meets a non-finite loss
    stops there and says so. On a CPU the result depends on nothing but the arguments and the processor type:
    one thread, no global generator. An arm with +dp trains as :mod:`shadow_pool.train.private` says.
    """
    model.to(job.device)
    inputs, labels = torch.from_numpy(x).to(job.device), torch.from_numpy(label).to(job.device)
    if job.arm.dp is None:
        preprocess = _laid_out(model, inputs, preprocess)
        limit = job.recipe.epochs * (FIT_LIMIT if job.fit_loss is not None else 1)
        epochs = _epochs(model, inputs, labels, job, preprocess, limit)
    else:
        epochs = private_epochs(model, inputs, labels, job, preprocess)
    loss, reached, epoch = math.nan, False, 0
    with seeds.torch_stream(seeds.integer(job.seed, "dropout", job.index)):
        for epoch, loss in enumerate(epochs, start=1):
            if not math.isfinite(loss):
                break
            if on_epoch is not None:
                on_epoch(epoch, model, loss)
            reached = job.fit_loss is not None and loss <= job.fit_loss
            if reached:
                break
    return TrainingOutcome(
        epochs=epoch,
        loss=loss,
        diverged=not math.isfinite(loss),
        reached=reached if job.arm.fit else None,
        epsilon=None if job.arm.dp is None else spent(job, len(labels), epoch),
    )


def _epochs(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    job: TrainingJob,
    preprocess: Callable[[Tensor], Tensor],
    limit: int,
) -> Iterator[float]:
    """Train epoch by epoch, yielding each one's mean training loss (NaN as soon as a loss is not finite)."""
    recipe = job.recipe
    optimizer = Optimizer(model, recipe)
    bounds = batch_bounds(len(labels), recipe.batch_size)
    steps, step = recipe.epochs * len(bounds), 0
    for epoch in range(limit):
        rng = seeds.stream(job.seed, "batches", job.index, epoch)
        order = torch.from_numpy(rng.permutation(len(labels))).to(inputs.device)
        x, y = augment_epoch(inputs[order], recipe, rng), labels[order]
        model.train()
        total = torch.zeros((), device=inputs.device)
        for start, stop in bounds:
            with autocast(job.device, job.precision):
                logits = logits_of(model(preprocess(x[start:stop])))
            loss = cross_entropy(logits.float(), y[start:stop], recipe.label_smoothing)
            total += loss.detach() * (stop - start)
            if job.arm.penalty:
                loss = loss + job.arm.penalty * penalty(model)
            loss.backward()
            optimizer.step(learning_rate(recipe, step, steps))
            step += 1
        yield float(total) / len(labels)


def _laid_out(model: nn.Module, inputs: Tensor, preprocess: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Put model and batches of images into channels-last order, in which convolutions run up to 1.4 times as fast.

    Models of few channels (:func:`shadow_pool.train.precision.is_wide`) and those whose forward cannot take that
    (``view`` of a feature map) keep the usual order.
    """
    x = preprocess(inputs[:2])
    if x.ndim != 4 or not is_wide(model):
        return preprocess
    try:
        with torch.no_grad(), seeds.torch_stream(0):
            model.to(memory_format=torch.channels_last).eval()(x.to(memory_format=torch.channels_last))
    except RuntimeError:
        model.to(memory_format=torch.contiguous_format)
        return preprocess
    return lambda batch: preprocess(batch).to(memory_format=torch.channels_last)


def autocast(device: str, precision: str) -> AbstractContextManager[object]:
    """bf16 autocast where ``precision`` asks for it; weights, loss and signals stay float32."""
    if precision != "bf16":
        return nullcontext()
    return torch.autocast(device_type=torch.device(device).type, dtype=torch.bfloat16)
