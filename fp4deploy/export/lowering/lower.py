"""Lower a canonical ONNX file for an engine, and plan the precision of each layer.

`--conv` chooses the form of FP4 convolutions:

| mode | 1x1 | ConvTranspose 2x2 stride 2 | other convolutions |
|---|---|---|---|
| auto | FP4 GEMM | FP4 GEMM | FP8 where one group and faster by `lowering.cost`, else as qdq |
| qdq | FP4 GEMM | as the other convolutions | convolution: weights stored in FP4, computed in FP16 |
| gemm | FP4 GEMM | FP4 GEMM | im2col and FP4 GEMM; transposed ones too, see `lowering.conv_transpose` |
| fp8 | FP4 GEMM | FP4 GEMM | FP8 convolution, see `lowering.fp8` |
| plugin | FP4 plugin | FP4 plugin | FP4 plugin; groups, or strides or paddings that differ by axis: as auto |

(Where the rest is BF16 or FP32 there is no plugin, and no FP8 but that of the model: both are for FP16. Operators that
TensorRT-RTX refuses in BF16 stand between Casts to FP32; of transposed convolutions it then makes kernels in BF16.)

(TensorRT-RTX 1.7.1 does not build a 1x1 convolution with FP4 weights, so even `qdq` makes it a GEMM. It takes no
plugins: `plugin` is for TensorRT, see `lowering.plugin`. A weight of a single block, and that of a 1x1 convolution in
groups, is decoded to FP16 in every mode without a plugin for it, see `lowering.decode`. FP4 GEMMs are written in the
form that stays one, see `lowering.linear`.)

The ledger compares the plan with the engine: a layer whose actual precision is not the planned one fell back, and
`--strict` fails on it. Model-local functions are dropped, because the engine has its own `TRT_FP4DynamicQuantize`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult, Sequential
from onnx_ir.passes.common import NameFixPass, RemoveUnusedNodesPass
from onnx_ir.passes.common.naming import SimpleNameGenerator

from fp4deploy.errors import InputError, suggest
from fp4deploy.export.ledger.ledger import PlannedLayer
from fp4deploy.export.lowering.constants import FoldResizes
from fp4deploy.export.lowering.conv_transpose import TransposedToGemm, phases
from fp4deploy.export.lowering.cost import prefers_fp8
from fp4deploy.export.lowering.decode import DecodeWeights, why_decoded
from fp4deploy.export.lowering.forecast import NO_MX
from fp4deploy.export.lowering.fp8 import REASON, ConvToFp8, can_be_fp8
from fp4deploy.export.lowering.gemm import ConvToGemm, geometry, is_pointwise, is_upsampling
from fp4deploy.export.lowering.linear import CutLinear, FlattenLinear
from fp4deploy.export.lowering.pattern import Fp4Layer, check_multiple, find_fp4_layers, is_fp4
from fp4deploy.export.lowering.placement import quantized_after
from fp4deploy.export.lowering.plan import count_macs, is_sized, plan_layers
from fp4deploy.export.lowering.plugin import ConvToPlugin
from fp4deploy.export.lowering.plugin_match import read_source
from fp4deploy.export.lowering.scales import RepeatGlobalScales
from fp4deploy.export.onnx.bf16 import NARROW, WidenOperators
from fp4deploy.export.onnx.canonical import IR_VERSION, LAYERS_KEY, OPSET, foreign_graph, metadata_object, parse_onnx
from fp4deploy.export.onnx.layers import planned_layers
from fp4deploy.export.onnx.meaning import check_meaning
from fp4deploy.export.onnx.size import fix_size, fold_sizes
from fp4deploy.export.onnx.trt_operators import with_shapes
from fp4deploy.formats import NVFP4_BLOCK
from fp4deploy.models.card import CARD_KEY

CONV_MODES = ("auto", "qdq", "gemm", "fp8", "plugin")
LACK_BF16 = ("ConvTranspose", "HardSwish", "Mish")  # of 65 kinds of layers that were built with TensorRT-RTX 1.7.1


@dataclass(frozen=True)
class LoweredModel:
    """An engine-ready graph and its plan; `card` is the model card as plain JSON, or None for a foreign file.

    `fp4`: the graph asks the engine for FP4. A plugin does not: to the engine its codes are INT8.
    """

    model: onnx.ModelProto
    layers: tuple[PlannedLayer, ...]
    card: dict[str, Any] | None
    fp4: bool

    @property
    def requests_fp4(self) -> bool:
        """Whether the file requests FP4 of a layer, in whatever precision this form multiplies it."""
        return any(layer.requested == "FP4" for layer in self.layers)


class DropFunctions(InPlacePass):
    """Remove model-local functions: they give meaning to operators that the engine has built in.

    onnx-ir removes functions that nothing calls, or writes them out; here nodes go on calling the engine's own.
    """

    def call(self, model: ir.Model) -> PassResult:
        modified = bool(model.functions)
        model.functions.clear()
        return PassResult(model, modified)


class NamedByOutput(SimpleNameGenerator):
    """The ledger finds layers by the names of their nodes: one without a name is called after its output."""

    def generate_node_name(self, node: ir.Node) -> str:
        """A name, which `NameFixPass` makes unique."""
        return node.name or node.outputs[0].name or node.op_type


def check_conv_mode(conv: str, backend: str) -> None:
    """Refuse a `--conv` value that this backend cannot take.

    Raises:
        InputError: unknown value, or plugins asked of TensorRT-RTX.
    """
    if conv not in CONV_MODES:
        raise InputError(f"--conv {conv} is unknown.{suggest(conv, CONV_MODES)} Valid values: {', '.join(CONV_MODES)}.")
    if conv == "plugin" and backend == "tensorrt-rtx":
        valid = ", ".join(mode for mode in CONV_MODES if mode != "plugin")
        raise InputError(
            "TensorRT-RTX takes no plugins: --conv plugin needs --backend tensorrt. "
            f"Valid --conv values with --backend tensorrt-rtx: {valid}."
        )


def read_buildable(path: Path) -> onnx.ModelProto:
    """Read an ONNX file that an engine may be built of.

    Raises:
        InputError: the file is missing, not ONNX, or of an opset or IR version the engines do not take.
    """
    model = parse_onnx(path)
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)
    if opset > OPSET or model.ir_version > IR_VERSION:
        raise InputError(
            f"{path} has opset {opset} and IR version {model.ir_version}; engines take at most opset {OPSET} and IR "
            f"version {IR_VERSION}. Export it again: fp4deploy export --format onnx"
        )
    return model


def lower(
    proto: onnx.ModelProto,
    conv: str = "auto",
    backend: str = "tensorrt-rtx",
    usual: tuple[int, int] | None = None,
    plugins: bool = True,
) -> LoweredModel:
    """Check a graph and lower its FP4 convolutions to the form that `conv` asks for. `proto` is not changed.

    usual: of a graph whose image size is open and stays so, the most frequent height and width, at which
        multiply-accumulates are counted.
    plugins: write the nodes of plugins; without them their layers stay Q/DQ convolutions, which compute the same.

    Raises:
        InputError: an FP4 layer breaks a rule of the canonical graph (the message names it), or the opset is too old.
    """
    check_conv_mode(conv, backend)
    with foreign_graph("The file"):
        return _lower(proto, conv, backend, usual, plugins)


def _lower(
    proto: onnx.ModelProto, conv: str, backend: str, usual: tuple[int, int] | None, write_plugins: bool
) -> LoweredModel:
    for tensor in proto.graph.initializer:
        _check_stored(tensor)
    model = ir.from_proto(_with_shapes(proto))
    fp4 = is_fp4(model)
    opset = model.opset_imports.get("", 0)
    if fp4 and opset < OPSET:
        raise InputError(
            f"The file has opset {opset}, and FP4 tensors exist from opset {OPSET}. "
            "Export it again: fp4deploy export --format onnx"
        )
    requests = _requests(proto)
    _check_requests(requests, fp4)
    layers = {layer.name: layer for layer in find_fp4_layers(model)}
    _check_open(layers.values(), conv, usual)
    check_meaning(proto)
    plugins = {name for name, layer in layers.items() if conv == "plugin" and _is_plugin(layer)}
    reasons = {name: _gemm_reason(layer, conv) for name, layer in layers.items() if name not in plugins}
    decoded = {name: why for name, reason in reasons.items() if (why := why_decoded(layers[name], reason))}
    reasons = {name: reason for name, reason in reasons.items() if name not in decoded}
    lowered = {name: reason for name, reason in reasons.items() if reason is not None}
    sized = model if usual is None else ir.from_proto(_with_shapes(fix_size(proto, usual)))
    if not is_sized(sized):  # behind a size that the file computes
        sized = ir.from_proto(ir.to_proto(sized))
        fold_sizes(sized)
    macs = count_macs(sized)
    judged = layers if usual is None else {layer.name: layer for layer in find_fp4_layers(sized)}
    eight = {
        name: why for name, reason in reasons.items() if reason is None and (why := _fp8_reason(judged[name], conv))
    }
    inputs = quantized_after(model)
    transposed = {name for name in lowered if not is_upsampling(layers[name])}
    share = [RepeatGlobalScales()] if backend == "tensorrt-rtx" else []
    gemms = (ConvToGemm(lowered), TransposedToGemm(transposed))
    forms = (ConvToPlugin(plugins if write_plugins else set()), DecodeWeights(decoded), *gemms, ConvToFp8(eight))
    linear = (FlattenLinear(), CutLinear())
    wide = WidenOperators(_lacks_bf16)
    names = NameFixPass(NamedByOutput())
    Sequential(DropFunctions(), FoldResizes(), names, *forms, *linear, *share, wide, RemoveUnusedNodesPass(), names)(
        model
    )
    plan = plan_layers(model, requests, layers, lowered, macs, conv, plugins, eight, inputs, decoded, wide.widened)
    return LoweredModel(ir.to_proto(model), plan, metadata_object(proto, CARD_KEY), is_fp4(model))


def _lacks_bf16(node: ir.Node) -> bool:
    values = (*node.inputs, *node.outputs)
    return node.op_type in LACK_BF16 and any(value is not None and value.dtype == NARROW for value in values)


def _is_plugin(layer: Fp4Layer) -> bool:
    return layer.dtype == ir.DataType.FLOAT16 and read_source(layer) is not None


def _check_open(layers: Iterable[Fp4Layer], conv: str, usual: tuple[int, int] | None) -> None:
    """Where height and width are open, a range of them is wanted, and the form of the layers can take one."""
    first = next((layer.name for layer in layers if layer.is_open), None)
    if first is not None and usual is None:
        raise InputError(
            f"Layer {first}: an engine is built for one image size, and this file leaves height and width open. "
            "Give one with --size HxW."
        )
    if first is not None and conv in ("gemm", "plugin"):
        raise InputError(
            f"Layer {first}: --conv {conv} needs one image size. Give it with --size HxW, or choose --conv auto or qdq."
        )


def _check_stored(tensor: onnx.TensorProto) -> None:
    """Compare the bytes of a constant with its shape; for FP4 codes say which K the bytes are."""
    name, shape, stored = tensor.name, list(tensor.dims), len(tensor.raw_data)
    if not tensor.HasField("raw_data") or stored == math.ceil(
        math.prod(shape) * ir.DataType(tensor.data_type).itemsize
    ):
        return
    if tensor.data_type == onnx.TensorProto.FLOAT4E2M1 and len(shape) == 2 and shape[0]:
        layer = name.removesuffix(".weight.codes")
        check_multiple(layer, "contracted weights (K)", shape[1])
        raise InputError(
            f"Layer {layer}: its weight has shape {shape}, and its {stored} bytes make "
            f"K = {2 * stored / shape[0]:g}. K must be {shape[1]}, a multiple of {NVFP4_BLOCK}. The file is "
            "damaged; export it again: fp4deploy export --format onnx"
        )
    raise InputError(
        f"The constant {name} has shape {shape} and {stored} bytes, which do not match. The file is damaged; "
        "export it again: fp4deploy export --format onnx"
    )


def _with_shapes(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model with inferred shapes where inference succeeds (they are only used to count multiplications)."""
    try:
        return with_shapes(proto)
    except (onnx.shape_inference.InferenceError, ValueError, RuntimeError):
        return proto


