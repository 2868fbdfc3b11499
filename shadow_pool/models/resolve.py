"""From ``--arch`` to a module: names of the zoo, torchvision, timm, and a user's own factory."""

from __future__ import annotations

import ast
import difflib
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from shadow_pool import seeds
from shadow_pool.errors import UserError, few, unknown_name
from shadow_pool.models.norms import coupling_layer, to_norm
from shadow_pool.models.outputs import logits_of
from shadow_pool.models.zoo import ZOO
from shadow_pool.usercode import describe, is_reference, load_object

_PROBE = 4
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_ARCH = re.compile(r"(?P<name>.*?\.py:\w+|[^(]*)(?P<call>\(.*)?", re.DOTALL)


def build_model(
    arch: str,
    norm: str,
    *,
    classes: int,
    input_shape: tuple[int, ...],
    seed: int,
    initial: Mapping[str, torch.Tensor] | None = None,
    check: bool = True,
) -> nn.Module:
    """A fresh model on the CPU in float32, its weights drawn from ``seed`` alone.

    The same seed gives the layers that two arms share the same weights; ``initial`` takes their place. Inputs and
    outputs must fit the records, and a model from outside the zoo must be without coupling where the arm is without
    BatchNorm.

    Args:
        arch: ``lenet``, ``torchvision:NAME``, ``timm:NAME``, ``module:factory`` or ``path/file.py:factory``, each
            optionally with keyword arguments as literals: ``file.py:Net(width=2)``. A factory is a class or function
            that returns an nn.Module; it is given ``classes`` or ``num_classes`` and ``input_shape`` where it has
            parameters of these names.
        norm: one of :data:`shadow_pool.arms.NORMS`.
        classes: number of classes.
        input_shape: (C, H, W) of an image or (D,) of features, as the model takes them.
        seed: non-negative integer.
        initial: a state dict of the model as given; other arms take it over as
            :func:`shadow_pool.models.norms.to_norm` says of trained weights.
        check: try the model on inputs of ``input_shape``; False where that is a guess.

    Raises:
        UserError: an unknown name, a factory that fails, or a model that does not fit.
    """
    name, options = parse_arch(arch)
    given = {"classes": classes, "num_classes": classes, "input_shape": input_shape}
    with seeds.torch_stream(0):  # a user's module may draw when it is first run
        factory = _factory(name, given)
    with seeds.torch_stream(seed):
        model = factory(options)
        if not isinstance(model, nn.Module):
            raise UserError(f"arch {name} must return a torch.nn.Module, got {type(model).__name__}")
        model = model.to("cpu", torch.float32)
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in model.parameters()):
            check_model(model, input_shape, classes, arch=name)  # lazy layers take their shapes from a first batch
    if initial is not None:
        model.load_state_dict(initial)
    twin = to_norm(model, norm, trained=initial is not None)
    if not check:
        return twin
    check_model(twin, input_shape, classes, arch=name)
    if name not in ZOO and norm != "batch":
        _refuse_coupling(twin, name, norm, input_shape)
    return twin


def parse_arch(arch: str) -> tuple[str, dict[str, Any]]:
    """``file.py:Net(width=2)`` -> ``("file.py:Net", {"width": 2})``. Only literals are taken; nothing is run."""
    match = _ARCH.fullmatch(arch.strip())
    assert match is not None  # the second alternative takes any text
    name, call = match["name"], match["call"]
    if call is None:
        return name, {}
    refused = UserError(f"arch arguments must be keyword literals, as in {name}(width=2), got {arch.strip()!r}")
    try:
        tree = ast.parse(f"f{call}", mode="eval").body
        if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name) or tree.args:
            raise refused
        options = {str(word.arg): ast.literal_eval(word.value) for word in tree.keywords if word.arg is not None}
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise refused from None
    if len(options) != len(tree.keywords):
        raise refused
    return name, options


