"""Which estimate of spread finds the most members, by number of shadow models, on pools that exist on disk.

Every arm of every pool given is cut into as many pools of 8, 16, 32, 64 models as it holds; each is scored with
lira-online, every model in turn the target, its pair left out; the table gives the means of AUC, TPR at 1 % and 0.1 %.

``nig-t`` is the form of BaVarIA-t (arXiv 2603.11799), the nearest published relative: a normal-inverse-gamma prior on
each side, Student-t predictive. Its prior mean and scale are those of all records; its two weights (observations
that the prior mean and the prior variance are worth) are the best of a grid for each row, chosen by the AUC that is
reported: more than an attacker could do.

Run: python benchmarks/spreads.py POOL...
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from scipy import stats

from mia_audit.attacks import lira_pool
from mia_audit.attacks.spreads import SPREADS
from mia_audit.metrics import roc
from shadow_pool.store.pool import Pool, open_pool

SIZES = (8, 16, 32, 64)
MEAN_WEIGHTS, VARIANCE_WEIGHTS = (0.01, 0.1, 0.5), (1.0, 4.0, 16.0)
Scorer = Callable[[np.ndarray, np.ndarray], np.ndarray]


def nig_t(phi: np.ndarray, membership: np.ndarray, *, mean_weight: float, variance_weight: float) -> np.ndarray:
    """Scores [M, N] from phi [M, N] with a normal-inverse-gamma prior on each side."""
    scores = np.empty(phi.shape)
    for first in range(0, len(phi), 2):
        pair = [first, first + 1]
        values, rows = np.delete(phi, pair, axis=0), np.delete(membership, pair, axis=0)
        logs = []
        for mask in (rows, ~rows):
            n = mask.sum(axis=0)
            mean = np.where(mask, values, 0).sum(axis=0) / n
            square = np.where(mask, (values - mean) ** 2, 0).sum(axis=0)
            prior_mean, prior_variance = mean.mean(), (square / (n - 1)).mean()
            weight, freedom = mean_weight + n, variance_weight + n
            location = (mean_weight * prior_mean + n * mean) / weight
            surprise = mean_weight * n / weight * (mean - prior_mean) ** 2
            variance = (variance_weight * prior_variance + square + surprise) / freedom
            scale = np.sqrt(variance * (1 + 1 / weight))
            logs.append(stats.t.logpdf(phi[pair], freedom, location, scale))
        scores[pair] = logs[0] - logs[1]
    return scores


def measure(score: Scorer, phi: np.ndarray, membership: np.ndarray, models: int) -> np.ndarray:
    """[AUC, TPR at 1 %, at 0.1 %], the mean over the disjoint pools of ``models`` models."""
    found = []
    for start in range(0, len(phi) - models + 1, models):
        part = slice(start, start + models)
        curve = roc(membership[part], score(phi[part], membership[part]))
        found.append((curve.auc, curve.tpr_at(0.01), curve.tpr_at(0.001)))
    return np.mean(found, axis=0)


def read(pool: Pool, arm: str) -> tuple[np.ndarray, np.ndarray]:
    """phi [M, N] (mean over queries) and membership of the pairs that are trained, in order."""
    good, _ = pool.scan(arm)
    pairs = next(j for j in itertools.count() if not {2 * j, 2 * j + 1} <= good.keys())
    if not pairs:
        return np.empty((0, 0)), np.empty((0, 0), dtype=bool)
    phi = pool.phi(arm, np.arange(2 * pairs))
    return phi.reshape(*phi.shape[:2], -1).mean(axis=2), pool.membership[: 2 * pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pools", type=Path, nargs="+", metavar="POOL")
    grid = [
        partial(nig_t, mean_weight=mean_weight, variance_weight=variance_weight)
        for mean_weight, variance_weight in itertools.product(MEAN_WEIGHTS, VARIANCE_WEIGHTS)
    ]
    for path in parser.parse_args().pools:
        pool = open_pool(path)
        for arm in pool.spec.arms:
            phi, membership = read(pool, arm)
            for models in SIZES:
                if models > len(phi):
                    continue
                print(f"{path.name} {arm}: {phi.shape[1]} records, {models} models, {len(phi) // models} pools")
                for spread in SPREADS:
                    row = measure(partial(lira_pool, spread=spread), phi, membership, models)
                    print(f"    {spread:10s} {row[0]:.3f} {row[1]:.3f} {row[2]:.3f}")
                best = max((measure(score, phi, membership, models) for score in grid), key=lambda row: row[0])
                print(f"    {'nig-t':10s} {best[0]:.3f} {best[1]:.3f} {best[2]:.3f}", flush=True)


if __name__ == "__main__":
    main()
