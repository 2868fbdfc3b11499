"""Every shape of checkpoint gives the same weights."""

import argparse
import collections
import copy

import numpy as np
import pytest
import torch
from hostile import edit_zip
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from mia_audit.checkpoints import load_into, open_checkpoint, what_would_run
from mia_audit.checkpoints.inspection import inspect_checkpoint
from mia_audit.checkpoints.state_dicts import match_names, strip_prefixes
from shadow_pool.errors import UserError


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3))


NET = network()
STATE = NET.state_dict()


class Config:
    """A class that weights_only refuses."""


class CustomDict(dict):
    pass


def prefixed(*prefixes):
    return {"".join(prefixes) + name: value for name, value in STATE.items()}


def optimizer_state():
    optimizer = torch.optim.Adam(NET.parameters())
    NET(torch.randn(4, 1, 4, 4)).sum().backward()
    optimizer.step()
    STATE_AFTER = copy.deepcopy(optimizer.state_dict())
    NET.load_state_dict(ORIGINAL)
    return STATE_AFTER


ORIGINAL = copy.deepcopy(STATE)
LIGHTNING = {
    "epoch": 3,
    "global_step": 100,
    "pytorch-lightning_version": "2.1.0",
    "state_dict": prefixed("model."),
    "optimizer_states": [optimizer_state()],
    "lr_schedulers": [{"last_epoch": 3}],
    "callbacks": {"ModelCheckpoint": {"best_model_score": torch.tensor(0.9)}},
    "hparams_name": "kwargs",
    "hyper_parameters": argparse.Namespace(lr=0.1, config=Config()),
}

SHAPES = {
    "state dict": STATE,
    "plain dict": dict(STATE),
    "state_dict": {"state_dict": STATE, "epoch": 3, "loss": torch.tensor(0.1)},
    "model_state_dict": {"model_state_dict": STATE, "optimizer_state_dict": optimizer_state()},
    "model": {"model": STATE, "optimizer": optimizer_state(), "lr_scheduler": {"last_epoch": 1}},
    "net": {"net": STATE, "acc": 91.2},
    "ema": {"ema": STATE, "step": 3},
    "ema beside model": {"ema": {name: value * 0 for name, value in STATE.items() if value.is_floating_point()}}
    | {"model": STATE},
    "own name": {"classifier_weights": STATE, "optim": optimizer_state()},
    "nested": {"checkpoint": {"model": {"state_dict": STATE}}},
    "tuple": (STATE, 17),
    "parallel": prefixed("module."),
    "compiled parallel": prefixed("module.", "_orig_mod."),
    "parallel compiled": prefixed("_orig_mod.", "module."),
    "private": {"state_dict": prefixed("_module.", "model.", "module.")},
    "lightning": LIGHTNING,
    "refused objects beside": {"state_dict": STATE, "config": Config(), "rng": np.random.default_rng(0)},
    "refused mapping around": CustomDict(state_dict=STATE),
    "defaultdict": collections.defaultdict(Config, model=STATE),
    "parameters": {name: nn.Parameter(value) if value.is_floating_point() else value for name, value in STATE.items()},
    "other entries": {**STATE, "version": 3, "_extra_state": {"a": 1}},
}


