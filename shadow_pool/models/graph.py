"""How layers of a module are wired: which layer feeds each BatchNorm, and which end a residual branch.

Read from a symbolic trace (torch.fx). A module that cannot be traced (its control flow depends on data)
falls back to the order in which layers were registered; residual branches are then unknown.
"""

from __future__ import annotations

import inspect
import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from shadow_pool import seeds

WEIGHTED = (nn.modules.conv._ConvNd, nn.Linear)
_ADD = {operator.add, operator.iadd, torch.add, "add", "add_"}
_BATCH_NORM = {F.batch_norm, torch.batch_norm, torch.native_batch_norm}


def outputs_of(layer: nn.Module) -> int:
    """Output channels of a convolution, output features of a linear layer."""
    return int(layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Wiring:
    """What a trace tells about a module.

    Attributes:
        feeders: name of a BatchNorm -> the convolution or linear layer it normalizes, where one feeds it
            through nothing but operations on a single tensor (ReLU, pooling, dropout).
        foldable: those of ``feeders`` that a BatchNorm's scale and shift can be folded into: nothing lies between
            the two, and neither is used elsewhere.
        branch_ends: the last convolution or linear layer of each residual branch that holds a BatchNorm.
        functional_batch_norm: whether batch_norm is called as a function, outside any layer.
    """

    feeders: dict[str, nn.Module]
    foldable: dict[str, nn.Module] = field(default_factory=dict)
    branch_ends: tuple[nn.Module, ...] = ()
    functional_batch_norm: bool = False


def read_wiring(model: nn.Module, is_norm: Callable[[nn.Module], bool]) -> Wiring:
    """The wiring of ``model``; ``is_norm`` tells BatchNorm layers."""
    try:
        graph = trace(model, is_norm)
    except Exception:  # a stranger's forward may raise anything when it meets a symbolic tensor
        return Wiring(_feeders_by_registration(model, is_norm))
    layers = {node: model.get_submodule(str(node.target)) for node in graph.nodes if node.op == "call_module"}
    calls = Counter(layers.values())
    feeders: dict[str, nn.Module] = {}
    foldable: dict[str, nn.Module] = {}
    for node, layer in layers.items():
        feeder = _weighted_before(node, layers, is_norm)
        if not is_norm(layer) or feeder is None:
            continue
        feeders.setdefault(str(node.target), layers[feeder])
        alone = calls[layer] == calls[layers[feeder]] == len(feeder.users) == 1
        if alone and node.all_input_nodes == [feeder] and not getattr(layers[feeder], "transposed", False):
            foldable[str(node.target)] = layers[feeder]
    return Wiring(
        feeders=feeders,
        foldable=foldable,
        branch_ends=tuple(_branch_ends(graph, layers, is_norm)),
        functional_batch_norm=any(node.target in _BATCH_NORM for node in graph.nodes if node.op == "call_function"),
    )


def trace(model: nn.Module, is_leaf: Callable[[nn.Module], bool]) -> fx.Graph:
    """What the forward does, without values; raises whatever a forward whose path depends on them raises.

    ``is_leaf`` tells the layers that are not looked into, besides torch's own.
    """

    class Tracer(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return is_leaf(m) or super().is_leaf_module(m, module_qualified_name)

    parameters = inspect.signature(model.forward).parameters.values()
    defaults: dict[str, Any] = {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
    with seeds.torch_stream(0):  # the forward may draw
        return Tracer().trace(model, concrete_args=defaults or None)


def has_hooks(layer: nn.Module) -> bool:
    """Whether something else is called when the layer is, forward or backward."""
    return any((layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks))


def _weighted_before(
    node: fx.Node, layers: dict[fx.Node, nn.Module], is_norm: Callable[[nn.Module], bool] | None
) -> fx.Node | None:
    """The convolution or linear layer upstream of ``node`` along single inputs; norms stop the walk if told."""
    while len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
        layer = layers.get(node)
        if isinstance(layer, WEIGHTED):
            return node
        if layer is not None and is_norm is not None and is_norm(layer):
            return None
    return None


def _branch_ends(
    graph: fx.Graph, layers: dict[fx.Node, nn.Module], is_norm: Callable[[nn.Module], bool]
) -> list[nn.Module]:
    """At each sum of two tensors with a common origin, the longer path is the branch, the other its shortcut."""
    bit = {node: 1 << i for i, node in enumerate(graph.nodes)}
    upto: dict[fx.Node, int] = {}  # a node and all its ancestors, as a set of bits
    depth: dict[fx.Node, int] = {}
    norms = sum(bit[node] for node, layer in layers.items() if is_norm(layer))
    ends = []
    for node in graph.nodes:
        inputs = node.all_input_nodes
        upto[node] = bit[node]
        for source in inputs:
            upto[node] |= upto[source]
        weighted = isinstance(layers.get(node), WEIGHTED)
        depth[node] = max((depth[source] for source in inputs), default=0) + weighted
        if node.target not in _ADD or len(inputs) != 2 or depth[inputs[0]] == depth[inputs[1]]:
            continue
        shortcut, last = sorted(inputs, key=lambda source: depth[source])
        branch = upto[last] & ~upto[shortcut]
        end = last if last in layers and isinstance(layers[last], WEIGHTED) else _weighted_before(last, layers, None)
        if upto[last] & upto[shortcut] and branch & norms and end is not None and branch & bit[end]:
            ends.append(layers[end])
    return ends


def _feeders_by_registration(model: nn.Module, is_norm: Callable[[nn.Module], bool]) -> dict[str, nn.Module]:
    feeders = {}
    for prefix, parent in model.named_modules():
        before: nn.Module | None = None
        for name, child in parent.named_children():
            if isinstance(child, WEIGHTED):
                before = child
            elif is_norm(child):
                if before is not None and outputs_of(before) == getattr(child, "num_features", None):
                    feeders[f"{prefix}.{name}" if prefix else name] = before
                before = None
            elif next(child.children(), None) is not None:
                before = None
    return feeders
