"""What stays FP32 in a network of FP16: operators with numbers that FP16 does not hold, and what reads their results.

    y / (y.sum(1) + 1e-8)          sum, add and div in FP32; y stays as it was
    scores.masked_fill(m, -1e9)    this and the softmax after it in FP32; the product with the values in FP16

One rule, for the graph that becomes an ONNX file (`keep_wide`) and for the nodes of a packed network
(`packed.wide`):

* an operator with such a number (in BF16 also one that makes positions), or one that reads such a constant, computes in
  FP32; a constant that the code casts to the network's type, as in `torch.tensor(1e-9).to(x)`, stays as it is;
* so does what reads a result in FP32, up to a layer, norm or product of activations: those cast it back. Results of
  such operators may be as small or as large as the number;
* so do the sums and squares before it that nobody else reads: what is compared with 1e-12 is as small;
* and so does everything that the code of a module of `Rest.wide` calls, products included;
* an operator that is given a size of an open axis, as in `x / (h * w)`, which may be any number at another size: one
  that is computed of sizes and is no whole number, as `h**-0.5`, is rounded all the same;
* but a mask that attention adds to its scores is cast back limited to the least number: a row of -Inf would be NaN.

It is what autocast does, and what torch computes in when the network is evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._ops import OpOverload

from fp4deploy.graph.capture import module_of
from fp4deploy.graph.folding import CASTS, operator_name, parameters_of
from fp4deploy.rest import POSITIONS, Rest

PRODUCTS = (  # whose operands have one type, that of weights; norms compute in FP32 by themselves
    "convolution", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "linear",
    "addmm", "mm", "bmm", "matmul", "baddbmm", "addbmm", "dot", "mv", "einsum", "bilinear",
    "batch_norm", "native_batch_norm", "_native_batch_norm_legit_no_training", "cudnn_batch_norm",
    "layer_norm", "native_layer_norm", "group_norm", "native_group_norm", "instance_norm", "rms_norm",
    *CASTS,
)  # fmt: skip
SUMS = ("pow", "square", "mul", "sum", "mean", "var", "linalg_vector_norm", "norm", "add", "sub", "exp", "abs", "clone")
ARITHMETIC = ("add", "sub", "mul", "div", "rsub")  # whose numbers are rounded where they are held
NUMBERS = (torch.NumberType, torch.FloatType, torch.TensorType)  # add(x, 1e-8) is add.Tensor
aten, FP32 = torch.ops.aten, {"dtype": torch.float32}
Step = TypeVar("Step", bound=Hashable)


def wide_steps(
    steps: Sequence[Step],
    reads: Callable[[Step], Iterable[Step]],
    seeds: Collection[Step],
    casts: Callable[[Step], bool],
    sums: Callable[[Step], bool],
    kept: Collection[Step],
) -> set[Step]:
    """The steps that compute in FP32, of `steps` in the order in which they run.

    Args:
        reads: the steps whose results one reads.
        seeds: those that must.
        casts: whether a step has operands and a result of one type, and casts what it reads.
        sums: whether a step is a sum or square, which begins a computation in FP32.
        kept: whose results are outputs of the network.
    """
    found: set[Step] = set()
    readers: dict[Step, list[Step]] = {}
    for step in steps:
        sources = list(reads(step))
        for source in sources:
            readers.setdefault(source, []).append(step)
        if step in seeds or (not casts(step) and any(source in found for source in sources)):
            found.add(step)
    for step in reversed(steps):
        if sums(step) and step not in kept and readers.get(step) and found.issuperset(readers[step]):
            found.add(step)
    return found


def keep_wide(program: torch.export.ExportedProgram, rest: Rest) -> None:
    """Cast to FP32, in place, what an exported program in `rest` computes with numbers that `rest` does not hold."""
    calls = [node for node in program.graph.nodes if node.op == "call_function" and _values(node)]
    wide_constants = _wide_constants(program, rest) | {node for node in calls if _makes_unheld(node, rest)}
    for node in calls:
        if operator_name(node.target) in CASTS and node.args[0] in wide_constants and _has_type(node, rest.dtype):
            node.replace_all_uses_with(cast(fx.Node, node.args[0]))
    wide_constants |= _sizes_as_tensors(program.graph, calls, rest)
    if rest.name == "fp32":
        return
    seeds = {
        node
        for node in calls
        if module_of(node) in rest.wide
        or (not casts_operands(node.target) and (_unheld(node, rest) or _reads(node, wide_constants)))
    }
    if not seeds:
        return
    outputs = set(program.graph.output_node().all_input_nodes)
    casts, sums = (lambda node, of=of: of(node.target) for of in (casts_operands, is_sum))
    found = wide_steps(calls, lambda node: node.all_input_nodes, seeds, casts, sums, outputs)
    for node in [each for each in program.graph.nodes if operator_name(each.target) == "_assert_tensor_metadata"]:
        program.graph.erase_node(node)  # of the types as they were
    widened: dict[fx.Node, fx.Node] = {}  # a value of `rest` -> its cast to FP32, and one in FP32 -> its cast back
    limited: dict[fx.Node, fx.Node] = {}  # a mask in FP32 -> it, with the least number that `rest` holds
    results = set(wide_constants)  # in FP32 by this function
    for node in calls:
        if node in found:
            sources = [each for each in node.all_input_nodes if _has_type(each, rest.dtype)]
            _read_casts(program.graph, node, sources, torch.float32, widened)
            _compute_wide(node, rest)
            results.add(node)
        else:
            _limit_mask(program.graph, node, results, rest, limited)
            sources = [each for each in node.all_input_nodes if each in results and _has_type(each, torch.float32)]
            if operator_name(node.target) not in CASTS:
                _read_casts(program.graph, node, sources, rest.dtype, widened)
    program.graph_module.recompile()


def mask_of(called: Any, args: Sequence[object], kwargs: Mapping[str, object]) -> Any:
    """What attention adds to its scores; None of any other operator."""
    if "scaled_dot_product" not in operator_name(called):
        return None
    names = [argument.name for argument in called._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return given.get("attn_mask", given.get("attn_bias"))


def _limit_mask(
    graph: fx.Graph, node: fx.Node, wide: set[fx.Node], rest: Rest, limited: dict[fx.Node, fx.Node]
) -> None:
    """Let attention read a mask that is FP32 with the least number of `rest` in place of those below."""
    mask = mask_of(node.target, node.args, node.kwargs)
    if mask not in wide or not _has_type(mask, torch.float32):
        return
    if mask not in limited:
        with graph.inserting_before(node):
            limited[mask] = graph.call_function(torch.ops.aten.clamp.default, (mask, -rest.largest))
        limited[mask].meta = dict(mask.meta)
        wide.add(limited[mask])
    node.replace_input_with(mask, limited[mask])


def _values(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    several = value if isinstance(value, (list, tuple)) else [value]
    return [each for each in several if isinstance(each, torch.Tensor)]


def _has_type(node: fx.Node, dtype: torch.dtype) -> bool:
    return any(each.dtype == dtype for each in _values(node))


def casts_operands(called: object) -> bool:
    """Products, norms, and operators of other libraries, such as the markers of quantised layers."""
    if not isinstance(called, OpOverload):  # getitem: one of several results
        return False
    name = operator_name(called)
    return called.namespace != "aten" or name in PRODUCTS or "scaled_dot_product" in name


def is_sum(called: object) -> bool:
    """Whether an operator is a sum or square, which begins a computation in FP32 that nobody else reads."""
    return operator_name(called) in SUMS


def _unheld(node: fx.Node, rest: Rest) -> bool:
    """Whether an operator on values of `rest`, or one that makes some, is given a number that these do not hold."""
    if not isinstance(node.target, OpOverload):
        return False
    if not any(_has_type(each, rest.dtype) for each in (node, *node.all_input_nodes)):
        return False
    if rest.whole < POSITIONS and operator_name(node.target) in ("arange", "linspace"):
        return True
    return any(not rest.holds(number) for number in _numbers(node).values())


def _makes_unheld(node: fx.Node, rest: Rest) -> bool:
    """Whether a call makes an FP32 tensor of a number that `rest` does not hold, of nothing else."""
    alone = isinstance(node.target, OpOverload) and not any(map(_values, node.all_input_nodes))
    return alone and _has_type(node, torch.float32) and any(not rest.holds(each) for each in _numbers(node).values())


def numbers_of(called: object, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, float]:
    """The numbers that a call is given, by the names of its schema; no sizes, no positions."""
    found: dict[str, float] = {}
    if not isinstance(called, OpOverload):
        return found
    for at, argument in enumerate(called._schema.arguments):
        given = args[at] if at < len(args) else kwargs.get(argument.name)
        if not isinstance(given, (int, float)) or isinstance(given, bool):
            continue
        kind: object = argument.type
        kind = kind.getElementType() if isinstance(kind, torch.OptionalType) else kind
        if isinstance(kind, NUMBERS):
            found[argument.name] = given
    return found


def _numbers(node: fx.Node) -> dict[str, float]:
    return numbers_of(node.target, node.args, node.kwargs)


def _wide_constants(program: torch.export.ExportedProgram, rest: Rest) -> set[fx.Node]:
    """Constants in FP32 that `rest` does not hold."""
    held = parameters_of(program).items()
    return {node for node, x in held if x.dtype == torch.float32 and not rest.holds_tensor(x)}


def _sizes_as_tensors(graph: fx.Graph, calls: Iterable[fx.Node], rest: Rest) -> set[fx.Node]:
    """Put FP32 tensors in the place of sizes of open axes that operators on floating point numbers are given."""
    made: dict[fx.Node, fx.Node] = {}
    for node in calls:
        if not (isinstance(node.target, OpOverload) and _reads_floats(node)):
            continue
        for at, argument in enumerate(node.target._schema.arguments[: len(node.args)]):
            size: object = node.args[at]
            if isinstance(argument.type, torch.TensorType) and isinstance(size, fx.Node) and not _values(size):
                if size not in made:
                    with graph.inserting_before(node):
                        made[size] = _rounded(
                            graph, _call(graph, node, aten.scalar_tensor.default, size, **FP32), node, rest
                        )
                node.update_arg(at, made[size])
    return {*made.values()}


def _rounded(graph: fx.Graph, number: fx.Node, user: fx.Node, rest: Rest) -> fx.Node:
    """A number with the digits of `rest`, as `Rest.rounded`, once the file runs; whole numbers as they are.

    By Veltkamp's split, since a decomposed graph is FP32 and has no casts: n C - (n C - n), C = 2^(24 - digits) + 1.
    """
    if isinstance(cast(fx.Node, number.args[0]).meta["val"], torch.SymInt) or rest.name == "fp32":
        return number
    factor = round(torch.finfo(rest.dtype).eps / torch.finfo(torch.float32).eps) + 1
    scaled = _call(graph, user, aten.mul.Tensor, number, factor)
    return _call(graph, user, aten.sub.Tensor, scaled, _call(graph, user, aten.sub.Tensor, scaled, number))


def _call(graph: fx.Graph, user: fx.Node, called: OpOverload, *args: Any, **named: Any) -> fx.Node:
    """A new call, on behalf of another."""
    node = graph.call_function(called, args, named)
    node.meta = {key: value for key, value in user.meta.items() if key in ("nn_module_stack", "stack_trace", "val")}
    node.meta["val"] = _value(node)
    return node


def _value(node: fx.Node) -> object:
    """What torch makes of the values of a call's operands; its old value tells of which program these are."""
    arguments, named = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    fake = detect_fake_mode([node.meta["val"], arguments, named]) or nullcontext()
    with torch.no_grad(), enable_python_dispatcher(), fake:  # what computes shapes of open ones is in Python
        return cast(Callable[..., object], node.target)(*arguments, **named)


