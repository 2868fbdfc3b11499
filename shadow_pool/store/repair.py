"""Read every byte of a pool, name what is damaged, and clear it away so that training makes it anew."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from shadow_pool.errors import UserError
from shadow_pool.store.entry import entry_lock, temporary_path
from shadow_pool.store.pool import Pool, rewrite_membership


@dataclass(frozen=True)
class Verification:
    """``tables`` and ``models`` name what is damaged, ``leftovers`` counts directories of killed trainings."""

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
    """Read everything. With ``repair``, damaged models and leftovers are removed and membership.npy is redrawn.

    Costs one read of the pool. A damaged records.parquet is rebuilt by train-shadows, which has the source.
    """
    tables = []
    for name in ("table", "membership"):
        try:
            getattr(pool, name)
        except UserError as error:
            tables.append(str(error))
    missing = sum(len(pool.missing(arm)) for arm in pool.spec.arms)
    total = pool.spec.n * len(pool.spec.arms)
    models = [str(error) for arm in pool.spec.arms for error in pool.verify(arm).values()]
    if repair:
        discard_damaged(pool)
        if any("membership.npy" in text for text in tables):
            rewrite_membership(pool)
    return Verification(
        checked=total - missing,
        missing=missing,
        tables=tuple(tables),
        models=tuple(models),
        leftovers=_leftovers(pool, remove=repair),
        repaired=repair and not any("records.parquet" in text for text in tables),
    )


def discard_damaged(pool: Pool) -> list[UserError]:
    """Remove every model whose bytes do not match their hashes; the reasons, in order of arm and index."""
    reasons = []
    for arm in pool.spec.arms:
        for index, reason in sorted(pool.verify(arm).items()):
            with entry_lock(pool.entry(arm, index), wait=True):
                shutil.rmtree(pool.entry(arm, index), ignore_errors=True)
            reasons.append(reason)
    return reasons


def _leftovers(pool: Pool, *, remove: bool) -> int:
    """Count (and remove) uncommitted directories that no living process holds."""
    found = 0
    for arm in pool.spec.arms:
        for index in range(pool.spec.n):
            entry = pool.entry(arm, index)
            if not temporary_path(entry).exists():
                continue
            with entry_lock(entry, wait=False) as held:
                if held:
                    found += 1
                    if remove:
                        shutil.rmtree(temporary_path(entry), ignore_errors=True)
    return found
