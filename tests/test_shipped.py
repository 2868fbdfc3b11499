"""What is read from scikit-learn's files is what scikit-learn reads from them."""

import numpy as np
import pytest
from sklearn.datasets import load_digits, load_sample_images

from shadow_pool.data import shipped
from shadow_pool.errors import UserError


def test_digits():
    images, labels = load_digits(return_X_y=True)
    found = shipped.digits()
    np.testing.assert_array_equal(found[0].reshape(len(images), -1), images)
    np.testing.assert_array_equal(found[1], labels)
    assert found[1].dtype == np.int64


def test_photographs():
    for found, expected in zip(shipped.photographs(), load_sample_images().images, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_missing_file_is_named(monkeypatch):
    monkeypatch.setattr(shipped, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"digits\.csv\.gz"):
        shipped.digits()
