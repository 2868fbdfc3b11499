"""Precision and recall of suspected subsets against the outliers that were injected, per pool and arm.

    python benchmarks/subsets.py POOL [POOL ...]

Pools are trained with, for instance, `mia-audit train-shadows --n 16 --mislabeled .05 --ood .05 --pool POOL`. Takes
seconds. Precision counts an injected outlier of another kind as wrong.

Measured with 5 % mislabeled and 5 % ood, one pool each; accuracy is on labels as trained on, outliers included:

    data (ood from), records, network     arm    models  accuracy  mislabeled P / R   ood P / R
    digits (photo patches), 1527, LeNet   batch       8      .858       1.00 / .83   .74 / .99
    digits (photo patches), 1527, LeNet   none        8      .858        .95 / .78   .90 / .99
    Fashion-MNIST (MNIST), 2040, LeNet    batch       6      .733        .44 / .71   .58 / .37
    CIFAR-10 (CIFAR-100), 2040, LeNet     batch       6      .328        .16 / .31   .06 / .03

Suspects are as good as the models: at an accuracy of a third they are mostly wrong. The thresholds were chosen on
pools of digits and Fashion-MNIST, so their rows flatter; the CIFAR-10 row made the rule for mislabeled ask for a
majority.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from mia_audit.evidence import load_evidence
from mia_audit.subsets import suspect_subsets
from shadow_pool.errors import UserError
from shadow_pool.store.pool import open_pool


def main(folders: list[str]) -> None:
    print(
        f"{'pool':24} {'arm':10} {'models':>6} {'accuracy':>8}  {'subset':11} {'injected':>8} {'suspected':>9}"
        f" {'precision':>9} {'recall':>6}"
    )
    for folder in folders:
        pool = open_pool(Path(folder))
        records = pool.table[pool.table["role"] == "record"]
        label, truth = records["label"].to_numpy(), records["subset"].to_numpy(object)
        for arm in pool.spec.arms:
            try:
                found = load_evidence(pool, arm)
            except UserError as error:
                print(f"{folder:24} {arm:10} {error}")
                continue
            suspects = suspect_subsets(
                label, found.predicted, found.predicted_probability, found.phi[..., 0], found.energy, found.membership
            )
            accuracy = np.mean((found.predicted == label)[~found.membership])
            for subset in ("mislabeled", "ood"):
                injected, suspected = truth == subset, suspects.subset == subset
                hits = int((injected & suspected).sum())
                precision = f"{hits / suspected.sum():9.2f}" if suspected.any() else f"{'-':>9}"
                recall = f"{hits / injected.sum():6.2f}" if injected.any() else f"{'-':>6}"
                print(
                    f"{folder:24} {arm:10} {len(found.indices):6} {accuracy:8.3f}  {subset:11} {injected.sum():8} "
                    f"{suspected.sum():9} {precision} {recall}"
                )


if __name__ == "__main__":
    main(sys.argv[1:])
