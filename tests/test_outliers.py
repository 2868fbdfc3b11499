"""Outliers made on purpose."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from sklearn.datasets import load_sample_images

from shadow_pool.data.load import load_data
from shadow_pool.data.outliers import add_outliers
from shadow_pool.errors import UserError
from shadow_pool.spec import DataSpec


@pytest.fixture(scope="module")
def digits():
    return load_data(DataSpec(holdout=0), seed=0).records


def test_shares_are_exact_and_disjoint_and_tagged(digits):
    made = add_outliers(digits, DataSpec(mislabeled=0.05, ood=0.03), seed=0)
    wrong, foreign = made.subset == "mislabeled", made.subset == "ood"
    assert wrong.sum() == round(0.05 * 1797)
    assert foreign.sum() == round(0.03 * 1797)
    assert (made.subset_source[wrong | foreign] == "injected").all()
    assert set(made.subset_source[~wrong & ~foreign]) == {None}
    assert (made.label[wrong] != made.original_label[wrong]).all()
    assert (made.original_label == digits.label).all()
    clean = ~wrong & ~foreign
    np.testing.assert_array_equal(made.label[clean], digits.label[clean])
    np.testing.assert_array_equal(made.x[~foreign], digits.x[~foreign])
    assert (made.x[foreign] != digits.x[foreign]).any(axis=(1, 2, 3)).all()


def test_the_records_given_are_left_alone(digits):
    before = digits.x.copy(), digits.label.copy(), digits.subset.copy()
    add_outliers(digits, DataSpec(mislabeled=0.2, ood=0.2), seed=0)
    for kept, now in zip(before, (digits.x, digits.label, digits.subset), strict=True):
        np.testing.assert_array_equal(kept, now)


def test_one_share_does_not_move_the_other(digits):
    a = add_outliers(digits, DataSpec(mislabeled=0.05, ood=0.05), seed=0)
    b = add_outliers(digits, DataSpec(mislabeled=0.1, ood=0.05), seed=0)
    c = add_outliers(digits, DataSpec(mislabeled=0.05, ood=0.05), seed=1)
    np.testing.assert_array_equal(a.subset == "ood", b.subset == "ood")
    np.testing.assert_array_equal(a.x, b.x)
    assert (a.subset != c.subset).any()


def test_new_labels_are_uniform_over_the_right_classes(digits):
    made = add_outliers(digits, DataSpec(mislabeled=0.5, ood=0.5), seed=0)
    wrong, foreign = made.subset == "mislabeled", made.subset == "ood"
    shift = (made.label - made.original_label)[wrong] % 10
    assert stats.chisquare(np.bincount(shift, minlength=10)[1:]).pvalue > 1e-3
    assert stats.chisquare(np.bincount(made.label[foreign], minlength=10)).pvalue > 1e-3


def test_default_ood_are_crops_of_the_photographs(digits):
    colour = replace(digits, x=np.zeros((1797, 3, 9, 7), dtype=np.uint8))
    made = add_outliers(colour, DataSpec(ood=0.002), seed=0)
    windows = [
        np.lib.stride_tricks.sliding_window_view(photo, (9, 7), axis=(0, 1)) for photo in load_sample_images().images
    ]
    for patch in made.x[made.subset == "ood"]:
        assert any((view == patch).all(axis=(2, 3, 4)).any() for view in windows)


def test_photographs_are_enlarged_for_large_records(digits):
    large = replace(digits.take(np.arange(10)), x=np.zeros((10, 1, 500, 700), dtype=np.uint8))
    made = add_outliers(large, DataSpec(ood=0.2), seed=0)
    assert made.x[made.subset == "ood"].std() > 5


def test_another_source_is_resized_recoloured_and_rescaled(digits):
    colour = replace(digits, x=np.random.default_rng(0).uniform(-1, 1, (1797, 3, 16, 12)).astype(np.float32))
    made = add_outliers(colour, DataSpec(ood=0.01, ood_from="digits"), seed=0)
    x = made.x[made.subset == "ood"]
    assert x.dtype == np.float32
    assert x.min() == pytest.approx(-1, abs=1e-3)
    assert x.max() == pytest.approx(1, abs=1e-2)
    np.testing.assert_array_equal(x[:, 0], x[:, 2])


def test_features_need_a_source_of_their_width(tmp_path, digits):
    table = replace(digits, x=digits.x.reshape(1797, 64).astype(np.float32))
    with pytest.raises(UserError, match="--ood-from"):
        add_outliers(table, DataSpec(ood=0.1), seed=0)
    np.savez(tmp_path / "o.npz", x=np.full((400, 64), -7.0), y=np.arange(400) % 2)
    made = add_outliers(table, DataSpec(ood=0.1, ood_from=str(tmp_path / "o.npz")), seed=0)
    assert (made.x[made.subset == "ood"] == -7).all()
    with pytest.raises(UserError, match="of the same kind"):
        add_outliers(table, DataSpec(ood=0.1, ood_from="digits"), seed=0)
    with pytest.raises(UserError, match="400 inputs, 539 are needed"):
        add_outliers(table, DataSpec(ood=0.3, ood_from=str(tmp_path / "o.npz")), seed=0)


def test_only_clean_records_are_chosen(digits):
    marked = replace(digits, subset=np.where(np.arange(1797) < 900, "ood", "clean").astype(object))
    with pytest.raises(UserError, match="only 897 of the 1797"):
        add_outliers(marked, DataSpec(mislabeled=0.6), seed=0)