def assert_same(checkpoint, atol=0.0):
    assert checkpoint.state.keys() == ORIGINAL.keys()
    for name, value in ORIGINAL.items():
        found = checkpoint.state[name]
        assert found.dtype == (torch.float32 if value.is_floating_point() else value.dtype)
        assert not found.requires_grad
        torch.testing.assert_close(found, value, atol=atol, rtol=0)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_gives_the_same_weights(tmp_path, shape, legacy):
    path = tmp_path / "model.pt"
    torch.save(SHAPES[shape], path, _use_new_zipfile_serialization=not legacy)
    refused = "refused" in shape or shape in ("lightning", "defaultdict")
    if legacy and refused:
        with pytest.raises(UserError, match=r"--trust"):
            open_checkpoint(path)
        return
    checkpoint = open_checkpoint(path)
    assert_same(checkpoint)
    assert any("left out without running it" in note for note in checkpoint.notes) == refused
    # A model with the same layers takes them, and gives the same logits.
    other = nn.Sequential(*[copy.deepcopy(layer) for layer in network()])
    nn.init.zeros_(other[3].weight)
    load_into(other, checkpoint)
    x = torch.randn(2, 1, 4, 4)
    assert torch.equal(other.eval()(x), NET.eval()(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("form", ["pt", "safetensors"])
def test_other_precisions_become_float32(tmp_path, dtype, form):
    path = tmp_path / f"model.{form}"
    state = {name: value.to(dtype) if value.is_floating_point() else value for name, value in STATE.items()}
    torch.save(state, path) if form == "pt" else save_file(state, path)
    checkpoint = open_checkpoint(path)
    assert_same(checkpoint, atol=0.02)
    assert str(dtype).removeprefix("torch.") in " ".join(checkpoint.notes)


@pytest.mark.parametrize("beside", [None, Config()])
def test_tensors_saved_on_a_gpu(tmp_path, beside):
    torch.save({"state_dict": STATE, "beside": beside}, tmp_path / "cpu.pt")
    place = b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0"

    def moved(name, content):
        return content.replace(*place) if name.endswith("data.pkl") else content

    edit_zip(tmp_path / "cpu.pt", tmp_path / "gpu.pt", moved)
    assert b"cuda:0" in (tmp_path / "gpu.pt").read_bytes()
    assert_same(open_checkpoint(tmp_path / "gpu.pt"))


def test_safetensors(tmp_path):
    save_file({name: value.clone() for name, value in prefixed("module.").items()}, tmp_path / "m.safetensors")
    checkpoint = open_checkpoint(tmp_path / "m.safetensors")
    assert_same(checkpoint)
    assert (checkpoint.kind, checkpoint.module) == ("safetensors", None)
    assert len(checkpoint.sha256) == 64


def test_views_and_tied_weights_are_read_without_the_refused_objects(tmp_path):
    base = torch.arange(24.0).view(4, 6)
    state = {
        "a": base,
        "t": base.t(),
        "part": base[1:3, ::2],
        "tied": base,
        "empty": torch.zeros(0, 3),
        "s": torch.tensor(5),
    }
    torch.save({"state_dict": state, "config": Config()}, tmp_path / "m.pt")
    checkpoint = open_checkpoint(tmp_path / "m.pt")
    for name, value in state.items():
        torch.testing.assert_close(checkpoint.state[name], value)


def test_whole_modules_are_opened_only_with_trust(tmp_path):
    torch.save(NET, tmp_path / "whole.pt")
    torch.save({"model": NET, "stats": {"mean": torch.zeros(3)}}, tmp_path / "inside.pt")
    for name in ("whole.pt", "inside.pt"):
        with pytest.raises(UserError, match=r"whole pickled module.*Sequential.*--trust"):
            open_checkpoint(tmp_path / name)
        assert "torch.nn.modules.container.Sequential" in what_would_run(tmp_path / name)
        checkpoint = open_checkpoint(tmp_path / name, trust=True)
        assert_same(checkpoint)
        assert checkpoint.kind == "module"
        assert isinstance(checkpoint.module, nn.Sequential)
        assert "trusted to run" in checkpoint.notes[0]


@pytest.mark.filterwarnings("ignore")
def test_programs_are_opened_only_with_trust(tmp_path):
    torch.jit.save(torch.jit.script(network().eval()), tmp_path / "m.pt")
    exported = torch.export.export(network().eval(), (torch.zeros(2, 1, 4, 4),))
    torch.export.save(exported, tmp_path / "m.pt2")
    for name, kind in (("m.pt", "TorchScript"), ("m.pt2", "torch.export")):
        with pytest.raises(UserError, match=rf"{kind} archive.*--trust"):
            open_checkpoint(tmp_path / name)
        checkpoint = open_checkpoint(tmp_path / name, trust=True)
        assert_same(checkpoint)
        assert checkpoint.kind == kind
        seen = inspect_checkpoint(tmp_path / name, trust=True)
        assert [row.layer for row in seen.batchnorm] == ["1"]
    torch.jit.save(torch.jit.freeze(torch.jit.script(network().eval())), tmp_path / "frozen.pt")
    with pytest.raises(UserError, match=r"no weights .* before it is frozen"):
        open_checkpoint(tmp_path / "frozen.pt", trust=True)


def test_what_else_a_file_holds_is_said(tmp_path):
    torch.save({"model": STATE, "ema": STATE, "criterion": {"w": torch.ones(2)}, "optim": {}}, tmp_path / "m.pt")
    assert open_checkpoint(tmp_path / "m.pt").notes == (
        "weights taken from the entry model; passed over: ema, criterion",
    )


def test_several_models_are_not_guessed_between(tmp_path):
    torch.save({"generator": STATE, "critic": STATE}, tmp_path / "m.pt")
    with pytest.raises(UserError, match=r"several state dicts \(generator, critic\)"):
        open_checkpoint(tmp_path / "m.pt")


def test_broken_weights_are_noted(tmp_path):
    finite = {"large": torch.full((3,), 3e38), "empty": torch.zeros(0), "scalar": torch.tensor(1.0)}
    broken = {"nan": torch.tensor([1.0, float("nan")]), "both": torch.tensor([float("inf"), float("-inf")])}
    torch.save(finite | broken, tmp_path / "m.pt")
    assert "2 tensors hold NaN or infinity (nan, both)" in open_checkpoint(tmp_path / "m.pt").notes


class Wrapped(nn.Module):
    """A module whose own attribute is called as wrappers call theirs."""

    def __init__(self):
        super().__init__()
        self.model = network()


def test_a_models_own_attribute_named_model(tmp_path):
    torch.save(Wrapped().state_dict(), tmp_path / "m.pt")
    model = Wrapped()
    nn.init.zeros_(model.model[3].weight)
    load_into(model, open_checkpoint(tmp_path / "m.pt"))
    assert torch.equal(model.model[3].weight, NET[3].weight)


@pytest.mark.parametrize("prefix", ["model.", "student.net.", "_orig_mod.model.module."])
def test_other_things_beside_the_model_are_passed_over(tmp_path, prefix):
    torch.save(prefixed(prefix) | {"loss.weight": torch.ones(3), "accuracy.total": torch.tensor(4)}, tmp_path / "m.pt")
    assert load_into(network(), open_checkpoint(tmp_path / "m.pt")) == ("2 tensors outside the model were passed over",)


def test_old_batchnorm_without_a_count_of_batches(tmp_path):
    torch.save({name: value for name, value in STATE.items() if "num_batches" not in name}, tmp_path / "m.pt")
    load_into(network(), open_checkpoint(tmp_path / "m.pt"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop("3.bias"), "1 of 9 expected keys are missing (3.bias)"),
        (lambda s: s.update({"4.bias": torch.ones(3)}), "1 keys are unexpected (4.bias)"),
        (lambda s: s.update({"3.weight": torch.ones(5, 16)}), "3.weight is [5, 16], expected [3, 16]"),
        (lambda s: [s.pop(f"1.{k}") for k in ("weight", "bias", "running_mean", "running_var")], "4 of 9"),
        (
            lambda s: [s.pop(f"1.{k}") for k in ("weight", "bias", "running_mean", "running_var")],
            "1.running_mean, ...)",
        ),
    ],
)
def test_misfits_name_the_first_keys(tmp_path, change, words):
    state = dict(STATE)
    change(state)
    torch.save(state, tmp_path / "m.pt")
    model = network()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UserError, match="does not fit Sequential") as caught:
        load_into(model, open_checkpoint(tmp_path / "m.pt"))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


