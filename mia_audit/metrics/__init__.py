"""Statistics: scores and membership in, curves, rates and intervals out."""

from mia_audit.metrics.epsilon import choose_guesses, epsilon_lower, one_run_epsilon
from mia_audit.metrics.intervals import auc_delong, clopper_pearson, resolved, tpr_interval
from mia_audit.metrics.jackknife import METRICS, Jackknife, jackknife_interval, jackknife_pool
from mia_audit.metrics.records import false_positive_rate, memorization, vulnerability
from mia_audit.metrics.roc import Roc, roc

__all__ = [
    "METRICS",
    "Jackknife",
    "Roc",
    "auc_delong",
    "choose_guesses",
    "clopper_pearson",
    "epsilon_lower",
    "false_positive_rate",
    "jackknife_interval",
    "jackknife_pool",
    "memorization",
    "one_run_epsilon",
    "resolved",
    "roc",
    "tpr_interval",
    "vulnerability",
]
