"""inspect: what a checkpoint holds, with and without its architecture."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from mia_audit.checkpoints.inspection import inspect_checkpoint
from shadow_pool.errors import UserError
from shadow_pool.models.resolve import build_model


def trained_like(norm, gamma=2.0):
    """A LeNet whose BatchNorm layers have scale ``gamma`` and running variance 0.25."""
    model = build_model("lenet", norm, classes=10, input_shape=(1, 28, 28), seed=0)
    for layer in model.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            nn.init.constant_(layer.weight, gamma)
            nn.init.constant_(layer.running_var, 0.25)
    return model


def saved(tmp_path, model, prefix="module."):
    torch.save({"state_dict": {prefix + key: value for key, value in model.state_dict().items()}}, tmp_path / "m.pt")
    return tmp_path / "m.pt"


@pytest.mark.parametrize("arch", [None, "lenet"])
def test_layers_ratios_and_parameters(tmp_path, arch):
    model = trained_like("batch")
    seen = inspect_checkpoint(saved(tmp_path, model), arch=arch)
    assert seen.parameters == sum(p.numel() for p in model.parameters())
    norms = [name for name, layer in model.named_modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    assert [row.layer for row in seen.batchnorm] == norms
    assert sum(seen.norm_layers.values()) == len(norms)
    expected = 2 / np.sqrt(0.25 + 1e-5)
    for row in seen.batchnorm:
        assert row.ratio_mean == pytest.approx(expected, rel=1e-6)
        assert row.amplification_median == pytest.approx(expected**2, rel=1e-6)
        assert row.fraction_above_one == 1
    assert "100% of" in seen.summary
    assert "median amplification 16" in seen.summary
    assert seen.kind == "container"
    json.dumps(seen.to_dict(), allow_nan=False)


def test_kinds_are_told_from_shapes(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv1d(2, 3, 3), nn.LayerNorm(4), nn.Linear(4, 2))
    seen = inspect_checkpoint(saved(tmp_path, model, ""))
    assert [layer.kind for layer in seen.layers] == [
        "Conv2d",
        "BatchNorm",
        "Conv1d",
        "Norm without statistics",
        "Linear",
    ]
    assert [layer.shape for layer in seen.layers][::4] == [(8, 3, 3, 3), (2, 4)]
    assert seen.norm_layers == {"BatchNorm": 1, "Norm without statistics": 1}


def test_summaries_follow_the_ratios(tmp_path):
    assert "No BatchNorm" in inspect_checkpoint(saved(tmp_path, trained_like("none"))).summary
    assert "hardly amplifies" in inspect_checkpoint(saved(tmp_path, trained_like("batch", gamma=0.1))).summary


def test_an_architecture_that_does_not_fit(tmp_path):
    with pytest.raises(UserError, match=r"does not fit .* expected keys are missing"):
        inspect_checkpoint(saved(tmp_path, trained_like("batch")), arch="resnet8")


OWN = """
from torch import nn


class Flat(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(1, 7, 3), nn.BatchNorm2d(7, eps=0.5), nn.Flatten(), nn.Linear(7 * 20 * 22, 5))
"""


def test_an_architecture_for_one_odd_size_of_input(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    model = nn.Sequential(nn.Conv2d(1, 7, 3), nn.BatchNorm2d(7), nn.Flatten(), nn.Linear(7 * 20 * 22, 5))
    seen = inspect_checkpoint(saved(tmp_path, model), arch=f"{tmp_path / 'own.py'}:Flat")
    assert seen.norm_layers == {"BatchNorm2d": 1}
    assert seen.batchnorm[0].ratio_median == pytest.approx(1 / np.sqrt(1.5))


def test_a_trusted_module_needs_no_architecture(tmp_path):
    torch.save(trained_like("batch"), tmp_path / "m.pt")
    seen = inspect_checkpoint(tmp_path / "m.pt", trust=True)
    assert seen.norm_layers == {"BatchNorm2d": 2, "BatchNorm1d": 2}
    assert seen.kind == "module"


def test_nothing_slow_is_imported_but_torch():
    slow = ("pandas", "scipy", "sklearn", "matplotlib", "torchvision", "pyarrow", "opacus")
    code = f"import sys, mia_audit.checkpoints.inspection; sys.exit(str([m for m in {slow} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.stderr.strip() == "[]"
