"""What auto means here, and which devices there are."""

import pytest
import torch
from torch import nn

from shadow_pool import processor
from shadow_pool.errors import UserError
from shadow_pool.models.resolve import build_model
from shadow_pool.models.stack import is_wide
from shadow_pool.train.precision import check_device, settle_precision


@pytest.mark.parametrize(("arch", "wide"), [("lenet", False), ("mlp", False), ("resnet8", True), ("densenet22", True)])
@pytest.mark.parametrize("flags", ["fpu avx512_bf16 amx_bf16", "fpu avx2", None])
def test_auto_is_bf16_where_processor_and_model_gain(arch, wide, flags, tmp_path, monkeypatch):
    model = build_model(arch, "batch", classes=10, input_shape=(3, 32, 32), seed=0)
    assert is_wide(model) is wide
    path = tmp_path / "cpuinfo"
    if flags is not None:
        path.write_text(flags)
    monkeypatch.setattr(processor, "CPUINFO", path)
    gains = wide and flags is not None and "bf16" in flags
    assert settle_precision("auto", "cpu", model) == ("bf16" if gains else "fp32")
    assert settle_precision("bf16", "cpu", model) == "bf16"
    assert settle_precision("fp32", "cpu", model) == "fp32"


def test_a_narrow_stem_before_a_wide_net_is_wide():
    grey = nn.Sequential(
        nn.Conv2d(1, 3, 1), build_model("resnet8", "batch", classes=10, input_shape=(3, 32, 32), seed=0)
    )
    assert is_wide(grey)


@pytest.mark.parametrize(("native", "expected"), [(True, "bf16"), (False, "fp32")])
def test_emulated_bf16_of_a_gpu_does_not_count(native, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or native)
    assert settle_precision("auto", "cuda", nn.Linear(2, 2)) == expected


@pytest.mark.parametrize("device", ["meta", "mps", "xpu", "cpu:0", "gpu", "cuda:x", "", "cuda:0,cuda:1"])
def test_other_devices_are_refused(device):
    with pytest.raises(UserError, match="device must be cpu, cuda or cuda:N"):
        check_device(device)


def test_the_processor_and_missing_gpus(monkeypatch):
    check_device("cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_device("cuda")
    check_device("cuda:1")
    with pytest.raises(UserError, match="one of the 2 GPUs"):
        check_device("cuda:2")
