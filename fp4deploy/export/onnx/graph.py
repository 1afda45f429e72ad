"""torch -> canonical NVFP4 Q/DQ ONNX: the hardware-neutral file from which every target is lowered.

The model is copied, the copy rounded to FP16, or what else the rest is (`fp4deploy.rest`), and traced by torch's
exporter with two kinds of layers replaced:

* a quantised layer leaves two markers, "its input is quantised here" and "its weight comes from here". Its float weight
  is never traced, so no float copy of it can end up in the file. A pass (`qdq.LowerMarkers`) then puts Q/DQ nodes in
  their place, with constants quantised from the FP32 weights.
* GroupNorm becomes ONNX GroupNormalization (opset 21+). TensorRT-RTX builds the same fused kernel from it as from the
  exporter's Reshape, InstanceNormalization, Mul, Add chain, and the file stays readable. InstanceNorm likewise.

BatchNorm is not folded into the convolution before it. The exporter would fold it in FP16, which rounds every weight a
second time: the file would hold other weights than those that were trained and compared, and FP4 layers below would see
other codes. A compiler may fold it in higher precision, and each layer keeps its name.

A graph in BF16 has FP32 inputs and outputs, and operators in FP32 where ONNX has no others (`bf16`).

A model without quantised layers gives the plain FP16 graph, so both precisions share one path. The batch is dynamic,
the image size fixed or, with `dynamic_size`, free; the same checkpoint gives the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import onnx
import onnx.checker
import onnx_ir as ir
import torch
from onnx_ir.passes.common import NameFixPass
from torch import nn

from fp4deploy.errors import InputError
from fp4deploy.export.onnx.bf16 import WidenEnds, WidenOperators
from fp4deploy.export.onnx.canonical import CANONICAL, FORM_KEY, IR_VERSION, LAYERS_KEY, REST_KEY, WIDE_KEY
from fp4deploy.export.onnx.exporter import BATCH, Examples, OpenAxes, input_names, trace
from fp4deploy.export.onnx.layer_constants import Constants, expert_constants, layer_constants
from fp4deploy.export.onnx.markers import traceable
from fp4deploy.export.onnx.mixed_types import one_type_of_norms
from fp4deploy.export.onnx.naming import ForgetTracing, NameAfterModules, aliases_of
from fp4deploy.export.onnx.qdq import LowerMarkers, marked_layers
from fp4deploy.graph.capture import Inputs, arguments, require_axes
from fp4deploy.graph.copies import copied
from fp4deploy.graph.randomness import refuse_random
from fp4deploy.models.card import CARD_KEY, ModelCard
from fp4deploy.qat.experts import experts_of
from fp4deploy.qat.plan import layer_plan
from fp4deploy.qat.prepare import quantized_layers, unquantized
from fp4deploy.rest import BF16, FP16, FP32, Rest, rest_of

SIZES = ("H", "W")
PRODUCER = "fp4deploy"


def export_graph(
    model: nn.Module,
    input_shape: tuple[int, ...] | Inputs,
    card: ModelCard | None = None,
    dynamic_size: bool = False,
    rest: str | Rest | None = None,
    dynamic: Dynamic | None = None,
    batch: int | None = None,
) -> onnx.ModelProto:
    """Make the canonical graph of a model: FP4 for the layers `qat.prepare` quantised, FP16, or what is chosen, for the
    rest.

    Args:
        model: convolutional model, FP32, on any device; it is not changed.
        input_shape: of one sample, (C, H, W) for images; or example inputs: a tensor, several in the order of the
            model's forward, or a dict by the names of its arguments. Of those, shapes and types are read.
        card: stored in the file, so that it can be evaluated on its own.
        dynamic_size: leave all axes of a sample but the first (the channels) open. ONNX Runtime takes any size that the
            network takes; for an engine, `fp4deploy build --size HxW` fixes one.
        rest: "fp16", "bf16" or "fp32", or one with modules in FP32 (`fp4deploy.rest`); None: as the card says, FP16
            without one.
        dynamic: more open axes with their names, by input: {"input_ids": {1: "L"}, "attention_mask": {1: "L"}}.
        batch: the only number of samples that the file takes; None: any.

    Returns:
        Opset 23, IR 11; float16 (of another rest float32) "image" [N, *input_shape] -> float16 "logits" [N, ...], N
        dynamic; checked. Several inputs have the names of the arguments, several outputs those of a dict, or
        "output_0", "output_1" of a tuple.

    Raises:
        InputError: an uncalibrated layer, a value that is not finite or beyond the rest's range, a model that cannot be
            traced.
        UnsettledSizes: `dynamic_size`, and sizes that are too long formulas of the image's.

    >>> graph = export_graph(nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU()), (3, 8, 8))
    >>> [node.op_type for node in graph.graph.node]
    ['Conv', 'Relu']
    """
    constants, refused = _constants(model)
    precision = rest_of(rest or card)
    # The multi-term FP4 encoding reads FP16.
    examples = _examples(input_shape, FP16 if getattr(model, "digits", False) else precision, batch)
    open_axes = _open_axes(model, examples, dynamic or {}, dynamic_size, batch)
    refuse_random(unquantized(copied(model)), *examples)
    traced = trace(traceable(model, constants, refused, precision), examples, open_axes, dynamic_size, precision)
    reached = marked_layers(traced)
    operators = WidenOperators()
    wide = (operators, WidenEnds()) if precision.name == BF16.name else ()
    leaves = {name for name, module in model.named_modules() if not any(module.children())}
    for each in (
        NameAfterModules(leaves, aliases_of(model)),
        ForgetTracing(),
        LowerMarkers(constants, precision),
        *wide,
        NameFixPass(),
    ):
        each(traced)
    _trim_less(traced.graph)
    one_type_of_norms(traced.graph)
    _name_axes(traced.graph, dynamic or {}, dynamic_size)
    traced.ir_version = IR_VERSION
    traced.producer_name, traced.producer_version = PRODUCER, None
    traced.graph.name = card.architecture if card else type(model).__name__.lower()
    traced.metadata_props[FORM_KEY] = CANONICAL
    traced.metadata_props[LAYERS_KEY] = json.dumps(_layers(model, reached, precision, operators.widened, examples))
    if precision.name != FP16.name:
        traced.metadata_props[REST_KEY] = precision.name
    if precision.wide:
        traced.metadata_props[WIDE_KEY] = "\n".join(precision.wide)
    if card:
        traced.metadata_props[CARD_KEY] = replace(card, rest=precision.name).to_json()
    proto = ir.to_proto(traced)
    onnx.checker.check_model(proto, full_check=True)
    return proto


def _trim_less(graph: ir.Graph) -> None:
    """Rows that a transposed convolution adds at the end are rows that it trims less: ONNX Runtime adds fewer than a
    stride, torch fewer than the dilation, too.
    """
    for node in graph:
        extra = node.attributes.get_ints("output_padding", ()) if node.op_type == "ConvTranspose" else ()
        if not any(extra):
            continue
        strides, pads = node.attributes.get_ints("strides"), [*node.attributes.get_ints("pads")]
        trimmed = [min(rows, pad) for rows, pad in zip(extra, pads[len(extra) :], strict=True)]
        left = [rows - less for rows, less in zip(extra, trimmed, strict=True)]
        if all(rows < stride for rows, stride in zip(extra, strides, strict=True)):
            continue
        if any(rows >= stride for rows, stride in zip(left, strides, strict=True)):
            raise InputError(
                f"{node.name}: a transposed convolution with output_padding={[*extra]}, padding={pads[: len(extra)]} "
                f"and stride={[*strides]} has no form that ONNX Runtime computes. Append the rows with F.pad."
            )
        pads[len(extra) :] = [pad - less for pad, less in zip(pads[len(extra) :], trimmed, strict=True)]
        node.attributes["output_padding"], node.attributes["pads"] = (
            ir.AttrInt64s("output_padding", left),
            ir.AttrInt64s("pads", pads),
        )


def _name_axes(graph: ir.Graph, dynamic: Dynamic, dynamic_size: bool) -> None:
    """Open axes of inputs and outputs get the names of `dynamic`, and H and W (H_2 of a second input of another size,
    ...), instead of those that tracing makes up.
    """
    names: dict[str, str] = {}
    for number, value in enumerate(graph.inputs, 1):
        assert value.shape is not None
        for axis, size in enumerate(value.shape):
            if label := dynamic.get(str(value.name), {}).get(axis):
                names[str(size)] = label
            elif dynamic_size and 1 < axis < 2 + len(SIZES) and not isinstance(size, int):
                label = SIZES[axis - 2]
                names.setdefault(str(size), label if label not in names.values() else f"{label}_{number}")
    for value in (*graph.inputs, *graph.outputs):
        if value.shape is not None:
            value.shape = ir.Shape([names.get(str(size), size) for size in value.shape])


def _constants(model: nn.Module) -> tuple[dict[str, Constants], dict[str, InputError]]:
    """The constants of the quantised layers, and why others have none: an error only if the network calls the layer."""
    found: dict[str, Constants] = {}
    refused: dict[str, InputError] = {}
    for name, layer in quantized_layers(model).items():
        try:
            found[name] = layer_constants(name, layer)
        except InputError as error:
            refused[name] = error
    for name, experts in experts_of(model).items():
        found |= {f"{name}.{own}": expert_constants(name, experts, own) for own in experts.names}
    return found, refused


def _layers(
    model: nn.Module, reached: set[str], rest: Rest, widened: list[str], examples: Examples
) -> dict[str, dict[str, str]]:
    """What each layer is in; a quantised one that the network never calls is not in the file.

    widened: nodes that ONNX does not define in the rest.
    """
    quantized = quantized_layers(model)
    recipes = [layer.recipe for layer in quantized.values()]
    positional, named = examples
    given = named or positional
    plans = layer_plan(model, recipes[0] if recipes else None, example_inputs=given)  # of a prepared model: as it is
    found = {}
    for plan in plans:
        if plan.name not in reached and plan.name in quantized:
            continue
        precision, reason = plan.precision, plan.reason
        if precision == FP16.label:
            precision, reason = rest.label, reason.replace(FP16.label, rest.label)
            if plan.name in widened:
                precision, reason = FP32.label, f"{reason}; ONNX does not define it for {rest.label}"
        found[plan.name] = {"kind": plan.kind, "precision": precision, "reason": reason}
    for path in rest.wide:
        kind = type(model.get_submodule(path)).__name__
        found[path or kind] = {"kind": kind, "precision": FP32.label, "reason": f"leaves {rest.label}'s range"}
    return found


def _examples(given: tuple[int, ...] | Inputs, rest: Rest, batch: int | None) -> Examples:
    """Example inputs, floating point ones in `rest`, with a batch of at least two: one would be a constant."""
    shape = not isinstance(given, torch.Tensor | Mapping) and all(isinstance(size, int) for size in given)
    positional, named = arguments(torch.zeros((2, *given)) if shape else given, batch)  # type: ignore[arg-type]
    typed = [x.to(rest.dtype) if x.is_floating_point() else x for x in (*positional, *named.values())]
    count = len(positional)
    return tuple(typed[:count]), dict(zip(named, typed[count:], strict=True))


Dynamic = Mapping[str, Mapping[int, str]]  # input -> open axis -> its name


def _open_axes(
    model: nn.Module, examples: Examples, dynamic: Dynamic, dynamic_size: bool, batch: int | None
) -> OpenAxes:
    """The open axes of each input, in order: the batch unless it is fixed, height and width, and what is asked for.

    Raises:
        InputError: `dynamic` names no input, or no axis that it has behind the batch.
    """
    positional, named = examples
    tensors = dict(zip(input_names(model, positional, named), (*positional, *named.values()), strict=True))
    require_axes(dynamic, tensors)
    several = {} if batch else {0: torch.export.Dim(BATCH, min=1)}
    return {
        name: several
        | dict.fromkeys({*(range(2, x.ndim) if dynamic_size else ()), *dynamic.get(name, ())}, torch.export.Dim.DYNAMIC)
        for name, x in tensors.items()
    }
