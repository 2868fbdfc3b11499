"""Speed and memory of scoring a whole pool with lira-online, beside the same from the formula in plain loops.

``plain`` takes every model in turn as target, drops its pair, and goes record by record (normal, per-record
spread; measured on a few targets and scaled to all). ``per target`` is the usual vectorized script: every target
anew, with NumPy over its records. All on one thread, in CPU seconds. Pools beyond memory: benchmarks/blocks.py.

Measured 2026-11-30 on 2 cores of a virtual x86-64 machine that others used too (hence CPU seconds), one run:

                              plain loops   per-target script   record   moderated   shrunk    rmia      loss
    64 models x  3,000 records     10.5 s              1.22 s   0.022 s     0.024 s  0.045 s  0.059 s  0.006 s
    256 models x 10,000 records     322 s              45.6 s   0.126 s     0.218 s  0.435 s  0.712 s  0.066 s

so that moderated is 436 and 1,478 times as fast as the plain loops, 51 and 209 times as the script (which computes
the cheaper per-record spread).

Run: python benchmarks/attacks.py
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from mia_audit.attacks import lira_pool, pool_scores
from mia_audit.attacks.registry import ATTACKS
from mia_audit.attacks.spreads import SPREADS
from shadow_pool.membership import draw_membership


def draw(models: int, records: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    membership = draw_membership(0, models, records)
    phi = rng.normal(0, 3, records) + rng.gamma(2, 1, records) * rng.standard_normal((models, records))
    return phi + 2 * membership, membership


def plain(phi: np.ndarray, membership: np.ndarray, target: int) -> list[float]:
    """LiRA online with per-record normals, record by record."""
    scores = []
    for record in range(phi.shape[1]):
        inside, outside = [], []
        for model in range(len(phi)):
            if model not in (target, target ^ 1):
                (inside if membership[model, record] else outside).append(phi[model, record])
        logs = []
        for values in (inside, outside):
            mean = sum(values) / len(values)
            variance = sum((value - mean) ** 2 for value in values) / len(values)
            logs.append(-0.5 * math.log(variance) - (phi[target, record] - mean) ** 2 / (2 * variance))
        scores.append(logs[0] - logs[1])
    return scores


def per_target(phi: np.ndarray, membership: np.ndarray, target: int) -> np.ndarray:
    """The same with NumPy over the records of one target."""
    gone = [target, target ^ 1]
    values, mask = np.delete(phi, gone, axis=0), np.delete(membership, gone, axis=0)
    logs = []
    for side in (mask, ~mask):
        masked = np.where(side, values, np.nan)
        mean, variance = np.nanmean(masked, axis=0), np.nanvar(masked, axis=0)
        logs.append(-0.5 * np.log(variance) - (phi[target] - mean) ** 2 / (2 * variance))
    return logs[0] - logs[1]


def seconds(run: Callable[[], Any], repeats: int = 1) -> float:
    times = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return min(times)


def speed(models: int, records: int, sampled: int) -> None:
    phi, membership = draw(models, records)
    ours = lira_pool(phi, membership, spread="record")
    np.testing.assert_allclose(ours[0], plain(phi, membership, 0), rtol=1e-6)
    np.testing.assert_allclose(ours[1], per_target(phi, membership, 1), rtol=1e-6)
    loop = seconds(lambda: [plain(phi, membership, target) for target in range(sampled)]) * models / sampled
    script = seconds(lambda: [per_target(phi, membership, target) for target in range(sampled)]) * models / sampled
    print(f"{models} models x {records} records: plain loops {loop:.1f} s, per-target script {script:.2f} s")
    for name in (*SPREADS, *(attack for attack in ATTACKS if not attack.startswith("lira"))):
        attack, spread = ("lira-online", name) if name in SPREADS else (name, "moderated")
        run = partial(pool_scores, attack, phi, membership, population_phi=phi[:, :300], spread=spread)
        spent = seconds(run, repeats=3)
        print(f"  {name:14s} {spent:7.3f} s   {loop / spent:6.0f}x plain   {script / spent:5.0f}x per target")


def main() -> None:
    with threadpool_limits(1):
        speed(64, 3000, sampled=4)
        speed(256, 10_000, sampled=1)


if __name__ == "__main__":
    main()
