"""Comparing two audits: paired by record, honest about chance, and clear about what differs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import examples
import numpy as np
import pandas as pd
import pytest
from scipy import stats

from mia_audit.compare import Comparison, Difference, compare
from mia_audit.results import AttackRow, AuditResult, TprAtFpr
from shadow_pool.data.records import Records
from shadow_pool.errors import UserError


@pytest.fixture(scope="module")
def records() -> Records:
    return examples.digits(600)


def audit(records: Records, member: np.ndarray, score: np.ndarray) -> AuditResult:
    """A target's audit that holds just these scores."""
    base = examples.target_audit(records, leak=0)
    frame = base.records.assign(member=pd.array(member, dtype="boolean"), **{"lira-online": score})
    rows = examples.attack_rows("lira-online", "batch", member, score, records.subset)
    return replace(base, attacks=rows, headline=None, records=frame, effect=())


def written(result: AuditResult, folder: Path) -> Path:
    result.write(folder)
    return folder


def find(comparison: Comparison, subset: str, metric: str) -> Difference:
    return next(d for d in comparison.differences if (d.subset, d.metric) == (subset, metric))


def delong_interval(member: np.ndarray, a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """The textbook's paired DeLong: structural components by the kernel, then the variance of their difference."""
    parts = []
    for score in (a, b):
        kernel = (score[member][:, None] > score[~member]) + 0.5 * (score[member][:, None] == score[~member])
        parts.append((kernel.mean(axis=1), kernel.mean(axis=0), kernel.mean()))
    over_members = np.var(parts[1][0] - parts[0][0], ddof=1) / member.sum()
    over_others = np.var(parts[1][1] - parts[0][1], ddof=1) / (~member).sum()
    half = stats.norm.ppf(0.975) * np.sqrt(over_members + over_others)
    return parts[1][2] - parts[0][2] - half, parts[1][2] - parts[0][2] + half


def test_the_auc_is_paired_as_delong_has_it(records: Records, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    member = rng.random(len(records)) < 0.5
    shared = rng.standard_normal(len(records))
    a = np.round(shared + 0.4 * rng.standard_normal(len(records)) + member, 1)
    b = np.round(shared + 0.4 * rng.standard_normal(len(records)) + 0.5 * member, 1)
    made = compare(
        written(audit(records, member, a), tmp_path / "a"), written(audit(records, member, b), tmp_path / "b")
    )
    row = find(made, "all", "auc")
    assert row.paired
    assert row.ci == pytest.approx(delong_interval(member, a, b), abs=1e-9)
    assert row.difference == pytest.approx(row.b - row.a)
    assert made.shared_records == len(records)


def test_the_order_of_records_does_not_matter(records: Records, tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    member = rng.random(len(records)) < 0.5
    a, b = (rng.standard_normal(len(records)) + size * member for size in (1.0, 0.5))
    second = audit(records, member, b)
    turned = replace(second, records=second.records.iloc[::-1].reset_index(drop=True))
    first = written(audit(records, member, a), tmp_path / "a")
    straight, reversed_ = (compare(first, written(result, tmp_path / "b")) for result in (second, turned))
    assert [d.ci for d in straight.differences] == [d.ci for d in reversed_.differences]


def test_an_audit_does_not_differ_from_itself(records: Records, tmp_path: Path) -> None:
    folder = written(examples.target_audit(records), tmp_path)
    made = compare(folder, folder)
    assert made.differences
    for row in made.differences:
        assert row.difference == 0
        assert row.ci is not None
        assert row.ci[0] <= 0 <= row.ci[1]
    assert find(made, "all", "auc").ci == (0, 0)
    assert made.warnings == ()


def test_disjoint_records_and_other_members_still_give_an_interval(records: Records, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    other = replace(records, id=np.array([f"other-{i}" for i in range(len(records))], dtype=object))
    sides = []
    for name, part in (("a", records), ("b", other)):
        member = rng.random(len(part)) < 0.5
        sides.append(written(audit(part, member, rng.standard_normal(len(part)) + member), tmp_path / name))
    made = compare(*sides)
    assert made.shared_records == 0
    row = find(made, "all", "auc")
    own = [row_.auc_ci for folder in sides for row_ in [read_row(folder)] if row_.auc_ci is not None]
    assert row.ci is not None
    # With nothing shared, the variances add: the interval is wider than either audit's own.
    assert row.ci[1] - row.ci[0] > max(high - low for low, high in own)


def read_row(folder: Path) -> AttackRow:
    from mia_audit.stored import read_audit

    return read_audit(folder).attacks[0]


def test_intervals_of_equal_models_hold_their_level(records: Records, tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    hits = {"auc": 0, "tpr@0.1": 0}
    trials = 40
    records = records.take(np.arange(0, len(records), 3))
    base = audit(records, rng.random(len(records)) < 0.5, rng.standard_normal(len(records)))
    for _ in range(trials):
        member = rng.random(len(records)) < 0.5
        shared = rng.standard_normal(len(records)) + member
        for name in ("a", "b"):
            score = shared + 0.5 * rng.standard_normal(len(records))
            frame = base.records.assign(member=pd.array(member, dtype="boolean"), **{"lira-online": score})
            rows = examples.attack_rows("lira-online", "batch", member, score, records.subset)[:1]
            replace(base, records=frame, attacks=rows).write(tmp_path / name)
        made = compare(tmp_path / "a", tmp_path / "b")
        for metric in hits:
            ci = find(made, "all", metric).ci
            assert ci is not None
            hits[metric] += ci[0] <= 0 <= ci[1]
    # 38 expected; fewer than 33 has a chance below 1 in 500.
    assert min(hits.values()) >= 33


def test_full_separation_is_not_taken_for_certainty(records: Records, tmp_path: Path) -> None:
    member = np.arange(len(records)) % 2 == 0
    a = written(audit(records, member, member + 0.1), tmp_path / "a")
    b = written(audit(records, member, member + np.random.default_rng(0).normal(size=len(records))), tmp_path / "b")
    row = find(compare(a, b), "all", "auc")
    assert row.a == 1
    assert not row.paired
    assert row.ci is not None
    assert row.ci[0] < row.difference < row.ci[1]


def test_unresolved_rates_join_the_audits_own_intervals(records: Records, tmp_path: Path) -> None:
    folder = written(examples.target_audit(records), tmp_path)
    row = find(compare(folder, folder), "all", "tpr@0.001")
    assert not row.resolved
    assert not row.paired


def test_joined_intervals_square_and_add(records: Records, tmp_path: Path) -> None:
    base = examples.pool_audit(records, arms=("batch", "none"))
    point = TprAtFpr(0.01, 0.2, (0.15, 0.3), True)
    one = AttackRow("lira-online", "batch", "all", 100, 100, 0.8, (0.7, 0.84), 0.7, (point,))
    two = replace(one, auc=0.6, auc_ci=(0.57, 0.7))
    a = written(replace(base, attacks=(one,)), tmp_path / "a")
    b = written(replace(base, attacks=(two,)), tmp_path / "b")
    row = find(compare(a, b), "all", "auc")
    assert not row.paired
    assert row.ci == pytest.approx((-0.2 - np.hypot(0.03, 0.04), -0.2 + np.hypot(0.1, 0.1)))


def test_pools_are_compared_arm_by_arm(records: Records, tmp_path: Path) -> None:
    a = written(examples.pool_audit(records, arms=("batch", "none")), tmp_path / "a")
    b = written(examples.pool_audit(records, arms=("batch", "none+fit")), tmp_path / "b")
    assert {d.arms for d in compare(a, b).differences} == {("batch", "batch")}
    c = written(examples.pool_audit(records, arms=("none", "none+fit")), tmp_path / "c")
    d = written(examples.pool_audit(records, arms=("batch", "batch+penalty(1)")), tmp_path / "d")
    assert {row.arms for row in compare(c, d).differences} == {("none", "batch")}


def test_a_target_and_a_pool_are_not_comparable(records: Records, tmp_path: Path) -> None:
    a = written(examples.target_audit(records), tmp_path / "a")
    b = written(examples.pool_audit(records), tmp_path / "b")
    with pytest.raises(UserError, match="both audits must be of targets or both of pools"):
        compare(a, b)


def test_what_else_differs_is_warned_of(records: Records, tmp_path: Path) -> None:
    first = examples.target_audit(records)
    assert first.target is not None
    second = replace(
        first,
        pool=replace(first.pool, fingerprint="0" * 64, n=64),
        target=replace(first.target, query_mode="batch"),
        attacks=(),
        headline=None,
    )
    made = compare(written(first, tmp_path / "a"), written(second, tmp_path / "b"))
    assert made.differences == ()
    for words in ("nothing to compare", "different records", "16 and 64 models", "eval and batch"):
        assert any(words in warning for warning in made.warnings), words


def test_audits_without_a_record_in_common_get_no_verdict(records: Records, tmp_path: Path) -> None:
    base = examples.target_audit(records)
    base.write(tmp_path / "a")
    others = base.records.assign(id=[f"other-{place}" for place in range(len(base.records))])
    replace(base, records=others).write(tmp_path / "b")
    found = compare(tmp_path / "a", tmp_path / "b")
    assert found.shared_records == 0
    assert "share no record" in found.sentence
    assert "clear of zero" not in found.sentence


def test_a_comparison_is_plain_values(records: Records, tmp_path: Path) -> None:
    a = written(examples.target_audit(records), tmp_path / "a")
    b = written(examples.target_audit(records, leak=0.2), tmp_path / "b")
    body = json.loads(json.dumps(compare(a, b).to_dict(), allow_nan=False))
    assert body["kind"] == "comparison"
    assert body["a"]["test_accuracy"] == 0.874
    assert {row["subset"] for row in body["differences"]} == {"all", "clean", "mislabeled", "ood"}
    overall = next(
        row
        for row in body["differences"]
        if (row["attack"], row["subset"], row["metric"]) == ("lira-online", "all", "auc")
    )
    assert overall["difference"] < 0
    assert overall["ci"][1] < 0


def test_the_sentence_names_what_is_resolved_and_clear_of_zero(records: Records, tmp_path: Path) -> None:
    result = examples.target_audit(records)
    folder = written(result, tmp_path / "a")
    same = compare(folder, folder)
    assert same.sentence.startswith("No resolved difference is clear of zero")

    def told(attack: str, subset: str, difference: float, ci: tuple[float, float] | None, resolved: bool) -> Difference:
        return Difference(attack, ("batch", "none"), subset, "auc", 0.5, 0.5, difference, ci, True, resolved)

    found = replace(
        same,
        differences=(
            told("lira-online", "all", -0.2, (-0.3, -0.1), True),
            told("lira-online", "clean", 0.2, (0.1, 0.3), True),
            told("lira-online", "mislabeled", -0.2, (-0.3, -0.1), False),
            told("lira-online", "ood", -0.2, (-0.5, 0.1), True),
            told("loss", "ood", -0.2, (-0.3, -0.1), True),
        ),
    )
    assert found.sentence == "B leaks less in all auc; more in clean auc: their intervals are clear of zero."
    assert replace(same, differences=()).sentence.startswith("No resolved difference")
