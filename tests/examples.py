"""Audits and studies made from synthetic scores, for tests of everything that reads them.

``leak`` is by how much members score above non-members, in standard deviations: 0 is a model that leaks nothing.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy.stats import norm
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score, roc_curve

from mia_audit.results import (
    FPRS,
    SUBSET_ROWS,
    ArmSummary,
    AttackRow,
    AuditResult,
    EffectRow,
    Headline,
    LayerRatio,
    PoolInfo,
    TargetInfo,
    TprAtFpr,
)
from mia_audit.studies.result import StudyFigure, StudyResult, StudyRow
from shadow_pool.data.records import Records
from shadow_pool.membership import draw_membership

SOFTWARE = {"mia-audit": "0.1.0", "numpy": "2.0.0", "python": "3.11.2", "torch": "2.6.0"}
CREATED = "2026-11-30T02:00:00+00:00"
EXTRA = {"clean": 0.0, "mislabeled": 2.0, "ood": 2.4}
ARM_LEAK = {"batch": 1.0, "none": 0.35, "none+fit": 0.8, "batch+penalty(1)": 0.4, "group+dp(8)": 0.05}


def digits(count: int = 600, seed: int = 0) -> Records:
    """Real digits, 6 % of them with a wrong label and 6 % replaced by noise."""
    rng = np.random.default_rng(seed)
    source = load_digits()
    rows = rng.permutation(len(source.target))[:count]
    x = (source.images[rows] * 15.9).astype(np.uint8)[:, None]
    original = source.target[rows].astype(np.int64)
    label, subset = original.copy(), np.full(count, "clean", dtype=object)
    share = count // 16
    subset[:share], subset[share : 2 * share] = "mislabeled", "ood"
    label[:share] = (label[:share] + rng.integers(1, 10, share)) % 10
    x[share : 2 * share] = rng.integers(0, 256, (share, 1, 8, 8), dtype=np.uint8)
    return Records(
        x=x,
        label=label,
        id=np.array([f"digits-{row:04d}" for row in rows], dtype=object),
        original_label=original,
        subset=subset,
        subset_source=np.where(subset == "clean", None, "injected"),
        source_index=rows.astype(np.int64),
        group=None,
        classes=tuple(str(digit) for digit in range(10)),
    )


def scores(records: Records, membership: np.ndarray, leak: float, seed: int) -> np.ndarray:
    """Synthetic attack scores [models, records]; outliers leak more than clean records do."""
    rng = np.random.default_rng(seed)
    shift = leak * (1 + np.array([EXTRA[name] for name in records.subset]))
    return rng.standard_normal(membership.shape) + membership * shift


def attack_rows(
    attack: str, arm: str, member: np.ndarray, score: np.ndarray, subset: np.ndarray
) -> tuple[AttackRow, ...]:
    """Rows for all records and each subset present; intervals are rough normal ones, enough to draw."""
    rows = []
    for name in SUBSET_ROWS:
        inside = np.ones(len(subset), dtype=bool) if name == "all" else subset == name
        truth, value = member[..., inside].ravel(), score[..., inside].ravel()
        if not truth.any() or truth.all():
            continue
        fpr, tpr, _ = roc_curve(truth, value, drop_intermediate=False)
        auc, positives, negatives = float(roc_auc_score(truth, value)), int(truth.sum()), int((~truth).sum())
        points = []
        for level in FPRS:
            hit = float(tpr[fpr <= level].max())
            points.append(TprAtFpr(level, hit, _around(hit, positives), level * negatives >= 5))
        balanced = float(np.max(tpr + 1 - fpr) / 2)
        rows.append(
            AttackRow(attack, arm, name, positives, negatives, auc, _around(auc, positives), balanced, tuple(points))
        )
    return tuple(rows)


def _around(value: float, count: int) -> tuple[float, float]:
    half = 1.96 * np.sqrt(max(value * (1 - value), 1 / count) / count)
    return max(0.0, value - half), min(1.0, value + half)


def _headline(rows: tuple[AttackRow, ...]) -> Headline | None:
    row = next(row for row in rows if row.subset == "all")
    for point in row.tpr_at_fpr:
        if point.resolved and point.tpr is not None and point.ci is not None:
            return Headline(row.attack, row.arm, "all", point.fpr, point.tpr, point.ci)
    return None


def _curves(arm: str, member: np.ndarray, score: np.ndarray, subset: np.ndarray) -> dict:
    curves = {}
    for name in SUBSET_ROWS:
        inside = np.ones(len(subset), dtype=bool) if name == "all" else subset == name
        if inside.any():
            fpr, tpr, _ = roc_curve(member[..., inside].ravel(), score[..., inside].ravel(), drop_intermediate=False)
            curves[arm, name] = (fpr, tpr)
    return curves


def layers(count: int = 4) -> tuple[LayerRatio, ...]:
    """BatchNorm layers whose ratio rises with depth."""
    return tuple(
        LayerRatio(
            f"features.norm{i + 1}",
            "BatchNorm2d",
            16 * (i + 1),
            0.8 + 0.5 * i,
            0.9 + 0.5 * i,
            1.9 + 0.9 * i,
            min(1.0, 0.3 + 0.2 * i),
            (0.8 + 0.5 * i) ** 2,
        )
        for i in range(count)
    )


def effect_rows(pool: dict[str, tuple[AttackRow, ...]], reference: str, scope: str, matched: str) -> list[EffectRow]:
    """Differences between two arms' rows, in AUC and TPR."""
    rows = []
    for with_bn, without in zip(pool["batch"], pool[reference], strict=True):
        pairs = [("auc", with_bn.auc, without.auc)]
        both = zip(with_bn.tpr_at_fpr, without.tpr_at_fpr, strict=True)
        pairs += [(f"tpr@{a.fpr:g}", a.tpr, b.tpr) for a, b in both if a.fpr < 0.1]
        for metric, a, b in pairs:
            half = 0.012 if with_bn.subset == "all" else 0.035
            rows.append(
                EffectRow(
                    scope, matched, with_bn.attack, with_bn.subset, metric, reference, a, b, a - b, _span(a - b, half)
                )
            )
    return rows


