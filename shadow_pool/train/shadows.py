"""Models trained by a pool's recipe, not yet written anywhere: its shadows, several at a time, and targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from shadow_pool import seeds
from shadow_pool.arms import parse_arm
from shadow_pool.data.preprocess import parse_normalize
from shadow_pool.models.resolve import build_model
from shadow_pool.models.stack import STACK
from shadow_pool.spec import PoolSpec
from shadow_pool.store.pool import Pool
from shadow_pool.store.trust import check_code
from shadow_pool.train.job import TrainingJob, TrainingOutcome
from shadow_pool.train.loop import OnEpoch, Training, common_steps, may_stack, train_model, train_side_by_side
from shadow_pool.train.usertrain import train_by_user


def block_size(pool: Pool, arm: str, device: str) -> int:
    """How many models of consecutive indices, from a multiple of it on, are best trained by one call."""
    return models_at_once(pool.spec, arm, starting_model(pool, arm), device)


def models_at_once(spec: PoolSpec, arm: str, model: nn.Module, device: str) -> int:
    """How many models like this one of an arm are trained by one call.

    Small models train side by side (:func:`shadow_pool.train.loop.train_side_by_side`), others one by one.
    """
    return STACK if spec.train is None and may_stack(model, parse_arm(arm), spec.recipe, device) else 1


@dataclass(frozen=True, eq=False)
class Shadow:
    """A model of the pool to train on ``x`` and ``label``, its members; ``fit_loss`` and ``on_epoch`` as in
    :class:`~shadow_pool.train.job.TrainingJob` and :class:`~shadow_pool.train.loop.Training`."""

    index: int
    x: np.ndarray
    label: np.ndarray
    fit_loss: float | None = None
    on_epoch: OnEpoch | None = None


def train_shadows(
    pool: Pool, arm: str, shadows: Sequence[Shadow], *, device: str = "cpu"
) -> list[tuple[nn.Module, TrainingOutcome]]:
    """Build and train models of one block of an arm: the pool's own, to the bit, whichever of the block are asked for.

    Raises:
        UserError: the pool names code that may not be run (:mod:`shadow_pool.store.trust`), or it fails.
    """
    trainings = [_training(pool, arm, shadow, seed=pool.spec.seed, device=device) for shadow in shadows]
    alike: dict[tuple[int | None, ...], list[Training]] = {}
    for training in trainings:
        first = training.job.index // 2 * 2
        one, other = (int(row.sum()) for row in pool.membership[first : first + 2])
        alike.setdefault(common_steps((one, other), pool.spec.recipe.batch_size), []).append(training)
    preprocess = preprocess_of(pool)
    outcomes: dict[Training, TrainingOutcome] = {}
    with one_thread():
        for steps, some in alike.items():
            if pool.spec.train is not None:
                found = [_by_user(pool, training, preprocess) for training in some]
            else:
                found = train_side_by_side(some, steps, preprocess=preprocess)
            outcomes |= dict(zip(some, found, strict=True))
    return [(training.model, outcomes[training]) for training in trainings]


def train_target_model(
    pool: Pool,
    arm: str,
    x: np.ndarray,
    label: np.ndarray,
    *,
    seed: int,
    device: str = "cpu",
    fit_loss: float | None = None,
) -> tuple[nn.Module, TrainingOutcome]:
    """Build and train a model by the pool's recipe on the given members, on its own; ``seed`` takes the pool's place.

    Raises:
        UserError: as :func:`train_shadows`.
    """
    training = _training(pool, arm, Shadow(0, x, label, fit_loss), seed=seed, device=device)
    preprocess = preprocess_of(pool)
    with one_thread():
        if pool.spec.train is not None:
            return training.model, _by_user(pool, training, preprocess)
        return training.model, train_model(training, preprocess=preprocess)


def _training(pool: Pool, arm: str, shadow: Shadow, *, seed: int, device: str) -> Training:
    """``seed`` and index fix initial weights, batch order and augmentation, the same in every arm: layers that two
    arms share start equal."""
    job = TrainingJob(
        arm=parse_arm(arm),
        recipe=pool.spec.recipe,
        seed=seed,
        index=shadow.index,
        device=device,
        precision=pool.spec.precision,
        fit_loss=shadow.fit_loss,
    )
    model = starting_model(pool, arm, seed=seeds.integer(seed, "weights", shadow.index))
    return Training(model, shadow.x, shadow.label, job, shadow.on_epoch)


def _by_user(pool: Pool, training: Training, preprocess: Callable[[Tensor], Tensor]) -> TrainingOutcome:
    """A user's own training function in place of the recipe."""
    check_code(pool, ["train"])
    assert pool.spec.train is not None
    model, x, label, job = training.model, training.x, training.label, training.job
    return train_by_user(pool.spec.train, model, x, label, job, preprocess=preprocess)


def starting_model(pool: Pool, arm: str, *, seed: int = 0, arch: str | None = None) -> nn.Module:
    """A model of an arm as its training starts: drawn from ``seed``, or the pool's initial weights.

    ``arch`` takes the place of the pool's architecture, its initial weights then left aside. Raises
    :class:`UserError` where the pool names code that may not be run (:mod:`shadow_pool.store.trust`).
    """
    if arch is None:
        check_code(pool, ["arch"])
    return build_model(
        arch or pool.spec.arch,
        parse_arm(arm).norm,
        classes=len(pool.spec.data.classes),
        input_shape=pool.manifest.model_shape,
        seed=seed,
        initial=pool.initial if arch is None else None,
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread: sums in one order give the same bits whatever runs beside, and cores go to models."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def preprocess_of(pool: Pool) -> Callable[[Tensor], Tensor]:
    """What the pool's models see of a stored batch. Raises :class:`UserError` as :func:`starting_model` does."""
    check_code(pool, ["data.normalize"])
    return parse_normalize(pool.spec.data.normalize, pool.manifest.input_shape)
