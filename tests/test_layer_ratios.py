"""gamma/sigma by layer as rows of audit.json."""

from __future__ import annotations

import numpy as np
import pytest

from mia_audit.batchnorm.ratios import layer_ratios


def test_rows_are_over_the_channels_of_all_models():
    first = {"deep.norm": np.array([0.5, 3.0]), "norm": np.array([1.0])}
    second = {"deep.norm": np.array([2.0, 1.0]), "norm": np.array([4.0])}
    deep, shallow = layer_ratios([first, second], kinds={"norm": "BatchNorm1d"})
    assert (deep.layer, deep.kind, deep.channels) == ("deep.norm", "BatchNorm", 2)
    assert (shallow.layer, shallow.kind, shallow.channels) == ("norm", "BatchNorm1d", 1)
    assert (deep.ratio_median, deep.ratio_mean, deep.ratio_max) == (1.5, 1.625, 3.0)
    assert deep.fraction_above_one == 0.5
    assert deep.amplification_median == np.median([0.25, 9, 4, 1])


def test_one_model_and_none():
    (row,) = layer_ratios([{"norm": np.array([2.0, 2.0])}])
    assert (row.ratio_median, row.amplification_median, row.fraction_above_one) == (2.0, 4.0, 1.0)
    assert layer_ratios([]) == []
    assert layer_ratios([{}]) == []


def test_models_of_another_shape_are_refused():
    with pytest.raises(ValueError, match="same BatchNorm layers"):
        layer_ratios([{"norm": np.ones(2)}, {"norm": np.ones(3)}])
    with pytest.raises(ValueError, match="same BatchNorm layers"):
        layer_ratios([{"norm": np.ones(2)}, {"other": np.ones(2)}])
