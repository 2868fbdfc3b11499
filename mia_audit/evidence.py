"""What a pool offers as evidence: the usable models of an arm, in whole pairs, as arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from mia_audit.results import SUBSET_ROWS
from shadow_pool.arms import parse_arm
from shadow_pool.data.records import PoolData
from shadow_pool.errors import UserError
from shadow_pool.memory import memory_limit
from shadow_pool.signals import Signals
from shadow_pool.store.entry import EntryInfo
from shadow_pool.store.pool import Pool
from shadow_pool.train.requery import batch_mode_signals

REPORT_MODELS = 6
"""A pool judges itself from this many models on: with a pair left out, two values a side remain."""


@dataclass(frozen=True)
class ArmEvidence:
    """The M usable models of one arm on N records and P population records.

    A model is usable when it trained (neither diverged nor at chance) and its complementary partner did too.

    Attributes:
        indices: int64 [M], the models; consecutive entries 2j and 2j + 1 are a pair.
        membership: bool [M, N].
        phi: float64 [M, N, Q]; population_phi: float64 [M, P, Q].
        predicted: int64 [M, N]; predicted_probability, energy: float32 [M, N].
        infos: model.json of each.
        notes: what was left out and why, for the audit's warnings.
    """

    arm: str
    indices: np.ndarray
    membership: np.ndarray
    phi: np.ndarray
    population_phi: np.ndarray
    predicted: np.ndarray
    predicted_probability: np.ndarray
    energy: np.ndarray
    infos: tuple[EntryInfo, ...]
    notes: tuple[str, ...]

    def take(self, indices: np.ndarray) -> ArmEvidence:
        """The evidence of the models at ``indices`` alone (a subset of ``self.indices``)."""
        keep = np.isin(self.indices, indices)
        return ArmEvidence(
            arm=self.arm,
            indices=self.indices[keep],
            membership=self.membership[keep],
            phi=self.phi[keep],
            population_phi=self.population_phi[keep],
            predicted=self.predicted[keep],
            predicted_probability=self.predicted_probability[keep],
            energy=self.energy[keep],
            infos=tuple(info for info, kept in zip(self.infos, keep, strict=True) if kept),
            notes=self.notes,
        )


def usable_models(pool: Pool, arm: str) -> tuple[list[int], tuple[str, ...]]:
    """Indices of the usable models of an arm, and notes on the others. A damaged model raises :class:`UserError`."""
    good, bad = pool.scan(arm)
    for error in bad.values():
        raise error
    trained = {index for index, info in good.items() if info.status == "trained"}
    usable = [index for index in range(pool.spec.n) if {index, index ^ 1} <= trained]
    notes = []
    missing = pool.spec.n - len(good)
    if missing:
        notes.append(f"arm {arm}: {missing} of {pool.spec.n} models are not trained yet; train-shadows completes them")
    for status, what in (("diverged", "diverged"), ("chance", "ended at chance accuracy")):
        count = sum(info.status == status for info in good.values())
        if count:
            notes.append(f"arm {arm}: {count} models {what} and are left out with their pairs")
    alone = len(trained) - len(usable)
    if alone and not missing:
        notes.append(f"arm {arm}: {alone} trained models are left out because their pair is not usable")
    return usable, tuple(notes)


def required_models(pool: Pool, arm: str) -> tuple[list[int], tuple[str, ...]]:
    """:func:`usable_models`; raises :class:`UserError` where there are fewer than 4, or no such arm."""
    require_arm(pool, arm)
    usable, notes = usable_models(pool, arm)
    if len(usable) < 4:
        why = "; ".join(notes) or "too few were trained"
        raise UserError(f"arm {arm} of {pool.path} must have at least 4 usable models, found {len(usable)}: {why}")
    return usable, notes


def require_arm(pool: Pool, arm: str) -> None:
    """Raise :class:`UserError` where the pool has no such arm."""
    if arm not in pool.spec.arms:
        raise UserError(
            f"the pool {pool.path} has no arm {arm}: it has {', '.join(pool.spec.arms)}; "
            f"choose one with --arm, or train it with mia-audit train-shadows --arms {arm}"
        )


def load_evidence(pool: Pool, arm: str, *, query_mode: str = "eval", data: PoolData | None = None) -> ArmEvidence:
    """Read an arm's usable models. Costs one read of M x (N + P) x Q signals, and 8 Q + 17 bytes a model and record.

    Query mode ``batch`` takes signals through batch statistics, computed from the stored weights on first use;
    it needs ``data``. Raises :class:`UserError` where fewer than 4 models are usable, a file is damaged, or the
    machine has too little memory.
    """
    usable, notes = required_models(pool, arm)
    _check_memory(pool)
    if query_mode == "batch":
        if data is None:
            raise ValueError("query mode batch must have data, got None")
        both = (batch_mode_signals(pool, data, arm, index) for index in usable)
    else:
        both = ((pool.signals(arm, i), pool.signals(arm, i, population=True)) for i in usable)
    records, population = _stacked(both, len(usable))
    good = pool.scan(arm)[0]
    return ArmEvidence(
        arm=arm,
        indices=np.array(usable),
        membership=pool.membership[usable],
        phi=records.phi,
        population_phi=population.phi,
        predicted=records.predicted,
        predicted_probability=records.predicted_probability,
        energy=records.energy,
        infos=tuple(good[index] for index in usable),
        notes=notes,
    )


def _check_memory(pool: Pool) -> None:
    """Say beforehand what would end in a process killed without a word: an audit comes to hold all arms."""
    models = [pool.spec.n - len(pool.missing(arm)) for arm in pool.spec.arms]
    needed = judging_bytes(models, pool.membership.shape[1], len(pool.manifest.views))
    if needed > memory_limit():
        raise UserError(
            f"judging the {sum(models)} models of {', '.join(pool.spec.arms)} takes about {needed / 1e9:.1f} GB of "
            f"memory, this machine has {memory_limit() / 1e9:.1f} GB; use a larger one, or score blocks of records in "
            "Python with mia_audit.audit.scoring.scores_from_disk"
        )


def judging_bytes(models: Sequence[int], records: int, queries: int) -> int:
    """About the most memory that judging arms of so many models each takes, the evidence of all of them held.

    Each arm keeps its evidence and its scores, and the one being judged takes more. Fitted to measured peaks, of a
    target's audit and, higher, of a pool's own: bytes a model and record, 16 models on 100,000 records, of one arm and
    1 query 178 and 214, of two 212 and 312, of two and 4 queries 282 and 363.
    """
    return records * (sum(models) * (52 + 8 * queries) + max(models, default=0) * (127 + 9 * queries))


def _stacked(both: Iterable[tuple[Signals, Signals]], models: int) -> tuple[Signals, Signals]:
    """Signals of one model after another, on records and population, as arrays with an axis of models before."""
    whole: list[np.ndarray] = []
    for model, parts in enumerate(both):
        arrays = [getattr(part, f.name) for part in parts for f in fields(Signals)]
        whole = whole or [np.empty((models, *array.shape), array.dtype) for array in arrays]
        for stack, array in zip(whole, arrays, strict=True):
            stack[model] = array
    middle = len(whole) // 2
    return Signals(*whole[:middle]), Signals(*whole[middle:])


def arm_trains(pool: Pool, arm: str) -> bool:
    """Whether an arm can stand as reference: at least half of its committed models, and four, are usable."""
    if arm not in pool.spec.arms:
        return False
    usable, _ = usable_models(pool, arm)
    committed = pool.spec.n - len(pool.missing(arm))
    return len(usable) >= max(4, committed / 2)


def reference_arms(pool: Pool) -> tuple[list[tuple[str, str]], tuple[str, ...]]:
    """(matched, arm) for each reference arm effects are measured against, and notes on why.

    ``epochs``: the arm ``none``, or ``group`` where the models of ``none`` do not train; ``fit``: the same arm
    with ``+fit``. Empty where the pool has no usable ``batch`` arm or no reference.
    """
    if not arm_trains(pool, "batch"):
        return [], ()
    notes: list[str] = []
    found = []
    for matched, suffix in (("epochs", ""), ("fit", "+fit")):
        for norm in ("none", "group"):
            arm = parse_arm(norm + suffix).name
            if arm_trains(pool, arm):
                found.append((matched, arm))
                break
            if arm in pool.spec.arms:
                notes.append(_why_no_reference(pool, arm, instead=parse_arm("group" + suffix).name))
    return found, tuple(notes)


def _why_no_reference(pool: Pool, arm: str, *, instead: str) -> str:
    if pool.spec.n - len(pool.missing(arm)) < 4:
        return f"arm {arm} is not trained yet, so it is not the reference for BatchNorm's effect; train-shadows does it"
    remedy = "" if instead in pool.spec.arms else f"; mia-audit train-shadows --arms {instead} trains another"
    return f"arm {arm} does not train here, so it is not the reference for BatchNorm's effect{remedy}"


def subset_masks(subset: np.ndarray) -> dict[str, np.ndarray]:
    """``all`` and each subset that occurs, as bool [N], in the order of audit.json's rows."""
    masks = {name: (subset == name) | (name == "all") for name in SUBSET_ROWS}
    return {name: mask for name, mask in masks.items() if mask.any()}
