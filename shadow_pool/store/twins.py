"""Twins of a target: models of several arms trained by the pool's recipe on exactly the target's members.

They live in a folder of their own inside the pool, laid out as a pool is, so that training, resuming and
reading them need nothing new; only its membership differs: every row is the target's.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np

from shadow_pool import seeds
from shadow_pool.store.files import file_lock, write_atomically
from shadow_pool.store.grow import write_pool
from shadow_pool.store.manifest import now, software_versions
from shadow_pool.store.pool import INITIAL, Pool, open_pool
from shadow_pool.store.trust import check_code


def twin_pool(pool: Pool, member: np.ndarray, *, count: int, arms: tuple[str, ...]) -> Pool:
    """The folder of at least ``count`` twins an arm, POOL/twins/DIGEST-OF-MEMBERS, created or extended.

    Args:
        member: bool [records], the target's members.
        count: twins an arm; the folder's n is the next even number from 4 on, train the first ``count`` alone.
        arms: which arms; ``batch`` first where another of them has ``+fit``.

    Raises:
        UserError: the pool names code that may not be run (:mod:`shadow_pool.store.trust`).
    """
    check_code(pool)
    folder = pool.path / "twins" / hashlib.sha256(member.tobytes()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    with file_lock(folder / ".lock", wait=True):
        n = max(4, count + count % 2)
        if (folder / "pool.json").exists():
            known = open_pool(folder)
            n, arms = max(n, known.spec.n), tuple(dict.fromkeys([*known.spec.arms, *arms]))
        spec = replace(pool.spec, n=n, arms=arms, seed=seeds.integer(pool.spec.seed, "twins"))
        if pool.initial is not None:
            write_atomically(folder / INITIAL, (pool.path / INITIAL).read_bytes())
        manifest = replace(pool.manifest, spec=spec, warnings=(), software=software_versions(), created=now())
        write_pool(folder, manifest, np.tile(member, (n, 1)), (pool.path / "records.parquet").read_bytes())
    return open_pool(folder, trust=True)  # the spec is the pool's, whose code was checked
