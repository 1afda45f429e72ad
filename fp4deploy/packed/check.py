"""Checks of a graph: every name exists, every shape fits, every activation is written once and before it is read.

A network that passes runs, whatever program wrote its file, and gives finite numbers of the shapes that `shapes` finds:

| bound | for |
|---|---|
| 4096 nodes, 64 forms a node, 2^28 elements of an activation at the example's size | time and memory |
| W x KH x C of a packed convolution below 2^31 | 32-bit offsets of the kernels |
| amax of an input from 2^-100 to 65504, of a weight from 0; block scales positive numbers | finite products |
| every other number in the range of the rest: FP16, at most 65504, BF16 or FP32 | the same |
| constants and numbers of nodes at most 3.4e38: what reads one beyond FP16 computes in FP32 (`wide`) | the same |
| 2048 positions of an `argmax` | exact whole numbers in FP16 |

A product may still leave the range of what it is computed in: the rest, such as FP16 (65504), on a GPU, FP32 on a CPU
(3.4e38). It is infinite then, as in torch, and a packed activation after it saturates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fp4deploy.errors import InputError
from fp4deploy.formats import EIGHT_BITS, MXFP4_BLOCK, NVFP4_BLOCK
from fp4deploy.formats.mxfp4 import E8M0_NAN
from fp4deploy.graph.ir import COMPUTED
from fp4deploy.models.heads import Head
from fp4deploy.packed.graph import (
    Activation,
    Affine,
    Arithmetic,
    Aten,
    Attention,
    Compare,
    Conv2d,
    ConvTranspose2d,
    Experts,
    Form,
    Graph,
    GroupNormReLU,
    Input,
    Layer,
    Linear,
    Node,
    Norm,
    Pad,
    Pool,
    PReLU,
    Resize,
    Roll,
    axes_of,
    constants_of,
    is_quantized,
    named,
    parts_of,
    tensors_of,
    weight_names,
)
from fp4deploy.packed.operators import COMPLEX, NUMBERS, aten_function
from fp4deploy.packed.shapes import Shapes, shapes_of, weight_shape
from fp4deploy.rest import rest_of

SMALLEST_AMAX = 2.0**-100
TYPES: dict[torch.dtype, Any] = {  # as safetensors call them
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
}
AGAIN = "Export the model again: fp4deploy export --format packed"
Requirement = tuple[str, str, list[int]]  # tensor, type, shape


def check_graph(graph: Graph, channels: int | None = None, head: Head | None = None) -> Shapes:
    """Check the whole graph; the shapes of its activations at the example's size.

    Args:
        channels: of the model card: the first output is then a map of so many channels, and of the input's size.

    Raises:
        InputError: naming the node and the fault.
    """
    _check_inputs(graph)
    forms: dict[str, Form] = {}
    for each in graph.inputs:
        _check_outputs(graph, each, forms)
    for number, node in enumerate(graph.nodes):
        try:
            _check_names(graph, node, forms)
            _check_node(node)
            plain = isinstance(node, Layer) and not is_quantized(node) and node.precision != graph.rest
            _require(not plain, f"it is {getattr(node, 'precision', '')} in a network whose rest is {graph.rest}")
            _check_outputs(graph, node, forms)
        except InputError as error:
            raise InputError(f"Node {number} of the graph ({node.op} '{named(node)}'): {error}") from None
    _check_used(graph)
    _check_wide(graph)
    _check_complex(graph)
    try:
        shapes = shapes_of(graph)
    except InputError as error:
        raise InputError(f"{error}. {AGAIN}") from None
    layers: dict[str, tuple[object, ...]] = {}
    for number, node in enumerate(graph.nodes):
        try:
            _check_tensors(graph, node, shapes, layers)
        except InputError as error:
            raise InputError(f"Node {number} of the graph ({node.op} '{named(node)}'): {error}") from None
    if channels is not None:
        _check_logits(graph, shapes, channels, head)
    return shapes


def check_values(tensors: Mapping[str, torch.Tensor], graph: Graph) -> None:
    """Check the numbers of the tensors that a checked graph lists.

    Raises:
        InputError: naming the tensor, its value and the limit.
    """
    amaxes = {form.amax for form in graph.forms().values() if form.amax}
    rest = rest_of(graph)
    constants = constants_of(graph)
    for name, tensor in tensors.items():
        if tensor.dtype == torch.uint8:
            if name.endswith(".scales") and (tensor == E8M0_NAN).any():
                raise InputError(f"the block scales '{name}' hold NaN. {AGAIN}")
            continue
        if not tensor.float().isfinite().all():
            raise InputError(f"the tensor '{name}' holds NaN or Inf. Export an earlier checkpoint.")
        if name.endswith(".scales") and torch.signbit(tensor.float()).any():  # -0 is no scale for a kernel either
            raise InputError(f"the scales '{name}' hold a negative number. {AGAIN}")
        if name not in constants and tensor.numel() and tensor.float().abs().max() > rest.largest:
            largest = float(tensor.float().abs().max())
            limit = f"the largest of {rest.label} is {rest.largest:g}"
            raise InputError(f"the tensor '{name}' holds {largest:g}, and {limit}. {AGAIN}")
        if name in amaxes and not float(tensor) >= SMALLEST_AMAX:
            raise InputError(f"'{name}' is {float(tensor):g}, and a scale needs an amax of at least 2^-100. {AGAIN}")
        if name.endswith(".amax") and not (tensor >= 0).all():
            raise InputError(f"'{name}' is {float(tensor.min()):g}, and an amax is not negative. {AGAIN}")


def _check_inputs(graph: Graph) -> None:
    names = [each.name for each in graph.inputs]
    if len(set(names)) != len(names):
        raise InputError(f"Two inputs of the graph have one name. {AGAIN}")
    for each in graph.inputs:
        channels = 1 in each.free and len(each.shape) > 3
        batch = 0 not in each.free or each.shape[0] == 1
        if channels or not batch or max(each.free, default=0) >= len(each.shape):
            raise InputError(
                f"The input '{each.name}' needs a free batch of 1 as its first axis, or a fixed one, and fixed "
                "channels."
            )
        if (0 in each.free) != (0 in graph.inputs[0].free):
            raise InputError(f"The batch of '{each.name}' is free where that of another input is not. {AGAIN}")
        if each.dtype == "int64" and any(form.amax or form.pooled for form in each.outputs):
            raise InputError(f"The input '{each.name}' holds whole numbers, which are never packed. {AGAIN}")
    if graph.digits and (len(graph.inputs) != 1 or len(graph.inputs[0].shape) != 4 or graph.inputs[0].shape[1] != 3):
        raise InputError(f"Only an RGB image is encoded as multi-term FP4. {AGAIN}")


def _check_names(graph: Graph, node: Node, forms: Mapping[str, Form]) -> None:
    for name in node.inputs:
        _require(name in forms, f"it reads '{name}', which no node before it writes")
    for name in tensors_of(node):
        _require(name in graph.tensors, f"the tensor '{name}' is missing")
    packed = [forms[name].amax is not None for name in node.inputs]
    if not isinstance(node, Layer):
        _require(not any(packed), "its input is packed")
        if isinstance(node, Aten):
            _check_schema(node)
        return
    _require(all(packed) if node.precision == "nvfp4" else not any(packed), f"its input is not {node.precision}")
    axis = "last" if isinstance(node, Linear) else "channels"
    wrong = [name for name in node.inputs if forms[name].amax is not None and forms[name].axis != axis]
    _require(not wrong, f"its input is not packed along its {axis}")


def _check_schema(node: Aten) -> None:
    """The operator is on the list, and its schema has the arguments; torch decides what fits them (`shapes`)."""
    try:
        schema = aten_function(node.function)._schema
    except ValueError as error:
        raise InputError(str(error)) from None
    known = {argument.name for argument in schema.arguments}
    given = [role.partition(".")[0] for role in node.roles] + list(node.arguments)
    _require(len(node.roles) == len(node.inputs), "it has another number of roles than of inputs")
    unknown = [name for name in given if name not in known]
    _require(not unknown, f"{node.function} has no argument '{unknown[0] if unknown else ''}'")
    _require(node.result < len(schema.returns), f"{node.function} has {len(schema.returns)} results")


def _check_wide(graph: Graph) -> None:
    """What is FP32 whatever the rest is, is written by nodes that are no layers."""
    written = {form.name for node in graph.nodes if not isinstance(node, Layer) for form in node.outputs}
    wrong = [name for names in graph.wide.values() for name in names if name not in written]
    if wrong:
        raise InputError(f"'{wrong[0]}' is said to be FP32, and no node but a layer writes it. {AGAIN}")


def _check_complex(graph: Graph) -> None:
    """Complex activations, of a Fourier transform, are read by no layer, not packed, and no output."""
    found = set[str]()
    for node in graph.nodes:
        function = node.function.partition(".")[0] if isinstance(node, Aten) else ""
        reads = bool(found & {*node.inputs})
        if reads and isinstance(node, Layer):
            raise InputError(f"'{named(node)}' reads a complex activation. {AGAIN}")
        real = function == "_fft_c2r" or (isinstance(node, Activation) and node.function == "abs")
        if function in COMPLEX or (reads and not real):
            found |= {form.name for form in node.outputs}
            if any(form.amax for form in node.outputs):
                raise InputError(f"'{named(node)}' is complex, and packed. {AGAIN}")
    if any(each.activation in found for each in graph.outputs):
        raise InputError(f"An output of the graph is complex. {AGAIN}")


def _check_outputs(graph: Graph, writer: Node | Input, forms: dict[str, Form]) -> None:
    for form in writer.outputs:
        _require(form.name not in forms, f"it writes '{form.name}' a second time")
        _require(not form.pooled or isinstance(writer, GroupNormReLU), "only group_norm_relu pools")
        if form.amax:
            _require(form.amax in graph.tensors, f"the tensor '{form.amax}' is missing")
            _tensor(graph, form.amax, "F32", [])
        forms[form.name] = form


def _check_node(node: Node) -> None:
    """What the fields of one node do not say by themselves."""
    if isinstance(node, Activation):
        count = NUMBERS.get(node.function, 0)
        _require(len(node.parameters) == count, f"{node.function} takes {count} numbers")
        _require(node.function != "softplus" or node.parameters[0] > 0, "the first number of softplus is positive")
    elif isinstance(node, Arithmetic):
        _require((len(node.inputs) == 2) != (node.number is not None), "it takes two activations, or one and a number")
        _require(node.op != "div" or node.number != 0, "it divides by zero")
    elif isinstance(node, Compare):
        _require((len(node.inputs) == 2) != (node.number is not None), "it takes two activations, or one and a number")
    elif isinstance(node, Roll):
        _require(len(node.shifts) == len(node.dims), "it takes one shift for each axis")
    elif isinstance(node, Attention):
        _require(len(node.inputs) == 3 or not node.causal, "a causal attention takes no mask")
    elif isinstance(node, Pool):
        places = [node.kernel, node.stride, node.padding, node.dilation]
        _require(len({len(each) for each in places}) == 1, "its window has another number of axes than its places")
    elif isinstance(node, Resize):
        _require((node.size is None) != (node.scale is None), "it takes a size or a scale")
    elif isinstance(node, Pad):
        _require(len(node.pad) % 2 == 0, "it pads each axis on two sides")
    elif isinstance(node, ConvTranspose2d):
        places = [node.stride, node.padding, node.output_padding, node.dilation]
        _require(all(len(each) == axes_of(node) for each in places), f"it has {axes_of(node)} spatial axes")
        beyond = any(a >= max(b, c) for a, b, c in zip(node.output_padding, node.stride, node.dilation, strict=True))
        _require(not beyond, "its output padding is not below its stride or dilation")
    elif isinstance(node, Conv2d):
        places = [node.stride, node.padding, node.dilation]
        _require(all(len(each) == axes_of(node) for each in places), f"it has {axes_of(node)} spatial axes")
        single = node.precision == "nvfp4" and node.groups == 1
        _require(len(node.inputs) == 1 or single, "only a packed convolution of one group has two inputs")
    elif isinstance(node, Norm):
        _require((node.op == "layer_norm") == bool(node.shape), "a layer norm alone has a shape")


def _check_used(graph: Graph) -> None:
    read = {name for node in graph.nodes for name in node.inputs} | {each.activation for each in graph.outputs}
    forms = graph.forms()
    outputs = [each.activation for each in graph.outputs]
    for name in outputs:
        if name not in forms or forms[name].amax is not None:
            raise InputError(f"The output '{name}' of the graph is no plain activation that a node writes. {AGAIN}")
    names = [each.name for each in graph.outputs]
    if len(set(names)) != len(names) or ("" in names and len(names) > 1):
        raise InputError(f"Outputs of the graph share a name. {AGAIN}")
    tensors = {name for node in (*graph.nodes, *graph.inputs) for name in tensors_of(node)}
    unused = [name for name in forms if name not in read and name not in {each.name for each in graph.inputs}]
    unused += [name for name in graph.tensors if name not in tensors]
    if unused:
        raise InputError(f"{len(unused)} names of the graph are never used (first '{unused[0]}').")


def _check_tensors(graph: Graph, node: Node, shapes: Shapes, layers: dict[str, tuple[object, ...]]) -> None:
    """Types and shapes; a layer that several nodes read is the same layer."""
    for name, dtype, shape in required(graph, node, shapes):
        _tensor(graph, name, dtype, shape)
    if isinstance(node, PReLU):
        _check_slopes(graph, node, shapes)
    if isinstance(node, Layer):
        channels = sum(shapes[name][1 if not isinstance(node, Linear) else -1] for name in node.inputs)
        known = (type(node), node.precision, node.e4m3_max, weight_shape(graph, node, channels), len(node.inputs))
        same = layers.setdefault(node.layer, known) == known
        _require(same, "another node reads this layer as one of another shape or kind")
        if len(node.inputs) == 2:
            first = shapes[node.inputs[0]][1]
            _require(first % NVFP4_BLOCK == 0, f"its first input is not a multiple of {NVFP4_BLOCK} channels")


def required(graph: Graph, node: Node, shapes: Shapes) -> Iterator[Requirement]:
    """The tensors that a node reads, with type and shape; those of its forms are checked where they are written."""
    rest = TYPES[rest_of(graph.rest).dtype]
    if isinstance(node, Layer):
        axis = -1 if isinstance(node, Linear) else 1
        channels = sum(shapes[name][axis] for name in node.inputs)
        shape = weight_shape(graph, node, channels)
        *rows, deep = shape
        if node.bias:
            groups = node.groups if isinstance(node, ConvTranspose2d) else 1
            yield node.bias, rest, [rows[0] * groups]
        names = weight_names(node)
        if not is_quantized(node):
            yield names[0], "F32" if node.layer.startswith(COMPUTED) else rest, shape
            return
        if node.precision in EIGHT_BITS:
            yield names[0], TYPES[EIGHT_BITS[node.precision].dtype], shape
            yield names[1], "F32", rows[:1]
            yield names[2], "F32", []
            return
        block, scale = (NVFP4_BLOCK, "F8_E4M3") if node.precision == "nvfp4" else (MXFP4_BLOCK, "U8")
        blocks = -(-deep // block)
        yield names[0], "U8", [*rows, blocks * block // 2]
        yield names[1], scale, [*rows, blocks]
        for name in names[2:]:
            yield name, "F32", []
        if isinstance(node, Conv2d) and node.groups > 1:
            _require(deep % block == 0, f"a block of {block} would cross its groups of {deep} channels")
        return
    if isinstance(node, Experts):
        codes, scales, amax = parts_of(node.tensor)
        *rows, deep = graph.tensors[codes].shape
        _require(len(rows) == 2 and deep % 8 == 0, "the weights of its experts are not [E, N, K] in whole blocks")
        yield codes, "U8", [*rows, deep]
        yield scales, "F8_E4M3", [*rows, deep // 8]
        yield amax, "F32", [rows[0], 1]
    if isinstance(node, GroupNormReLU | Affine | Norm) and node.layer is not None:
        source = shapes[node.inputs[0]]
        shape = list(node.shape) if isinstance(node, Norm) and node.op == "layer_norm" else [source[1]]
        parts = ("scale", "shift") if isinstance(node, Affine) else ("weight", "bias")
        for part in parts:
            yield f"{node.layer}.{part}", "F32" if isinstance(node, Affine) else rest, shape
        if isinstance(node, GroupNormReLU):
            _require(len(source) == 4, "it reads feature maps [N, C, H, W]")
            if node.bias:
                yield node.bias, rest, shape


def _check_slopes(graph: Graph, node: PReLU, shapes: Shapes) -> None:
    """One number, or one for each channel."""
    info, source = graph.tensors[node.tensor], shapes[node.inputs[0]]
    _require(info.dtype in (TYPES[rest_of(graph.rest).dtype], "F32"), f"the tensor '{node.tensor}' is {info.dtype}")
    _require(
        info.shape == [1] or info.shape == [source[1] if len(source) > 1 else 1], "its slopes are not its channels"
    )


def _check_logits(graph: Graph, shapes: Shapes, channels: int, head: Head | None) -> None:
    logits, image = shapes[graph.outputs[0].activation], tuple(graph.inputs[0].shape)
    size = image[2:] if head is None or len(image) != 4 else head.output_size(int(image[2]), int(image[3]))
    if channels < 1 or len(image) not in (4, 5) or logits != (image[0], channels, *size):
        places = "the input's size" if size == image[2:] else f"{size[0]} places"
        raise InputError(
            f"The first output of the graph is {list(logits)} for an input {list(image)}, and the model card has "
            f"{channels} channels of {places}. {AGAIN}"
        )


def _tensor(graph: Graph, name: str, dtype: str, shape: list[int]) -> None:
    info = graph.tensors[name]
    _require(
        (info.dtype, info.shape) == (dtype, shape),
        f"the tensor '{name}' is {info.dtype} {info.shape}, and {dtype} {shape} is needed",
    )


def _require(condition: bool, cause: str) -> None:
    if not condition:
        raise InputError(f"{cause}. {AGAIN}")
