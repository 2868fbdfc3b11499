"""Units of work: train a model of an arm and commit it. Any scheduler can run them; they need only the pool."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from shadow_pool.arms import parse_arm
from shadow_pool.errors import UserError
from shadow_pool.models.kernels import made_by
from shadow_pool.signals import compute_signals
from shadow_pool.store.entry import EntryInfo, commit_entry, entry_lock, entry_path, workspace
from shadow_pool.store.manifest import software_versions
from shadow_pool.store.pool import Pool, open_pool
from shadow_pool.store.trust import MODEL_FIELDS, code_versions
from shadow_pool.train.history import History, at_chance
from shadow_pool.train.job import TrainingData, TrainingOutcome
from shadow_pool.train.shadows import Shadow, one_thread, preprocess_of, train_shadows
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
    """Train and commit models of one arm and one block, each under its lock; a receipt for each.

    What a block is says :func:`shadow_pool.train.shadows.block_size`. A failure is in the receipt; an OSError is
    raised, since a disk that is full or read-only stops every model.
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
        info = replace(info, seconds=taken, software=software_versions(device) | code | {"kernels": made_by()})
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
