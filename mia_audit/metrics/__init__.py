"""Statistics: scores and membership in, curves, rates and intervals out."""

from mia_audit.metrics.intervals import auc_delong, clopper_pearson, resolved, tpr_interval
from mia_audit.metrics.jackknife import METRICS, Jackknife, jackknife_interval, jackknife_pool
from mia_audit.metrics.records import false_positive_rate, memorization, vulnerability
from mia_audit.metrics.roc import Roc, roc

__all__ = [
    "METRICS",
    "Jackknife",
    "Roc",
    "auc_delong",
    "clopper_pearson",
    "false_positive_rate",
    "jackknife_interval",
    "jackknife_pool",
    "memorization",
    "resolved",
    "roc",
    "tpr_interval",
    "vulnerability",
]
