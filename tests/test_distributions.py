"""Our quantiles, probabilities and ranks against those of scipy.stats."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from mia_audit.metrics.distributions import (
    beta_quantile,
    binomial_pmf,
    binomial_quantile,
    midranks,
    normal_quantile,
    student_quantile,
)

P = st.floats(1e-6, 1 - 1e-6)
COUNT = st.integers(1, 20_000)
FAST = settings(max_examples=200, deadline=None)


@given(p=P, freedom=st.one_of(st.floats(0.5, 1e6), st.just(math.inf)))
@FAST
def test_normal_and_student_quantiles(p, freedom):
    assert normal_quantile(p) == pytest.approx(stats.norm.ppf(p), rel=1e-9, abs=1e-12)
    assert student_quantile(p, freedom) == pytest.approx(stats.t.ppf(p, freedom), rel=1e-7, abs=1e-9)


@given(p=P, successes=COUNT, failures=COUNT)
@FAST
def test_beta_quantiles(p, successes, failures):
    assert beta_quantile(p, successes, failures) == pytest.approx(stats.beta.ppf(p, successes, failures), rel=1e-8)


@given(p=P, trials=COUNT, rate=st.floats(1e-5, 1 - 1e-5))
@FAST
def test_binomial_quantiles_are_the_least_count_that_reaches_p(p, trials, rate):
    found = binomial_quantile(p, trials, rate)
    assert found == stats.binom.ppf(p, trials, rate)
    assert isinstance(found, int)


@given(trials=st.integers(1, 3000), rate=st.one_of(st.floats(1e-9, 1 - 1e-9), st.sampled_from([0.0, 1.0])))
@FAST
def test_binomial_probabilities(trials, rate):
    k = np.arange(trials + 1)
    np.testing.assert_allclose(binomial_pmf(k, trials, rate), stats.binom.pmf(k, trials, rate), rtol=1e-8, atol=1e-300)


@given(data=st.data(), rows=st.integers(1, 12), columns=st.integers(1, 4))
@FAST
def test_ranks_share_ties(data, rows, columns):
    values = st.one_of(
        st.integers(-2, 2).map(float), st.floats(allow_nan=False), st.sampled_from([math.inf, -math.inf])
    )
    drawn = np.array(data.draw(st.lists(values, min_size=rows * columns, max_size=rows * columns)))
    np.testing.assert_array_equal(midranks(drawn), stats.rankdata(drawn))
    table = drawn.reshape(rows, columns)
    np.testing.assert_array_equal(midranks(table), stats.rankdata(table, axis=0))
