"""Train models: plain tensors in memory, one gather per epoch, no loader; small models of one pool side by side."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from shadow_pool import seeds
from shadow_pool.arms import Arm
from shadow_pool.models.fused import fusing
from shadow_pool.models.stack import STACK, Stack, is_small, is_wide
from shadow_pool.spec import Recipe
from shadow_pool.train.job import TrainingJob, TrainingOutcome
from shadow_pool.train.penalty import penalty
from shadow_pool.train.private import private_epochs, spent
from shadow_pool.train.recipe import Optimizer, augment_epoch, batch_bounds, cross_entropy, learning_rate

OnEpoch = Callable[[int, nn.Module, float], None]
FIT_LIMIT = 10
"""A +fit arm trains for at most this many times the recipe's epochs."""


@dataclass(frozen=True, eq=False)
class Training:
    """One model to train in place on inputs ``x`` [N, ...] and labels int64 [N], its members.

    ``on_epoch(epoch, model, loss)`` is called after every epoch, counted from 1, with the epoch's mean training loss;
    it may put the model in any mode but must not touch its weights.
    """

    model: nn.Module
    x: np.ndarray
    label: np.ndarray
    job: TrainingJob
    on_epoch: OnEpoch | None = None


def train_model(training: Training, *, preprocess: Callable[[Tensor], Tensor]) -> TrainingOutcome:
    """Train one model on its own.

    Training that meets a non-finite loss stops there and says so. On a CPU the result depends on nothing but the
    arguments and the processor type: one thread, no global generator. An arm with +dp trains as
    :mod:`shadow_pool.train.private` says.
    """
    model, job = training.model.to(training.job.device), training.job
    inputs, labels = _on_device(training)
    epochs: Iterator[list[float]]
    if job.arm.dp is not None:
        epochs = ([loss] for loss in private_epochs(model, inputs, labels, job, preprocess))
    else:
        preprocess = _laid_out(model, inputs, preprocess)
        steps = common_steps((len(labels), len(labels)), job.recipe.batch_size)
        epochs = _epochs(Stack([model], model), [training], steps, preprocess)
    return _follow(epochs, [training])[0]


def train_side_by_side(
    trainings: Sequence[Training], steps: Sequence[int | None], *, preprocess: Callable[[Tensor], Tensor]
) -> list[TrainingOutcome]:
    """Train models of one arm and of one block of :data:`~shadow_pool.models.stack.STACK` indices as a stack.

    A model comes out the same to the bit whichever of its block train with it: each has its place in the stack, and
    copies fill those of models that are not asked for. Models that cannot be stacked train one after another.

    Args:
        trainings: at most one of each index.
        steps: :func:`common_steps` of each of the models with its complementary partner, the same for all.
        preprocess: stored batch -> what the models see.
    """
    stacked = _stacked(trainings, preprocess) if steps else None
    if stacked is None:
        return [train_model(training, preprocess=preprocess) for training in trainings]
    stack, filled = stacked
    outcomes = _follow(_epochs(stack, filled, steps, preprocess), filled, stack.release)
    return [outcomes[training.job.index % STACK] for training in trainings]


def common_steps(halves: tuple[int, int], batch_size: int) -> tuple[int | None, ...]:
    """The sizes of an epoch's batches that the two models of a pair have in common; empty where their steps differ.

    None for a step in which one has more records than the other, which is run model by model. That it is the pair's
    sizes that decide, not those of whoever trains along, keeps a model's bits its own.
    """
    mine, other = ([stop - start for start, stop in batch_bounds(half, batch_size)] for half in halves)
    if len(mine) != len(other):
        return ()
    return tuple(size if size == its else None for size, its in zip(mine, other, strict=True))


def may_stack(model: nn.Module, arm: Arm, recipe: Recipe, device: str) -> bool:
    """Whether models like this one gain by training side by side, as far as that shows before it is tried.

    Clipping a gradient, and the noise of +dp, take one model's gradient as a whole.
    """
    return device == "cpu" and arm.dp is None and not recipe.gradient_clip and is_small(model)


def _stacked(
    trainings: Sequence[Training], preprocess: Callable[[Tensor], Tensor]
) -> tuple[Stack, list[Training]] | None:
    first = trainings[0]
    if not may_stack(first.model, first.job.arm, first.job.recipe, first.job.device):
        return None
    asked = {training.job.index % STACK: training for training in trainings}
    filled = [
        asked[place] if place in asked else replace(first, model=copy.deepcopy(first.model), on_epoch=None)
        for place in range(STACK)
    ]
    shape = preprocess(torch.from_numpy(first.x[:2])).shape[1:]
    stack = Stack.of([training.model for training in filled], shape)
    return None if stack is None else (stack, filled)


