"""Slow, obvious oracles that tests compare the library with. Nothing here is shared with the code under test."""

from __future__ import annotations

import numpy as np
from scipy import optimize, special, stats

# --- attacks and statistics: every formula as it stands on paper, one record at a time ---------------------------


def side_density(
    values: np.ndarray, everyone: list[np.ndarray], spread: str, centre: str
) -> tuple[float, float, float] | None:
    """(degrees of freedom, location, scale) of one record's values on one side; None where they have no spread.

    ``everyone``: the values of every (record, query) that a shared spread is taken from, each at least two.
    """
    middle = np.mean if centre == "mean" else np.median
    location = float(middle(values))
    if spread == "record":
        scale = np.std(values) if np.ptp(values) > 0 else 0.0
    elif spread == "pooled":
        scale = np.std(np.concatenate([v - middle(v) for v in everyone]))
    elif spread == "pooled-in":
        scale = np.std(np.concatenate(everyone))
    else:
        prior = moderated_prior(everyone)
        if prior is None:
            return None
        freedom, variance = moderated_variance(values, prior)
        return freedom, location, float(np.sqrt(variance * (1 + 1 / len(values))))
    return (np.inf, location, float(scale)) if scale > 0 else None


def variance_of(values: np.ndarray) -> float:
    """Sample variance, exactly 0 of equal values."""
    return float(np.var(values, ddof=1)) if np.ptp(values) > 0 else 0.0


def moderated_prior(everyone: list[np.ndarray]) -> tuple[float, float, float] | None:
    """(floor of variances, d0, s0^2) over all records; None where all are constant."""
    variances = [variance_of(v) for v in everyone]
    if not any(variances):
        return None
    floor = 0.01 * (np.median(variances) or np.median([v for v in variances if v > 0]))
    degrees = np.array([len(v) - 1 for v in everyone])
    return (float(floor), *smyth_prior(np.maximum(variances, floor), degrees))


def moderated_variance(values: np.ndarray, prior: tuple[float, float, float]) -> tuple[float, float]:
    """(degrees of freedom, variance) of one record, shrunk toward the prior."""
    floor, prior_degrees, prior_variance = prior
    if prior_degrees == np.inf:
        return np.inf, prior_variance
    own = len(values) - 1
    total = prior_degrees + own
    return total, (prior_degrees * prior_variance + own * max(variance_of(values), floor)) / total


