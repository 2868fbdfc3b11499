"""The delete-a-pair jackknife of a pool."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from mia_audit.attacks import pool_scores
from mia_audit.metrics import METRICS, jackknife_interval, jackknife_pool, roc
from shadow_pool.membership import draw_membership

RECORDS = 60
SUBSETS = {"all": np.ones(RECORDS, dtype=bool), "few": np.arange(RECORDS) < 7, "none": np.zeros(RECORDS, dtype=bool)}


def draw(seed: int, models: int, shift: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    membership = draw_membership(seed, models, RECORDS)
    return rng.normal(0, 2, RECORDS) + shift * membership + rng.standard_normal((models, RECORDS)), membership


@pytest.mark.parametrize("attack", ["lira-online", "rmia"])
def test_replicates_are_the_pool_without_each_pair(attack):
    phi, membership = draw(0, 10)
    population = np.random.default_rng(1).standard_normal((10, 40))
    found = jackknife_pool(attack, phi, membership, SUBSETS, population_phi=population)
    assert (found.subsets, found.metrics) == (tuple(SUBSETS), METRICS)
    assert found.replicates.shape == (5, 3, 5)
    everyone = np.arange(10)
    for pair, values in [(None, found.estimate), *enumerate(found.replicates)]:
        keep = everyone if pair is None else everyone[everyone // 2 != pair]
        scores = pool_scores(attack, phi[keep], membership[keep], population_phi=population[keep])
        for name, row in zip(SUBSETS, values, strict=True):
            if name == "none":
                assert np.isnan(row).all()
                continue
            curve = roc(membership[keep][:, SUBSETS[name]], scores[:, SUBSETS[name]])
            tprs = [curve.tpr_at(fpr) for fpr in (0.1, 0.01, 0.001)]
            np.testing.assert_allclose(row, [curve.auc, *tprs, curve.balanced_accuracy], atol=1e-12)
    np.testing.assert_array_equal(found.scores, pool_scores(attack, phi, membership, population_phi=population))
    assert found.records.tolist() == [60, 7, 0]


def test_the_interval_is_students():
    replicates = np.array([[0.61], [0.64], [0.60], [0.66]])
    low, high = jackknife_interval(np.array([0.63]), replicates)
    half = stats.t.ppf(0.975, 3) * np.sqrt(3 / 4 * ((replicates - replicates.mean()) ** 2).sum())
    assert (low[0], high[0]) == pytest.approx((0.63 - half, 0.63 + half), abs=1e-12)
    assert np.isnan(jackknife_interval(np.array([0.63]), replicates[:1])).all()


def test_of_a_mean_it_is_the_textbook_interval():
    values = np.random.default_rng(0).standard_normal(12)
    replicates = (values.sum() - values) / 11
    low, high = jackknife_interval(values.mean(), replicates)
    expected = stats.t.interval(0.95, 11, values.mean(), stats.sem(values))
    assert (low, high) == pytest.approx(expected, abs=1e-12)


def test_paired_arms_are_compared_pair_by_pair():
    (strong, membership), (weak, _) = draw(0, 16, 3.0), draw(0, 16, 1.0)
    one, two = (jackknife_pool("lira-online", phi, membership, SUBSETS) for phi in (strong, weak))
    difference, low, high = one.minus(two)
    np.testing.assert_allclose(difference, one.estimate - two.estimate)
    assert low[0, 0] > 0
    assert (low[0] <= difference[0]).all()
    assert (difference[0] <= high[0]).all()
    # The arms share membership and noise: their difference is known better than if they were independent.
    (one_low, one_high), (two_low, two_high) = one.interval(), two.interval()
    apart = np.hypot(one_high - one_low, two_high - two_low)
    assert (high - low)[0, 0] < apart[0, 0]
    same, none_low, none_high = one.minus(one)
    assert (same[:2] == 0).all()
    assert np.isnan(none_low[:2]).all()
    assert np.isnan(none_high[:2]).all()
    with pytest.raises(ValueError, match="arms must share"):
        one.minus(jackknife_pool("lira-online", *draw(0, 10), SUBSETS))


def test_no_spread_among_replicates_is_not_certainty():
    rng = np.random.default_rng(0)
    membership = draw_membership(0, 12, RECORDS)
    phi = 1000.0 * membership + rng.standard_normal((12, RECORDS))
    found = jackknife_pool("lira-online", phi, membership, SUBSETS)
    low, high = found.interval()
    assert (found.replicates[:, :2] == 1).all()
    assert low[0, 0] == pytest.approx(0.025 ** (1 / 60))
    assert low[1, 0] == pytest.approx(0.025 ** (1 / 7))
    assert (high[:2] == 1).all()


def test_constant_scores_have_no_interval():
    membership = draw_membership(0, 12, RECORDS)
    found = jackknife_pool("loss", np.zeros((12, RECORDS)), membership, SUBSETS, metrics=("auc", "tpr@0.1"))
    assert found.estimate[0].tolist() == [0.5, 0.0]
    low, high = found.interval()
    assert np.isnan(low[0, 0])
    assert np.isnan(high[0, 0])
    assert (low[0, 1], high[0, 1]) == pytest.approx((0.0, 1 - 0.025 ** (1 / RECORDS)))


def test_a_pool_too_small_to_lose_a_pair_has_no_interval():
    found = jackknife_pool("lira-online", *draw(0, 6), SUBSETS)
    assert np.isfinite(found.estimate[:2]).all()
    assert np.isnan(found.replicates).all()
    assert np.isnan(found.interval()).all()


def test_records_without_a_score_are_left_out():
    phi, membership = draw(3, 12)
    membership[::2, 3], membership[1::2, 3] = True, False
    membership[0, 3], membership[1, 3] = False, True
    found = jackknife_pool("lira-online", phi, membership, SUBSETS)  # record 3 has one out-value in the even models
    assert np.isfinite(found.estimate[0]).all()
    small = jackknife_pool("lira-online", *draw(0, 4), SUBSETS)
    assert np.isnan(small.scores).all()
    assert np.isnan(small.estimate).all()
    assert small.records.tolist() == [0, 0, 0]


def test_unknown_metrics_are_refused():
    with pytest.raises(ValueError, match="metric must be"):
        jackknife_pool("loss", *draw(0, 8), SUBSETS, metrics=("auc", "f1"))
