"""Passes over the graph that torch.compile captured, before it is differentiated and compiled.

    identities   dropout of nothing and padding by nothing are removed    they hide a norm from its activation
    share        quantisers of one tensor with one recipe become one      skips, residual branches, pyramids
    moments      norms return their moments                               for the next pass
    amax         that of a norm, resize, pooling or concatenation         from what is known, without another pass
    repeat       nearest resizing by whole factors copies pixels          a gradient without atomic operations
    push         quantisers move in front of repetition, concatenation    each part is quantised where it is computed
    rectify      a ReLU before a quantiser keeps a bit an element         and is one with it, if nobody else reads it
    weights      all weights in two launches                              instead of two or three for each

A quantiser is found by its function (`traced`), everything else by torch's. What a pass does not recognise stays as it
is, and is compiled as it is. No pass changes a number, with three exceptions, all of rounding: an amax that is computed
from a norm's moments may differ in the last place from that of the norm's output, GroupNorm and InstanceNorm are
computed in another order, and gradients of shared quantisers are added before they are masked.

Two layers that share a quantiser have an amax each; the larger counts. They see the same tensor, so the two are equal
unless they were calibrated apart, and become equal with the next larger value.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import fx

from fp4deploy.formats import NVFP4_BLOCK
from fp4deploy.graph.sizes import each
from fp4deploy.qat.fusion import norms, traced, weights

RELUS = (F.relu, torch.relu, torch.relu_)
RELU_METHODS = ("relu", "relu_")
LEAKY = (F.leaky_relu,)
POOLS = (F.max_pool2d, F.max_pool1d, F.max_pool3d)
DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)
PADS = (F.pad, torch._C._nn.pad)
SLOPE = 0.01  # torch's default of a leaky ReLU


def apply_passes(module: fx.GraphModule) -> fx.GraphModule:
    """Run all passes on a graph of torch functions, in place."""
    graph = module.graph
    if any(node.target in (traced.quantize, traced.quantize_learned, traced.quantize_weight) for node in graph.nodes):
        for each in (
            _remove_identities,
            _share,
            _expose_moments,
            _shorten_amax,
            _repeat,
            _push,
            _rectify,
            _collect_weights,
        ):
            each(graph)
        graph.lint()
        module.recompile()
    return module


def _calls(graph: fx.Graph, *targets: object) -> list[Any]:
    return [node for node in graph.nodes if node.op == "call_function" and node.target in targets]


def _value(node: object) -> torch.Tensor | None:
    """The example of what a node computes; None where there is none."""
    found = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return found if isinstance(found, torch.Tensor) else None


def _remove_identities(graph: fx.Graph) -> None:
    """Dropout that drops nothing and padding by nothing, which stand between a norm and its activation."""
    for node in _calls(graph, *DROPOUTS, *PADS):
        given = dict(zip(("input", "p" if node.target in DROPOUTS else "pad"), node.args, strict=False)) | dict(
            node.kwargs
        )
        nothing = given.get("p", 0.5) == 0 if node.target in DROPOUTS else not any(given.get("pad", (1,)))
        if nothing and isinstance(given.get("input"), fx.Node):
            node.replace_all_uses_with(given["input"])
            graph.erase_node(node)


def _share(graph: fx.Graph) -> None:
    alike: dict[tuple[Any, ...], list[fx.Node]] = {}
    for node in _calls(graph, traced.quantize):
        x, _, *options = node.args
        alike.setdefault((x, *options), []).append(node)
    place = {node: at for at, node in enumerate(graph.nodes)}
    for nodes in alike.values():
        amaxes = list(dict.fromkeys(node.args[1] for node in nodes))
        if len(nodes) == 1 or (len(amaxes) > 1 and not _movable(graph, nodes[0], amaxes, place)):
            continue
        first = nodes[0]
        with graph.inserting_before(first):
            amax = amaxes[0]
            for other in amaxes[1:]:
                amax = graph.call_function(torch.maximum, (amax, other))
        first.args = (first.args[0], amax, *first.args[2:])
        for node in nodes[1:]:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _movable(graph: fx.Graph, first: fx.Node, amaxes: Sequence[object], place: dict[fx.Node, int]) -> bool:
    """Move what computes the later amaxes in front of the first quantiser; False where that is not possible."""
    needed: list[fx.Node] = []

    def collect(node: object) -> bool:
        if not isinstance(node, fx.Node) or place[node] < place[first] or node in needed:
            return True
        if node.op != "call_function" or not all(collect(each) for each in node.all_input_nodes):
            return False
        needed.append(node)
        return True

    if not all(collect(amax) for amax in amaxes):
        return False
    writes = [node for node in graph.nodes if node.op == "call_method" and str(node.target).endswith("_")]
    read = {each for node in needed for each in node.all_input_nodes}
    if any(
        write.args[0] in read and place[write] > place[first] and _precedes(write, needed, place) for write in writes
    ):
        return False
    for node in needed:
        first.prepend(node)
    return True


def _precedes(write: fx.Node, needed: list[fx.Node], place: dict[fx.Node, int]) -> bool:
    """A write comes before one of the nodes that read what it writes."""
    return any(place[node] > place[write] and write.args[0] in node.all_input_nodes for node in needed)


def _expose_moments(graph: fx.Graph) -> None:
    """Norms become the functions that return their moments as well."""
    for node in _calls(graph, F.batch_norm, F.group_norm, F.instance_norm):
        arguments = _bound(node)
        x = _value(arguments.get("input"))
        if x is None or not x.is_floating_point() or x.ndim < 3:
            continue
        weight, bias, eps = arguments["weight"], arguments["bias"], arguments["eps"]
        function: Any = norms.group_norm
        new: tuple[Any, ...]
        if node.target is F.batch_norm:
            momentum = arguments["momentum"]
            if arguments["training"] is not True or not isinstance(momentum, float):
                continue
            running = arguments["running_mean"], arguments["running_var"]
            function, new = norms.batch_norm, (arguments["input"], *running, weight, bias, momentum, eps)
        elif (weight is None) != (bias is None):
            continue
        elif node.target is F.group_norm:
            new = (arguments["input"], arguments["num_groups"], weight, bias, eps, True)
        elif arguments["running_mean"] is None and arguments["use_input_stats"] is True:
            new = (arguments["input"], x.shape[1], weight, bias, eps, False)
        else:
            continue
        with graph.inserting_before(node):
            whole = graph.call_function(function, new)
            y, *moments = (graph.call_function(operator.getitem, (whole, at)) for at in range(3))
        y.meta = dict(node.meta)
        y.meta["norm"] = (arguments["input"], *moments, weight, bias)
        node.replace_all_uses_with(y)
        graph.erase_node(node)


def _bound(node: fx.Node) -> dict[str, Any]:
    """The arguments of a norm by name."""
    signature = inspect.signature(node.target)  # type: ignore[arg-type]
    bound = signature.bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _shorten_amax(graph: fx.Graph) -> None:
    for node in _calls(graph, traced.amax):
        with graph.inserting_before(node):
            found = _known_amax(graph, node.args[0])
        if found is not None:
            node.replace_all_uses_with(found)
            graph.erase_node(node)


def _known_amax(graph: fx.Graph, x: object) -> fx.Node | None:
    """A node that computes the amax of `x` without reading it; None where there is no such way."""
    if not isinstance(x, fx.Node):
        return None
    source, slope = _activation(x) or (x, 1.0)
    if isinstance(source, fx.Node) and "norm" in source.meta and 0 <= slope <= 1:
        return graph.call_function(norms.amax_of_norm, (*source.meta["norm"], source, slope))
    if x.op != "call_function":
        return _known_amax(graph, x.args[0]) if x.op == "call_method" and x.target == "contiguous" else None
    if x.target is F.interpolate and _repeats(x):
        return _known_amax(graph, x.args[0]) or graph.call_function(traced.amax, (x.args[0],))
    if x.target in POOLS and _covers(x):
        return _known_amax(graph, x.args[0])
    if x.target is torch.cat:
        parts: Any = x.args[0] if x.args else x.kwargs["tensors"]
        known = [_known_amax(graph, part) for part in parts]
        if not any(known):
            return None
        every = [each or graph.call_function(traced.amax, (part,)) for each, part in zip(known, parts, strict=True)]
        return _largest(graph, every)
    return None


def _largest(graph: fx.Graph, values: list[fx.Node]) -> fx.Node:
    first, *rest = values
    for value in rest:
        first = graph.call_function(torch.maximum, (first, value))
    return first


def _activation(node: fx.Node) -> tuple[Any, float] | None:
    """(input, slope below zero) of a ReLU or leaky ReLU."""
    if node.op == "call_function" and node.target in RELUS:
        return (node.args[0] if node.args else node.kwargs["input"]), 0.0
    if node.op == "call_method" and node.target in RELU_METHODS:
        return node.args[0], 0.0
    if node.op == "call_function" and node.target in LEAKY:
        slope = node.args[1] if len(node.args) > 1 else node.kwargs.get("negative_slope", SLOPE)
        source = node.args[0] if node.args else node.kwargs["input"]
        return (source, float(slope)) if isinstance(slope, (int, float)) else None
    return None


def _is_inplace(node: fx.Node) -> bool:
    if node.op == "call_method":
        return str(node.target).endswith("_")
    position = {F.relu: 1}.get(node.target, 2 if node.target in LEAKY else 9)  # type: ignore[arg-type]
    given = node.args[position] if len(node.args) > position else node.kwargs.get("inplace", False)
    return node.target is torch.relu_ or bool(given)


def _repeats(node: fx.Node) -> bool:
    """A resize that only repeats pixels, all of them."""
    before, after = _value(node.args[0]), _value(node)
    mode = node.kwargs.get("mode", node.args[3] if len(node.args) > 3 else "nearest")
    if before is None or after is None or mode not in ("nearest", "nearest-exact"):
        return False
    return all(new >= old for new, old in zip(after.shape[2:], before.shape[2:], strict=True))


def _covers(node: fx.Node) -> bool:
    """A maximum over windows that leave no pixel out, of values that are not negative."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or (_activation(source) or (None, 1.0))[1] != 0.0:
        return False
    names = ("input", "kernel_size", "stride", "padding", "dilation")
    given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    before, after = _value(source), _value(node)
    if before is None or after is None or given.get("dilation", 1) not in (1, (1, 1)):
        return False
    axes = before.ndim - 2
    kernel = each(given["kernel_size"], axes)
    stride = kernel if given.get("stride") is None else each(given["stride"], axes)
    padding = each(given.get("padding", 0), axes)
    return all(
        step <= size and (count - 1) * step - edge + size >= extent
        for size, step, edge, count, extent in zip(
            kernel, stride, padding, after.shape[2:], before.shape[2:], strict=True
        )
    )


