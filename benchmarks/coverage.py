"""How often do the 95 % intervals hold the truth? By simulation, printed as three tables.

1. One target, binormal scores (members normal with mean mu, non-members with mean 0): AUC by DeLong, TPR at an FPR by
   the rule of mia_audit.metrics.tpr_interval.
2. A pool of paired models whose targets share their shadows: lira-online, delete-a-pair jackknife. Records
   are fixed; models differ in what they do to every record at once (a random factor on the shift). The truth is the
   mean of the estimate over all simulated pools.
3. The difference of two such pools that share membership and part of their noise, as paired arms do.

Measured 2026-11-30 on 2 shared cores. One target, 500 repeats (standard error .010; DeLong again with 2,500 repeats
at 750 a side: .949, .945, .950 for mu 0, 1, 3, and .932 at 100 a side for mu 2):

    a side   mu    AUC  TPR at .1   .01   .001
    750    0.0  0.944  0.976  0.976  1.000
    750    0.5  0.950  0.964  0.970  1.000
    750    1.0  0.924  0.942  0.960  1.000
    750    2.0  0.936  0.960  0.952  0.996
    750    3.0  0.922  0.960  0.962  0.998
    1500    0.0  0.942  0.928  0.972  1.000
    1500    0.5  0.950  0.954  0.966  1.000
    1500    1.0  0.950  0.966  0.966  1.000
    1500    2.0  0.936  0.944  0.944  1.000
    1500    3.0  0.964  0.966  0.962  0.994
    5000    0.0  0.940  0.944  0.954  0.958
    5000    0.5  0.948  0.966  0.966  0.972
    5000    1.0  0.938  0.938  0.960  0.968
    5000    2.0  0.940  0.936  0.960  0.950
    5000    3.0  0.956  0.960  0.950  0.954

Pools of 500 records, 150 pools (standard error .018), the spread that audits use (``shrunk``).
At .001 the rows of 8 and 16 models are not resolved (2 and 4 non-member cells): audits show such a TPR, and say so.

    models             AUC  TPR at .1   .01   .001  balanced accuracy
     8 one arm       0.967  0.960  0.960  0.933  0.960
     8 difference    0.940  0.973  0.987  0.967  0.960
    16 one arm       0.960  0.993  0.987  0.993  0.973
    16 difference    0.987  0.987  0.993  0.993  0.987
    32 one arm       0.960  0.980  0.993  1.000  1.000
    32 difference    0.987  1.000  1.000  1.000  1.000

The jackknife of a TPR is conservative from 16 models on: a deleted pair is missing as targets and as shadows.

Run: python benchmarks/coverage.py [--repeats 1000] [--pools 300]
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from scipy import stats

from mia_audit.metrics import auc_delong, jackknife_pool, tpr_interval
from shadow_pool.membership import draw_membership

METRICS = ("auc", "tpr@0.1", "tpr@0.01", "tpr@0.001", "balanced_accuracy")


def target_coverage(size: int, mu: float, repeats: int, rng: np.random.Generator) -> list[float]:
    """Coverage of the AUC and of TPR at 10 %, 1 %, 0.1 %, with ``size`` members and as many non-members."""
    fprs = (0.1, 0.01, 0.001)
    truth = [stats.norm.cdf(mu / np.sqrt(2)), *stats.norm.cdf(mu + stats.norm.ppf(fprs))]
    member = np.arange(2 * size) < size
    held = np.zeros(4)
    for repeat in range(repeats):
        score = rng.standard_normal(2 * size) + mu * member
        intervals = [auc_delong(member, score), *(tpr_interval(member, score, fpr, repeat) for fpr in fprs)]
        held += [low <= value <= high for (low, high), value in zip(intervals, truth, strict=True)]
    return list(held / repeats)


def pool_coverage(models: int, records: int, pools: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Coverage [metrics] of one arm's jackknife interval and of the difference of two arms'."""
    rng = np.random.default_rng(seed)
    level, spread = rng.normal(0, 3, records), rng.gamma(3, 0.4, records)
    shifts = rng.gamma(0.5, 1.5, records), rng.gamma(0.5, 0.8, records)
    everyone = {"all": np.ones(records, dtype=bool)}
    arms: list[list[np.ndarray]] = [[], [], []]
    bounds: list[list[tuple[np.ndarray, np.ndarray]]] = [[], []]
    for pool in range(pools):
        membership = draw_membership(seed + 1 + pool, models, records)
        shared, factor = rng.standard_normal((models, records)), rng.lognormal(0, 0.2, (2, models, 1))
        found = []
        for shift, scale in zip(shifts, factor, strict=True):
            noise = 0.6 * shared + 0.8 * rng.standard_normal((models, records))
            phi = level + scale * shift * membership + spread * noise
            found.append(jackknife_pool("lira-online", phi, membership, everyone, metrics=METRICS))
        difference, low, high = found[0].minus(found[1])
        bounds[0].append(tuple(bound[0] for bound in found[0].interval()))
        bounds[1].append((low[0], high[0]))
        for values, value in zip(arms, (found[0].estimate[0], found[1].estimate[0], difference[0]), strict=True):
            values.append(value)
    covered = []
    for values, pairs in zip((arms[0], arms[2]), bounds, strict=True):
        truth = np.mean(values, axis=0)
        covered.append(np.mean([(low <= truth) & (truth <= high) for low, high in pairs], axis=0))
    return covered[0], covered[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--pools", type=int, default=300)
    options = parser.parse_args()
    start = time.perf_counter()
    rng = np.random.default_rng(0)
    print("one target:   a side    mu   AUC  TPR at .1   .01   .001")
    for size in (750, 1500, 5000):
        for mu in (0.0, 0.5, 1.0, 2.0, 3.0):
            cells = "  ".join(f"{value:.3f}" for value in target_coverage(size, mu, options.repeats, rng))
            print(f"{size:20d} {mu:6.1f}  {cells}")
    print("a pool:       models  " + "  ".join(METRICS))
    for models in (8, 16, 32):
        for name, covered in zip(
            ("one arm", "difference"), pool_coverage(models, 500, options.pools, models), strict=True
        ):
            print(f"{name:12s} {models:7d}  " + "  ".join(f"{value:.3f}" for value in covered))
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
