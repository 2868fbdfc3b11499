"""AuditResult: what an audit found, as plain values; written as audit.json and records.parquet."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

PROTOCOL = 1
FPRS = (0.001, 0.01, 0.1)
SUBSET_ROWS = ("all", "clean", "mislabeled", "ood")
ATTACKS = ("lira-online", "lira-offline", "rmia", "rmia-offline", "loss", "reference")
METRICS = ("auc", "tpr@0.01", "tpr@0.001")
Interval = tuple[float, float]


@dataclass(frozen=True)
class TprAtFpr:
    """TPR at one FPR. ``resolved``: fpr x non-members (cells for a pool) >= 5."""

    fpr: float
    tpr: float | None
    ci: Interval | None
    resolved: bool


@dataclass(frozen=True)
class AttackRow:
    """One attack on one subset. ``members`` and ``nonmembers`` count records, or cells for a pool."""

    attack: str
    arm: str
    subset: str
    members: int
    nonmembers: int
    auc: float | None
    auc_ci: Interval | None
    balanced_accuracy: float | None
    tpr_at_fpr: tuple[TprAtFpr, ...]
    epsilon_lower: float | None = None


@dataclass(frozen=True)
class Headline:
    """The headline attack's TPR over all records at the lowest resolved FPR."""

    attack: str
    arm: str
    subset: str
    fpr: float
    tpr: float
    ci: Interval


@dataclass(frozen=True)
class TargetInfo:
    """The model under audit. ``norm_layers`` counts layers by kind, e.g. ``{"BatchNorm2d": 2}``."""

    path: str
    sha256: str
    arch: str
    parameters: int
    norm_layers: dict[str, int]
    query_mode: str
    member_accuracy: float | None
    nonmember_accuracy: float | None
    shadow_accuracy_percentile: float | None


@dataclass(frozen=True)
class PoolInfo:
    """The pool the evidence comes from."""

    path: str
    fingerprint: str
    n: int
    arms: tuple[str, ...]
    records: int
    subsets: dict[str, int]


@dataclass(frozen=True)
class LayerRatio:
    """gamma/sigma of one BatchNorm layer, over its channels (for a pool: over the channels of all models)."""

    layer: str
    kind: str
    channels: int
    ratio_median: float
    ratio_mean: float
    ratio_max: float
    fraction_above_one: float
    amplification_median: float


@dataclass(frozen=True)
class EffectRow:
    """A paired difference ``with_bn`` - ``without_bn`` of one metric of one attack on one subset."""

    scope: str
    matched: str
    attack: str
    subset: str
    metric: str
    reference: str
    with_bn: float
    without_bn: float
    difference: float
    ci: Interval | None


@dataclass(frozen=True)
class ArmSummary:
    """One arm of the pool: what its models achieve and, by the headline attack over all records, leak.

    ``trained`` is False where the arm's models ended near chance. Accuracies are means over models; the
    test accuracy is the population's.
    """

    arm: str
    trained: bool
    test_accuracy: float | None
    member_accuracy: float | None
    auc: float | None
    auc_ci: Interval | None
    tpr_at_fpr: tuple[TprAtFpr, ...]


@dataclass(frozen=True)
class AuditResult:
    """One audit of a target or of a pool.

    ``records`` is records.parquet (one row per record). The rest is what the report draws and is not written to
    audit.json: ``curves[arm, subset]`` is (fpr, tpr) of the headline attack, ``bands[arm, subset]`` its 95 % band as
    (fpr, low, high) where one was computed, ``cells[arm]`` is (member, score) of it, ``arms`` a summary per arm,
    ``query_mode`` how the models were queried.
    """

    kind: str
    created: str
    software: dict[str, str]
    headline: Headline | None
    target: TargetInfo | None
    pool: PoolInfo
    attacks: tuple[AttackRow, ...]
    layers: tuple[LayerRatio, ...]
    effect: tuple[EffectRow, ...]
    warnings: tuple[str, ...]
    records: pd.DataFrame
    curves: dict[tuple[str, str], tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    bands: dict[tuple[str, str], tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=dict)
    cells: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    arms: tuple[ArmSummary, ...] = ()
    query_mode: str = "eval"

    def to_dict(self) -> dict[str, Any]:
        """The content of audit.json: plain values, every non-finite number as null."""
        return {
            "protocol": PROTOCOL,
            "kind": self.kind,
            "created": self.created,
            "software": self.software,
            "headline": plain(self.headline),
            "target": plain(self.target),
            "pool": plain(self.pool),
            "attacks": plain(self.attacks),
            "batchnorm": {"layers": plain(self.layers), "effect": plain(self.effect)},
            "warnings": list(self.warnings),
        }

    def to_frame(self) -> pd.DataFrame:
        """One row per (attack, subset, fpr), with AUC and intervals as columns; for notebooks."""
        import pandas as pd  # here, since inspecting a checkpoint has no tables to wait for

        rows = []
        for row in self.attacks:
            low, high = row.auc_ci or (None, None)
            shared = {
                "attack": row.attack,
                "arm": row.arm,
                "subset": row.subset,
                "members": row.members,
                "nonmembers": row.nonmembers,
                "auc": row.auc,
                "auc_low": low,
                "auc_high": high,
            }
            for point in row.tpr_at_fpr:
                low, high = point.ci or (None, None)
                rows.append(
                    shared
                    | {"fpr": point.fpr, "tpr": point.tpr, "tpr_low": low, "tpr_high": high}
                    | {"resolved": point.resolved}
                )
        return pd.DataFrame(rows)

    def write(self, folder: Path) -> None:
        """Write audit.json and records.parquet into ``folder`` (created where missing)."""
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False)
        (folder / "audit.json").write_text(text + "\n", encoding="utf-8")
        self.records.to_parquet(folder / "records.parquet", index=False)


def plain(value: Any) -> Any:
    """Dataclasses, tuples and NumPy scalars as JSON values; non-finite floats as None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def finite(value: float) -> float | None:
    """None for NaN."""
    return float(value) if np.isfinite(value) else None


def ends(low: float, high: float) -> Interval | None:
    """An interval, or None where it is NaN."""
    return (float(low), float(high)) if np.isfinite(low) and np.isfinite(high) else None
