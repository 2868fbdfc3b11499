"""What a pool will cost on this machine and what it can resolve, before a night is spent on it."""

from __future__ import annotations

import copy
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import nn

from mia_audit.metrics.intervals import resolved
from mia_audit.results import FPRS
from shadow_pool.arms import parse_arm
from shadow_pool.data.preprocess import model_input_shape, parse_normalize
from shadow_pool.models.resolve import build_model
from shadow_pool.prepare import PlannedPool
from shadow_pool.queries import PLAIN, query_views
from shadow_pool.signals import compute_signals
from shadow_pool.store.entry import entry_path, weights_bytes
from shadow_pool.train.job import TrainingJob
from shadow_pool.train.loop import FIT_LIMIT, Training, common_steps, train_side_by_side
from shadow_pool.train.recipe import batch_bounds
from shadow_pool.train.shadows import models_at_once, one_thread
from shadow_pool.train.usertrain import train_by_user

STEPS = 2
"""Training steps that are timed per arm, and several times as many: what a run costs once is told from what a step
costs."""
_RUNS, _ENOUGH = 5, 0.3
_SMALL_FILES = 8_000
_TABLE_ROW = 40


@dataclass(frozen=True)
class ArmCost:
    """``models`` to train, ``seconds`` each on one core; ``at_most`` is more where +fit may train on; bytes on disk.

    ``side_by_side`` of them train in one process at a time.
    """

    arm: str
    models: int
    side_by_side: int
    seconds: float
    at_most: float
    bytes_per_model: int


@dataclass(frozen=True)
class Resolution:
    """Whether an FPR is resolved, and from how many non-members (of a pool: cells of one arm)."""

    scope: str
    fpr: float
    nonmembers: int
    resolved: bool


