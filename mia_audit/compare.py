"""Two audits held against each other, for example before and after a remedy: differences with intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from mia_audit.metrics.distributions import TWO_SIDED, normal_quantile
from mia_audit.metrics.intervals import placements
from mia_audit.results import PROTOCOL, SUBSET_ROWS, AttackRow, AuditResult, Interval, plain
from mia_audit.stored import read_audit
from shadow_pool import seeds
from shadow_pool.errors import UserError

_REPLICATES = 1000
_CHUNK = 250


@dataclass(frozen=True)
class Difference:
    """``b`` - ``a`` of one metric of one attack on one subset.

    ``arms``: the arm of a and of b. ``paired``: the interval pairs records by id; otherwise it joins the two audits'
    own intervals. ``resolved``: both audits resolve the metric's FPR (always True for the AUC).
    """

    attack: str
    arms: tuple[str, str]
    subset: str
    metric: str
    a: float
    b: float
    difference: float
    ci: Interval | None
    paired: bool
    resolved: bool


@dataclass(frozen=True)
class Side:
    """One of the audits. ``test_accuracy`` is a target's on its non-members."""

    path: str
    kind: str
    subject: str
    created: str
    test_accuracy: float | None


@dataclass(frozen=True)
class Comparison:
    """Audit b against audit a. ``shared_records`` have the same id in both."""

    a: Side
    b: Side
    shared_records: int
    differences: tuple[Difference, ...]
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"protocol": PROTOCOL, "kind": "comparison", **plain(self)}

    @property
    def sentence(self) -> str:
        """In which resolved metrics of the first attack the two differ by more than chance."""
        if not self.shared_records:
            return "The audits share no record: their differences are those of the data as much as of the models."
        found = {"less": [], "more": []}  # type: dict[str, list[str]]
        for row in self.differences:
            if row.attack == self.differences[0].attack and row.resolved and row.ci and not row.ci[0] <= 0 <= row.ci[1]:
                found["less" if row.difference < 0 else "more"].append(f"{row.subset} {row.metric}")
        parts = [f"{way} in {', '.join(names)}" for way, names in found.items() if names]
        if not parts:
            return "No resolved difference is clear of zero: B is not shown to leak more or less than A."
        return f"B leaks {'; '.join(parts)}: their intervals are clear of zero."


def compare(a: Path, b: Path) -> Comparison:
    """Compare the audits in two folders, attack by attack and subset by subset.

    Two targets with known members are paired by record id: the AUC's difference by DeLong's influence of each
    record on either AUC (DeLong, DeLong, Clarke-Pearson 1988, for any overlap of records and whatever their
    membership in each), the TPR's by a bootstrap of records. Otherwise, and where an FPR is not resolved, the interval
    joins both audits' own by the square-and-add rule for independent estimates (Zou and Donner 2008), which is
    wide for audits that share records.

    Raises:
        UserError: a folder holds no readable audit, or one is of a target and the other of a pool.
    """
    first, second = read_audit(a), read_audit(b)
    if first.kind != second.kind:
        raise UserError(
            f"both audits must be of targets or both of pools, got a {first.kind} in {a} and a {second.kind} in {b}"
        )
    rows = {(row.attack, row.arm, row.subset): row for row in second.attacks}
    arms = _arm_pairs(first, second)
    differences: list[Difference] = []
    for row in first.attacks:
        for other_arm in (theirs for ours, theirs in arms if ours == row.arm):
            other = rows.get((row.attack, other_arm, row.subset))
            if other is not None:
                differences += _differences(row, other, first.records, second.records, first.kind == "target")
    return Comparison(
        a=_side(first, a),
        b=_side(second, b),
        shared_records=int(first.records["id"].isin(second.records["id"]).sum()),
        differences=tuple(differences),
        warnings=tuple(_warnings(first, second, differences)),
    )


def _side(result: AuditResult, path: Path) -> Side:
    target = result.target
    subject = target.path if target else result.pool.path
    return Side(str(path), result.kind, subject, result.created, target.nonmember_accuracy if target else None)


