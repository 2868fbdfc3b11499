"""From an arch string to a checked model."""

from __future__ import annotations

import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shadow_pool.arms import NORMS
from shadow_pool.errors import UserError
from shadow_pool.models.norms import norm_layers
from shadow_pool.models.resolve import build_model, check_model, logits_of, parse_arch

NET = """
import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self, num_classes, width=4, dtype=torch.float32):
        super().__init__()
        self.linear = nn.Linear(5, width, bias=False, dtype=dtype)
        self.norm = nn.BatchNorm1d(width, dtype=dtype)
        self.head = nn.Linear(width, num_classes, dtype=dtype)

    def forward(self, x):
        return {"logits": self.head(self.norm(self.linear(x))), "features": x}


def wide(classes, input_shape):
    return nn.Sequential(nn.Linear(input_shape[0], 64), nn.BatchNorm1d(64), nn.Linear(64, classes))


def softmax():
    return nn.Sequential(nn.Linear(5, 3), nn.Softmax(dim=1))


def log_softmax():
    return nn.Sequential(nn.Linear(5, 3), nn.LogSoftmax(dim=1))


def half(num_classes):
    return Net(num_classes, dtype=torch.float16)


def lazy():
    return nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.LazyLinear(3))


def configured(config, *, num_classes):
    return nn.Linear(5, num_classes)


def broken():
    raise RuntimeError("no weights here")


def number():
    return 3


class Ghost(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        if float(x.sum()) != 0:
            x = F.batch_norm(x, None, None, training=True)
        return self.head(self.norm(x))


made = nn.Linear(5, 3)
"""


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("user") / "net.py"
    path.write_text(NET, encoding="utf-8")
    return path


def build(arch: str, norm: str = "batch", *, classes: int = 3, seed: int = 0) -> nn.Module:
    return build_model(arch, norm, classes=classes, input_shape=(5,), seed=seed)


def test_shared_layers_start_equal_in_every_arm(net: Path) -> None:
    for arch, shape in ((f"{net}:Net", (5,)), ("lenet", (1, 8, 8)), ("densenet22", (1, 8, 8))):
        arms = {norm: build_model(arch, norm, classes=3, input_shape=shape, seed=11).state_dict() for norm in NORMS}
        weights = {key for key, value in arms["batch"].items() if value.ndim > 1}
        assert len(weights) > 1
        for state in arms.values():
            assert weights <= set(state)
            assert all(torch.equal(state[key], arms["batch"][key]) for key in weights)
    other = build(f"{net}:Net", seed=12).state_dict()
    assert not torch.equal(other["head.weight"], build(f"{net}:Net", seed=11).state_dict()["head.weight"])


def test_building_leaves_the_global_generator_alone(net: Path) -> None:
    state = torch.get_rng_state()
    for norm in NORMS:
        build(f"{net}:Net", norm)
    assert torch.equal(torch.get_rng_state(), state)


def test_factories_get_what_their_parameters_ask_for(net: Path) -> None:
    assert build(f"{net}:Net(width=2)").linear.weight.shape == (2, 5)
    assert build(f"{net}:Net(num_classes=3, width=7)").head.weight.shape == (3, 7)
    assert build(f"{net}:wide")[0].weight.shape == (64, 5)
    assert build("mlp(width=16, depth=1)").head.weight.shape == (3, 16)
    assert build(f"{net}:configured(config=1)").weight.shape == (3, 5)
    assert build(f"{net}:log_softmax")[0].weight.shape == (3, 5)
    assert build(f"{net}:half").head.weight.dtype == torch.float32


def test_lazy_layers_are_filled_from_the_seed(net: Path) -> None:
    first, second = build(f"{net}:lazy", "none"), build(f"{net}:lazy", "group")
    assert first[0].weight.shape == (8, 5)
    assert torch.equal(first[0].weight, second[0].weight)
    assert norm_layers(second) == {"GroupNorm": 1}


def test_names_of_timm_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def create_model(
        model_name: str, *, pretrained: bool, num_classes: int, in_chans: int, **options: int
    ) -> nn.Module:
        assert (model_name, pretrained, in_chans) == ("tiny", False, 1)
        return nn.Sequential(nn.Flatten(), nn.Linear(4, options["width"]), nn.Linear(options["width"], num_classes))

    timm = SimpleNamespace(
        is_model=lambda name: name == "tiny", list_models=lambda: ["tiny"], create_model=create_model
    )
    monkeypatch.setitem(sys.modules, "timm", timm)
    model = build_model("timm:tiny(width=3)", "batch", classes=2, input_shape=(1, 2, 2), seed=0)
    assert model[1].out_features == 3
    with pytest.raises(UserError, match="unknown timm model 'tinny': nearest: tiny"):
        build("timm:tinny")
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UserError, match=r"not installed; pip install 'mia-audit\[timm\]'"):
        build("timm:tiny")


