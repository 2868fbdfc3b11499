"""Vulnerability, memorization and false-positive rates of single records."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import auc_reference

from mia_audit.metrics import false_positive_rate, memorization, vulnerability
from shadow_pool.membership import draw_membership


@given(seed=st.integers(0, 10_000), models=st.integers(2, 9))
@settings(max_examples=40, deadline=None)
def test_vulnerability_is_the_auc_of_a_records_phi(seed, models):
    rng = np.random.default_rng(seed)
    membership = rng.random((models, 12)) < 0.5
    phi = np.round(rng.standard_normal((models, 12)) + membership, 1)  # with ties
    found = vulnerability(phi, membership)
    for r in range(12):
        column = membership[:, r]
        if column.all() or not column.any():
            assert np.isnan(found[r])
        else:
            assert found[r] == pytest.approx(auc_reference(column, phi[:, r]), abs=1e-12)


def test_vulnerability_averages_queries_and_does_not_depend_on_blocks(monkeypatch):
    phi = np.random.default_rng(0).standard_normal((8, 30, 3))
    membership = draw_membership(0, 8, 30)
    expected = vulnerability(phi.mean(axis=2), membership)
    np.testing.assert_array_equal(vulnerability(phi, membership), expected)
    monkeypatch.setattr("mia_audit.attacks.shadows._BLOCK_CELLS", 100)
    np.testing.assert_array_equal(vulnerability(phi, membership), expected)


def test_memorization_is_the_difference_that_training_on_a_record_makes():
    membership = np.array([[1, 1, 0, 1], [1, 0, 1, 1], [0, 1, 0, 1], [0, 0, 1, 1]], dtype=bool)
    correct = np.array([[1, 1, 1, 1], [1, 0, 1, 1], [0, 1, 1, 0], [1, 0, 1, 1]], dtype=bool)
    np.testing.assert_array_equal(memorization(correct, membership), [0.5, 1.0, 0.0, np.nan])
    with pytest.raises(ValueError, match="must be \\[models, records\\]"):
        memorization(correct[:3], membership)


@given(seed=st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_false_positive_rate_counts_non_member_cells_at_or_above(seed):
    rng = np.random.default_rng(seed)
    membership = draw_membership(seed, 6, 10)
    pool, target = rng.integers(-4, 4, (6, 10)).astype(float), rng.integers(-5, 5, 10).astype(float)
    pool[0, :3] = np.nan
    target[4] = np.nan
    cells = pool[~membership]
    cells = cells[~np.isnan(cells)]
    expected = [np.nan if np.isnan(t) else (1 + (cells >= t).sum()) / (1 + len(cells)) for t in target]
    np.testing.assert_allclose(false_positive_rate(target, pool, membership), expected, rtol=1e-12)


def test_false_positive_rates_of_non_members_are_as_often_below_a_as_a():
    rng = np.random.default_rng(0)
    membership = draw_membership(0, 20, 2000)
    rates = false_positive_rate(rng.standard_normal(50_000), rng.standard_normal((20, 2000)), membership)
    for a in (0.1, 0.01, 0.001):
        assert np.mean(rates <= a) == pytest.approx(a, abs=5 * np.sqrt(a / 15_000))


def test_false_positive_rate_needs_the_membership_of_its_cells():
    with pytest.raises(ValueError, match="pool_score and membership must match"):
        false_positive_rate(np.zeros(3), np.zeros((2, 3)), np.zeros((2, 4), dtype=bool))
