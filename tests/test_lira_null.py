"""Pure noise must look like pure noise, whatever the number of models and the spread."""

from __future__ import annotations

import numpy as np
import pytest

from mia_audit.attacks import pool_scores
from mia_audit.attacks.registry import ATTACKS
from mia_audit.attacks.spreads import SPREADS
from mia_audit.metrics import roc
from shadow_pool.membership import draw_membership


def null(
    models: int, records: int, draws: int, attack: str, spread: str, leave_out: str = "pair"
) -> tuple[float, float]:
    """Mean AUC and mean TPR at 1 % over draws of phi that know nothing of membership."""
    found = []
    for seed in range(draws):
        rng = np.random.default_rng([seed, models])
        membership = draw_membership(seed, models, records)
        phi = rng.normal(0, 3, records) + rng.gamma(2, 1, records) * rng.standard_normal((models, records))
        population = rng.standard_normal((models, 200))
        scores = pool_scores(attack, phi, membership, population_phi=population, spread=spread, leave_out=leave_out)
        curve = roc(membership, scores)
        found.append((curve.auc, curve.tpr_at(0.01)))
    auc, tpr = np.mean(found, axis=0)
    return float(auc), float(tpr)


@pytest.mark.parametrize("spread", SPREADS)
def test_lira_is_null_on_noise(spread):
    auc, tpr = null(8, 1000, 24, "lira-online", spread)
    assert abs(auc - 0.5) < 0.004
    assert abs(tpr - 0.01) < 0.002


@pytest.mark.parametrize("attack", sorted(set(ATTACKS) - {"lira-online"}))
def test_other_attacks_are_null_on_noise(attack):
    auc, tpr = null(8, 1000, 24, attack, "moderated")
    assert abs(auc - 0.5) < 0.004
    assert tpr < 0.0125


def test_leaving_out_the_target_alone_is_biased_on_a_balanced_design():
    auc, _ = null(8, 1000, 8, "lira-online", "moderated", leave_out="one")
    assert auc < 0.48


@pytest.mark.slow
@pytest.mark.parametrize("models", [8, 16, 32])
@pytest.mark.parametrize("spread", SPREADS)
def test_lira_is_null_on_much_noise(spread, models):
    auc, tpr = null(models, 2000, 1600 // models, "lira-online", spread)
    assert abs(auc - 0.5) < 0.003
    assert abs(tpr - 0.01) < 0.002