def _reads(node: fx.Node, constants: Collection[fx.Node]) -> bool:
    return any(each in constants for each in node.all_input_nodes)


def _read_casts(
    graph: fx.Graph, node: fx.Node, sources: Iterable[fx.Node], dtype: torch.dtype, made: dict[fx.Node, fx.Node]
) -> None:
    """Let a node read its sources in another type, of which there is one cast each, right behind the source."""
    for source in sources:
        if source not in made:
            after = source.next
            while after.op == "placeholder":
                after = after.next
            with graph.inserting_before(after):
                made[source] = graph.call_function(torch.ops.aten._to_copy.default, (source,), {"dtype": dtype})
            meta = {key: value for key, value in source.meta.items() if key in ("nn_module_stack", "stack_trace")}
            made[source].meta = {**meta, "val": source.meta["val"].to(dtype)}
        node.replace_input_with(source, made[source])


def _compute_wide(node: fx.Node, rest: Rest) -> None:
    """The type of what a call makes of operands in FP32; numbers that are held are rounded as everywhere else."""
    if isinstance(node.target, OpOverload):
        for at, argument in enumerate(node.target._schema.arguments):
            if argument.name == "dtype":
                _set(node, at, argument.name, rest.dtype, torch.float32)
            elif argument.name in _numbers(node) and operator_name(node.target) in ARITHMETIC:
                number = _numbers(node)[argument.name]
                if isinstance(number, float):
                    _set(node, at, argument.name, number, rest.rounded(number))
    if "dtype" not in node.kwargs and not _reads_floats(node) and _has_type(node, rest.dtype):  # full, zeros, arange
        node.kwargs = {**node.kwargs, "dtype": torch.float32}
    node.meta["val"] = _value(node)
    node.meta.pop("tensor_meta", None)


def _reads_floats(node: fx.Node) -> bool:
    return any(each.is_floating_point() for source in node.all_input_nodes for each in _values(source))


def _set(node: fx.Node, at: int, name: str, old: object, new: float | torch.dtype) -> None:
    """Replace an argument that has this value."""
    if at < len(node.args) and node.args[at] == old and type(node.args[at]) is type(old):
        node.update_arg(at, new)
    elif name in node.kwargs and node.kwargs[name] == old:
        node.update_kwarg(name, new)
