"""One unit of work: train one model of one arm and commit it. Any scheduler can run it; it needs only the pool."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shadow_pool import seeds
from shadow_pool.arms import parse_arm
from shadow_pool.data.preprocess import parse_normalize
from shadow_pool.data.records import PoolData
from shadow_pool.errors import UserError
from shadow_pool.models.resolve import build_model
from shadow_pool.signals import compute_signals
from shadow_pool.store.entry import EntryInfo, entry_lock, entry_path, read_info, temporary_path, write_entry
from shadow_pool.store.manifest import software_versions, training_digest
from shadow_pool.store.pool import Pool, open_pool
from shadow_pool.train.history import History, at_chance
from shadow_pool.train.loop import OnEpoch, TrainingJob, TrainingOutcome, train_model


@dataclass(frozen=True)
class Unit:
    """Which model to train. ``wait``: where another process is training it, wait for that one to end."""

    pool: Path
    arm: str
    index: int
    device: str = "cpu"
    wait: bool = field(default=False, compare=False)

    @property
    def entry(self) -> Path:
        """The directory the model is committed to."""
        return entry_path(self.pool, self.arm, self.index)


@dataclass(frozen=True)
class Receipt:
    """What became of a unit: ``outcome`` is ``trained``, ``chance``, ``diverged``, ``present`` (another process
    committed it), ``busy`` (another process is training it) or ``failed``; ``images`` counts training records seen.
    """

    unit: Unit
    outcome: str
    seconds: float = 0.0
    images: int = 0
    message: str = ""


@dataclass(frozen=True)
class TrainingData:
    """The arrays a worker needs, without ids: small tables to send, large ones to share by memory map."""

    x: np.ndarray
    label: np.ndarray
    subset: np.ndarray
    population_x: np.ndarray
    population_label: np.ndarray
    classes: int

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
            classes=len(records.classes),
        )


def train_unit(unit: Unit, data: TrainingData) -> Receipt:
    """Train and commit one model under its lock. Never raises: a failure is in the receipt."""
    try:
        with one_thread(), entry_lock(unit.entry, wait=unit.wait) as held:
            if unit.entry.exists():
                return Receipt(unit, "present")
            if not held:
                return Receipt(unit, "busy")
            temporary_path(unit.entry).mkdir(exist_ok=True)
            info, images = _train_and_commit(open_pool(unit.pool), unit, data)
            return Receipt(unit, info.status, info.seconds, images)
    except Exception as error:
        text = " ".join(str(error).split())
        return Receipt(
            unit, "failed", message=text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"
        )


def train_for_pool(
    pool: Pool,
    arm: str,
    x: np.ndarray,
    label: np.ndarray,
    *,
    seed: int,
    index: int,
    classes: int,
    device: str = "cpu",
    fit_loss: float | None = None,
    on_epoch: OnEpoch | None = None,
) -> tuple[nn.Module, TrainingOutcome]:
    """Build and train one model by the pool's recipe on the given members: shadows, targets and twins alike.

    ``seed`` and ``index`` fix initial weights, batch order and augmentation, the same in every arm: layers that
    two arms share start equal.
    """
    norm = parse_arm(arm).norm
    weights = seeds.integer(seed, "weights", index)
    model = build_model(pool.spec.arch, norm, classes=classes, input_shape=pool.manifest.input_shape, seed=weights)
    job = TrainingJob(
        arm=parse_arm(arm),
        recipe=pool.spec.recipe,
        seed=seed,
        index=index,
        device=device,
        precision=pool.spec.precision,
        fit_loss=fit_loss,
    )
    with one_thread():
        outcome = train_model(model, x, label, job, preprocess=preprocess_of(pool), on_epoch=on_epoch)
    return model, outcome


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
    """What the pool's models see of a stored batch."""
    return parse_normalize(pool.spec.data.normalize, pool.manifest.input_shape)


def _train_and_commit(pool: Pool, unit: Unit, data: TrainingData) -> tuple[EntryInfo, int]:
    started = time.perf_counter()
    member = np.array(pool.membership[unit.index])
    preprocess = preprocess_of(pool)
    history = History(data, member, preprocess, unit.device, pool.spec.recipe.evaluate_epochs)
    fit_loss = _loss_to_reach(pool, unit)
    model, outcome = train_for_pool(
        pool,
        unit.arm,
        data.x[member],
        data.label[member],
        seed=pool.spec.seed,
        index=unit.index,
        classes=data.classes,
        device=unit.device,
        fit_loss=fit_loss,
        on_epoch=history,
    )
    ask: dict[str, Any] = {"preprocess": preprocess, "views": pool.manifest.views, "device": unit.device}
    records = compute_signals(model, data.x, data.label, **ask)
    population = compute_signals(model, data.population_x, data.population_label, **ask)
    history.record(outcome.epochs, model)
    correct = records.predicted == data.label
    status = "trained"
    if outcome.diverged or not np.isfinite(records.phi).all():
        status = "diverged"
    elif at_chance(correct[member], data.label[member]):
        status = "chance"
    info = {
        "arm": unit.arm,
        "index": unit.index,
        "seed": pool.spec.seed,
        "status": status,
        "seconds": round(time.perf_counter() - started, 3),
        "epochs": outcome.epochs,
        "loss": outcome.loss if np.isfinite(outcome.loss) else None,
        "reached": outcome.reached,
        "epsilon": outcome.epsilon,
        "member_accuracy": _mean(correct[member]),
        "nonmember_accuracy": _mean(correct[~member]),
        "population_accuracy": _mean(population.predicted == data.population_label),
        "digest": training_digest(pool.spec),
        "software": software_versions(),
    }
    entry = write_entry(
        unit.entry, info, state=model.state_dict(), records=records, population=population, history=history.table()
    )
    return entry, outcome.epochs * int(member.sum())


def _loss_to_reach(pool: Pool, unit: Unit) -> float | None:
    if not parse_arm(unit.arm).fit:
        return None
    batch = pool.entry("batch", unit.index)
    if not batch.exists():
        raise UserError(f"+fit needs model {unit.index} of the batch arm, which is not trained; train it first")
    loss = read_info(batch).loss
    if loss is None:
        raise UserError(f"+fit needs the training loss of model {unit.index} of the batch arm, which diverged")
    return loss


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None
