"""What 1, 2, 4, 9 views of a record buy an attacker, and what they cost, on pools with nine stored queries.

Every arm of every pool given is scored with lira-online, every model in turn the target, its pair left out, by
the first 1, 2, 4 and 9 of its queries; intervals are the delete-a-pair jackknife's. Scoring costs CPU seconds; asking
one forward pass a query.

Measured 2026-11-30 on digits (train-shadows --n 16 --arms batch --queries 9 --mislabeled .05 --ood .05 --seed 7: 1,527
records, trained without augmentation), one thread of a shared 2-core machine:

    queries   AUC                    TPR at 1 %             TPR at 0.1 %           scoring
    1         .758 [.753, .764]      .141 [.132, .151]      .083 [.074, .091]      0.02 s
    2         .732 [.716, .748]      .124 [.105, .143]      .076 [.058, .094]      0.02 s
    4         .698 [.683, .713]      .108 [.085, .132]      .065 [.043, .088]      0.04 s
    9         .660 [.647, .673]      .093 [.080, .107]      .043 [.022, .065]      0.08 s

Shifted views cost power here: a pixel is an eighth of the picture, the models never saw shifted digits, and the mean
over queries counts every view alike. One query is the right default. Models trained with shifts were not measured.

Run: python benchmarks/queries.py POOL...        (pools made with train-shadows --queries 9)
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from mia_audit.attacks import pool_scores
from mia_audit.metrics import jackknife_pool
from shadow_pool.errors import UserError
from shadow_pool.store.pool import open_pool

QUERIES = (1, 2, 4, 9)
METRICS = ("auc", "tpr@0.01", "tpr@0.001")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pools", type=Path, nargs="+", metavar="POOL")
    for path in parser.parse_args().pools:
        pool = open_pool(path)
        if pool.spec.queries < max(QUERIES):
            raise UserError(f"pool {path} must hold {max(QUERIES)} queries, got {pool.spec.queries}")
        everyone = {"all": np.ones(pool.membership.shape[1], dtype=bool)}
        for arm in pool.spec.arms:
            phi = np.asarray(pool.phi(arm, range(pool.spec.n)))
            print(f"{path.name} {arm}: {phi.shape[1]} records, {len(phi)} models")
            for queries in QUERIES:
                part = np.ascontiguousarray(phi[..., :queries])
                start = time.process_time()
                pool_scores("lira-online", part, pool.membership)
                spent = time.process_time() - start
                found = jackknife_pool("lira-online", part, pool.membership, everyone, metrics=METRICS)
                low, high = found.interval()
                cells = "   ".join(
                    f"{value:.3f} [{a:.3f}, {b:.3f}]"
                    for value, a, b in zip(found.estimate[0], low[0], high[0], strict=True)
                )
                print(f"    {queries} queries: {cells}   {spent:.2f} s", flush=True)


if __name__ == "__main__":
    main()
