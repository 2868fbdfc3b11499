"""From settings to an open pool and its records: create it, extend it, or find its inputs again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shadow_pool.arms import parse_arm
from shadow_pool.data.load import load_data, resolve_data_spec
from shadow_pool.data.preprocess import model_input_shape
from shadow_pool.data.records import PoolData
from shadow_pool.errors import UserError
from shadow_pool.models.norms import has_batchnorm
from shadow_pool.models.resolve import build_model, check_model
from shadow_pool.spec import PoolSpec, to_dict
from shadow_pool.store.entry import weights_bytes
from shadow_pool.store.grow import create_pool, extend_pool, planned_spec
from shadow_pool.store.pool import Pool, check_fingerprint, open_pool
from shadow_pool.store.trust import FIELDS, check_code, named_code, refuse_changed_code
from shadow_pool.train.precision import check_device, settle_precision
from shadow_pool.train.usertrain import load_trainer


@dataclass(frozen=True)
class InitialWeights:
    """Weights from a file that every model of a pool starts from.

    ``name`` is how the spec calls them, with a hash of the file: a pool refuses any other. ``load`` copies them into
    a model as built, or raises :class:`UserError` where they do not fit.
    """

    name: str
    load: Callable[[nn.Module], object]


@dataclass(frozen=True)
class PlannedPool:
    """What a pool will be: its settled spec, its records, the state dict its models start from, if one is given.

    ``exists`` tells whether there is a pool already.
    """

    spec: PoolSpec
    data: PoolData
    initial: dict[str, Tensor] | None
    exists: bool


def prepare_pool(
    path: Path,
    changes: Mapping[str, Any],
    *,
    data_root: Path | None = None,
    download: bool = False,
    device: str = "cpu",
    initial: InitialWeights | None = None,
    trust: bool = False,
    check: Callable[[PlannedPool], None] = lambda planned: None,
) -> tuple[Pool, PoolData]:
    """The pool at ``path`` brought up to ``changes`` (nested plain values of a spec), and its records.

    A new pool is created; an existing one keeps its stored spec where ``changes`` is silent and grows in n and
    arms. What the models need is tried on the records before anything is written; then ``check`` may raise.

    Code that ``changes`` name is the user's own word and is run; code that an existing pool alone names, where the
    user made it here with this code (:mod:`shadow_pool.store.trust`), or with ``trust``. The pool returned is
    trusted so far. Raises :class:`UserError` for what the user can mend.
    """
    planned = plan_pool(
        path, changes, data_root=data_root, download=download, device=device, initial=initial, trust=trust
    )
    check(planned)
    spec, data = planned.spec, planned.data
    weights = weights_bytes(planned.initial) if planned.initial is not None else None
    if not planned.exists:
        create_pool(path, spec, data, initial=weights)
        # Another process may have been first, with other settings.
        spec, _ = planned_spec(path, to_dict(spec))
    pool = open_pool(path, trust=True)
    check_fingerprint(pool, data)
    return extend_pool(pool, spec, data, initial=weights), data


def plan_pool(
    path: Path,
    changes: Mapping[str, Any],
    *,
    data_root: Path | None = None,
    download: bool = False,
    device: str = "cpu",
    initial: InitialWeights | None = None,
    trust: bool = False,
) -> PlannedPool:
    """What :func:`prepare_pool` would make at ``path``, tried on the records; writes nothing."""
    check_device(device)
    if initial is not None:
        changes = {**changes, "init": initial.name}
    spec, exists = planned_spec(path, changes)
    if exists and not trust:
        known, named = open_pool(path), named_code(changes)
        check_code(known, [field for field in FIELDS if field not in named])
        refuse_changed_code(known)
    data = load_data(spec.data, seed=spec.seed, data_root=data_root, download=download)
    if not exists:
        spec = replace(spec, data=resolve_data_spec(spec.data, data))
        if spec.init is not None and initial is None:
            raise ValueError(f"initial must hold the weights that init = {spec.init!r} names, got None")
    weights = open_pool(path).initial if exists and initial is None else None
    if initial is not None:
        weights, found = _initial_state(spec, data, initial)
        data = replace(data, warnings=(*data.warnings, *found))
    models = _try_models(spec, data, weights)
    if not exists:
        spec = replace(spec, precision=settle_precision(spec.precision, device, next(iter(models.values()))))
        if len(models) > 1 and "batch" in models and not has_batchnorm(models["batch"]):
            same = f"{spec.arch} has no BatchNorm: the arms {', '.join(models)} are the same model, one is enough"
            data = replace(data, warnings=(*data.warnings, same))
    return PlannedPool(spec, data, weights, exists)


def pool_data(pool: Pool, *, source: str | None = None, data_root: Path | None = None) -> PoolData:
    """The records of an existing pool, from its source or from where they moved, checked against its fingerprint.

    Raises :class:`UserError` where they are not found, or the pool names code that may not be run.
    """
    check_code(pool, ["data.ood_from"] if source is not None else ["data.source", "data.ood_from"])
    spec = pool.spec.data if source is None else replace(pool.spec.data, source=source)
    try:
        data = load_data(spec, seed=pool.spec.seed, data_root=data_root)
    except UserError as error:
        if source is not None:
            raise
        raise UserError(
            f"{error} (the pool {pool.path} was made from {pool.spec.data.source}, looked for from {Path.cwd()}: run "
            "there, or say with --data where it is now)"
        ) from error
    check_fingerprint(pool, data)
    return data


def _initial_state(spec: PoolSpec, data: PoolData, initial: InitialWeights) -> tuple[dict[str, Tensor], list[str]]:
    """The state dict of the model as given with the initial weights in it, and warnings."""
    shape = model_input_shape(spec.data.normalize, data.records.x)
    model = build_model(spec.arch, "batch", classes=len(data.records.classes), input_shape=shape, seed=0)
    initial.load(model)
    warnings = []
    if has_batchnorm(model):
        warnings.append(
            f"every model starts from {initial.name}: arms none and affine as the same function, BatchNorm's running "
            "statistics folded into the weights; arms group and layer with its gamma and beta alone, as another "
            "function, so compare them at equal fit"
        )
    return model.state_dict(), warnings


def _try_models(spec: PoolSpec, data: PoolData, initial: dict[str, Tensor] | None) -> dict[str, nn.Module]:
    """A model of each normalization among the arms.

    Refuses an architecture, in any arm, or a training function that cannot do with the records.
    """
    shape, classes = model_input_shape(spec.data.normalize, data.records.x), len(data.records.classes)
    models = {}
    for norm in dict.fromkeys(parse_arm(arm).norm for arm in spec.arms):
        models[norm] = build_model(spec.arch, norm, classes=classes, input_shape=shape, seed=0, initial=initial)
        check_model(models[norm], shape, classes)
    if spec.train is not None:
        load_trainer(spec.train)
    return models
