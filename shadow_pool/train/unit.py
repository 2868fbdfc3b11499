"""One unit of work: train one model of one arm and commit it. Any scheduler can run it; it needs only the pool."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shadow_pool import seeds
from shadow_pool.arms import parse_arm
from shadow_pool.data.preprocess import parse_normalize
from shadow_pool.errors import UserError
from shadow_pool.models.resolve import build_model
from shadow_pool.signals import compute_signals
from shadow_pool.store.entry import EntryInfo, commit_entry, entry_lock, entry_path, workspace
from shadow_pool.store.manifest import software_versions
from shadow_pool.store.pool import Pool, open_pool
from shadow_pool.store.trust import MODEL_FIELDS, check_code, code_versions
from shadow_pool.train.history import History, at_chance
from shadow_pool.train.job import TrainingData, TrainingJob, TrainingOutcome
from shadow_pool.train.loop import OnEpoch, train_model
from shadow_pool.train.usertrain import train_by_user
from shadow_pool.usercode import describe


@dataclass(frozen=True)
class Unit:
    """Which model to train. ``wait``: where another process is training it, wait for that one to end; and where it
    follows a batch model that is not there, fail."""

    pool: Path
    arm: str
    index: int
    device: str = "cpu"
    wait: bool = field(default=False, compare=False)

    @property
    def entry(self) -> Path:
        """The directory the model is committed to."""
        return entry_path(self.pool, self.arm, self.index)

    @property
    def follows(self) -> Unit | None:
        """The unit whose training loss a +fit arm trains to; None for other arms."""
        return replace(self, arm="batch", wait=False) if parse_arm(self.arm).fit else None


@dataclass(frozen=True)
class Receipt:
    """What became of a unit: ``outcome`` is ``trained``, ``chance``, ``diverged``, ``present`` (another process
    committed it), ``busy`` (another process is training it, or the batch model it follows is not there yet) or
    ``failed``; ``images`` counts training records seen.
    """

    unit: Unit
    outcome: str
    seconds: float = 0.0
    images: int = 0
    message: str = ""


def train_unit(unit: Unit, data: TrainingData) -> Receipt:
    """Train and commit one model under its lock.

    A failure is in the receipt; an OSError is raised, since a disk that is full or read-only stops every model.
    """
    try:
        with one_thread(), entry_lock(unit.entry, wait=unit.wait) as held:
            if unit.entry.exists():
                return Receipt(unit, "present")
            if not held or not (unit.wait or unit.follows is None or is_committed(unit.follows.entry)):
                return Receipt(unit, "busy")
            with workspace(unit.entry):
                # Whoever hands out units has checked the pool's code, perhaps on another machine.
                info, images = _train_and_commit(open_pool(unit.pool, trust=True), unit, data)
            return Receipt(unit, info.status, info.seconds, images)
    except OSError:
        raise
    except Exception as error:
        return Receipt(unit, "failed", message=str(error) if isinstance(error, UserError) else describe(error))


def is_committed(entry: Path) -> bool:
    """Whether a model is there, whatever a network file system remembers: listing a folder has it look anew."""
    return entry.exists() or (entry.parent.exists() and entry.name in os.listdir(entry.parent))


def train_for_pool(
    pool: Pool,
    arm: str,
    x: np.ndarray,
    label: np.ndarray,
    *,
    seed: int,
    index: int,
    device: str = "cpu",
    fit_loss: float | None = None,
    on_epoch: OnEpoch | None = None,
) -> tuple[nn.Module, TrainingOutcome]:
    """Build and train one model by the pool's recipe on the given members: shadows, targets and twins alike.

    ``seed`` and ``index`` fix initial weights, batch order and augmentation, the same in every arm: layers that
    two arms share start equal. A user's own training function takes the recipe's place.
    """
    check_code(pool, ["train"])
    model = starting_model(pool, arm, seed=seeds.integer(seed, "weights", index))
    job = TrainingJob(
        arm=parse_arm(arm),
        recipe=pool.spec.recipe,
        seed=seed,
        index=index,
        device=device,
        precision=pool.spec.precision,
        fit_loss=fit_loss,
    )
    preprocess = preprocess_of(pool)
    with one_thread():
        if pool.spec.train is not None:
            return model, train_by_user(pool.spec.train, model, x, label, job, preprocess=preprocess)
        return model, train_model(model, x, label, job, preprocess=preprocess, on_epoch=on_epoch)


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


def _train_and_commit(pool: Pool, unit: Unit, data: TrainingData) -> tuple[EntryInfo, int]:
    started = time.perf_counter()
    code = code_versions(pool.spec, MODEL_FIELDS)
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
        device=unit.device,
        fit_loss=fit_loss,
        on_epoch=history,
    )
    ask: dict[str, Any] = {"preprocess": preprocess, "views": pool.manifest.views, "device": unit.device}
    records = compute_signals(model, data.x, data.label, **ask)
    population = compute_signals(model, data.population_x, data.population_label, **ask)
    history.record(outcome.epochs, model, records, population)
    correct = records.predicted == data.label
    status = "trained"
    if outcome.diverged or not np.isfinite(records.phi).all():
        status = "diverged"
    elif at_chance(correct[member], data.label[member]):
        status = "chance"
    info = EntryInfo(
        arm=unit.arm,
        index=unit.index,
        seed=pool.spec.seed,
        status=status,
        seconds=round(time.perf_counter() - started, 3),
        epochs=outcome.epochs,
        loss=outcome.loss if np.isfinite(outcome.loss) else None,
        reached=outcome.reached,
        epsilon=outcome.epsilon,
        member_accuracy=_mean(correct[member]),
        nonmember_accuracy=_mean(correct[~member]),
        population_accuracy=_mean(population.predicted == data.population_label),
        digest=pool.manifest.digest,
        software=software_versions(unit.device) | code,
    )
    info = commit_entry(
        unit.entry, info, state=model.state_dict(), records=records, population=population, history=history.table()
    )
    return info, outcome.epochs * int(member.sum())


def _loss_to_reach(pool: Pool, unit: Unit) -> float | None:
    """The loss a +fit arm trains to; None for other arms, and where the batch model diverged and has none."""
    if unit.follows is None:
        return None
    if not is_committed(unit.follows.entry):
        raise UserError(f"+fit needs model {unit.index} of the batch arm, which is not trained; train it first")
    return pool.info("batch", unit.index).loss


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None
