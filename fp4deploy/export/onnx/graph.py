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
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

import onnx
import onnx.checker
import onnx_ir as ir
import torch
import torch.nn.functional as F
from onnx_ir.passes.common import NameFixPass
from torch import nn
from torch.overrides import TorchFunctionMode

from fp4deploy.errors import InputError
from fp4deploy.export.onnx.bf16 import WidenEnds, WidenOperators
from fp4deploy.export.onnx.canonical import CANONICAL, FORM_KEY, IR_VERSION, LAYERS_KEY, OPSET, REST_KEY, WIDE_KEY
from fp4deploy.export.onnx.exporter import short_export
from fp4deploy.export.onnx.floor import TRANSLATIONS
from fp4deploy.export.onnx.layer_constants import CONVOLUTIONS, Fp8Constants, LayerConstants, layer_constants
from fp4deploy.export.onnx.mixed_types import MixedTypes, one_type_of_norms
from fp4deploy.export.onnx.naming import ForgetTracing, NameAfterModules, aliases_of
from fp4deploy.export.onnx.pooling import Divisors
from fp4deploy.export.onnx.qdq import ACTIVATION_MARKER, MARKER_DOMAIN, WEIGHT_MARKER, LowerMarkers, marked_layers
from fp4deploy.graph.capture import (
    Inputs,
    arguments,
    file_names,
    fixes_an_axis,
    input_names,
    output_names,
    place_of,
    quiet,
    require_axes,
    why_not_captured,
)
from fp4deploy.graph.copied import copied
from fp4deploy.graph.divided import Divided
from fp4deploy.graph.growth import BoundedSizes, undecided, unsettled
from fp4deploy.graph.randomness import refuse_random
from fp4deploy.graph.specialized import Specializing, specializing, watched
from fp4deploy.graph.unpooling import Unpooling
from fp4deploy.models.card import CARD_KEY, ModelCard
from fp4deploy.qat.computed import rest_tensors, torch_class
from fp4deploy.qat.experts import refuse_experts
from fp4deploy.qat.layers import QuantConvTranspose2d, QuantLinear
from fp4deploy.qat.prepare import layer_plan, quantized_layers, unquantized
from fp4deploy.rest import BF16, FP16, FP32, Rest, rest_of
from fp4deploy.tracing import make_no_folder

ATTENTION_AXES = "only 4D query, key, and value are supported"  # says torch's exporter
INPUT, OUTPUT, BATCH = "image", "logits", "N"
SIZES = ("H", "W")
PRODUCER = "fp4deploy"
LITTLE = 1e-6


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
    refuse_experts(model)
    constants, refused = _constants(model)
    precision = rest_of(rest or card)
    # The multi-term FP4 encoding reads FP16.
    examples = _examples(input_shape, FP16 if getattr(model, "digits", False) else precision, batch)
    open_axes = _open_axes(model, examples, dynamic or {}, dynamic_size, batch)
    refuse_random(unquantized(copied(model)), *examples)
    traced = _trace(_traceable(model, constants, refused, precision), examples, open_axes, dynamic_size, precision)
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
    _name_open(traced.graph, dynamic or {})
    if dynamic_size:
        _name_axes(traced.graph)
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


def _name_axes(graph: ir.Graph) -> None:
    """The open axes of inputs and outputs get the names H and W (H_2 of a second input of another size, ...) instead of
    those that tracing makes up.
    """
    names: dict[str, str] = {}
    for number, value in enumerate(graph.inputs, 1):
        assert value.shape is not None
        for size, name in zip(tuple(value.shape)[2:], SIZES, strict=False):
            if not isinstance(size, int):
                names.setdefault(str(size), name if name not in names.values() else f"{name}_{number}")
    for value in (*graph.inputs, *graph.outputs):
        if value.shape is not None:
            value.shape = ir.Shape([names.get(str(size), size) for size in value.shape])


def _constants(model: nn.Module) -> tuple[dict[str, LayerConstants | Fp8Constants], dict[str, InputError]]:
    """The constants of the quantised layers, and why others have none: an error only if the network calls the layer."""
    found: dict[str, LayerConstants | Fp8Constants] = {}
    refused: dict[str, InputError] = {}
    for name, layer in quantized_layers(model).items():
        try:
            found[name] = layer_constants(name, layer)
        except InputError as error:
            refused[name] = error
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


