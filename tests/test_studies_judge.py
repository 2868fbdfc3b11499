"""Intervals over pairs, verdicts, rank correlation and the sentence that sums a study up."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from mia_audit.metrics import Jackknife
from mia_audit.studies.audits import Difference
from mia_audit.studies.gradients import rank_correlation
from mia_audit.studies.judge import pair_mean, sample_mean, summarize, verdict_above, verdict_within
from mia_audit.studies.result import StudyRow


def test_pair_mean_takes_pairs_as_independent():
    values = np.array([1.0, 3.0, 5.0, 5.0, 0.0, 2.0])
    mean, ci = pair_mean(values)
    expected = stats.t.interval(0.95, 2, loc=8 / 3, scale=stats.sem([2.0, 5.0, 1.0]))
    assert mean == pytest.approx(8 / 3)
    assert ci == pytest.approx(expected)


def test_pair_mean_leaves_out_a_pair_with_nan():
    assert pair_mean(np.array([1.0, np.nan, 2.0, 4.0, 5.0, 5.0])) == pair_mean(np.array([2.0, 4.0, 5.0, 5.0]))


def test_the_interval_of_a_share_ends_at_one():
    values = np.array([1.0, 1.0, 1.0, 1.0, 0.9, 0.9])
    mean, (low, high) = pair_mean(values, within=(0.0, 1.0))
    assert (mean, high) == (pytest.approx(values.mean()), 1.0)
    assert low == pytest.approx(pair_mean(values)[1][0])


def test_pair_mean_covers():
    rng = np.random.default_rng(0)
    # Partners that err in opposite directions, as complementary halves do.
    shared = rng.standard_normal((2000, 6, 1))
    values = 1 + shared * np.array([1.0, -1.0]) + rng.standard_normal((2000, 6, 2))
    hits = [low <= 1 <= high for _, (low, high) in map(pair_mean, values.reshape(2000, 12))]
    assert np.mean(hits) == pytest.approx(0.95, abs=0.02)


def test_too_few_for_an_interval():
    assert sample_mean(np.array([2.0])) == (2.0, None)
    mean, ci = sample_mean(np.empty(0))
    assert math.isnan(mean)
    assert ci is None


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -3.7e9])
@pytest.mark.parametrize("noise", [0.0, 1e-16])
def test_without_spread_there_is_no_interval_and_no_verdict(value: float, noise: float):
    values = value * (1 + noise * np.arange(6))
    for mean, ci in (sample_mean(values), pair_mean(values, within=(-1e10, 1e10))):
        assert mean == pytest.approx(value)
        assert ci is None
        assert verdict_above(ci, value - 1) == "not resolved"


def test_what_is_not_finite_has_no_interval():
    assert sample_mean(np.array([1.0, -np.inf, 2.0])) == (-np.inf, None)


def test_an_excess_without_spread_over_pairs_is_not_resolved():
    estimate = np.array([[0.9, 0.5]])
    spread = 0.01 * np.arange(6)[:, None, None]
    same = np.broadcast_to(estimate, (6, 1, 2))

    def found(change: float, replicates: np.ndarray) -> Jackknife:
        return Jackknife(("all",), ("auc", "tpr@0.01"), np.zeros((12, 9)), np.array([9]), estimate + change, replicates)

    blind = Difference.mostly_fit(found(0.1, same), found(0, same), found(0.1, same), "")
    assert blind.estimate == pytest.approx(0.1)
    assert blind.interval(0, 0) is None
    seen = Difference.mostly_fit(found(0.1, same), found(0, same), found(0.1, same + spread), "")
    assert seen.interval(0, 0) is not None


@given(low=st.floats(-10, 10), width=st.floats(0, 10), threshold=st.floats(-10, 10))
def test_verdict_above(low: float, width: float, threshold: float):
    high = low + width
    verdict = verdict_above((low, high), threshold)
    assert (verdict == "holds") == (low > threshold)
    assert (verdict == "does not hold") == (high < threshold)


def test_verdict_within():
    assert verdict_within((0.03, 0.05), 0.03, 0.05) == "holds"
    assert verdict_within((0.02, 0.04), 0.03, 0.05) == "not resolved"
    assert verdict_within((0.06, 0.07), 0.03, 0.05) == "does not hold"
    assert verdict_within((-0.1, 0.02), 0.03, 0.05) == "does not hold"
    assert verdict_within((0.0, 0.1), 0.03, 0.05) == "not resolved"


@pytest.mark.parametrize("ci", [None, (math.nan, 1.0), (0.5, math.inf)])
def test_without_an_interval_nothing_is_resolved(ci):
    assert verdict_above(ci, 0) == "not resolved"
    assert verdict_within(ci, 0, 1) == "not resolved"


def test_the_summary_names_each_claim_once_with_its_places():
    def row(claim: str, subset: str, at: float | str | None, verdict: str | None) -> StudyRow:
        return StudyRow(claim, "batch", subset, "auc", at, 0.5, (0.4, 0.6), verdict)

    rows = [
        row("more leaks", "ood", 3, "holds"),
        row("more leaks", "clean", "0.05", "holds"),
        row("less fits", "ood", None, "not resolved"),
        row("a number", "ood", None, None),
    ]
    assert summarize(rows) == "Holds: more leaks (ood at 3; clean at 0.05). Not resolved: less fits (ood)."
    other = StudyRow("more leaks", "none", "ood", "auc", 3, 0.5, None, "not resolved")
    assert (
        summarize([rows[0], other]) == "Holds: more leaks (batch, ood at 3). Not resolved: more leaks (none, ood at 3)."
    )
    other = replace(rows[0], metric="tpr", verdict="not resolved")
    assert summarize([rows[0], other]) == "Holds: more leaks (ood at 3, auc). Not resolved: more leaks (ood at 3, tpr)."
    assert summarize(rows[3:]) == "No claim could be judged."
    many = [row("more leaks", "ood", epoch, "holds" if epoch < 6 else "not resolved") for epoch in range(10)]
    assert summarize(many) == (
        "Holds: more leaks (6 of 10). Not resolved: more leaks (ood at 6; ood at 7; ood at 8; ood at 9)."
    )


def test_rank_correlation_is_spearman_with_an_interval_that_covers():
    rng = np.random.default_rng(1)
    rho = 6 / np.pi * np.arcsin(0.6 / 2)  # of a binormal pair with correlation 0.6
    hits = []
    for _ in range(400):
        a, b = rng.multivariate_normal([0, 0], [[1, 0.6], [0.6, 1]], size=200).T
        found, (low, high) = rank_correlation(np.exp(a), b)
        assert found == pytest.approx(stats.spearmanr(a, b).statistic)
        hits.append(low <= rho <= high)
    assert np.mean(hits) == pytest.approx(0.95, abs=0.03)


def test_rank_correlation_of_constants_is_not_a_number():
    found, ci = rank_correlation(np.ones(10), np.arange(10.0))
    assert math.isnan(found)
    assert ci is None