def _span(value: float, half: float) -> tuple[float, float]:
    return value - half, value + half


def false_positive_rates(score: np.ndarray, nonmember: np.ndarray) -> np.ndarray:
    """(1 + non-member scores at or above each score) / (1 + how many there are)."""
    ordered = np.sort(nonmember)
    return (1 + len(ordered) - np.searchsorted(ordered, score, side="left")) / (1 + len(ordered))


def target_audit(
    records: Records, *, leak: float = 1.0, seed: int = 0, members_known: bool = True, bn: bool = True, n: int = 16
) -> AuditResult:
    """An audit of one target with members drawn by coins."""
    rng = np.random.default_rng([seed, 7])
    membership = draw_membership(seed, n, len(records))
    member = rng.random(len(records)) < 0.5
    score = scores(records, member[None], leak, seed)[0]
    loss = score * 0.5 + rng.standard_normal(len(records))
    pools = {
        arm: attack_rows(
            "lira-online", arm, membership, scores(records, membership, leak * size, seed + 1), records.subset
        )
        for arm, size in ARM_LEAK.items()
    }
    rows: tuple[AttackRow, ...] = ()
    if members_known:
        rows = attack_rows("lira-online", "batch", member, score, records.subset)
        rows += attack_rows("loss", "batch", member, loss, records.subset)
    effects = effect_rows(pools, "none", "recipe", "epochs") + effect_rows(pools, "none+fit", "recipe", "fit")
    if bn:
        effects += effect_rows(pools, "none", "checkpoint", "epochs")
    frame = records.to_frame("record")[["id", "label", "subset", "subset_source"]].assign(
        member=pd.array(member, dtype="boolean") if members_known else pd.array([None] * len(member), dtype="boolean"),
        phi=score * 2,
        **{"lira-online": score, "loss": loss},
        vulnerability=norm.cdf(leak * np.array([1 + EXTRA[name] for name in records.subset]) / np.sqrt(2)),
        memorization=np.clip(rng.normal(0.3, 0.2, len(records)), 0, 1),
        false_positive_rate=false_positive_rates(score, rng.standard_normal(20000)),
    )
    return AuditResult(
        kind="target",
        created=CREATED,
        software=SOFTWARE,
        headline=_headline(rows) if rows else None,
        target=TargetInfo(
            "model.pt", "9f" * 32, "lenet", 61706, {"BatchNorm2d": 2, "BatchNorm1d": 2} if bn else {}, "eval",
            0.998 if members_known else None, 0.874 if members_known else None, 0.53 if members_known else None,
        ),
        pool=_pool_info(records, n),
        attacks=rows,
        layers=layers() if bn else (),
        effect=tuple(effects) if leak else (),
        warnings=() if members_known else ("members unknown: the audit gives scores and false-positive rates only",),
        records=frame,
        curves=_curves("batch", member, score, records.subset) if members_known else {},
        cells={"batch": (member, score)} if members_known else {},
        arms=_arm_summaries(pools),
    )  # fmt: skip