def _requests(proto: onnx.ModelProto) -> dict[str, dict[str, str]]:
    """Torch layer name -> {kind, precision, reason} as the exporter wrote it; empty for foreign files."""
    metadata_object(proto, LAYERS_KEY)
    return planned_layers(proto)


def _check_requests(requests: dict[str, dict[str, str]], fp4: bool) -> None:
    mixed = [name for name, request in requests.items() if request.get("precision") == "W4A8"]
    if mixed:
        raise InputError(
            f"{len(mixed)} layers are W4A8 ({mixed[0]}, ...), MXFP4 weights and MXFP8 activations: {NO_MX}. "
            "Pack the checkpoint: fp4deploy export --format packed"
        )
    names = [name for name, request in requests.items() if request.get("precision") == "FP4"]
    if names and not fp4:
        raise InputError(
            f"The file says that {len(names)} layers are FP4 ({names[0]}, ...) and holds no FP4 tensor: it looks like "
            "the decomposed graph, which is for ONNX Runtime. Build the canonical file (without .portable) instead."
        )


def _gemm_reason(layer: Fp4Layer, conv: str) -> str | None:
    """Why a layer becomes a GEMM, or None where it stays what it is."""
    if is_pointwise(layer):
        return "1x1 convolution as an FP4 GEMM, the only form of it that the compiler takes"
    if conv == "qdq" or layer.kind == "Linear":
        return None
    if is_upsampling(layer):
        return "ConvTranspose 2x2 stride 2 as an FP4 GEMM and DepthToSpace"
    size = f"{layer.kernel[0]}x{layer.kernel[1]}" if len(layer.kernel) == 2 else ""
    if conv == "gemm" and geometry(layer) is not None:
        return f"{size} convolution as im2col and an FP4 GEMM"
    if conv == "gemm" and phases(layer) is not None:
        return f"{size} transposed convolution as im2col, an FP4 GEMM and DepthToSpace"
    return None


def _fp8_reason(layer: Fp4Layer, conv: str) -> str | None:
    """Why a layer becomes an FP8 convolution, or None where it does not."""
    if conv == "fp8":
        return REASON if can_be_fp8(layer) else None
    return prefers_fp8(layer) if conv == "auto" else None