Examples = tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]  # positional, by name


def _examples(given: tuple[int, ...] | Inputs, rest: Rest, batch: int | None) -> Examples:
    """Example inputs, floating point ones in `rest`, with a batch of at least two: one would be a constant."""
    shape = not isinstance(given, torch.Tensor | Mapping) and all(isinstance(size, int) for size in given)
    positional, named = arguments(torch.zeros((2, *given)) if shape else given, batch)  # type: ignore[arg-type]
    typed = [x.to(rest.dtype) if x.is_floating_point() else x for x in (*positional, *named.values())]
    count = len(positional)
    return tuple(typed[:count]), dict(zip(named, typed[count:], strict=True))


Dynamic = Mapping[str, Mapping[int, str]]  # input -> open axis -> its name
OpenAxes = dict[str, dict[int, Any]]  # input -> open axis -> what torch.export calls it


def _open_axes(
    model: nn.Module, examples: Examples, dynamic: Dynamic, dynamic_size: bool, batch: int | None
) -> OpenAxes:
    """The open axes of each input, in order: the batch unless it is fixed, height and width, and what is asked for.

    Raises:
        InputError: `dynamic` names no input, or no axis that it has behind the batch.
    """
    positional, named = examples
    tensors = dict(zip(_input_names(model, positional, named), (*positional, *named.values()), strict=True))
    require_axes(dynamic, tensors)
    several = {} if batch else {0: torch.export.Dim(BATCH, min=1)}
    return {
        name: several
        | dict.fromkeys({*(range(2, x.ndim) if dynamic_size else ()), *dynamic.get(name, ())}, torch.export.Dim.DYNAMIC)
        for name, x in tensors.items()
    }


def _name_open(graph: ir.Graph, dynamic: Dynamic) -> None:
    """Axes that were asked for by name have these names, in inputs and outputs."""
    inputs = {value.name: value for value in graph.inputs}
    names: dict[str, str] = {}
    for name, axes in dynamic.items():
        shape = inputs[name].shape
        assert shape is not None
        names |= {str(shape[axis]): label for axis, label in axes.items()}
    for value in (*graph.inputs, *graph.outputs):
        if value.shape is not None:
            value.shape = ir.Shape([names.get(str(size), size) for size in value.shape])


def _trace(model: nn.Module, examples: Examples, open_axes: OpenAxes, dynamic_size: bool, rest: Rest) -> ir.Model:
    positional, named = examples
    tensors = (*positional, *named.values())
    shapes: Any = open_axes if named else tuple(open_axes.values())

    make_no_folder()

    def export() -> torch.onnx.ONNXProgram:
        program = torch.onnx.export(
            model,
            positional,
            kwargs=named or None,
            dynamo=True,
            opset_version=OPSET,
            input_names=_input_names(model, positional, named),
            custom_translation_table=TRANSLATIONS,
            dynamic_shapes=shapes,
            verbose=False,
            optimize=False,
        )
        assert program is not None
        return program

    bound = BoundedSizes()
    try:
        with (
            watched() as fixed,
            quiet(),
            short_export(rest),
            bound if dynamic_size else nullcontext(),
            Divided(),
            Unpooling(),
            MixedTypes(),
            Divisors(),
        ):
            try:
                program = export()
            except Exception as error:
                if not any(ATTENTION_AXES in str(each) for each in _chain(error)):
                    raise
                with AttentionOfFourAxes():
                    program = export()
            with _not_folded(program.model):
                program.optimize()
    except Exception as error:
        if isinstance(error, InputError):
            raise
        unsolved = undecided(error) if dynamic_size else None
        if ended := bound.error or unsolved:
            advice = "Export it for one image size, without --dynamic-size (dynamic_size=False)."
            raise unsettled(type(model).__name__, place_of(ended), advice, ended is not unsolved) from error
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        refused = next((each for each in _chain(error) if isinstance(each, InputError)), None)
        if refused is not None:  # by the network itself
            raise InputError(str(refused)) from error
        given = ", ".join(f"[N, {', '.join(map(str, x.shape[1:]))}]" for x in tensors)
        why = why_not_captured(model, cause, partial(specializing, model, positional, named))
        if "sizes of tensors" in why.lower():
            why += " Check the image size too (a UNet needs multiples of 16)."
        raise InputError(f"torch could not trace {type(model).__name__} with an input {given}: {why}") from error
    _require_free(
        program.model.graph,
        type(model).__name__,
        open_axes,
        fixed[-1],
        partial(specializing, model, positional, named),
    )
    _name_outputs(program)
    return program.model