def shrunk_densities(
    inside: list[np.ndarray], outside: list[np.ndarray], centre: str
) -> list[tuple[tuple[float, float, float], tuple[float, float, float]]]:
    """(in, out) densities of every cell under "shrunk", each posterior from its two by two linear system."""
    middle = np.mean if centre == "mean" else np.median
    sides = []
    for values in (inside, outside):
        prior = moderated_prior(values)
        assert prior is not None
        freedoms, variances = np.array([moderated_variance(v, prior) for v in values]).T
        sides.append((freedoms, np.array([middle(v) for v in values]), variances, variances / [len(v) for v in values]))
    (freedom_in, y_in, v_in, b), (freedom_out, y_out, v_out, a) = sides
    level, shift = (y_in + y_out) / 2, y_in - y_out
    bins = np.array_split(np.argsort(level, kind="stable"), min(25, max(1, len(level) // 40)))
    at, mean_at = [level[i].mean() for i in bins], [shift[i].mean() for i in bins]
    deviation = shift - np.interp(level, at, mean_at)
    spread_at = [max((deviation[i] ** 2).sum() / max(len(i) - 1, 1) - (a + b)[i].mean(), 0.0) for i in bins]
    found = []
    for r in range(len(level)):
        m, t = np.interp(level[r], at, mean_at), max(np.interp(level[r], at, spread_at), 1e-13)
        # Unknown: the out-mean (flat prior) and the shift (normal, mean m, variance t).
        precision = np.array([[1 / a[r] + 1 / b[r], 1 / b[r]], [1 / b[r], 1 / b[r] + 1 / t]])
        covariance = np.linalg.inv(precision)
        mu_out, delta = covariance @ [y_out[r] / a[r] + y_in[r] / b[r], y_in[r] / b[r] + m / t]
        var_out, var_in = covariance[0, 0], covariance.sum()
        density_in = (freedom_in[r], float(mu_out + delta), float(np.sqrt(v_in[r] + var_in)))
        found.append((density_in, (freedom_out[r], float(mu_out), float(np.sqrt(v_out[r] + var_out)))))
    return found


def log_survival(x: float, freedom: float, location: float, scale: float) -> float:
    """log P(Z > x)."""
    if np.isinf(freedom):
        return float(stats.norm.logsf(x, location, scale))
    return float(stats.t.logsf(x, freedom, location, scale))


def smyth_prior(variances: np.ndarray, degrees: np.ndarray) -> tuple[float, float]:
    """(d0, s0^2) by moments of log variance (Smyth 2004, section 6.2), trigamma inverted by bisection."""
    e = np.log(variances) - special.digamma(degrees / 2) + np.log(degrees / 2)
    between = np.var(e, ddof=1) - np.mean(special.polygamma(1, degrees / 2)) if len(e) > 1 else 0.0
    if between <= 0:
        return np.inf, float(np.exp(np.mean(e)))
    half = optimize.brentq(lambda log_y: special.polygamma(1, np.exp(log_y)) - between, -40, 40, xtol=1e-14)
    half = np.exp(half)
    return 2 * half, float(np.exp(np.mean(e) + special.digamma(half) - np.log(half)))


def lira_reference(
    target: np.ndarray,
    shadows: np.ndarray,
    membership: np.ndarray,
    mode: str = "online",
    spread: str = "moderated",
    centre: str = "mean",
    tail: str = "upper",
) -> np.ndarray:
    """LiRA of one target [N, Q] by shadows [M, N, Q], record by record and query by query."""
    records, queries = target.shape
    cells = [(r, q) for r in range(records) for q in range(queries)]
    inside = {(r, q): shadows[membership[:, r], r, q] for r, q in cells}
    outside = {(r, q): shadows[~membership[:, r], r, q] for r, q in cells}
    scores = np.full(records, np.nan)
    for r in range(records):
        needed = [inside, outside] if mode == "online" else [outside]
        if any(len(side[r, 0]) < 2 for side in needed):
            continue
        per_query = []
        for q in range(queries):
            found = []
            for side in needed:
                shared = needed[0] if spread == "pooled-in" else side
                everyone = [v for v in shared.values() if len(v) >= 2]
                found.append(side_density(side[r, q], everyone, spread, centre))
            if any(density is None for density in found):
                per_query.append(0.0)
            elif mode == "online":
                per_query.append(stats.t.logpdf(target[r, q], *found[0]) - stats.t.logpdf(target[r, q], *found[1]))
            elif tail == "upper":
                per_query.append(-log_survival(target[r, q], *found[0]))
            else:
                per_query.append(-stats.t.logpdf(target[r, q], *found[0]))
        scores[r] = np.mean(per_query)
    return scores


def rmia_reference(
    target: np.ndarray,
    shadows: np.ndarray,
    membership: np.ndarray,
    population_target: np.ndarray,
    population_shadows: np.ndarray,
    gamma: float = 1.0,
    mode: str = "online",
    a: float = 1.0,
) -> np.ndarray:
    """RMIA of one target [N, Q], from probabilities themselves, one comparison at a time."""
    scores = np.full(len(target), np.nan)
    for r in range(len(target)):
        inside, outside = membership[:, r], ~membership[:, r]
        if not outside.any() or (mode == "online" and not inside.any()):
            continue
        wins = []
        for q in range(target.shape[1]):
            p_out = special.expit(shadows[outside, r, q]).mean()
            if mode == "online":
                p_x = (special.expit(shadows[inside, r, q]).mean() + p_out) / 2
            else:
                p_x = ((1 + a) * p_out + (1 - a)) / 2
            for z in range(len(population_target)):
                p_z = special.expit(population_shadows[:, z, q]).mean()
                if mode == "offline":
                    p_z = ((1 + a) * p_z + (1 - a)) / 2
                ratio_z = special.expit(population_target[z, q]) / p_z
                wins.append(special.expit(target[r, q]) / p_x / ratio_z > gamma)
        scores[r] = np.mean(wins)
    return scores


def difficulty_reference(target: np.ndarray, shadows: np.ndarray, membership: np.ndarray) -> np.ndarray:
    """The loss against a reference (Watson 2022), record by record."""
    score = lambda phi: -np.logaddexp(0, -phi)  # noqa: E731
    scores = np.full(len(target), np.nan)
    for r in range(len(target)):
        out = ~membership[:, r]
        if out.any():
            scores[r] = np.mean(score(target[r]) - score(shadows[out, r]).mean(axis=0))
    return scores


def without(array: np.ndarray, models: list[int]) -> np.ndarray:
    """An array without some of its rows."""
    return np.delete(array, models, axis=0)


def auc_reference(member: np.ndarray, score: np.ndarray) -> float:
    """P(member scores higher) + P(tie) / 2, pair by pair."""
    wins = [(a > b) + (a == b) / 2 for a in score[member] for b in score[~member]]
    return float(np.mean(wins))


def tpr_reference(member: np.ndarray, score: np.ndarray, fpr: float) -> float:
    """The largest TPR over thresholds whose FPR is at most ``fpr``."""
    best = 0.0
    for threshold in np.unique(score):
        called = score >= threshold
        if np.mean(called[~member]) <= fpr:
            best = max(best, float(np.mean(called[member])))
    return best
