"""Precision and recall of suspected subsets against the outliers that were injected, per pool and arm.

    python benchmarks/subsets.py POOL [POOL ...]

Reads pools that were made with `mia-audit train-shadows --arms batch,none --mislabeled .05 --ood .05 --pool POOL ...`
and takes seconds; the pools below took 40 minutes on 2 cores that others used too. Precision counts an injected outlier
of another kind as wrong.

Measured 2026-11-30, one pool each: digits, LeNet, `--epochs 20 --lr .05` (ood: patches of photographs); Fashion-MNIST,
LeNet, 20 epochs (ood: MNIST); CIFAR-10, ResNet-8, 30 epochs, lr .05 (ood: CIFAR-100). Accuracy is that of models on
records they did not train on, labels as trained on, outliers included:

    data, records         arm    models  accuracy  mislabeled: precision, recall  ood: precision, recall
    digits, 1527          batch      16      .856                     1.00   .83                .79  1.00
    digits, 1527          none       16      .859                      .98   .80                .83  1.00
    Fashion-MNIST, 2040   batch       8      .733                      .41   .61                .57   .28
    Fashion-MNIST, 2040   none        8      .709                      .52   .61                .65   .64
    CIFAR-10, 2040        batch       8      .393                      .19   .21                .08   .04
    CIFAR-10, 2040        none        8      .367                      .26   .14                .00   .00

Suspects are as good as the models: where these are right about a third of the records, most suspects are wrong. The
thresholds were chosen on pools of digits and Fashion-MNIST, so their rows flatter; an earlier CIFAR-10 pool made the
rule for mislabeled ask for a majority.
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
