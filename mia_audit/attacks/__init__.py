"""Attacks: phi in, scores out; higher is always more likely a member."""

from mia_audit.attacks.baselines import loss, loss_pool, reference, reference_pool
from mia_audit.attacks.lira import lira, lira_pool
from mia_audit.attacks.registry import (
    ATTACKS,
    NEEDS_IN_SHADOWS,
    NEEDS_POPULATION,
    pool_scores,
    target_scores,
)
from mia_audit.attacks.rmia import rmia, rmia_pool

__all__ = [
    "ATTACKS",
    "NEEDS_IN_SHADOWS",
    "NEEDS_POPULATION",
    "lira",
    "lira_pool",
    "loss",
    "loss_pool",
    "pool_scores",
    "reference",
    "reference_pool",
    "rmia",
    "rmia_pool",
    "target_scores",
]