def _require_free(
    graph: ir.Graph, kind: str, open_axes: OpenAxes, fixed: str, watched_again: Callable[[], Specializing]
) -> None:
    """Refuse a network that needs one size of an axis: torch's exporter fixes the axis, or not even that, in silence.

    fixed: what `specialized.fixed_axis` gives of the program that was exported. watched_again: traces once more.
    """
    if fixed:
        raise InputError(fixes_an_axis(kind, fixed, watched_again()))
    for value in graph.inputs:
        assert value.shape is not None
        for axis, size in enumerate(value.shape):
            if isinstance(size, int) and axis in open_axes[str(value.name)]:
                name = f"axis {axis} of {value.name}" if axis else BATCH
                raise InputError(fixes_an_axis(kind, name, watched_again()))


class AttentionOfFourAxes(TorchFunctionMode):
    """Give queries, keys and values [..., L, E] the four axes that torch's exporter asks for."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is not F.scaled_dot_product_attention or args[0].ndim == 4:
            return function(*args, **kwargs)
        query, key, value, *rest = args
        mask = rest[0] if rest else kwargs.pop("attn_mask", None)
        lead = query.shape[:-2]

        def four(x: torch.Tensor) -> torch.Tensor:
            return x.reshape(-1, 1, *x.shape[-2:])

        if mask is not None and mask.ndim > 2:
            mask = four(mask.expand(*lead, *mask.shape[-2:]))
        result = function(four(query), four(key), four(value), mask, *rest[1:], **kwargs)
        return result.reshape(*lead, *result.shape[-2:])


def _input_names(model: nn.Module, positional: tuple[torch.Tensor, ...], named: dict[str, torch.Tensor]) -> list[str]:
    if named:
        return list(named)
    if len(positional) == 1:
        return [INPUT]
    return input_names(model, len(positional))


def _name_outputs(program: torch.onnx.ONNXProgram) -> None:
    """ "logits" for a single output; the keys of a dict; else "output_0", "output_1.0" of a tuple in a tuple."""
    outputs = program.model.graph.outputs
    exported: Any = program.exported_program
    names = output_names(exported, len(exported.graph_signature.user_outputs))
    if len(names) != len(outputs):
        raise InputError("The module returns something that is no tensor. Return tensors, or a tuple or dict of them.")
    inputs = [str(value.name) for value in program.model.graph.inputs]
    for value, name in zip(outputs, file_names(names, inputs, OUTPUT), strict=True):
        value.name = name


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@contextmanager
def _not_folded(model: ir.Model) -> Iterator[None]:
    """Hide from the exporter's optimizer BatchNormalization, and sums with a number that it takes for 0."""
    nodes = [node for node in model.graph if node.op_type == "BatchNormalization" or _adds_little(node)]
    for node in nodes:
        node.domain = MARKER_DOMAIN
    yield
    for node in nodes:
        node.domain = ""


def _adds_little(node: ir.Node) -> bool:
    """Whether one operand of a sum or difference is a number next to 0: onnxscript leaves out up to 1e-8."""
    tensors = [None if value is None else ir.convenience.get_const_tensor(value) for value in node.inputs]
    numbers = [float(tensor.numpy().item()) for tensor in tensors if tensor is not None and tensor.size == 1]
    return node.op_type in ("Add", "Sub") and any(0 < abs(number) < LITTLE for number in numbers)


