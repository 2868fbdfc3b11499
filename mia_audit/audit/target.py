"""The model under audit: open its file, build it, ask it about every record."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import nn

from mia_audit.checkpoints import Checkpoint, load_into, open_checkpoint
from mia_audit.evidence import require_arm
from mia_audit.members import find_sidecar, population_members, read_members
from shadow_pool.arms import parse_arm
from shadow_pool.data.records import PoolData
from shadow_pool.errors import UserError
from shadow_pool.models.norms import batchnorm_without_running_stats, ratios_from_state
from shadow_pool.models.resolve import check_model
from shadow_pool.signals import Signals, compute_signals
from shadow_pool.store.pool import Pool
from shadow_pool.train.precision import check_device
from shadow_pool.train.shadows import preprocess_of, starting_model
from shadow_pool.train.target import read_facts


@dataclass(frozen=True)
class Target:
    """A target's model, its arm, its members where known (bool [N]) and its signals.

    ``coins``: members are known to have been drawn by independent fair coins. ``outside``: bool [P], the population's
    records that are not known to be members; ``population_phi``: [their number, Q].
    """

    path: Path
    checkpoint: Checkpoint
    arch: str
    arm: str
    model: nn.Module
    member: np.ndarray | None
    coins: bool
    records: Signals
    population_phi: np.ndarray
    outside: np.ndarray
    warnings: tuple[str, ...]


def open_target(
    path: Path,
    pool: Pool,
    data: PoolData,
    *,
    arch: str | None = None,
    arm: str | None = None,
    members: Path | None = None,
    query_mode: str = "eval",
    trust: bool = False,
    device: str = "cpu",
) -> Target:
    """Open a checkpoint as the pool's architecture (or ``arch``) and compute its signals on all records.

    The arm is ``arm``, else what the sidecar says, else ``batch`` where the weights hold BatchNorm statistics and the
    first that they fit where not, ``none`` before others. Members are read from ``members`` or from the sidecar beside
    the model.

    Raises:
        UserError: the file cannot be opened safely, its keys or shapes do not fit, members do not match the
            records, or the model gives non-finite logits.
    """
    check_device(device)
    checkpoint = open_checkpoint(path, trust=trust)
    members, facts, cautions = _members_file(members, checkpoint)
    arm = parse_arm(arm or facts.get("arm") or _guessed_arm(checkpoint, pool, arch)).name
    require_arm(pool, arm)
    model, notes = _built(checkpoint, pool, arm, arch)
    records, population = (
        compute_signals(
            model,
            part.x,
            part.label,
            preprocess=preprocess_of(pool),
            views=pool.manifest.views,
            device=device,
            query_mode=query_mode,
        )
        for part in (data.records, data.population)
    )
    broken = ~np.isfinite(records.phi).all(axis=1)
    if broken.any():
        raise UserError(
            f"{path} gives non-finite logits on {int(broken.sum())} of {len(broken)} records (the first has id "
            f"{data.records.id[broken][0]!r}); check the weights and --normalize"
        )
    inside = np.zeros(len(data.population), dtype=bool)
    if members is not None:
        inside = population_members(members, pool.table)
    return Target(
        path=path,
        checkpoint=checkpoint,
        arch=arch or pool.spec.arch,
        arm=arm,
        model=model,
        member=None if members is None else read_members(members, pool.table),
        coins=facts.get("drawn") == "coins",
        records=records,
        population_phi=population.phi[~inside],
        outside=~inside,
        warnings=(*checkpoint.notes, *cautions, *notes, *_mode_warnings(model), *_population_warnings(inside)),
    )


def _population_warnings(inside: np.ndarray) -> list[str]:
    if not inside.any():
        return []
    return [
        f"{int(inside.sum())} of the pool's {len(inside)} held-out records are members of the target: they are left "
        "out of RMIA's population, and no attack judges them, since no shadow model trained on them"
    ]


def _members_file(given: Path | None, checkpoint: Checkpoint) -> tuple[Path | None, dict[str, str], tuple[str, ...]]:
    """The file of members that was given, else the sidecar; what it says of itself; and cautions.

    A sidecar of another model is refused, since nobody said that its members are this one's.
    """
    members = given or find_sidecar(checkpoint.path)
    if members is None:
        return None, {}, ()
    facts = read_facts(members)
    if facts.get("model", checkpoint.sha256) == checkpoint.sha256:
        return members, facts, ()
    what = (
        f"{members} was written for another model (sha256 {facts['model'][:12]}) than {checkpoint.path} "
        f"({checkpoint.sha256[:12]})"
    )
    if given is None:
        raise UserError(f"{what}; name this one's members with --members (that very file, if they are the same)")
    return members, facts, (f"{what}: its members are taken as this one's",)


def _built(checkpoint: Checkpoint, pool: Pool, arm: str, arch: str | None) -> tuple[nn.Module, tuple[str, ...]]:
    """The module that the file held, else the architecture with its weights, and notes."""
    if checkpoint.module is None:
        model = starting_model(pool, arm, arch=arch)
        try:
            return model, load_into(model, checkpoint)
        except UserError as error:
            fits = _guessed_arm(checkpoint, pool, arch)
            if fits == arm or parse_arm(fits).norm == parse_arm(arm).norm:
                raise
            raise UserError(
                f"{error}; as arm {fits} it may fit: arm {arm} judges checkpoints that were built as its models are"
            ) from None
    module = checkpoint.module.float()
    check_model(module, pool.manifest.model_shape, len(pool.spec.data.classes), arch=str(checkpoint.path))
    return module, ()


def _guessed_arm(checkpoint: Checkpoint, pool: Pool, arch: str | None) -> str:
    """``batch`` where there are running statistics, else the first arm whose models the weights fit.

    ``none`` is tried first and ``batch``, whose layers may keep no statistics, last.
    """
    if ratios_from_state(checkpoint.state):
        return "batch"
    arms = sorted(pool.spec.arms, key=lambda arm: (arm != "none", arm == "batch"))
    for arm in arms:
        try:
            load_into(starting_model(pool, arm, arch=arch), checkpoint)
        except UserError:
            continue
        return arm
    return arms[0]


def _mode_warnings(model: nn.Module) -> list[str]:
    names = batchnorm_without_running_stats(model)
    if not names:
        return []
    return [
        f"{len(names)} BatchNorm layers keep no running statistics (the first is {names[0]}): they use the query "
        "batch's even in eval mode, so a record's phi depends on the records queried with it"
    ]
