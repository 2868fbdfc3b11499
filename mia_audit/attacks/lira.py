"""LiRA, the likelihood-ratio attack (Carlini et al. 2022, arXiv 2112.03570, algorithm 1 and section VI).

How likely is a record's phi under the target if models like it trained on the record (in), and if not (out)? The
shadow models say what both look like.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mia_audit.attacks.shadows import Shadows, check_choice, target_values
from mia_audit.attacks.sides import Side, Totals, totals
from mia_audit.attacks.spreads import SPREADS, densities

MODES = ("online", "offline")
CENTRES = ("mean", "median")
TAILS = ("upper", "two-sided")
_CELLS = 2**17  # phi values of one side that are judged at once: 1 MB, so that intermediates stay in a cache


def lira(
    target_phi: Any,
    shadow_phi: Any,
    membership: np.ndarray,
    *,
    mode: str = "online",
    spread: str = "moderated",
    centre: str = "mean",
    tail: str = "upper",
) -> np.ndarray:
    """LiRA score of every record for one target; higher is more likely a member.

    Args:
        target_phi: [N] or [N, Q], phi of N records under the target, for Q queries each.
        shadow_phi: [M, N] or [M, N, Q], the same under M shadow models; an array or anything that slices like one.
        membership: bool [M, N], which shadow trained on which record.
        mode: ``online``: mean over queries of log f(phi; in) - log f(phi; out). ``offline``: the out side alone,
            in-values are not needed.
        spread: how the variance of phi is estimated. ``moderated`` (default): per record, shrunk toward what all
            records share, Student-t. ``shrunk``: the same, and the shift from out to in is shrunk as well, toward
            what records of its level share; more power with few models (offline: as ``moderated``). ``record``: per
            record. ``pooled``: one for all records, in and out apart. ``pooled-in``: one of all in-values about their
            common mean (offline: of all out-values), the fixed variance of the published script, for comparison
            with published numbers.
        centre: ``mean`` or ``median`` (for comparison with published numbers).
        tail: offline only. ``upper``: -log P(Z > phi). ``two-sided``: -log f(phi; out), the published script's.

    Returns:
        float64 [N]. NaN where a side that is needed has fewer than two values. 0 where a side has no spread to
        judge by: all its values of a record equal under ``record``, all values of each record equal otherwise.

    Raises:
        ValueError: phi is not finite, shapes do not fit, or an option is unknown.
    """
    _check(mode, spread, centre, tail)
    target, shadows = target_values(target_phi), Shadows(shadow_phi, membership)
    shadows.check_target(target)
    parts = totals(shadows, inside=mode == "online", median=centre == "median")
    return _score(target[None, None], [part.whole() for part in parts], spread, centre, tail)[0, 0]


def lira_pool(
    phi: Any,
    membership: np.ndarray,
    *,
    leave_out: str = "pair",
    mode: str = "online",
    spread: str = "moderated",
    centre: str = "mean",
    tail: str = "upper",
) -> np.ndarray:
    """LiRA scores with every model of a pool in turn as the target, judged by the models that remain.

    ``leave_out="pair"`` takes the target's complementary partner out with it: then a record has as many in-values as
    out-values left whether or not the target trained on it. Leaving out the target alone gives its membership
    away through these counts; ``"one"`` exists for models whose membership was drawn otherwise.

    Args:
        phi: [M, N] or [M, N, Q].
        membership: bool [M, N]; under ``"pair"`` row 2j+1 is the complement of row 2j.
        mode, spread, centre, tail: as :func:`lira`.

    Returns:
        float64 [M, N]: what :func:`lira` gives for model i with the remaining models as shadows, for all i at the
        cost of a few passes over phi.

    Raises:
        ValueError: as :func:`lira`; or rows are not paired under ``"pair"``.
    """
    _check(mode, spread, centre, tail)
    shadows = Shadows(phi, membership)
    groups = shadows.groups(leave_out)
    parts = totals(shadows, inside=mode == "online", median=centre == "median")
    scores = np.empty((shadows.models, shadows.records))
    # Many groups at once, since a step over one group of few records costs more than its numbers do.
    at_once = max(1, _CELLS // max(1, shadows.records * shadows.queries))
    for start in range(0, len(groups), at_once):
        models = groups[start : start + at_once]
        targets = np.stack([np.stack([shadows.row(model) for model in column]) for column in models.T])
        sides = [_sides_without(part, shadows, models, targets) for part in parts]
        scores[models.T] = _score(targets, sides, spread, centre, tail)
    return scores


def _sides_without(part: Totals, shadows: Shadows, models: np.ndarray, targets: np.ndarray) -> Side:
    """The side without each group of ``models`` [G, 1 or 2], whose phi is ``targets`` [1 or 2, G, N, Q]."""
    on_side = (shadows.membership[models[:, 0]] == part.inside)[..., None]
    if len(targets) == 1:
        return part.without(models, targets[0], on_side)
    # Of a complementary pair exactly one model is on this side of a record.
    return part.without(models, np.where(on_side, targets[0], targets[1]), None)


def _score(targets: np.ndarray, sides: Sequence[Side], spread: str, centre: str, tail: str) -> np.ndarray:
    """[T, G, N] from targets [T, G, N, Q] and the sides they are judged by: (in, out), or (out,) offline."""
    found = densities(sides, spread, centre)
    if len(found) == 2:
        score = found[0].log_pdf(targets) - found[1].log_pdf(targets)
    elif tail == "upper":
        score = -found[0].log_sf(targets)
    else:
        score = -found[0].log_pdf(targets)
    for density in found:
        proper = density.proper
        if not proper.all():
            score = np.where(proper, score, 0.0)
    score = score.mean(axis=-1)
    for side in sides:
        if not side.enough.all():
            score = np.where(side.enough[..., 0], score, np.nan)
    return score


def _check(mode: str, spread: str, centre: str, tail: str) -> None:
    check_choice("mode", mode, MODES)
    check_choice("spread", spread, tuple(SPREADS))
    check_choice("centre", centre, CENTRES)
    check_choice("tail", tail, TAILS)