@dataclass(frozen=True)
class Plan:
    """The whole pool: ``seconds`` to ``at_most`` on ``workers`` processes, bytes on disk and in memory.

    ``resolution`` has rows of scope ``pool`` (its own report) and ``target`` (half of the records non-members).
    """

    n: int
    records: int
    workers: int
    arms: tuple[ArmCost, ...]
    disk: int
    memory: int
    resolution: tuple[Resolution, ...]

    @property
    def models(self) -> int:
        """Models to train, over all arms."""
        return sum(arm.models for arm in self.arms)

    @property
    def seconds(self) -> float:
        """Wall-clock seconds for all models."""
        return sum(arm.models * arm.seconds for arm in self.arms) / self._busy

    @property
    def at_most(self) -> float:
        """The same where every +fit model trains to its limit."""
        return sum(arm.models * arm.at_most for arm in self.arms) / self._busy

    @property
    def _busy(self) -> int:
        return max(1, min(self.workers, sum(-(-arm.models // arm.side_by_side) for arm in self.arms)))


def make_plan(
    pool: Path, planned: PlannedPool, *, workers: int, indices: range | None = None, device: str = "cpu"
) -> Plan:
    """Time :data:`STEPS` training steps, twice as many, and the queries of each arm, here and now, and scale them up.

    A machine that does other work meanwhile makes the estimate as much longer. A user's own training function is run
    whole on as many batches of records. Writes nothing.

    Args:
        pool: its folder, where models may be already; they cost nothing more.
        planned: what :func:`shadow_pool.prepare.plan_pool` gives.
        workers: processes that will train.
        indices: train these models only (each arm).
    """
    spec, records = planned.spec, planned.data.records
    wanted = [i for i in range(spec.n) if indices is None or i in indices]
    missing = {arm: sum(not entry_path(pool, arm, i).exists() for i in wanted) for arm in spec.arms}
    with one_thread():
        arms = tuple(_arm_cost(planned, arm, missing[arm], device) for arm in spec.arms)
    rows = len(records) + len(planned.data.population)
    half = len(records) // 2
    sizes = {"pool": spec.n * half, "target": half}
    return Plan(
        n=spec.n,
        records=len(records),
        workers=workers,
        arms=arms,
        disk=sum(arm.models * arm.bytes_per_model for arm in arms) + spec.n * len(records) + rows * _TABLE_ROW,
        memory=_memory(planned, workers, max(arm.side_by_side for arm in arms)),
        resolution=tuple(
            Resolution(scope, fpr, size, resolved(fpr, size)) for scope, size in sizes.items() for fpr in FPRS
        ),
    )


def _arm_cost(planned: PlannedPool, arm: str, models: int, device: str) -> ArmCost:
    spec, records = planned.spec, planned.data.records
    preprocess = parse_normalize(spec.data.normalize, records.x.shape[1:])
    shape = model_input_shape(spec.data.normalize, records.x)
    norm = parse_arm(arm).norm
    model = build_model(
        spec.arch, norm, classes=len(records.classes), input_shape=shape, seed=spec.seed, initial=planned.initial
    )
    side_by_side = models_at_once(spec, arm, model, device)
    fixed, varying = _training_seconds(planned, arm, [copy.deepcopy(model) for _ in range(side_by_side)], device)
    views = query_views(spec.queries, records.x.shape[1:])
    x, label = records.x[: _count(planned)], records.label[: _count(planned)]
    asking = _timed(lambda: compute_signals(model, x, label, preprocess=preprocess, views=(PLAIN,), device=device))
    evaluations = len({*spec.recipe.evaluate_epochs, spec.recipe.epochs})
    rows = len(records) + len(planned.data.population)
    queries = asking / len(x) * rows * (len(views) + evaluations)
    return ArmCost(
        arm=arm,
        models=models,
        side_by_side=side_by_side,
        seconds=fixed + varying + queries,
        at_most=fixed + varying * (FIT_LIMIT if parse_arm(arm).fit else 1) + queries,
        bytes_per_model=len(weights_bytes(model.state_dict())) + rows * (8 * len(views) + 16) + _SMALL_FILES,
    )


def _training_seconds(planned: PlannedPool, arm: str, models: list[nn.Module], device: str) -> tuple[float, float]:
    """Seconds that training one of the models costs whatever its length, and those that grow with it.

    A run of more steps tells them apart: +dp asks its accountant and looks for coupled records once a run. The steps of
    models that train side by side are short beside their start.
    """
    spec, records, count = planned.spec, planned.data.records, _count(planned)
    preprocess = parse_normalize(spec.data.normalize, records.x.shape[1:])
    job = TrainingJob(
        arm=replace(parse_arm(arm), fit=False),
        recipe=spec.recipe,
        seed=spec.seed,
        index=0,
        device=device,
        precision=spec.precision,
    )

    def train(times: int) -> object:
        if spec.train is not None:
            x, label = records.x[: times * count], records.label[: times * count]
            return train_by_user(spec.train, models[0], x, label, job, preprocess=preprocess)
        epochs = replace(job, recipe=replace(spec.recipe, epochs=times))
        trainings = [
            Training(own, records.x[:count], records.label[:count], replace(epochs, index=index))
            for index, own in enumerate(models)
        ]
        steps = common_steps((count, count), spec.recipe.batch_size)
        return train_side_by_side(trainings, steps, preprocess=preprocess)

    further = 10 if len(models) > 1 else 1
    once, longer = (_timed(partial(train, times)) / len(models) for times in (1, 1 + further))
    more = max(0.0, longer - once) / further
    half = len(records) // 2
    times = half / count
    if spec.train is None:
        steps, timed = (len(batch_bounds(size, spec.recipe.batch_size)) for size in (half, count))
        times = spec.recipe.epochs * steps / timed
    return max(0.0, once - more), more * times


def _count(planned: PlannedPool) -> int:
    """Records of :data:`STEPS` batches, at most a model's half."""
    return min(STEPS * planned.spec.recipe.batch_size, len(planned.data.records) // 2)


def _timed(run: Callable[[], object]) -> float:
    """Seconds of the fastest of a few runs after one to warm up: the others were held up by something else."""
    run()
    found: list[float] = []
    while len(found) < _RUNS and sum(found) < _ENOUGH:
        started = time.perf_counter()
        run()
        found.append(time.perf_counter() - started)
    return min(found)


def _memory(planned: PlannedPool, workers: int, side_by_side: int) -> int:
    """Bytes: the records once, and in each worker what this process needs besides, its members and their shuffle."""
    data = planned.data.records.x.nbytes + planned.data.population.x.nbytes
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return data + workers * (max(0, peak - data) + side_by_side * planned.data.records.x.nbytes)