def check_model(model: nn.Module, input_shape: tuple[int, ...], classes: int, *, arch: str = "the model") -> None:
    """Run a tiny batch in eval mode and refuse a model whose inputs or outputs do not fit the records.

    A single logit (N, 1) stands for two classes. Probabilities are refused: they would pass for logits and hide a leak.
    Modes are restored.

    Raises:
        UserError: one line saying what was expected and what was found.
    """
    modes = {module: module.training for module in model.modules()}
    x = torch.zeros(2, *input_shape)
    try:
        with torch.no_grad():
            output = model.eval()(x)
    except Exception as error:
        raise UserError(
            f"{arch} does not take a batch of the records, shape {list(x.shape)}: {describe(error)}; "
            "use --image-size, a --normalize FILE.py:FUNC that makes of a record what it takes (grey to colour), or "
            "another --arch"
        ) from error
    finally:
        for module, training in modes.items():
            module.training = training
    logits = logits_of(output)
    columns = [classes, 1] if classes == 2 else [classes]
    if len(logits) != len(x) or logits.shape[1] not in columns:
        raise UserError(
            f"{arch} must give logits of shape {[len(x), classes]} for {len(x)} records of {classes} classes, "
            f"got {list(logits.shape)}; set its number of classes"
        )
    if logits.shape[1] > 1 and (logits >= 0).all() and torch.allclose(logits.sum(1), torch.ones(2)):
        raise UserError(
            f"{arch} gives probabilities (each row sums to 1), expected logits: phi and our training need what goes "
            "into the softmax; let its forward return that, or log-probabilities"
        )


def _refuse_coupling(model: nn.Module, arch: str, norm: str, input_shape: tuple[int, ...]) -> None:
    x = torch.from_numpy(seeds.stream(0, "coupling-probe").standard_normal((_PROBE, *input_shape))).float()
    layer = coupling_layer(model, x)
    if layer is not None:
        raise UserError(
            f"arch {arch} still mixes the records of a batch in {layer} once its BatchNorm layers are out, "
            f"so it has no {norm} arm; audit with --arms batch"
        )


def _factory(name: str, given: dict[str, Any]) -> Callable[[dict[str, Any]], Any]:
    """A function of the options that calls the factory ``name`` with what of ``given`` it has parameters for."""
    if name in ZOO:
        return lambda options: _call(name, ZOO[name], given, options)
    origin, colon, rest = name.partition(":")
    if colon and origin == "torchvision":
        from torchvision import models

        known = models.list_models(module=models)
        if rest not in known:
            raise unknown_name("torchvision model", rest, known)
        return lambda options: _call(
            name, models.get_model, {}, {"name": rest, "weights": None, "num_classes": given["classes"], **options}
        )
    if colon and origin == "timm":
        return lambda options: _timm(rest, given, options)
    if not is_reference(name):
        raise unknown_name("arch", name, [*ZOO, "torchvision:NAME", "timm:NAME", "module:factory", "FILE.py:factory"])
    factory = load_object(name, what="arch")
    if isinstance(factory, nn.Module) or not callable(factory):
        raise UserError(
            f"arch {name} must be a class or function that makes a fresh torch.nn.Module, "
            f"got a {type(factory).__name__}"
        )
    return lambda options: _call(name, factory, given, options)


def _timm(name: str, given: dict[str, Any], options: dict[str, Any]) -> Any:
    try:
        import timm
    except ImportError:
        raise UserError(f"arch timm:{name} needs timm, which is not installed; pip install 'mia-audit[timm]'") from None
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), n=5)
        raise UserError(
            f"unknown timm model {name!r}: {'nearest: ' + ', '.join(near) if near else 'none is near'}; "
            "timm.list_models() names all"
        )
    settings = {"pretrained": False, "num_classes": given["classes"], "in_chans": given["input_shape"][0], **options}
    return _call(f"timm:{name}", timm.create_model, {}, {"model_name": name, **settings})


def _call(name: str, factory: Callable[..., Any], given: dict[str, Any], options: dict[str, Any]) -> Any:
    try:
        parameters = inspect.signature(factory).parameters.values()
        named = {p.name: p.default for p in parameters if p.kind not in _VARIABLE}
        unknown = [option for option in options if option not in named]
        if unknown and not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
            raise unknown_name(f"argument of arch {name}", unknown[0], named)
        arguments = {key: value for key, value in given.items() if key in named} | options
        missing = [key for key in named if named[key] is inspect.Parameter.empty and key not in arguments]
        if missing:
            raise UserError(
                f"arch {name} needs {few(missing)}; give literals, as in '{name}({missing[0]}=2)', or name a "
                "function without such parameters that makes the model"
            )
        return factory(**arguments)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"arch {name} failed to build a model: {describe(error)}") from error
