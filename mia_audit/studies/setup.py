"""What every study starts from: its settings and the user's, a trained pool under its folder, a dated result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mia_audit.audit.cautions import fit_warnings
from mia_audit.evidence import REPORT_MODELS, arm_trains, reference_arms, usable_models
from mia_audit.initial import initial_weights
from mia_audit.studies.judge import summarize
from mia_audit.studies.result import StudyFigure, StudyResult, StudyRow
from shadow_pool.data.preprocess import model_input_shape
from shadow_pool.data.records import PoolData
from shadow_pool.errors import UserError, unknown_name
from shadow_pool.models.norms import has_batchnorm
from shadow_pool.models.resolve import build_model
from shadow_pool.prepare import PlannedPool, prepare_pool
from shadow_pool.signals import QUERY_MODES
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
    it names. ``query_mode`` is what ``leakage`` and ``mitigation`` ask models in.
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

    def __post_init__(self) -> None:
        if self.query_mode not in QUERY_MODES:
            raise unknown_name("query mode", self.query_mode, QUERY_MODES)

    def values(self, defaults: Mapping[str, Any], *, compares: bool = False, follows: bool = False) -> dict[str, Any]:
        """``defaults`` with the user's settings in their place, checked before anything is trained.

        Raises :class:`UserError` where they are no spec, or lack the arm ``batch`` or, for a study that
        ``compares`` with an arm without BatchNorm, one of ``none`` and ``group``. A study that ``follows`` training
        epoch by epoch refuses a user's own training function, which shows its end alone, and query mode ``batch``,
        which is for attacks on trained models; the others audit pools, which takes six models.
        """
        values = merge(defaults, self.changes)
        spec = from_dict(values)
        if follows and spec.train is not None:
            raise UserError(
                f"this study must follow training epoch by epoch, which train = {spec.train} does not show; leave "
                "--train out, or run the study leakage or mitigation, which ask trained models alone"
            )
        if follows and self.query_mode != "eval":
            raise UserError(
                f"--query-mode must be eval for this study, got {self.query_mode}: it is for the attacks of leakage "
                "and mitigation on trained models; leave it out"
            )
        arms = spec.arms
        if "batch" not in arms or (compares and not {"none", "group"} & set(arms)):
            needed = "batch, and none or group," if compares else "batch"
            raise UserError(
                f"this study must have the arm {needed} among its arms, got {', '.join(arms)}; "
                f"use --arms {','.join(defaults['arms'])} or name them with yours"
            )
        if not follows and spec.n < REPORT_MODELS:
            raise UserError(
                f"this study audits its pools, which takes at least {REPORT_MODELS} models an arm, got n = {spec.n}; "
                "use --n 8, from which on there are intervals"
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


def must_have_batchnorm(planned: PlannedPool) -> None:
    """Raise :class:`UserError` where the architecture has no BatchNorm layer: its arm ``batch`` is as given."""
    spec, records = planned.spec, planned.data.records
    shape = model_input_shape(spec.data.normalize, records.x)
    model = build_model(
        spec.arch, "batch", classes=len(records.classes), input_shape=shape, seed=0, initial=planned.initial
    )
    if not has_batchnorm(model):
        raise UserError(
            f"the architecture must have a BatchNorm layer, whose effect this study measures, found none in "
            f"{spec.arch}; name another with --arch"
        )


def must_have_population(planned: PlannedPool) -> None:
    """Raise :class:`UserError` where no records are held out for test accuracy."""
    if not len(planned.data.population.label):
        raise UserError(
            f"this study must have held-out records for test accuracy, found none with holdout = "
            f"{planned.spec.data.holdout:g}; use --holdout .15"
        )


def study_pool(
    setup: StudySetup,
    values: Mapping[str, Any],
    folder: str,
    *,
    check: Callable[[PlannedPool], None] = must_have_batchnorm,
) -> StudyPool:
    """The pool of ``values`` in ``folder`` under the study's own, trained as far as it lacks.

    Each study names its pools: in one folder they stand beside one another, and beside what an audit wrote there.
    ``check`` raises :class:`UserError` for what the study cannot do with, before anything is written.
    """
    pool, data = prepare_pool(
        setup.out / folder,
        values,
        data_root=setup.data_root,
        download=setup.download,
        device=setup.device,
        initial=initial_weights(values, trust=setup.trust),
        trust=setup.trust,
        check=check,
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
    for arm in pool.spec.arms:
        usable, notes = usable_models(pool, arm)
        warnings += notes
        if arm_trains(pool, arm):
            infos = pool.scan(arm)[0]
            warnings += fit_warnings(arm, [infos[index] for index in usable])
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
    warnings: Iterable[str] = (),
) -> StudyResult:
    """The result: verdicts in one sentence, the pools' settings and the study's own, all warnings once."""
    return StudyResult(
        name=name,
        summary=f"{summarize(rows)} {conclusion}".strip(),
        created=now(),
        software=software_versions(),
        rows=tuple(rows),
        figures=tuple(figures),
        settings={**_together([to_dict(trained.pool.spec) for trained in pools]), **settings},
        warnings=tuple(dict.fromkeys((*_warnings(pools), *warnings))),
    )


def _together(specs: list[dict[str, Any]]) -> dict[str, Any]:
    """The settings of several pools as one: where they differ, the list of their values in the order of the pools."""
    found: dict[str, Any] = {}
    for name, value in specs[0].items():
        values = [spec[name] for spec in specs]
        if isinstance(value, Mapping):
            found[name] = _together(values)
        else:
            found[name] = value if all(other == value for other in values) else values
    return found


def _warnings(pools: list[StudyPool]) -> list[str]:
    """What is not true of all pools begins with the folder of its pool."""
    shared = set.intersection(*(set(trained.warnings) for trained in pools))
    return [
        text if text in shared else f"{trained.pool.path.name}: {text}"
        for trained in pools
        for text in trained.warnings
    ]
