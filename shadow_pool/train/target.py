"""Train a model to audit: by the pool's recipe, on members drawn by independent fair coins."""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from shadow_pool import seeds
from shadow_pool.arms import parse_arm
from shadow_pool.data.records import PoolData
from shadow_pool.errors import UserError
from shadow_pool.membership import draw_coins
from shadow_pool.store.entry import parquet_bytes
from shadow_pool.store.files import write_atomically
from shadow_pool.store.pool import Pool
from shadow_pool.train.precision import check_device
from shadow_pool.train.shadows import train_target_model

METADATA_KEY = b"mia_audit"


@dataclass(frozen=True)
class TrainedTarget:
    """Where the target and its members were written, and how it trained."""

    model: Path
    members: Path
    epochs: int
    loss: float


def train_target(
    pool: Pool, data: PoolData, *, arm: str = "batch", seed: int = 0, out: Path, device: str = "cpu"
) -> TrainedTarget:
    """Train a target and write ``out`` (a plain state dict) and its sidecar of members beside it.

    The sidecar, a parquet table of id and member, says in its metadata which arm was trained, the sha256 of the model's
    file, and that members were drawn by coins, which the one-run epsilon bound needs to know.
    """
    arm = parse_arm(arm).name
    check_device(device)
    member = draw_coins(seed, len(data.records))
    if member.sum() < 2:
        raise UserError(
            f"seed {seed} draws {int(member.sum())} members of {len(member)} records, at least 2 are needed; "
            "use another --seed"
        )
    model, outcome = train_target_model(
        pool,
        arm,
        data.records.x[member],
        data.records.label[member],
        seed=seeds.integer(seed, "target"),
        device=device,
        fit_loss=_usual_loss(pool) if parse_arm(arm).fit else None,
    )
    if outcome.diverged:
        raise UserError(
            f"training the target diverged in epoch {outcome.epochs}: its loss is not finite; lower recipe.lr"
        )
    buffer = io.BytesIO()
    torch.save({name: value.detach().cpu() for name, value in model.state_dict().items()}, buffer)
    out.parent.mkdir(parents=True, exist_ok=True)
    members = out.with_suffix(".members.parquet")
    digest = hashlib.sha256(buffer.getvalue()).hexdigest()
    _write_members(members, data.records.id, member, {"arm": arm, "drawn": "coins", "seed": seed, "model": digest})
    write_atomically(out, buffer.getvalue())
    return TrainedTarget(out, members, outcome.epochs, outcome.loss)


def read_facts(members: Path) -> dict[str, str]:
    """What a sidecar of :func:`train_target` says in its metadata; empty for any other file of members."""
    try:
        metadata = pq.read_schema(members).metadata or {}
        facts = json.loads(metadata.get(METADATA_KEY, b"{}"))
    except (OSError, ValueError, pa.ArrowException, RecursionError):
        return {}
    return {name: str(value) for name, value in facts.items()} if isinstance(facts, dict) else {}


def _usual_loss(pool: Pool) -> float:
    losses = [info.loss for info in pool.scan("batch")[0].values() if info.loss is not None]
    if not losses:
        raise UserError(
            "a +fit target needs the training loss of the pool's batch models, found none; train them first"
        )
    return float(np.median(losses))


def _write_members(path: Path, ids: np.ndarray, member: np.ndarray, facts: dict[str, object]) -> None:
    table = pa.table({"id": pa.array(ids, pa.string()), "member": pa.array(member)})
    table = table.replace_schema_metadata({METADATA_KEY: json.dumps(facts).encode()})
    write_atomically(path, parquet_bytes(table))
