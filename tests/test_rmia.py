"""RMIA against its formula and its edge cases."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import rmia_reference, without

from mia_audit.attacks import rmia, rmia_pool
from shadow_pool.membership import draw_membership

VARIANTS = [
    ("online", 1.0, 1.0),
    ("online", 1.0, 2.0),
    ("offline", 1.0, 1.0),
    ("offline", 0.3, 1.0),
    ("offline", 0.0, 1.5),
]


def draw(seed: int, models: int, queries: int, *, paired: bool = True) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """phi [M, 6, Q], membership and population phi [M, 9, Q]."""
    rng = np.random.default_rng(seed)
    membership = draw_membership(seed, models, 6) if paired else rng.random((models, 6)) < 0.5
    phi = rng.normal(0, 2, (6, queries)) + 2 * membership[..., None] + rng.standard_normal((models, 6, queries))
    return phi, membership, rng.normal(0, 2, (9, queries)) + rng.standard_normal((models, 9, queries))


@pytest.mark.parametrize(("mode", "a", "gamma"), VARIANTS)
@given(seed=st.integers(0, 10_000), models=st.integers(1, 7), queries=st.integers(1, 3))
@settings(max_examples=12, deadline=None)
def test_a_target_agrees_with_the_formula(mode, a, gamma, seed, models, queries):
    phi, membership, population = draw(seed, models + 1, queries, paired=False)
    given_arrays = (phi[0], phi[1:], membership[1:], population[0], population[1:])
    found = rmia(*given_arrays, gamma=gamma, mode=mode, a=a)
    np.testing.assert_allclose(found, rmia_reference(*given_arrays, gamma=gamma, mode=mode, a=a), rtol=1e-12)


@pytest.mark.parametrize(("mode", "a", "gamma"), VARIANTS)
@pytest.mark.parametrize("leave_out", ["pair", "one"])
@given(seed=st.integers(0, 10_000), pairs=st.integers(2, 4), queries=st.integers(1, 2))
@settings(max_examples=4, deadline=None)
def test_a_pool_is_every_model_in_turn_as_target(mode, a, gamma, leave_out, seed, pairs, queries):
    phi, membership, population = draw(seed, 2 * pairs, queries, paired=leave_out == "pair")
    found = rmia_pool(phi, membership, population, leave_out=leave_out, gamma=gamma, mode=mode, a=a)
    for i in range(2 * pairs):
        gone = [i, i ^ 1] if leave_out == "pair" else [i]
        shadows, rows = without(phi, gone), without(membership, gone)
        expected = rmia_reference(phi[i], shadows, rows, population[i], without(population, gone), gamma, mode, a)
        np.testing.assert_allclose(found[i], expected, rtol=1e-12)


def test_probabilities_too_small_for_a_float_are_still_compared():
    phi, membership, population = draw(0, 8, 1)
    # Where p = exp(phi), a common factor on every probability leaves all ratios as they are.
    deep, deeper = phi - 50.0, phi - 5000.0
    expected = rmia_pool(deep, membership, population - 50.0)
    assert 0 < expected.mean() < 1
    np.testing.assert_array_equal(rmia_pool(deeper, membership, population - 5000.0), expected)


def test_a_huge_value_left_out_leaves_no_trace():
    phi, membership, population = draw(1, 8, 1)
    phi -= 200.0
    phi[2] = 50.0
    found = rmia_pool(phi, membership, population)
    expected = rmia_reference(
        phi[2], without(phi, [2, 3]), without(membership, [2, 3]), population[2], without(population, [2, 3])
    )
    np.testing.assert_array_equal(found[2], expected)


def test_records_without_a_needed_value_score_nan():
    phi, _, population = draw(2, 4, 1)
    membership = np.ones((3, 6), dtype=bool)
    membership[0, 0] = False
    membership[:, 1] = False
    arrays = (phi[0], phi[1:], membership, population[0], population[1:])
    assert np.isnan(rmia(*arrays)).tolist() == [False, True, True, True, True, True]
    assert np.isnan(rmia(*arrays, mode="offline")).tolist() == [False, False, True, True, True, True]


def test_blocks_of_records_do_not_show(monkeypatch):
    phi, membership, population = draw(3, 8, 2)
    whole = rmia_pool(phi, membership, population)
    monkeypatch.setattr("mia_audit.attacks.shadows._BLOCK_CELLS", 40)
    np.testing.assert_array_equal(rmia_pool(phi, membership, population), whole)


def test_arguments_are_checked():
    phi, membership, population = draw(4, 8, 1)
    with pytest.raises(ValueError, match="complementary pairs"):
        rmia_pool(phi, draw(4, 8, 1, paired=False)[1], population)
    with pytest.raises(ValueError, match="population phi must match phi"):
        rmia_pool(phi, membership, population[:7])
    with pytest.raises(ValueError, match="population must hold at least one record"):
        rmia_pool(phi, membership, population[:, :0])
    with pytest.raises(ValueError, match="population phi must be finite"):
        rmia_pool(phi, membership, np.full_like(population, np.nan))
    with pytest.raises(ValueError, match="gamma must be above 0"):
        rmia_pool(phi, membership, population, gamma=0)
    with pytest.raises(ValueError, match=r"a must be in \[0, 1\]"):
        rmia_pool(phi, membership, population, mode="offline", a=1.5)
    with pytest.raises(ValueError, match="unknown mode"):
        rmia_pool(phi, membership, population, mode="both")