def _arm_pairs(a: AuditResult, b: AuditResult) -> list[tuple[str, str]]:
    """Arms of one name; where there is none, or for targets, the arms that each audit's first row is about."""
    ours, theirs = ([*dict.fromkeys(row.arm for row in result.attacks)] for result in (a, b))
    shared = [(arm, arm) for arm in ours if arm in theirs]
    return shared or list(zip(ours[:1], theirs[:1], strict=False))


def _warnings(a: AuditResult, b: AuditResult, differences: list[Difference]) -> list[str]:
    found = []
    if not differences:
        found.append("the audits have no attack and subset in common, so there is nothing to compare")
    if a.pool.fingerprint != b.pool.fingerprint:
        found.append("the audits are of pools on different records: a difference may come from the records")
    if a.pool.n != b.pool.n:
        found.append(f"the pools have {a.pool.n} and {b.pool.n} models an arm: more shadow models attack better")
    if a.target and b.target and a.target.query_mode != b.target.query_mode:
        found.append(f"query modes differ: {a.target.query_mode} and {b.target.query_mode}")
    return found


def _differences(
    a: AttackRow, b: AttackRow, ours: pd.DataFrame, theirs: pd.DataFrame, targets: bool
) -> list[Difference]:
    """AUC and TPRs of one attack on one subset."""
    sample = _pair(a, b, ours, theirs) if targets else None
    pairs = [(x, y) for x in a.tpr_at_fpr for y in b.tpr_at_fpr if x.fpr == y.fpr]
    paired: dict[str, Interval] = {}
    if sample is not None and a.auc is not None and b.auc is not None:
        paired |= sample.auc_interval(b.auc - a.auc)
    if sample is not None:
        paired |= sample.tpr_intervals([x.fpr for x, y in pairs if x.resolved and y.resolved])
    measured = [("auc", a.auc, a.auc_ci, b.auc, b.auc_ci, True)]
    measured += [(f"tpr@{x.fpr:g}", x.tpr, x.ci, y.tpr, y.ci, x.resolved and y.resolved) for x, y in pairs]
    found = []
    for metric, x, x_ci, y, y_ci, resolved in measured:
        if x is not None and y is not None:
            ci = paired.get(metric) or _square_and_add(x, x_ci, y, y_ci)
            arms = (a.arm, b.arm)
            found.append(Difference(a.attack, arms, a.subset, metric, x, y, y - x, ci, metric in paired, resolved))
    return found


def _square_and_add(x: float, x_ci: Interval | None, y: float, y_ci: Interval | None) -> Interval | None:
    """Interval of y - x from the intervals of two independent estimates (Zou and Donner 2008, eq. 4)."""
    if x_ci is None or y_ci is None:
        return None
    low = math.hypot(y - y_ci[0], x_ci[1] - x)
    high = math.hypot(y_ci[1] - y, x - x_ci[0])
    return y - x - low, y - x + high


