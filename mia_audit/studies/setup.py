"""What every study starts from: its settings and the user's, a trained pool under its folder, a dated result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mia_audit.evidence import arm_trains, reference_arms, usable_models
from mia_audit.initial import initial_weights
from mia_audit.studies.judge import summarize
from mia_audit.studies.result import StudyFigure, StudyResult, StudyRow
from shadow_pool.data.records import PoolData
from shadow_pool.errors import UserError
from shadow_pool.prepare import prepare_pool
from shadow_pool.spec import from_dict, merge, to_dict
from shadow_pool.store.manifest import now, software_versions
from shadow_pool.store.pool import Pool
from shadow_pool.train.schedule import Progress, train_pool

OUTLIERS = ("mislabeled", "ood")
FEWEST_MODELS = 4
"""Two pairs: the least that has an interval."""


def _silent(progress: Progress) -> None:
    pass


@dataclass(frozen=True)
class StudySetup:
    """Where and how a study runs.

    ``changes`` are the user's settings as nested plain values of a spec; they take the place of the study's own.
    Pools are stored under ``out``: a killed study resumes; ``trust`` lets one that was made elsewhere run the code
    it names. ``query_mode`` is what ``leakage`` asks models in.
    """

    out: Path
    changes: Mapping[str, Any] = field(default_factory=dict)
    data_root: Path | None = None
    download: bool = False
    device: str = "cpu"
    workers: int | None = None
    scheduler: str | None = None
    query_mode: str = "eval"
    trust: bool = False
    on_progress: Callable[[Progress], None] = _silent

    def values(self, defaults: Mapping[str, Any], *, compares: bool = False) -> dict[str, Any]:
        """``defaults`` with the user's settings in their place, checked before anything is trained.

        Raises :class:`UserError` where they are no spec, or lack the arm ``batch`` or, for a study that
        ``compares`` with an arm without BatchNorm, one of ``none`` and ``group``.
        """
        values = merge(defaults, self.changes)
        arms = from_dict(values).arms
        if "batch" not in arms or (compares and not {"none", "group"} & set(arms)):
            needed = "batch, and none or group," if compares else "batch"
            raise UserError(
                f"this study must have the arm {needed} among its arms, got {', '.join(arms)}; "
                f"use --arms {','.join(defaults['arms'])} or name them with yours"
            )
        return values


@dataclass(frozen=True)
class StudyPool:
    """A trained pool and its records, and what went wrong in training."""

    pool: Pool
    data: PoolData
    warnings: tuple[str, ...]

    @property
    def epochs(self) -> int:
        """Epochs of the recipe."""
        return self.pool.spec.recipe.epochs

    def outliers(self) -> tuple[str, ...]:
        """The outlier subsets that the records have."""
        return tuple(name for name in OUTLIERS if (self.data.records.subset == name).any())

    def arms(self) -> list[str]:
        """The arms whose models train, in the order of the spec."""
        return [arm for arm in self.pool.spec.arms if arm_trains(self.pool, arm)]

    def models(self, *arms: str) -> np.ndarray:
        """Indices of the models, in whole pairs, that trained in all of ``arms``."""
        common = set(range(self.pool.spec.n))
        for arm in arms:
            common &= set(usable_models(self.pool, arm)[0])
        if len(common) < FEWEST_MODELS:
            raise UserError(
                f"the arms {', '.join(arms)} of {self.pool.path} must have at least {FEWEST_MODELS} trained models in "
                f"common, found {len(common)}; train longer (--epochs), lower --lr, or name other arms"
            )
        return np.array(sorted(common))

    def references(self) -> dict[str, str]:
        """``epochs`` and, where the pool has it, ``fit``: the arm that BatchNorm is compared with."""
        found = dict(reference_arms(self.pool)[0])
        if "epochs" not in found:
            raise UserError(
                f"the pool {self.pool.path} must have a batch arm and a none or group arm whose models train, found "
                "none that do; use --arms batch,none,group, train longer (--epochs) or lower --lr"
            )
        return found


def study_pool(setup: StudySetup, values: Mapping[str, Any], folder: str) -> StudyPool:
    """The pool of ``values`` in ``folder`` under the study's own, trained as far as it lacks.

    Each study names its pools: in one folder they stand beside one another, and beside what an audit wrote there.
    """
    pool, data = prepare_pool(
        setup.out / folder,
        values,
        data_root=setup.data_root,
        download=setup.download,
        device=setup.device,
        initial=initial_weights(values, trust=setup.trust),
        trust=setup.trust,
    )
    receipts = train_pool(
        pool,
        data,
        workers=setup.workers,
        device=setup.device,
        scheduler=setup.scheduler,
        on_progress=setup.on_progress,
    )
    failed = [receipt for receipt in receipts if receipt.outcome == "failed"]
    warnings = [f"model {r.unit.index} of arm {r.unit.arm} failed: {r.message}" for r in failed]
    warnings += [note for arm in pool.spec.arms for note in usable_models(pool, arm)[1]]
    return StudyPool(pool, data, (*pool.manifest.warnings, *warnings))


def evaluation_epochs(epochs: int, *, at_most: int = 40) -> list[int]:
    """Every epoch, or ``at_most`` of them, evenly spaced, where there are more; the first and last always."""
    return sorted({round(epoch) for epoch in np.linspace(1, epochs, min(epochs, at_most))})


def finish(
    name: str,
    rows: list[StudyRow],
    figures: list[StudyFigure],
    pools: list[StudyPool],
    settings: Mapping[str, Any],
    *,
    conclusion: str = "",
) -> StudyResult:
    """The result: verdicts in one sentence, the first pool's settings and the study's own, all warnings once."""
    spec = to_dict(pools[0].pool.spec) if pools else {}
    return StudyResult(
        name=name,
        summary=f"{summarize(rows)} {conclusion}".strip(),
        created=now(),
        software=software_versions(),
        rows=tuple(rows),
        figures=tuple(figures),
        settings={**spec, **settings},
        warnings=tuple(dict.fromkeys(text for pool in pools for text in pool.warnings)),
    )
