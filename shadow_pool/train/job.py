"""What a training is given and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shadow_pool.arms import Arm
from shadow_pool.data.records import PoolData
from shadow_pool.spec import Recipe


@dataclass(frozen=True)
class TrainingData:
    """The arrays a worker needs, without ids: small tables to send, large ones to share by memory map."""

    x: np.ndarray
    label: np.ndarray
    subset: np.ndarray
    population_x: np.ndarray
    population_label: np.ndarray

    @classmethod
    def of(cls, data: PoolData) -> TrainingData:
        """The lean form of a pool's data."""
        records, population = data.records, data.population
        return cls(
            x=records.x,
            label=records.label,
            subset=records.subset.astype("U10"),
            population_x=population.x,
            population_label=population.label,
        )


@dataclass(frozen=True)
class TrainingJob:
    """What decides one model's training, besides its initial weights and records.

    ``seed`` and ``index`` fix batch order and augmentation: the same in every arm. ``fit_loss`` is the mean
    training loss at which a +fit arm stops; without one (its ``batch`` model diverged) it trains as others do.
    """

    arm: Arm
    recipe: Recipe
    seed: int
    index: int
    device: str = "cpu"
    precision: str = "fp32"
    fit_loss: float | None = None


@dataclass(frozen=True)
class TrainingOutcome:
    """``loss`` is the last epoch's mean training loss; ``reached`` whether a +fit arm got to its loss."""

    epochs: int
    loss: float
    diverged: bool
    reached: bool | None = None
    epsilon: float | None = None
