"""Which subset each record is in: tags that came with the data or were injected, else suspected ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from mia_audit.evidence import ArmEvidence
from mia_audit.subsets import suspect_subsets

SUBSET_CHOICES = ("auto", "given", "none")


@dataclass(frozen=True)
class Tags:
    """Subsets of N records.

    ``subset``: object [N]; ``subset_source``: object [N], None where nothing is known; ``suspected_label``: int64 [N],
    the class that the models believe of a suspected mislabeled record, else -1; ``notes`` for warnings.
    """

    subset: np.ndarray
    subset_source: np.ndarray
    suspected_label: np.ndarray
    notes: tuple[str, ...] = ()


def choose_tags(choice: str, records: pd.DataFrame, evidence: ArmEvidence) -> Tags:
    """Tags of the pool's records by ``choice`` of :data:`SUBSET_CHOICES`.

    ``given`` takes what records.parquet says; ``auto`` does too where it says anything, else it suspects from
    the predictions of models that did not train on a record; ``none`` treats all records as one.
    """
    unknown, believed = np.full(len(records), None, dtype=object), np.full(len(records), -1)
    if choice == "none":
        return Tags(np.full(len(records), "clean", dtype=object), unknown, believed)
    given = records["subset_source"].notna().any()
    if choice == "auto" and not given:
        return _suspected(records["label"].to_numpy(), evidence)
    subset = records["subset"].to_numpy(object)
    source = records["subset_source"].astype(object).where(records["subset_source"].notna(), None).to_numpy(object)
    return Tags(subset, source, believed)


def _suspected(label: np.ndarray, evidence: ArmEvidence) -> Tags:
    found = suspect_subsets(
        label,
        evidence.predicted,
        evidence.predicted_probability,
        evidence.phi[:, :, 0],
        evidence.energy,
        evidence.membership,
    )
    suspected = found.subset != "clean"
    source = np.full(len(label), None, dtype=object)
    source[suspected] = "suspected"
    if not suspected.any():
        return Tags(found.subset, source, found.label)
    accuracy = (evidence.predicted == label)[~evidence.membership].mean()
    counts = " and ".join(f"{(found.subset == name).sum()} {name}" for name in ("mislabeled", "ood"))
    note = (
        f"the data has no subset tags: {counts} records are suspected from the predictions of models that did not "
        f"train on them and are right about {accuracy:.0%} of all records: the lower this, the more suspects are wrong "
        "(--subsets none turns this off)"
    )
    return Tags(found.subset, source, found.label, (note,))