def _rectify(graph: fx.Graph) -> None:
    """ReLUs in front of quantisers keep bits instead of feature maps for their gradient."""
    for node in list(graph.nodes):
        found = _activation(node)
        if found is None:
            continue
        source, slope = found
        readers = list(node.users)
        x = _value(node)
        quantisers = [reader for reader in readers if reader.target is traced.quantize]
        if x is None or x.ndim < 3 or slope < 0 or (_is_inplace(node) and not _reads_alone(node, source)):
            continue
        if slope == 0 and len(readers) == 1 and quantisers and quantisers[0].args[2] == 1 - x.ndim:
            reader = quantisers[0]
            with graph.inserting_before(reader):
                merged = graph.call_function(traced.relu_and_quantize, (source, *reader.args[1:]))
            reader.replace_all_uses_with(merged)
            graph.erase_node(reader)
            graph.erase_node(node)
        elif any(_reaches_quantiser(reader) for reader in readers):
            with graph.inserting_before(node):
                new = graph.call_function(traced.rectify, (source, slope))
            new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
            graph.erase_node(node)


def _reads_alone(node: fx.Node, source: fx.Node) -> bool:
    """Nobody else reads the values of `source`, so that it may be kept instead of overwritten."""
    return all(reader is node or reader.target is norms.amax_of_norm for reader in source.users)


