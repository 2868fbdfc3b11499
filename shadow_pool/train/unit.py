"""Units of work: train a model of an arm and commit it. Any scheduler can run them; they need only the pool."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
from shadow_pool.models.stack import STACK
from shadow_pool.signals import compute_signals
from shadow_pool.store.entry import EntryInfo, commit_entry, entry_lock, entry_path, workspace
from shadow_pool.store.manifest import software_versions
from shadow_pool.store.pool import Pool, open_pool
from shadow_pool.store.trust import MODEL_FIELDS, check_code, code_versions
from shadow_pool.train.history import History, at_chance
from shadow_pool.train.job import TrainingData, TrainingJob, TrainingOutcome
from shadow_pool.train.loop import OnEpoch, Training, common_steps, may_stack, train_model, train_side_by_side
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


def train_units(units: Sequence[Unit], data: TrainingData) -> list[Receipt]:
    """Train and commit models of one arm and one block (:func:`block_size`), each under its lock; a receipt for each.

    A failure is in the receipt; an OSError is raised, since a disk that is full or read-only stops every model.
    """
    receipts: dict[Unit, Receipt] = {}
    try:
        # In the order of their indices: of two processes that wait for each other's neither would go on.
        with one_thread(), ExitStack() as locks:
            for unit in sorted(units, key=lambda unit: unit.index):
                obstacle = _obstacle(unit, held=locks.enter_context(entry_lock(unit.entry, wait=unit.wait)))
                if obstacle is not None:
                    receipts[unit] = Receipt(unit, obstacle)
            mine = [unit for unit in units if unit not in receipts]
            for unit in mine:
                locks.enter_context(workspace(unit.entry))
            if mine:
                # Whoever hands out units has checked the pool's code, perhaps on another machine.
                receipts |= _train_and_commit(open_pool(mine[0].pool, trust=True), mine, data)
    except OSError:
        raise
    except Exception as error:
        if len(units) > 1:  # which of them is to blame shows when each trains alone
            return [receipt for unit in units for receipt in train_units([unit], data)]
        message = str(error) if isinstance(error, UserError) else describe(error)
        return [Receipt(units[0], "failed", message=message)]
    return [receipts[unit] for unit in units]


def _obstacle(unit: Unit, *, held: bool) -> str | None:
    """The outcome of a unit that cannot be trained now, or None; ``held``: whether its lock is this process's."""
    if unit.entry.exists():
        return "present"
    if not held or not (unit.wait or unit.follows is None or is_committed(unit.follows.entry)):
        return "busy"
    return None


def is_committed(entry: Path) -> bool:
    """Whether a model is there, whatever a network file system remembers: listing a folder has it look anew."""
    return entry.exists() or (entry.parent.exists() and entry.name in os.listdir(entry.parent))


def block_size(pool: Pool, arm: str, device: str) -> int:
    """How many models of consecutive indices, from a multiple of it on, are best trained by one call.

    Small models train side by side (:func:`shadow_pool.train.loop.train_side_by_side`), others one by one.
    """
    if pool.spec.train is not None:
        return 1
    return STACK if may_stack(starting_model(pool, arm), parse_arm(arm), pool.spec.recipe, device) else 1


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


def _train_and_commit(pool: Pool, units: Sequence[Unit], data: TrainingData) -> dict[Unit, Receipt]:
    started = time.perf_counter()
    code = code_versions(pool.spec, MODEL_FIELDS)
    preprocess, device = preprocess_of(pool), units[0].device
    members = [np.array(pool.membership[unit.index]) for unit in units]
    histories = [History(data, member, preprocess, device, pool.spec.recipe.evaluate_epochs) for member in members]
    shadows = [
        Shadow(unit.index, data.x[member], data.label[member], _loss_to_reach(pool, unit), history)
        for unit, member, history in zip(units, members, histories, strict=True)
    ]
    trained = train_shadows(pool, units[0].arm, shadows, device=device)
    seconds = (time.perf_counter() - started) / len(units)
    receipts = {}
    for unit, member, history, (model, outcome) in zip(units, members, histories, trained, strict=True):
        started = time.perf_counter()
        info, entry = _judge(pool, unit, data, member, history, model, outcome)
        taken = round(seconds + time.perf_counter() - started, 3)
        info = replace(info, seconds=taken, software=software_versions(device) | code)
        info = commit_entry(unit.entry, info, **entry)
        receipts[unit] = Receipt(unit, info.status, info.seconds, outcome.epochs * int(member.sum()))
    return receipts


def _judge(
    pool: Pool,
    unit: Unit,
    data: TrainingData,
    member: np.ndarray,
    history: History,
    model: nn.Module,
    outcome: TrainingOutcome,
) -> tuple[EntryInfo, dict[str, Any]]:
    """Ask a trained model about all records: its model.json and the contents of its other files."""
    ask: dict[str, Any] = {"preprocess": preprocess_of(pool), "views": pool.manifest.views, "device": unit.device}
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
        seconds=0.0,
        epochs=outcome.epochs,
        loss=outcome.loss if np.isfinite(outcome.loss) else None,
        reached=outcome.reached,
        epsilon=outcome.epsilon,
        member_accuracy=_mean(correct[member]),
        nonmember_accuracy=_mean(correct[~member]),
        population_accuracy=_mean(population.predicted == data.population_label),
        digest=pool.manifest.digest,
        software={},
    )
    state = model.state_dict()
    return info, {"state": state, "records": records, "population": population, "history": history.table()}


def _loss_to_reach(pool: Pool, unit: Unit) -> float | None:
    """The loss a +fit arm trains to; None for other arms, and where the batch model diverged and has none."""
    if unit.follows is None:
        return None
    if not is_committed(unit.follows.entry):
        raise UserError(f"+fit needs model {unit.index} of the batch arm, which is not trained; train it first")
    return pool.info("batch", unit.index).loss


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None