def pool_audit(
    records: Records, *, leak: float = 1.0, seed: int = 0, n: int = 16, arms: tuple[str, ...] = tuple(ARM_LEAK)
) -> AuditResult:
    """An audit of a pool by itself."""
    membership = draw_membership(seed, n, len(records))
    table = {arm: scores(records, membership, leak * ARM_LEAK[arm], seed + i) for i, arm in enumerate(arms)}
    pools = {arm: attack_rows("lira-online", arm, membership, table[arm], records.subset) for arm in arms}
    effects = [
        row
        for reference, matched in (("none", "epochs"), ("none+fit", "fit"))
        if reference in arms and "batch" in arms
        for row in effect_rows(pools, reference, "recipe", matched)
    ]
    main = table[arms[0]]
    inside, outside = _means(main, membership), _means(main, ~membership)
    frame = records.to_frame("record")[["id", "label", "subset", "subset_source"]].assign(
        member=pd.array([None] * len(records), dtype="boolean"),
        phi=inside,
        **{"lira-online_out": outside, "lira-online_in": inside},
        vulnerability=norm.cdf((inside - outside) / np.sqrt(2)),
        memorization=np.clip(inside - outside, 0, 1),
        false_positive_rate=false_positive_rates(inside, main[~membership]),
    )
    curves: dict = {}
    for arm in arms:
        curves |= _curves(arm, membership, table[arm], records.subset)
    bands = {key: _band(fpr, tpr) for key, (fpr, tpr) in curves.items() if key[1] == "all"}
    return AuditResult(
        kind="pool",
        created=CREATED,
        software=SOFTWARE,
        headline=_headline(pools[arms[0]]),
        target=None,
        pool=_pool_info(records, n, arms),
        attacks=tuple(row for arm in arms for row in pools[arm]),
        layers=layers(),
        effect=tuple(effects),
        warnings=("2 records have an exact duplicate on the other side of a split",),
        records=frame,
        curves=curves,
        bands=bands,
        cells={arm: (membership.ravel(), table[arm].ravel()) for arm in arms},
        arms=_arm_summaries(pools),
    )


def _band(fpr: np.ndarray, tpr: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    levels = np.array([0.001, 0.003, 0.01, 0.03, 0.1, 0.3])
    at = np.array([tpr[fpr <= level].max() for level in levels])
    return levels, 0.85 * at, np.minimum(1.15 * at, 1)


def _means(score: np.ndarray, where: np.ndarray) -> np.ndarray:
    return (score * where).sum(axis=0) / where.sum(axis=0)


def _pool_info(records: Records, n: int, arms: tuple[str, ...] = tuple(ARM_LEAK)) -> PoolInfo:
    counts = {name: int((records.subset == name).sum()) for name in ("clean", "mislabeled", "ood")}
    return PoolInfo("pool", "c0ffee" * 10 + "abcd", n, arms, len(records), counts)


def _arm_summaries(pools: dict[str, tuple[AttackRow, ...]]) -> tuple[ArmSummary, ...]:
    accuracy = {"batch": 0.874, "none": 0.861, "none+fit": 0.868, "batch+penalty(1)": 0.871, "group+dp(8)": 0.702}
    return tuple(
        ArmSummary(
            arm, True, accuracy[arm], min(1.0, accuracy[arm] + 0.1), rows[0].auc, rows[0].auc_ci, rows[0].tpr_at_fpr
        )
        for arm, rows in pools.items()
    )


def study(name: str = "leakage") -> StudyResult:
    """A study with one verdict of each kind and one figure."""
    from mia_audit.report.figures import canvas

    figure, axes = canvas()
    axes.plot([1, 5, 10, 20], [0.2, 0.7, 0.9, 0.95], label="batch")
    axes.plot([1, 5, 10, 20], [0.1, 0.2, 0.3, 0.35], label="none")
    axes.set(xlabel="epoch", ylabel="share of mislabeled members fitted")
    axes.legend()
    return StudyResult(
        name=name,
        summary="With BatchNorm outliers are fitted faster and further.",
        created=CREATED,
        software=SOFTWARE,
        rows=(
            StudyRow("outliers are fitted further", "batch", "mislabeled", "accuracy", 20, 0.95, (0.93, 0.97), "holds"),
            StudyRow("clean records leak more", "batch", "clean", "auc", 20, 0.52, (0.49, 0.55), "not resolved"),
            StudyRow("gradients are smaller", "batch", "ood", "gradient norm", 20, 3.5, None, "does not hold"),
            StudyRow("epochs until 90 % are fitted", "none", "ood", "epochs", None, None, None, None),
        ),
        figures=(StudyFigure("Outliers fitted over epochs", "Share fitted, by arm: batch rises above none.", figure),),
        settings={"n": 16, "arch": "lenet", "recipe": {"epochs": 20, "lr": 0.02}},
        warnings=("the interval of ood rests on 8 models",),
    )