def _repeat(graph: fx.Graph) -> None:
    """Nearest resizing by whole factors, on its way to a quantiser."""
    for node in _calls(graph, F.interpolate):
        source, before, after = node.args[0] if node.args else None, None, _value(node)
        before = _value(source)
        if before is None or after is None or not _repeats(node) or not all(map(_reaches_quantiser, node.users)):
            continue
        pairs = list(zip(after.shape[2:], before.shape[2:], strict=True))
        if any(new % old for new, old in pairs):
            continue
        with graph.inserting_before(node):
            new_node = graph.call_function(norms.repeat_pixels, (source, *(new // old for new, old in pairs)))
        new_node.meta = dict(node.meta)
        node.replace_all_uses_with(new_node)
        graph.erase_node(node)


def _push(graph: fx.Graph) -> None:
    """Blocks lie within a pixel and, where the channels of all parts but the last fill blocks, within a part."""
    waiting = _calls(graph, traced.quantize)
    while waiting:
        node = waiting.pop()
        x, *options = node.args
        if not isinstance(x, fx.Node) or len(x.users) > 1 or x.op != "call_function":
            continue
        parts = [x.args[0]] if x.target is norms.repeat_pixels else _parts_in_blocks(x, options)
        if parts is None:
            continue
        with graph.inserting_before(node):
            quantized = [graph.call_function(traced.quantize, (part, *options)) for part in parts]
            repeats = x.target is norms.repeat_pixels
            arguments = (*quantized, *x.args[1:]) if repeats else (quantized, 1)
            moved = graph.call_function(x.target, arguments)  # type: ignore[arg-type]
        moved.meta = dict(node.meta)
        node.replace_all_uses_with(moved)
        graph.erase_node(node)
        graph.erase_node(x)
        waiting += quantized


def _parts_in_blocks(x: fx.Node, options: list[object]) -> list[fx.Node] | None:
    """What a concatenation of channels joins, if no block of the quantiser with these options spans two."""
    if x.target is not torch.cat:
        return None
    parts: Any = x.args[0] if x.args else x.kwargs["tensors"]
    axis = x.args[1] if len(x.args) > 1 else x.kwargs.get("dim", 0)
    values = [_value(part) for part in parts]
    _, where, groups, *_ = options
    if any(value is None for value in values) or axis != 1 or groups != 1 or len(set(parts)) < len(parts):
        return None
    aligned = all(value.shape[1] % NVFP4_BLOCK == 0 for value in values[:-1])  # type: ignore[union-attr]
    return list(parts) if aligned and where == 1 - values[0].ndim else None  # type: ignore[union-attr]


def _reaches_quantiser(node: fx.Node) -> bool:
    """A quantiser, or what only moves values on to one."""
    if node.target in (traced.quantize, traced.relu_and_quantize, traced.quantize_learned):
        return True
    moves = node.target in (torch.cat, F.interpolate, norms.repeat_pixels, *POOLS)
    return moves and any(_reaches_quantiser(reader) for reader in node.users)


def _collect_weights(graph: fx.Graph) -> None:
    """All plain weights in one call; what it cannot take is quantised layer by layer."""
    found = [node for node in _calls(graph, traced.quantize_weight) if _collectable(node)]
    if len(found) < 2:
        return
    axes = tuple(node.args[1:][1][-1] % node.args[0].meta["example_value"].ndim for node in found)
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    with graph.inserting_after(last):
        together = graph.call_function(weights.quantize_together, (axes, *(node.args[0] for node in found)))
    for at, node in reversed(list(enumerate(found))):
        with graph.inserting_after(together):
            one = graph.call_function(operator.getitem, (together, at))
        node.replace_all_uses_with(one)
        graph.erase_node(node)


def _collectable(node: fx.Node) -> bool:
    weight, *options = cast("tuple[Any, ...]", node.args)
    example = _value(weight)
    is_parameter = isinstance(weight, fx.Node) and weight.op == "placeholder"
    return is_parameter and example is not None and weights.can_collect(example, *options)