def test_names_of_torchvision_and_of_a_module() -> None:
    model = build_model("torchvision:resnet18", "group", classes=4, input_shape=(3, 32, 32), seed=0)
    assert model.fc.out_features == 4
    assert norm_layers(model) == {"GroupNorm": 20}
    densenet = build_model(
        "shadow_pool.models.zoo:DenseNet(depth=10, growth=4, bottleneck=True)",
        "none",
        classes=4,
        input_shape=(1, 8, 8),
        seed=0,
    )
    assert densenet(torch.zeros(1, 1, 8, 8)).shape == (1, 4)


@pytest.mark.parametrize(
    ("arch", "message"),
    [
        ("lenett", "unknown arch 'lenett': did you mean 'lenet'"),
        ("torchvision:resnet1", "unknown torchvision model 'resnet1'"),
        ("mlp(depht=3)", "did you mean 'depth'"),
        ("{net}:Nett", "did you mean 'Net'"),
        ("{net}:Net(widht=1)", "did you mean 'width'"),
        ("{net}:broken", r"failed to build a model: RuntimeError: no weights here \(net.py, line"),
        ("{net}:number", "must return a torch.nn.Module, got int"),
        ("{net}:made", "makes a fresh torch.nn.Module, got a Linear"),
        ("{net}:lazy(x=1)", "unknown argument of arch .*'x': known: none"),
        ("{net}:configured", r"configured needs config; give literals, as in '.*:configured\(config=2\)'"),
        ("{net}:softmax", r"softmax gives probabilities \(each row sums to 1\), expected logits"),
        ("{net}:Net(num_classes=4)", r"must give logits of shape \[2, 3\] .* got \[2, 4\]"),
        ("lenet", r"lenet needs images"),
        ("mlp(classes=4)", r"mlp must give logits of shape \[2, 3\]"),
        ("builtins:dict", "failed to build a model"),
        ("torchvision:resnet18", r"does not take a batch of the records, shape \[2, 5\]"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(net: Path, arch: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        build(arch.format(net=net))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("arch", ["broken.py:Net", "missing.py:Net", "no_such_module_here:Net"])
def test_a_file_that_cannot_be_imported_is_named(tmp_path: Path, arch: str) -> None:
    (tmp_path / "broken.py").write_text("import not_installed_anywhere\n", encoding="utf-8")
    where = arch if arch.startswith("no_") else f"{tmp_path / arch}"
    with pytest.raises(UserError, match=arch.split(":")[0]):
        build(where)


@pytest.mark.parametrize(
    "arch",
    [
        "f.py:Net(width=__import__('os').getpid())",
        "f.py:Net(width=[].append(1))",
        "f.py:Net(width=x)",
        "f.py:Net(3)",
        "f.py:Net(**{'width': 2})",
        "f.py:Net(width=2)(depth=3)",
        "f.py:Net(width=2",
        "f.py:Net(width=" + "(" * 500 + ")" * 500 + ")",
    ],
)
def test_arguments_are_literals_only(arch: str) -> None:
    with pytest.raises(UserError, match="must be keyword literals"):
        parse_arch(arch)


def test_literals_of_every_kind_are_taken() -> None:
    assert parse_arch("a.py:F(a=1, b=-2.5, c='(x)', d=(1, 2), e=None, f={'k': [True]})") == (
        "a.py:F",
        {"a": 1, "b": -2.5, "c": "(x)", "d": (1, 2), "e": None, "f": {"k": [True]}},
    )
    assert parse_arch("lenet") == ("lenet", {})
    assert parse_arch("mlp(a='x.py:y')") == ("mlp", {"a": "x.py:y"})
    assert parse_arch("/a (b)/n.py:Net(w=2)") == ("/a (b)/n.py:Net", {"w": 2})
    assert parse_arch("/a (b)/n.py:Net") == ("/a (b)/n.py:Net", {})
    assert parse_arch("lenet()") == ("lenet", {})


def test_an_arm_that_stays_coupled_is_refused(net: Path) -> None:
    assert build(f"{net}:Ghost", "batch").head.out_features == 3
    with pytest.raises(UserError, match="still mixes the records of a batch in Ghost"):
        build(f"{net}:Ghost", "group")


def test_logits_are_found_in_what_models_return() -> None:
    z = torch.zeros(2, 3)
    pair = namedtuple("Output", ["logits", "auxiliary"])(z, None)
    for output in (z, (z, None), [z], {"logits": z, "loss": None}, {"anything": z}, SimpleNamespace(logits=z), pair):
        assert logits_of(output) is z


@pytest.mark.parametrize(
    ("output", "found"),
    [
        (torch.zeros(2, 3, 4), r"a tensor of shape \[2, 3, 4\]"),
        ({"a": torch.zeros(2, 3), "b": torch.zeros(2, 3)}, "a dict with keys a, b"),
        (("x",), "a tuple of str"),
        ([], "a list of nothing"),
        (None, "NoneType"),
    ],
)
def test_outputs_without_logits_are_named(output: object, found: str) -> None:
    with pytest.raises(UserError, match=found):
        logits_of(output)


def test_a_single_logit_stands_for_two_classes() -> None:
    model = nn.Linear(5, 1)
    check_model(model, (5,), 2)
    with pytest.raises(UserError, match=r"3 classes, got \[2, 1\]"):
        check_model(model, (5,), 3)
    assert model.training