PART = st.sampled_from(["conv", "bn", "0", "1", "layer4", "fc", "weight", "bias", "head"])
NAMES = st.lists(st.lists(PART, min_size=2, max_size=4).map(".".join), min_size=2, max_size=8, unique=True)
PREFIXES = st.lists(st.sampled_from(["module.", "_orig_mod.", "_module.", "model."]), max_size=5)


@given(names=NAMES, prefixes=PREFIXES)
def test_any_nesting_of_wrappers_comes_off(names, prefixes):
    wrapped = ["".join(prefixes) + name for name in names]
    assert list(strip_prefixes(wrapped).values()) == names
    matched, unexpected = match_names(wrapped, names)
    assert matched == dict(zip(names, wrapped, strict=True))
    assert unexpected == ()


@given(names=NAMES, prefixes=PREFIXES, data=st.data())
def test_a_wrapper_inside_a_name_is_matched(names, prefixes, data):
    cut = data.draw(st.integers(0, 1))
    wrapped = [
        ".".join([*name.split(".")[:cut], "".join(prefixes) + ".".join(name.split(".")[cut:])]) for name in names
    ]
    assert match_names(wrapped, names)[0] == dict(zip(names, wrapped, strict=True))


@given(names=NAMES, extra=NAMES)
def test_names_without_a_common_wrapper_stay(names, extra):
    mixed = ["model." + name for name in names] + ["criterion." + name for name in extra]
    assert strip_prefixes(mixed) == {name: name for name in mixed}
