"""The parts of a recipe as the loop uses them: optimizer, learning rate per step, batches, augmentation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from shadow_pool.queries import shift_images
from shadow_pool.spec import Recipe


class Optimizer:
    """SGD with momentum or AdamW over the parameters that require a gradient, by torch's fused kernels.

    Does what ``torch.optim.SGD`` and ``AdamW`` do through their functional forms, because the first step of the
    classes imports torch's compiler: three seconds of processor time in every worker.
    """

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self._recipe = recipe
        self._parameters: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        moments = 1 if recipe.optimizer == "sgd" else 2
        self._moments = [[torch.zeros_like(p) for p in self._parameters] for _ in range(moments)]
        self._steps = [torch.zeros((), device=p.device) for p in self._parameters]

    @torch.no_grad()
    def step(self, lr_per_step: float) -> None:
        """Clip the gradients as the recipe says, move every parameter that has one, and drop the gradients."""
        recipe = self._recipe
        if recipe.gradient_clip:
            nn.utils.clip_grad_norm_(self._parameters, recipe.gradient_clip)
        rows = [i for i, p in enumerate(self._parameters) if p.grad is not None]
        parameters, steps = [self._parameters[i] for i in rows], [self._steps[i] for i in rows]
        gradients: list[Any] = [p.grad for p in parameters]
        moments: list[list[Any]] = [[values[i] for i in rows] for values in self._moments]
        options: dict[str, Any] = {"lr": lr_per_step, "weight_decay": recipe.weight_decay, "maximize": False}
        if recipe.optimizer == "sgd":
            options |= {"momentum": recipe.momentum, "dampening": 0.0, "nesterov": False}
            sgd(parameters, gradients, moments[0], fused=True, **options)
        else:
            options |= {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "amsgrad": False}
            adamw(parameters, gradients, moments[0], moments[1], [], steps, fused=True, **options)
        for p in parameters:
            p.grad = None


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """The same as a torch.optim.Optimizer, for what wraps one (Opacus)."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(
            parameters, lr=recipe.lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay, fused=True
        )
    return torch.optim.AdamW(parameters, lr=recipe.lr, weight_decay=recipe.weight_decay, fused=True)


def learning_rate(recipe: Recipe, step: int, steps: int) -> float:
    """Learning rate of ``step`` (from 0) of ``steps``; beyond the end the schedule starts anew (+fit)."""
    progress = (step % steps) / steps
    if recipe.schedule == "cosine":
        return recipe.lr * 0.5 * (1 + math.cos(math.pi * progress))
    if recipe.schedule == "step":
        return recipe.lr * (1.0 if progress < 0.5 else 0.1 if progress < 0.75 else 0.01)
    return recipe.lr


def batch_bounds(records: int, batch_size: int) -> list[tuple[int, int]]:
    """(start, stop) of each batch of an epoch; a last batch of one record joins the one before it.

    BatchNorm cannot take the variance of a single record.
    """
    starts = list(range(0, records, batch_size))
    if len(starts) > 1 and records - starts[-1] == 1:
        starts.pop()
    return list(zip(starts, [*starts[1:], records], strict=True))


def augment_epoch(x: Tensor, recipe: Recipe, rng: np.random.Generator) -> Tensor:
    """Augment the images of an epoch [N, C, H, W], each on its own, by shifts of up to an eighth of the side."""
    if recipe.augmentation == "none" or x.ndim != 4:
        return x
    if recipe.augmentation == "flip-shift":
        mirrored = torch.from_numpy(rng.random(len(x)) < 0.5).to(x.device)
        x = torch.where(mirrored[:, None, None, None], x.flip(-1), x)
    reach = max(1, x.shape[-1] // 8)
    shifts = torch.from_numpy(rng.integers(-reach, reach + 1, size=(2, len(x)))).to(x.device)
    moved = torch.empty_like(x)
    for dy in range(-reach, reach + 1):
        for dx in range(-reach, reach + 1):
            rows = ((shifts[0] == dy) & (shifts[1] == dx)).nonzero().flatten()
            if len(rows):
                moved[rows] = shift_images(x[rows], dy, dx)
    return moved


def cross_entropy(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy of logits [N, C]; [N, 1] means the two columns [0, z]."""
    if logits.shape[1] == 1:
        logits = torch.cat([torch.zeros_like(logits), logits], dim=1)
    return F.cross_entropy(logits, labels, label_smoothing=label_smoothing)
