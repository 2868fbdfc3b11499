"""Intervals of one target: closed forms, coverage by simulation, and the edges where formulas give out."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from mia_audit.metrics import auc_delong, clopper_pearson, resolved, roc, tpr_interval


def binormal(seed: int, members: int, nonmembers: int, mu: float) -> tuple[np.ndarray, np.ndarray]:
    member = np.arange(members + nonmembers) < members
    return member, np.random.default_rng(seed).standard_normal(member.size) + mu * member


def test_clopper_pearson_agrees_with_scipy():
    for successes, trials in ((0, 10), (3, 10), (10, 10), (7, 400)):
        expected = stats.binomtest(successes, trials).proportion_ci(0.95, "exact")
        assert clopper_pearson(successes, trials) == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert clopper_pearson(0, 0) == (0.0, 1.0)
    with pytest.raises(ValueError, match="successes must be in"):
        clopper_pearson(5, 4)


def test_delong_agrees_with_the_variance_of_placements():
    member, score = binormal(0, 60, 90, 1.0)
    score = np.round(score, 1)  # with ties
    above = np.array([((s > score[~member]) + (s == score[~member]) / 2).mean() for s in score[member]])
    below = np.array([((s < score[member]) + (s == score[member]) / 2).mean() for s in score[~member]])
    half = stats.norm.ppf(0.975) * np.sqrt(above.var(ddof=1) / 60 + below.var(ddof=1) / 90)
    auc = roc(member, score).auc
    assert auc_delong(member, score) == pytest.approx((auc - half, auc + half), abs=1e-12)


def test_full_separation_is_not_certainty():
    member = np.repeat([True, False], [30, 50])
    low, high = auc_delong(member, member.astype(float))
    assert (low, high) == clopper_pearson(30, 30)
    assert 0.8 < low < 0.95
    assert auc_delong(member, -member.astype(float)) == clopper_pearson(0, 30)
    assert auc_delong(np.array([True, False, False]), np.arange(3.0)) == (0.0, 1.0)


@pytest.mark.parametrize(("size", "mu"), [(750, 0.5), (750, 2.0), (1500, 1.0)])
def test_coverage_on_binormal_scores(size, mu):
    fprs = (0.1, 0.01, 0.001)
    truth = np.array([stats.norm.cdf(mu / np.sqrt(2)), *stats.norm.cdf(mu + stats.norm.ppf(fprs))])
    held, repeats = np.zeros(4), 150
    for seed in range(repeats):
        member, score = binormal(seed, size, size, mu)
        found = np.array([auc_delong(member, score), *(tpr_interval(member, score, fpr, seed) for fpr in fprs)])
        held += (found[:, 0] <= truth) & (truth <= found[:, 1])
    assert (held / repeats >= 0.9).all(), held / repeats
    assert (held[:2] < repeats).all()  # an interval that always holds says too little


@pytest.mark.parametrize("fpr", [0.1, 0.01, 0.001])
@pytest.mark.parametrize("mu", [-8.0, 0.0, 2.0, 8.0])
def test_a_tpr_interval_holds_the_estimate_and_has_width(fpr, mu):
    member, score = binormal(1, 300, 400, mu)
    low, high = tpr_interval(member, score, fpr, seed=0)
    assert 0 <= low <= roc(member, score).tpr_at(fpr) <= high <= 1
    assert low < high


def test_only_resolved_rates_are_bootstrapped():
    member, score = binormal(2, 500, 500, 1.0)
    assert resolved(0.01, 500)
    assert not resolved(0.01, 499)
    assert tpr_interval(member, score, 0.01, seed=0) != tpr_interval(member, score, 0.01, seed=1)
    assert tpr_interval(member, score, 0.01, seed=0) == tpr_interval(member, score, 0.01, seed=0)
    assert tpr_interval(member, score, 0.009, seed=0) == tpr_interval(member, score, 0.009, seed=1)


def test_the_conservative_interval_joins_two_of_97_5_percent():
    member, score = binormal(3, 200, 100, 1.0)
    nonmembers = np.sort(score[~member])[::-1]
    fewest, most = stats.binom.ppf([0.0125, 0.9875], 100, 0.02).astype(int)
    assert fewest == 0
    above = int((score[member] > nonmembers[most]).sum())
    expected = (0.0, stats.binomtest(above, 200).proportion_ci(0.975, "exact").high)
    assert tpr_interval(member, score, 0.02, seed=0) == pytest.approx(expected, abs=1e-12)


def test_scores_of_few_records_are_taken_and_bad_ones_refused():
    assert tpr_interval(np.array([True, False]), np.array([1.0, 0.0]), 0.01, seed=0) == (0.0, 1.0)
    with pytest.raises(ValueError, match="fpr must be in"):
        tpr_interval(np.array([True, False]), np.array([1.0, 0.0]), 0.0, seed=0)
    with pytest.raises(ValueError, match="NaN"):
        auc_delong(np.array([True, False]), np.array([1.0, np.nan]))
