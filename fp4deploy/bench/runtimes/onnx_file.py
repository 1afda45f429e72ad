"""What an ONNX file says of itself: its model card, its inputs, its precision."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import onnx

from fp4deploy.bench.runtimes.ports import Extent, Port
from fp4deploy.errors import InputError
from fp4deploy.export.onnx.layers import layers_of
from fp4deploy.models.card import CARD_KEY, ModelCard
from fp4deploy.system.onnx_runtime import ort

WEIGHTS: dict[int, str] = {
    onnx.TensorProto.FLOAT: "FP32", onnx.TensorProto.FLOAT16: "FP16", onnx.TensorProto.BFLOAT16: "BF16",
    onnx.TensorProto.INT8: "INT8", onnx.TensorProto.UINT8: "INT8", onnx.TensorProto.FLOAT8E4M3FN: "FP8",
}  # fmt: skip
TENSORS = {
    "float": np.float32, "float16": np.float16, "double": np.float64, "bool": np.bool_, "int64": np.int64,
    "int32": np.int32, "int16": np.int16, "int8": np.int8, "uint64": np.uint64, "uint32": np.uint32,
    "uint16": np.uint16, "uint8": np.uint8,
}  # fmt: skip


def ports_of(session: ort.InferenceSession, path: Path) -> tuple[Port, ...]:
    """The inputs of a session.

    Raises:
        InputError: one is no tensor, or of a type that arrays do not have.
    """
    found = []
    for each in session.get_inputs():
        dtype = TENSORS.get(each.type.removeprefix("tensor(").removesuffix(")"))
        if dtype is None:
            raise InputError(f"{path}: the input '{each.name}' is {each.type}; valid: tensors of {', '.join(TENSORS)}.")
        found.append(Port(each.name, np.dtype(dtype), tuple(map(_extent, each.shape)) or None))
    return tuple(found)


def _extent(size: object) -> Extent:
    return size if isinstance(size, str) or (isinstance(size, int) and size > 0) else None


def weights(model: onnx.ModelProto) -> str:
    """The type of most weights of a file that is not ours, as it multiplies them: "FP32", "FP16", "INT8"."""
    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant":
            types.update((node.output[0], each.t.data_type) for each in node.attribute if each.name == "value")
    quantizers = [node for node in model.graph.node if node.op_type == "QuantizeLinear" and len(node.input) > 2]
    quantized = {node.input[0]: types.get(node.input[2], 0) for node in quantizers}
    counts: Counter[int] = Counter()
    for tensor in model.graph.initializer:
        counts[quantized.get(tensor.name, tensor.data_type)] += math.prod(tensor.dims)
    most = max((kind for kind in counts if kind in WEIGHTS), key=counts.__getitem__, default=onnx.TensorProto.FLOAT)
    return WEIGHTS[most]


def is_fp4(model: onnx.ModelProto, card: ModelCard | None) -> bool:
    """Whether layers are in FP4, as the card or else the file's own list says."""
    if card is not None:
        return card.precision == "nvfp4"
    return any(each.precision == "FP4" for each in layers_of(model))


def find_card(model: onnx.ModelProto, path: Path) -> ModelCard | None:
    """The model card in the metadata; None where there is none.

    Raises:
        InputError: it cannot be read.
    """
    text = next((entry.value for entry in model.metadata_props if entry.key == CARD_KEY), None)
    return ModelCard.from_json(text, f"{path}: model card") if text is not None else None


def require_card(card: ModelCard | None, path: Path) -> ModelCard:
    """The card, where there is one.

    Raises:
        InputError: there is none.
    """
    if card is None:
        raise InputError(
            f"{path} carries no fp4deploy model card, so its input cannot be prepared. Write it with: fp4deploy "
            "export; of another tool's file bench takes classes, size and normalisation from --like FILE: YAML, or the "
            "file that fp4deploy quantize made of it"
        )
    return card
