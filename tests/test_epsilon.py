"""The one-run bound on epsilon: its published value, null data, a mechanism of known epsilon."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import special, stats

from mia_audit.metrics import choose_guesses, epsilon_lower, one_run_epsilon
from mia_audit.metrics.epsilon import p_value

RECORDS = 600


def scores(rng: np.random.Generator, targets: int, mu: float) -> tuple[np.ndarray, np.ndarray]:
    member = rng.random((targets, RECORDS)) < 0.5
    return member, rng.standard_normal((targets, RECORDS)) + mu * member


def test_published_value():
    assert epsilon_lower(86, 132, 132, delta=0.0) == pytest.approx(0.3122, abs=5e-5)


def test_without_delta_it_is_clopper_pearson_on_the_logit_scale():
    for correct, guesses in ((60, 100), (95, 100), (100, 100), (400, 700)):
        low = stats.binomtest(correct, guesses, alternative="greater").proportion_ci(0.95, "exact").low
        assert epsilon_lower(correct, guesses, 1000, delta=0.0) == pytest.approx(special.logit(low), abs=1e-6)


def test_delta_costs_what_the_theorem_says():
    rate = special.expit(1.0)
    tail = [(stats.binom.cdf(29, 40, rate) - stats.binom.cdf(29 - i, 40, rate)) / i for i in range(1, 31)]
    expected = stats.binom.sf(29, 40, rate) + 2 * 500 * 1e-4 * max(tail)
    assert p_value(30, 40, 500, 1.0, 1e-4) == pytest.approx(expected, rel=1e-10)
    bounds = [epsilon_lower(90, 100, 1000, delta=delta) for delta in (0.0, 1e-5, 1e-4, 1e-2)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] > bounds[2] > bounds[3]


def test_more_right_guesses_never_lower_the_bound():
    bounds = [epsilon_lower(correct, 50, 200) for correct in range(51)]
    assert bounds == sorted(bounds)
    assert bounds[25] == 0.0
    assert bounds[50] > 2.0


def test_null_data_give_zero_in_95_of_100_runs():
    rng = np.random.default_rng(0)
    member, score = scores(rng, 200, 0.0)
    found = [one_run_epsilon(m, s, 60, 60, delta=0.0) for m, s in zip(member, score, strict=True)]
    # Exactly 5 % of null runs may exceed 0; 200 runs say so within 3 standard errors.
    assert np.mean(np.array(found) > 0) <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 200)


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_randomized_response_of_known_epsilon_is_rarely_exceeded(epsilon):
    rng = np.random.default_rng(1)
    # The strongest epsilon-private mechanism: tell each membership truly with probability sigmoid(epsilon).
    member = rng.random((200, RECORDS)) < 0.5
    told = np.where(rng.random(member.shape) < special.expit(epsilon), member, ~member)
    found = np.array([one_run_epsilon(m, s + 0.0, 200, 200, delta=0.0) for m, s in zip(member, told, strict=True)])
    assert np.mean(found > epsilon) <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 200)
    assert np.median(found) > 0.55 * epsilon


def test_guesses_are_chosen_where_practice_is_right():
    rng = np.random.default_rng(2)
    top, bottom = choose_guesses(*scores(rng, 20, 3.0), records=RECORDS)
    assert 20 < top <= 300
    assert 20 < bottom <= 300
    member, score = scores(rng, 50, 3.0)
    chosen = [one_run_epsilon(m, s, top, bottom) for m, s in zip(member, score, strict=True)]
    every = [one_run_epsilon(m, s, 300, 300) for m, s in zip(member, score, strict=True)]
    assert np.median(chosen) > np.median(every)


def test_practice_records_without_a_score_are_left_out():
    member, score = scores(np.random.default_rng(3), 10, 2.0)
    expected = choose_guesses(member[:, 1:], score[:, 1:], records=RECORDS)
    score[4, 0] = np.nan
    assert choose_guesses(member, score, records=RECORDS) == expected
    with pytest.raises(ValueError, match="record without NaN"):
        choose_guesses(member, np.full_like(score, np.nan), records=RECORDS)


def test_impossible_counts_are_refused():
    with pytest.raises(ValueError, match="correct <= guesses <= records"):
        epsilon_lower(5, 4, 10)
    with pytest.raises(ValueError, match="top and bottom must be"):
        one_run_epsilon(np.array([True, False]), np.array([0.0, 1.0]), 2, 1)
