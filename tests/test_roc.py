"""The ROC curve against pair-by-pair counting."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import auc_reference, tpr_reference
from sklearn.metrics import roc_auc_score

from mia_audit.metrics import roc

SCORES = st.one_of(st.integers(-3, 3).map(float), st.floats(-1e12, 1e12), st.sampled_from([np.inf, -np.inf]))
LABELLED = st.lists(st.tuples(st.booleans(), SCORES), min_size=2, max_size=40).filter(
    lambda rows: 0 < sum(member for member, _ in rows) < len(rows)
)


@given(LABELLED, st.sampled_from([0.0, 0.01, 0.1, 0.25, 0.5, 1.0]))
@settings(max_examples=80, deadline=None)
def test_agrees_with_counting(rows, fpr):
    member, score = np.array([m for m, _ in rows]), np.array([s for _, s in rows])
    curve = roc(member, score)
    assert curve.auc == pytest.approx(auc_reference(member, score), abs=1e-12)
    assert curve.tpr_at(fpr) == tpr_reference(member, score, fpr)
    for point_fpr, point_tpr, threshold in zip(curve.fpr, curve.tpr, curve.thresholds, strict=True):
        if threshold < np.inf:
            assert point_fpr == np.mean(score[~member] >= threshold)
            assert point_tpr == np.mean(score[member] >= threshold)
    called = [score >= t for t in score]
    best = max([0.5] + [(c[member].mean() + 1 - c[~member].mean()) / 2 for c in called])
    assert curve.balanced_accuracy == pytest.approx(best, abs=1e-12)
    assert (curve.fpr[0], curve.tpr[0], curve.fpr[-1], curve.tpr[-1]) == (0, 0, 1, 1)
    assert len(curve.thresholds) == len(np.unique(score[score < np.inf])) + 1 + (score == np.inf).any()


def test_published_values():
    member = np.repeat([True, False], 100)
    curve = roc(member, np.concatenate([np.arange(100) + 9.5, np.arange(100.0)]))
    assert curve.auc == pytest.approx(0.5905, abs=1e-12)
    assert curve.tpr_at(0.01) == pytest.approx(0.11, abs=1e-12)


def test_agrees_with_scikit_learn():
    rng = np.random.default_rng(0)
    member, score = rng.random((40, 50)) < 0.3, np.round(rng.standard_normal((40, 50)), 1)
    assert roc(member, score).auc == pytest.approx(roc_auc_score(member.ravel(), score.ravel()), abs=1e-12)


def test_constant_scores_say_nothing_and_are_told_apart():
    curve = roc(np.array([True, False, True]), np.zeros(3))
    assert (curve.auc, curve.tpr_at(0.5), curve.balanced_accuracy, curve.constant) == (0.5, 0.0, 0.5, True)
    assert not roc(np.array([True, False]), np.array([1.0, 0.0])).constant


@pytest.mark.parametrize(
    ("member", "score", "message"),
    [
        ([1, 0], [0.0, 1.0], "member must be bool"),
        ([True, False], [0.0], "one shape"),
        ([True, False], [0.0, np.nan], "1 NaN"),
        ([True, True], [0.0, 1.0], "2 of 2 members"),
        ([False, False], [0.0, 1.0], "0 of 2 members"),
    ],
)
def test_what_has_no_curve_is_refused(member, score, message):
    with pytest.raises(ValueError, match=message):
        roc(np.array(member), np.array(score))


def test_a_rate_outside_0_to_1_is_refused():
    with pytest.raises(ValueError, match="fpr must be in"):
        roc(np.array([True, False]), np.array([0.0, 1.0])).tpr_at(1.5)
