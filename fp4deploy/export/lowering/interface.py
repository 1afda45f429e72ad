"""Input and output of an engine: type and layout, images as they come from a decoder, classes instead of logits.

The graph of a file reads normalised images FP16 [N,3,H,W] and gives logits FP16 [N,C,H,W], both FP32 where the rest is
BF16 or FP32. Around it go

    input     uint8:  x in 0..255 -> Cast FP32 -> (x - 255 mean) / (255 std) -> Cast FP16
              fp32:   Cast FP16
    layout    nhwc:   [N,H,W,3] -> Transpose -> [N,3,H,W], and the other way round at the end
    output    fp32:   Cast;    argmax: INT32 [N,H,W], the class with the largest logit, the first of equal ones

Normalisation is done in FP32 from the mean and standard deviation of the model card, so that an engine that takes bytes
gets the same FP16 values as one that is given normalised images rounded to FP16, to one unit in the last place.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from fp4deploy.errors import InputError, suggest

INPUTS = ("fp16", "fp32", "uint8")
OUTPUTS = ("fp16", "fp32", "argmax")
LAYOUTS = ("nchw", "nhwc")
PREFIX = "interface"  # of the nodes and values added here
TYPES = {"fp16": TensorProto.FLOAT16, "fp32": TensorProto.FLOAT, "uint8": TensorProto.UINT8}


@dataclass(frozen=True)
class Interface:
    """What an engine takes and gives; None is as in the ONNX file.

    Raises:
        InputError: an unknown value.
    """

    input: str | None = None
    input_layout: str = "nchw"
    output: str | None = None
    output_layout: str = "nchw"

    def __post_init__(self) -> None:
        for name, value, valid in (
            ("input", self.input, (None, *INPUTS)),
            ("input-layout", self.input_layout, LAYOUTS),
            ("output", self.output, (None, *OUTPUTS)),
            ("output-layout", self.output_layout, LAYOUTS),
        ):
            if value not in valid:
                known = [each for each in valid if each is not None]
                raise InputError(
                    f"--{name} is '{value}'.{suggest(str(value), known)} Valid values: {', '.join(known)}."
                )
        if self.output == "argmax" and self.output_layout != "nchw":
            raise InputError("--output argmax is [N,H,W], which has no channels: leave --output-layout out.")

    @property
    def as_in_file(self) -> bool:
        """Nothing is changed."""
        return self == Interface()

    def to_json(self) -> dict[str, str | None]:
        """For the ledger."""
        return asdict(self)


def with_interface(model: onnx.ModelProto, wanted: Interface, card: dict[str, object] | None) -> onnx.ModelProto:
    """A copy of a graph of one image input and one output, with another interface.

    card: the model card as JSON, for the normalisation of uint8 images.

    Raises:
        InputError: the graph has other inputs or outputs than an image and a map; bytes are asked for without a card.
    """
    if wanted.as_in_file:
        return model
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    graph = changed.graph
    if len(graph.input) != 1 or len(graph.output) != 1 or len(_extents(graph.input[0])) != 4:
        raise InputError(
            "--input, --output and their layouts are for networks of one image [N,3,H,W] and one output, and this file "
            f"has {len(graph.input)} inputs and {len(graph.output)} outputs."
        )
    if wanted.input not in (None, _type_name(graph.input[0])) or wanted.input_layout == "nhwc":
        _replace_input(graph, wanted, card)
    if wanted.output not in (None, _type_name(graph.output[0])) or wanted.output_layout == "nhwc":
        _replace_output(graph, wanted)
    return changed


def _replace_input(graph: onnx.GraphProto, wanted: Interface, card: dict[str, object] | None) -> None:
    given = graph.input[0]
    inner, name = f"{PREFIX}.{given.name}", given.name
    _rename(graph, name, inner)
    kind, extents = given.type.tensor_type.elem_type, _extents(given)
    outer = TYPES[wanted.input] if wanted.input else kind
    nodes: list[onnx.NodeProto] = []
    add = partial(_append, nodes, name)
    if wanted.input_layout == "nhwc":
        extents = [extents[0], *extents[2:], extents[1]]
        if wanted.input != "uint8":
            add("Transpose", "image_nchw", perm=[0, 3, 1, 2])
    if wanted.input == "uint8":
        if card is None:
            raise InputError("--input uint8 needs the model card, with mean and std, and this file has none.")
        add("Cast", "image_float", to=TensorProto.FLOAT)
        if wanted.input_layout == "nhwc":  # no Transpose takes bytes
            add("Transpose", "image_nchw", perm=[0, 3, 1, 2])
        mean, std = (np.array(card[key], np.float64) for key in ("mean", "std"))
        for op, role, constant in (("Sub", "centred", 255 * mean), ("Mul", "normalised", 1 / (255 * std))):
            each = numpy_helper.from_array(constant.astype(np.float32).reshape(1, 3, 1, 1), f"{PREFIX}.{role}.constant")
            graph.initializer.append(each)
            add(op, role, each.name)
    if (TensorProto.FLOAT if wanted.input == "uint8" else outer) != kind:
        add("Cast", "image_cast", to=kind)
    nodes[-1].output[0] = inner
    _put_first(graph, nodes)
    given.type.CopyFrom(_tensor(outer, extents))


def _replace_output(graph: onnx.GraphProto, wanted: Interface) -> None:
    given = graph.output[0]
    inner, name = f"{PREFIX}.{given.name}", given.name
    _rename(graph, name, inner)
    kind, extents = given.type.tensor_type.elem_type, _extents(given)
    nodes: list[onnx.NodeProto] = []
    add = partial(_append, nodes, inner)
    if wanted.output == "argmax":
        add("ArgMax", "classes", axis=1, keepdims=0)
        add("Cast", "classes_int32", to=TensorProto.INT32)
        kind, extents = TensorProto.INT32, [extents[0], *extents[2:]]
    elif wanted.output is not None and TYPES[wanted.output] != kind:
        kind = TYPES[wanted.output]
        add("Cast", "output_cast", to=kind)
    if wanted.output_layout == "nhwc":
        order = [0, *range(2, len(extents)), 1]
        add("Transpose", "output_nhwc", perm=order)
        extents = [extents[place] for place in order]
    nodes[-1].output[0] = name
    graph.node.extend(nodes)
    given.type.CopyFrom(_tensor(kind, extents))


def _append(nodes: list[onnx.NodeProto], first: str, op: str, role: str, *more: str, **attributes: Any) -> None:
    """Add a node that reads the output of the last one, or the value `first`."""
    value, made = nodes[-1].output[0] if nodes else first, f"{PREFIX}.{role}"
    nodes.append(helper.make_node(op, [value, *more], [made], name=made, **attributes))


def _type_name(value: onnx.ValueInfoProto) -> str:
    kind = value.type.tensor_type.elem_type
    return next((name for name, each in TYPES.items() if each == kind), "")


def _extents(value: onnx.ValueInfoProto) -> list[int | str]:
    extents = value.type.tensor_type.shape.dim
    return [each.dim_value if each.HasField("dim_value") else each.dim_param for each in extents]


def _tensor(kind: int, extents: list[int | str]) -> onnx.TypeProto:
    return helper.make_tensor_type_proto(kind, [extent or None for extent in extents])


def _rename(graph: onnx.GraphProto, old: str, new: str) -> None:
    """Let all nodes read and write `new` instead of `old`."""
    for node in graph.node:
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                if name == old:
                    names[place] = new
    for value in graph.value_info:
        if value.name == old:
            value.name = new


def _put_first(graph: onnx.GraphProto, nodes: list[onnx.NodeProto]) -> None:
    rest = [*graph.node]
    del graph.node[:]
    graph.node.extend([*nodes, *rest])
