"""The loss and reference attacks, and the one way to run every attack."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import difficulty_reference, without

from mia_audit import results
from mia_audit.attacks import (
    NEEDS_IN_SHADOWS,
    NEEDS_POPULATION,
    lira,
    loss,
    loss_pool,
    pool_scores,
    reference,
    reference_pool,
    rmia,
    target_scores,
)
from mia_audit.attacks.registry import SPREAD
from shadow_pool.membership import draw_membership


def draw(seed: int, models: int, queries: int = 1, *, paired: bool = True) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    membership = draw_membership(seed, models, 8) if paired else rng.random((models, 8)) < 0.5
    return rng.normal(0, 3, (8, 1)) + 2 * membership[..., None] + rng.standard_normal((models, 8, queries)), membership


def test_loss_is_minus_the_cross_entropy():
    phi = np.array([[-800.0, 0.0], [3.0, 3.0], [60.0, 60.0]])
    expected = [-(800 + np.log(2)) / 2, -np.log1p(np.exp(-3)), -np.exp(-60)]
    np.testing.assert_allclose(loss(phi), expected, rtol=1e-12)
    np.testing.assert_allclose(loss(phi[:, 0]), -np.logaddexp(0, -phi[:, 0]), rtol=1e-12)
    np.testing.assert_array_equal(loss_pool(np.stack([phi, phi + 1])), [loss(phi), loss(phi + 1)])


@given(seed=st.integers(0, 10_000), models=st.integers(1, 7), queries=st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_reference_agrees_with_the_formula(seed, models, queries):
    phi, membership = draw(seed, models + 1, queries, paired=False)
    expected = difficulty_reference(phi[0], phi[1:], membership[1:])
    np.testing.assert_allclose(reference(phi[0], phi[1:], membership[1:]), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("leave_out", ["pair", "one"])
@given(seed=st.integers(0, 10_000), pairs=st.integers(2, 4), queries=st.integers(1, 2))
@settings(max_examples=10, deadline=None)
def test_a_reference_pool_is_every_model_in_turn_as_target(leave_out, seed, pairs, queries):
    phi, membership = draw(seed, 2 * pairs, queries, paired=leave_out == "pair")
    phi[1, 3] = -1e12  # left out in its turn without a trace
    found = reference_pool(phi, membership, leave_out=leave_out)
    for i in range(2 * pairs):
        gone = [i, i ^ 1] if leave_out == "pair" else [i]
        expected = difficulty_reference(phi[i], without(phi, gone), without(membership, gone))
        np.testing.assert_allclose(found[i], expected, rtol=1e-10, atol=1e-12)


def test_reference_without_an_out_shadow_is_nan():
    phi, _ = draw(0, 4)
    assert np.isnan(reference(phi[0], phi[1:], np.ones((3, 8), dtype=bool))).all()


def test_every_attack_of_a_result_runs_by_its_name():
    phi, membership = draw(0, 8)
    population = np.random.default_rng(0).standard_normal((8, 30, 1))
    for attack in results.ATTACKS:
        needs = {} if attack not in NEEDS_POPULATION else {"population_phi": population}
        pool = pool_scores(attack, phi, membership, **needs)
        needs = (
            {}
            if not needs
            else {"population_target_phi": population[2], "population_shadow_phi": without(population, [2, 3])}
        )
        target = target_scores(attack, phi[2], without(phi, [2, 3]), without(membership, [2, 3]), **needs)
        np.testing.assert_allclose(pool[2], target, rtol=1e-9, atol=1e-12, err_msg=attack)
        out_only = np.zeros((6, 8), dtype=bool)
        scored = target_scores(attack, phi[2], without(phi, [2, 3]), out_only, **needs)
        assert np.isnan(scored).all() == (attack in NEEDS_IN_SHADOWS), attack


def test_names_lead_to_the_attacks_they_name():
    phi, membership = draw(1, 9, paired=False)
    population = np.random.default_rng(0).standard_normal((9, 30, 1))
    outsiders = {"population_target_phi": population[0], "population_shadow_phi": population[1:]}
    for attack, expected in {
        "lira-online": lira(phi[0], phi[1:], membership[1:], spread=SPREAD),
        "lira-offline": lira(phi[0], phi[1:], membership[1:], mode="offline", spread=SPREAD),
        "rmia": rmia(phi[0], phi[1:], membership[1:], population[0], population[1:]),
        "rmia-offline": rmia(phi[0], phi[1:], membership[1:], population[0], population[1:], mode="offline"),
        "loss": loss(phi[0]),
        "reference": reference(phi[0], phi[1:], membership[1:]),
    }.items():
        found = target_scores(attack, phi[0], phi[1:], membership[1:], **outsiders)
        np.testing.assert_array_equal(found, expected, err_msg=attack)


def test_unknown_attacks_and_missing_populations_are_refused():
    phi, membership = draw(2, 8)
    with pytest.raises(ValueError, match=r"unknown attack 'lira'.*lira-offline.*rmia"):
        pool_scores("lira", phi, membership)
    with pytest.raises(ValueError, match="rmia must have population phi"):
        pool_scores("rmia", phi, membership)
    with pytest.raises(ValueError, match="rmia-offline must have population phi"):
        target_scores("rmia-offline", phi[0], phi, membership, population_target_phi=phi[0])
