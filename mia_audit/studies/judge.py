"""How studies judge: intervals over pairs of models, and verdicts computed from intervals.

A verdict is about one claim on this data and recipe, at the 95 % level, one claim at a time (no correction for how
many a study makes; each was fixed before the run).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mia_audit.metrics.distributions import TWO_SIDED, student_quantile
from mia_audit.results import Interval
from mia_audit.studies.result import VERDICTS, StudyRow

HOLDS, DOES_NOT_HOLD, NOT_RESOLVED = VERDICTS
OPENINGS = {HOLDS: "Holds", DOES_NOT_HOLD: "Does not hold", NOT_RESOLVED: "Not resolved"}
"""What a summary says before the claims of each verdict."""

SHARE = (0.0, 1.0)
"""What an accuracy or a share can be."""
NAMED_PLACES = 4
"""A claim judged alike in more places than this is summarized by their number."""


def pair_mean(values: np.ndarray, *, within: Interval = (-math.inf, math.inf)) -> tuple[float, Interval | None]:
    """Mean over models and its 95 % interval, Student t over complementary pairs.

    Models 2j and 2j+1 train on opposite halves of one split, so pairs are what is independent.

    Args:
        values: [M], models in whole pairs; a pair with a NaN is left out.
        within: what the mean can be; the interval ends there.
    """
    pairs = values.reshape(-1, 2).mean(axis=1)
    mean, ci = sample_mean(pairs[~np.isnan(pairs)])
    return mean, None if ci is None else (max(ci[0], within[0]), min(ci[1], within[1]))


def sample_mean(values: np.ndarray) -> tuple[float, Interval | None]:
    """Mean of independent values [K] and its 95 % interval (Student t).

    None for fewer than two values, and where all are the same but for rounding or one is not finite: a sample without
    spread does not say how far its mean may lie off.
    """
    count = len(values)
    if not count:
        return math.nan, None
    mean = float(values.mean())
    if not np.isfinite(values).all() or np.ptp(values) <= 1e-12 * np.abs(values).max():
        return mean, None
    half = float(student_quantile(TWO_SIDED, count - 1) * values.std(ddof=1) / np.sqrt(count))
    return mean, (mean - half, mean + half)


def verdict_above(ci: Interval | None, threshold: float) -> str:
    """Whether a value lies above ``threshold``: ``holds`` or ``does not hold`` where its interval is clear of it."""
    if ci is None or not all(math.isfinite(end) for end in ci):
        return NOT_RESOLVED
    if ci[0] > threshold:
        return HOLDS
    return DOES_NOT_HOLD if ci[1] < threshold else NOT_RESOLVED


def verdict_within(ci: Interval | None, low: float, high: float) -> str:
    """Whether a value lies in [low, high]: ``holds`` where its interval does, ``does not hold`` where it misses it."""
    if ci is None or not all(math.isfinite(end) for end in ci):
        return NOT_RESOLVED
    if low <= ci[0] and ci[1] <= high:
        return HOLDS
    return DOES_NOT_HOLD if ci[1] < low or ci[0] > high else NOT_RESOLVED


def summarize(rows: Sequence[StudyRow]) -> str:
    """The verdicts in one sentence: which claims hold, which do not, which are not resolved, and where."""
    claims: dict[str, list[StudyRow]] = {}
    for row in rows:
        if row.verdict is not None:
            claims.setdefault(row.claim, []).append(row)
    parts = []
    for verdict, words in OPENINGS.items():
        found = [f"{claim} ({where})" for claim, judged in claims.items() if (where := _places(judged, verdict))]
        if found:
            parts.append(f"{words}: {'; '.join(found)}.")
    return " ".join(parts) or "No claim could be judged."


def _places(judged: Sequence[StudyRow], verdict: str) -> str:
    """Where one claim was judged so: the places, or how many of all; empty where it was not."""
    varied = [name for name in ("arm", "metric") if len({getattr(row, name) for row in judged}) > 1]
    alike = [_where(row, varied) for row in judged if row.verdict == verdict]
    return f"{len(alike)} of {len(judged)}" if len(alike) > NAMED_PLACES else "; ".join(dict.fromkeys(alike))


def _where(row: StudyRow, varied: Sequence[str]) -> str:
    """The row's place, with those of its arm and metric in which the claim's rows differ."""
    at = "" if row.at is None else f" at {row.at:g}" if isinstance(row.at, (int, float)) else f" at {row.at}"
    arm = f"{row.arm}, " if "arm" in varied else ""
    return f"{arm}{row.subset}{at}{f', {row.metric}' if 'metric' in varied else ''}"
