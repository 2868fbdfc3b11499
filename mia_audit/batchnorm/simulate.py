"""The one-channel model of :mod:`mia_audit.batchnorm.theory` set in motion: what its formulas leave out.

Every function draws independent problems (inputs, kernels, classifiers), all stepped at once as the leading
axis of one tensor, and returns what happened in each draw; nothing is averaged here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mia_audit.batchnorm import theory
from mia_audit.batchnorm.theory import Batch, Channel
from shadow_pool import seeds

KERNEL_SIDE = 3


@dataclass(frozen=True)
class Course:
    """Record 0 over training, each [steps + 1, draws], as the batch's own statistics show it.

    ``ratio`` is gamma/sigma; without BatchNorm it and ``gamma`` are NaN.
    """

    gamma: np.ndarray
    ratio: np.ndarray
    margin: np.ndarray
    loss: np.ndarray


def draw_problem(
    *, draws: int, batch_size: int, image_side: int, strength: float, seed: int, mislabeled: bool = True
) -> tuple[Channel, Batch]:
    """Standard normal images, record 0 ``strength`` times as large; labels by a random teacher.

    The model is another random draw with gamma 1. A 3 x 3 kernel sees an image of side 3 at one position (as
    a dense layer does), one of side 6 at 16. ``mislabeled`` gives record 0 the label that the teacher does
    not. Problems that differ in strength or label only share all their draws, so they can be compared in pairs.
    """
    rng = seeds.stream(seed, "one-channel", batch_size, image_side)
    images = rng.standard_normal((draws, batch_size, image_side, image_side))
    images[:, 0] *= strength
    patches = theory.unfold(torch.from_numpy(images), KERNEL_SIDE)
    teacher, model = (_draw_channel(rng, draws, positions=patches.shape[-2]) for _ in range(2))
    unsigned = Batch(patches, torch.ones(draws, batch_size, dtype=torch.float64))
    sign = torch.where(theory.margin(teacher, unsigned, None) >= 0, 1.0, -1.0).double()
    if mislabeled:
        sign[:, 0] *= -1
    return model, Batch(patches, sign)


def live_share(channel: Channel, batch: Batch, *, lr: float) -> tuple[np.ndarray, np.ndarray]:
    """Growth through the batch's own statistics as a share of equation (1) at those statistics.

    Returns:
        (first order, the limit of a small step; one step of size ``lr``), each [draws].
    """
    statistics = theory.live_statistics(channel, batch)
    predicted = theory.growth(channel, batch, statistics, lr=lr)
    pull = torch.sigmoid(-theory.margin(channel, batch, statistics)[..., 0])
    first_order = lr * pull * theory.live_slope(channel, batch).square().sum(-1)
    measured = theory.measured_growth(channel, batch, None, lr=lr, live=True)
    return (first_order / predicted).numpy(), (measured / predicted).numpy()


def decay_alone(channel: Channel, batch: Batch, *, steps: int, lr: float, weight_decay: float) -> np.ndarray:
    """gamma/sigma [steps + 1, draws] while weight decay shrinks the kernel and nothing else happens."""
    ratios = []
    for step in range(steps + 1):
        shrunk = replace(channel, kernel=channel.kernel * (1 - lr * weight_decay) ** step)
        ratios.append((channel.gamma / theory.live_statistics(shrunk, batch).std).numpy())
    return np.stack(ratios)


def train(
    channel: Channel,
    batch: Batch,
    *,
    batchnorm: bool,
    learn_gamma: bool,
    steps: int,
    lr: float,
    weight_decay: float,
) -> Course:
    """Gradient descent with weight decay on the batch's mean loss, every parameter but a fixed gamma.

    BatchNorm runs on the batch's own statistics, as in training.
    """
    values = {name: getattr(channel, name) for name in ("kernel", "classifier", "offset", "gamma")}
    learned = [name for name in values if name != "gamma" or (batchnorm and learn_gamma)]
    seen: list[tuple[np.ndarray, ...]] = []
    for _ in range(steps + 1):
        values = {name: value.detach().requires_grad_(name in learned) for name, value in values.items()}
        model = Channel(**values)
        statistics = theory.live_statistics(model, batch) if batchnorm else None
        margin = theory.margin(model, batch, statistics)
        loss = -torch.nn.functional.logsigmoid(margin)
        gamma = _numpy(model.gamma) if statistics else np.full(len(margin), np.nan)
        sigma = _numpy(statistics.std) if statistics else gamma
        seen.append((gamma, gamma / sigma, _numpy(margin[:, 0]), _numpy(loss[:, 0])))
        slopes = torch.autograd.grad(loss.mean(-1).sum(), [values[name] for name in learned])
        for name, slope in zip(learned, slopes, strict=True):
            values[name] = values[name] * (1 - lr * weight_decay) - lr * slope
    return Course(*(np.stack(column) for column in zip(*seen, strict=True)))


def _draw_channel(rng: np.random.Generator, draws: int, *, positions: int) -> Channel:
    weights = KERNEL_SIDE**2
    kernel = rng.standard_normal((draws, weights)) / np.sqrt(weights)
    classifier = rng.standard_normal((draws, positions)) / np.sqrt(positions)
    zero, one = np.zeros(draws), np.ones(draws)
    return Channel(*(torch.from_numpy(array) for array in (kernel, classifier, zero, one)))


def _numpy(value: Tensor) -> np.ndarray:
    return value.detach().numpy().copy()