def _follow(
    epochs: Iterator[list[float]],
    trainings: Sequence[Training],
    release: Callable[[int], None] = lambda place: None,
) -> list[TrainingOutcome]:
    """Run epochs until each model has come to its end; ``release`` is told whose end it is, by place."""
    ended: dict[int, TrainingOutcome] = {}
    first = trainings[0].job
    with seeds.torch_stream(seeds.integer(first.seed, "dropout", first.index)):
        for epoch, losses in enumerate(epochs, start=1):
            for place, (training, loss) in enumerate(zip(trainings, losses, strict=True)):
                if place in ended:
                    continue
                job, diverged = training.job, not math.isfinite(loss)
                if training.on_epoch is not None and not diverged:
                    training.on_epoch(epoch, training.model, loss)
                reached = job.fit_loss is not None and loss <= job.fit_loss
                if diverged or reached or epoch == _limit(job):
                    release(place)
                    ended[place] = TrainingOutcome(
                        epochs=epoch,
                        loss=loss,
                        diverged=diverged,
                        reached=reached if job.arm.fit else None,
                        epsilon=None if job.arm.dp is None else spent(job, len(training.label), epoch),
                    )
            if len(ended) == len(trainings):
                break
    return [ended[place] for place in range(len(trainings))]


def _limit(job: TrainingJob) -> int:
    return job.recipe.epochs * (FIT_LIMIT if job.fit_loss is not None else 1)


def _epochs(
    stack: Stack, trainings: Sequence[Training], steps: Sequence[int | None], preprocess: Callable[[Tensor], Tensor]
) -> Iterator[list[float]]:
    """Train epoch by epoch, yielding each model's mean training loss (NaN once a loss was not finite)."""
    job = trainings[0].job
    recipe, arm = job.recipe, job.arm
    records = [_on_device(training) for training in trainings]
    bounds = [batch_bounds(len(labels), recipe.batch_size) for _, labels in records]
    optimizer = Optimizer(stack.joint, recipe)
    step = 0
    for epoch in range(max(_limit(training.job) for training in trainings)):
        order = [_shuffled(*own, training.job, epoch) for own, training in zip(records, trainings, strict=True)]
        for module in (*stack.models, stack.joint):
            module.train()
        totals = torch.zeros(len(trainings), device=job.device)
        for common, spans in zip(steps, zip(*bounds, strict=True), strict=True):
            batches = [(x[a:b], y[a:b]) for (x, y), (a, b) in zip(order, spans, strict=True)]
            with autocast(job.device, job.precision), fusing():
                logits = stack.logits([preprocess(x) for x, _ in batches], jointly=common is not None)
            losses = torch.stack(
                [cross_entropy(z.float(), y, recipe.label_smoothing) for z, (_, y) in zip(logits, batches, strict=True)]
            )
            totals += losses.detach() * torch.tensor([b - a for a, b in spans], device=job.device)
            loss = losses.sum()
            if arm.penalty:
                # A layer's is the mean over its channels: of all models' here.
                loss = loss + arm.penalty * len(trainings) * penalty(stack.joint)
            loss.backward()
            if common is None:
                stack.gather_gradients()
            optimizer.step(learning_rate(recipe, step, recipe.epochs * len(steps)))
            step += 1
        yield [total / len(y) for total, (_, y) in zip(totals.tolist(), records, strict=True)]


def _on_device(training: Training) -> tuple[Tensor, Tensor]:
    device = training.job.device
    return torch.from_numpy(training.x).to(device), torch.from_numpy(training.label).to(device)


def _shuffled(inputs: Tensor, labels: Tensor, job: TrainingJob, epoch: int) -> tuple[Tensor, Tensor]:
    """An epoch's records in the order of its batches, augmented."""
    rng = seeds.stream(job.seed, "batches", job.index, epoch)
    order = torch.from_numpy(rng.permutation(len(labels))).to(inputs.device)
    return augment_epoch(inputs[order], job.recipe, rng), labels[order]


def _laid_out(model: nn.Module, inputs: Tensor, preprocess: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Put model and batches of images into channels-last order, in which convolutions run up to 1.4 times as fast.

    Models of few channels (:func:`shadow_pool.models.stack.is_wide`) and those whose forward cannot take that
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