def _traceable(
    model: nn.Module, constants: dict[str, LayerConstants | Fp8Constants], refused: dict[str, InputError], rest: Rest
) -> nn.Module:
    """A copy in `rest` on the CPU whose quantised layers leave markers, or raise what is `refused`."""
    for name, tensor in rest_tensors(model, rest):
        rest.require(name, tensor)
    traceable = copied(model).cpu().eval()
    numbers = {name: x.detach() for name, x in traceable.state_dict().items() if rest.is_wide_number(x)}
    held = traceable.to(rest.dtype).state_dict(keep_vars=True)
    for name, number in numbers.items():
        held[name].data = number
    for name, module in traceable.named_modules():
        forward: Callable[..., torch.Tensor] | None = None
        if name in constants:
            forward = _marking_forward(name, constants[name], module, rest.dtype)
        elif name in refused:
            forward = _refusing_forward(refused[name])
        elif _computes(module, nn.GroupNorm) and module.affine:
            forward = _group_norm
        elif _computes(module, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d) and module.running_mean is None:
            forward = _instance_norm
        if forward is not None:
            module.forward = types.MethodType(forward, module)
    return traceable


def _computes(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether the module is of one of these classes with the forward of the class, not one of its own."""
    return isinstance(module, kinds) and type(module).forward in [kind.forward for kind in kinds]


def _marking_forward(
    name: str, layer: LayerConstants | Fp8Constants, module: nn.Module, dtype: torch.dtype
) -> Callable[..., torch.Tensor]:
    """The layer's forward with two markers in place of its quantised operands."""
    shape = layer.shape if isinstance(layer, Fp8Constants) else tuple(layer.shape[axis] for axis in layer.order)
    channels = int(cast(Any, module.in_features if isinstance(module, nn.Linear) else module.in_channels))

    def operands(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.to(dtype)  # of code that computes in FP32
        padded: tuple[Any, ...] = tuple(x.shape)
        if not isinstance(layer, Fp8Constants):
            axis = layer.channel_axis % x.ndim
            torch._check(x.shape[axis] == channels)  # as the product that the markers stand for does
            padded = (*x.shape[:axis], layer.channels, *x.shape[axis + 1 :])
        activation = _marker(ACTIVATION_MARKER, [x], name, padded, dtype)
        return activation, _marker(WEIGHT_MARKER, [], name, shape, dtype)

    def convolution(self: Any, x: torch.Tensor) -> torch.Tensor:
        x, weight = operands(x)
        kind: Any = torch_class(self)  # a subclass may compute its weight there
        product: torch.Tensor = kind._conv_forward(self, x, weight, self.bias)
        return product

    def transposed_convolution(self: QuantConvTranspose2d, x: torch.Tensor) -> torch.Tensor:
        x, weight = operands(x)
        geometry: Any = (self.stride, self.padding, self.output_padding, self.groups, self.dilation)
        return F.conv_transpose2d(x, weight, self.bias, *geometry)

    def linear(self: QuantLinear, x: torch.Tensor) -> torch.Tensor:
        x, weight = operands(x)
        product = torch.matmul(x, weight)
        return product if self.bias is None else product + self.bias

    if isinstance(module, CONVOLUTIONS):
        return convolution
    return transposed_convolution if isinstance(module, QuantConvTranspose2d) else linear


def _refusing_forward(error: InputError) -> Callable[..., torch.Tensor]:
    def refuse(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        raise error

    return refuse


def _marker(
    kind: str, inputs: list[torch.Tensor], layer: str, shape: tuple[Any, ...], dtype: torch.dtype
) -> torch.Tensor:
    operator = f"{MARKER_DOMAIN}::{kind}"
    return torch.onnx.ops.symbolic(operator, inputs, {"layer": layer}, dtype=dtype, shape=shape, version=1)


def _group_norm(self: nn.GroupNorm, x: torch.Tensor) -> torch.Tensor:
    attributes = cast(Any, {"num_groups": self.num_groups, "epsilon": self.eps})
    inputs = [x, self.weight.to(x.dtype), self.bias.to(x.dtype)]
    return torch.onnx.ops.symbolic("GroupNormalization", inputs, attributes, dtype=x.dtype, shape=x.shape)


def _instance_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    weight, bias = (self.weight, self.bias) if self.affine else (x.new_ones(x.shape[1]), x.new_zeros(x.shape[1]))
    inputs = [x, weight.to(x.dtype), bias.to(x.dtype)]
    return torch.onnx.ops.symbolic("InstanceNormalization", inputs, {"epsilon": self.eps}, dtype=x.dtype, shape=x.shape)