@dataclass(frozen=True)
class _Paired:
    """One attack's scores in both audits over the union of their records, [K] each; ``here`` False: not in it."""

    here: tuple[np.ndarray, np.ndarray]
    member: tuple[np.ndarray, np.ndarray]
    score: tuple[np.ndarray, np.ndarray]

    def auc_interval(self, difference: float) -> dict[str, Interval]:
        """95 % interval of the AUC's difference, by metric; none where either AUC's own is estimated as sure."""
        influence = np.zeros(len(self.here[0]))
        for sign, here, member, score in zip((-1, 1), self.here, self.member, self.score, strict=True):
            own = _auc_influence(member[here], score[here])
            if not own.any():
                return {}
            influence[here] += sign * own
        variance = float(influence @ influence)
        half = normal_quantile(TWO_SIDED) * math.sqrt(variance)
        return {"auc": (max(difference - half, -1.0), min(difference + half, 1.0))}

    def tpr_intervals(self, fprs: list[float]) -> dict[str, Interval]:
        """95 % percentile intervals of the TPRs' differences over records drawn anew within equal membership."""
        if not fprs:
            return {}
        strata = sum(
            weight * np.where(here, 1 + member, 0)
            for weight, here, member in zip((1, 3), self.here, self.member, strict=True)
        )
        rng = seeds.stream(0, "compare-bootstrap")
        drawn = []
        for _ in range(_REPLICATES // _CHUNK):
            counts = _resample(np.asarray(strata), rng)
            a, b = (
                _weighted_tprs(counts[:, here], member[here], score[here], fprs)
                for here, member, score in zip(self.here, self.member, self.score, strict=True)
            )
            drawn.append(b - a)
        low, high = np.quantile(np.concatenate(drawn), [0.025, 0.975], axis=0)
        return {f"tpr@{fpr:g}": (float(low[i]), float(high[i])) for i, fpr in enumerate(fprs)}


def _pair(a: AttackRow, b: AttackRow, ours: pd.DataFrame, theirs: pd.DataFrame) -> _Paired | None:
    """Both audits' records of the rows' subset, joined by id; None where a side lacks members or non-members."""
    sides = []
    for row, table in ((a, ours), (b, theirs)):
        if row.attack not in table:
            return None
        inside = table["member"].notna() & table[row.attack].notna()
        if row.subset != SUBSET_ROWS[0]:
            inside &= table["subset"] == row.subset
        side = table.loc[inside, ["id", "member", row.attack]].set_index("id")
        members = int(side["member"].sum())
        if min(members, len(side) - members) < 2:
            return None
        sides.append(side)
    union = sides[0].index.union(sides[1].index).sort_values()
    both = [side.reindex(union) for side in sides]
    here = [side["member"].notna().to_numpy() for side in both]
    member = [side["member"].fillna(False).to_numpy(bool) for side in both]
    score = [side.iloc[:, 1].to_numpy(float) for side in both]
    return _Paired((here[0], here[1]), (member[0], member[1]), (score[0], score[1]))


def _auc_influence(member: np.ndarray, score: np.ndarray) -> np.ndarray:
    """Each record's part [K] in the AUC's error: their squares sum to DeLong's variance."""
    m, n = int(member.sum()), int((~member).sum())
    above, below = placements(member, score)
    influence = np.empty(len(score))
    influence[member] = (above - above.mean()) / math.sqrt(m * (m - 1))
    influence[~member] = (below - below.mean()) / math.sqrt(n * (n - 1))
    return influence


def _resample(strata: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """How often each record is drawn, [replicates, K], with the size of every stratum kept."""
    counts = np.zeros((_CHUNK, len(strata)), dtype=np.int32)
    for stratum in np.unique(strata):
        rows = np.flatnonzero(strata == stratum)
        drawn = rng.integers(len(rows), size=(_CHUNK, len(rows)))
        cells = (drawn + len(rows) * np.arange(_CHUNK)[:, None]).ravel()
        counts[:, rows] = np.bincount(cells, minlength=_CHUNK * len(rows)).reshape(_CHUNK, len(rows))
    return counts


def _weighted_tprs(counts: np.ndarray, member: np.ndarray, score: np.ndarray, fprs: list[float]) -> np.ndarray:
    """TPR at each FPR, [replicates, fprs], of records [K] that count [replicates, K] times."""
    order = np.argsort(-score, kind="stable")
    last = np.flatnonzero(np.append(score[order][1:] != score[order][:-1], True))
    weights = counts[:, order]
    true = np.cumsum(weights * member[order], axis=1, dtype=np.int32)[:, last]
    false = np.cumsum(weights * ~member[order], axis=1, dtype=np.int32)[:, last]
    m, n = int(member.sum()), int((~member).sum())
    # false rises along a row, so the points allowed are its first ones and true is largest at the last of them.
    reached = [(false <= math.floor(fpr * n + 1e-9)).sum(axis=1) for fpr in fprs]
    padded = np.concatenate([np.zeros((len(true), 1), dtype=true.dtype), true], axis=1)
    return np.stack([padded[np.arange(len(true)), place] for place in reached], axis=1) / m
