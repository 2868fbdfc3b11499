"""Read every byte of a pool, name what is damaged, and clear it away so that training makes it anew."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shadow_pool.errors import UserError
from shadow_pool.store.entry import clear_leftover, entry_lock, remove_entry
from shadow_pool.store.files import file_lock
from shadow_pool.store.grow import rewrite_membership
from shadow_pool.store.pool import Pool, open_pool


@dataclass(frozen=True)
class Verification:
    """``tables`` and ``models`` name what is damaged, ``leftovers`` counts what killed processes left behind."""

    checked: int
    missing: int
    tables: tuple[str, ...]
    models: tuple[str, ...]
    leftovers: int
    repaired: bool

    @property
    def sound(self) -> bool:
        """Whether nothing damaged remains; missing models are no damage."""
        return self.repaired or not (self.tables or self.models)


def verify_pool(pool: Pool, *, repair: bool = False) -> Verification:
    """Read everything, the twins of targets included.

    With ``repair``, damaged models and leftovers are removed and membership.npy is drawn again; a damaged
    records.parquet is rebuilt by train-shadows, which has the source, and damaged initial weights by its --init.
    Costs one read of the pool.
    """
    found = [_verify_folder(part, repair=repair) for part in (pool, *_twins(pool))]
    return Verification(
        checked=sum(part.checked for part in found),
        missing=found[0].missing,
        tables=tuple(text for part in found for text in part.tables),
        models=tuple(text for part in found for text in part.models),
        leftovers=sum(part.leftovers for part in found),
        repaired=all(part.repaired for part in found),
    )


def discard_damaged(pool: Pool) -> list[UserError]:
    """Remove every model whose bytes do not match their hashes; the reasons, in order of arm and index."""
    reasons = []
    for arm in pool.spec.arms:
        for index in range(pool.spec.n):
            if pool.verify(arm, index) is None:
                continue
            with entry_lock(pool.entry(arm, index), wait=True):
                # Another process may have replaced it while this one waited.
                reason = pool.verify(arm, index)
                if reason is not None:
                    remove_entry(pool.entry(arm, index))
                    reasons.append(reason)
    return reasons


def _verify_folder(pool: Pool, *, repair: bool) -> Verification:
    damage = {name: error for name in ("table", "membership", "initial") if (error := _damage(pool, name)) is not None}
    models = [
        reason
        for arm in pool.spec.arms
        for index in range(pool.spec.n)
        if (reason := pool.verify(arm, index)) is not None
    ]
    missing = sum(len(pool.missing(arm)) for arm in pool.spec.arms)
    repaired = False
    if repair:
        discard_damaged(pool)
        repaired = not damage.keys() & {"table", "initial"} and ("membership" not in damage or rewrite_membership(pool))
    return Verification(
        checked=pool.spec.n * len(pool.spec.arms) - missing,
        missing=missing,
        tables=tuple(str(error) for error in damage.values()),
        models=tuple(str(error) for error in models),
        leftovers=_leftovers(pool, remove=repair),
        repaired=repaired,
    )


def _twins(pool: Pool) -> list[Pool]:
    return [open_pool(path.parent) for path in sorted(pool.path.glob("twins/*/pool.json"))]


def _damage(pool: Pool, table: str) -> UserError | None:
    try:
        getattr(pool, table)
    except UserError as error:
        return error
    return None


def _leftovers(pool: Pool, *, remove: bool) -> int:
    """Count (and remove) what was never committed and no living process holds."""
    models = sum(
        clear_leftover(pool.entry(arm, index), remove=remove) for arm in pool.spec.arms for index in range(pool.spec.n)
    )
    files = list(pool.path.glob(".*.tmp"))
    for arm in pool.spec.arms:
        files += (pool.path / "arms" / arm).glob("[0-9]*/.*.tmp")
    if not (files and remove):
        return models + len(files)
    with file_lock(pool.path / ".lock", wait=False) as held:
        return models + sum(_unlink(path) for path in files if held)


def _unlink(path: Path) -> bool:
    path.unlink(missing_ok=True)
    return True
