"""What a packed file holds, node by node, for people and for JSON."""

from __future__ import annotations

from typing import Any

from fp4deploy.packed.file import PackedFile
from fp4deploy.packed.graph import Activation, Concat, Convolution, Node, outputs_of, tensors_of
from fp4deploy.packed.memory import activation_bytes, full_precision, plain_bytes

COLUMNS = ("layer", "op", "precision", "shape", "writes", "bytes", "sha256")


def describe_packed(file: PackedFile) -> tuple[dict[str, Any], tuple[str, ...], list[tuple[Any, ...]], str]:
    """Properties, columns, one row a node and a closing line; the digests were checked when the file was read."""
    graph, card = file.graph, file.card
    size = (card.height, card.width)
    properties: dict[str, Any] = {
        "file": str(file.path),
        "bytes": file.path.stat().st_size,
        "written_by": f"fp4deploy {file.version}",
        "precision": card.precision,
        "scale": card.scale,
        "digits": card.digits,
        "task": card.task,
        "classes": len(card.class_names),
        "channels": card.channels,
        "height": card.height,
        "width": card.width,
        "weight_bytes": file.weight_bytes,
        "weight_bytes_fp16": plain_bytes(graph),
        "activation_bytes": activation_bytes(graph, *size),
        "activation_bytes_fp16": activation_bytes(full_precision(graph), *size),
    }
    rows = [_row(file, node) for node in graph.steps]
    packed = sum(isinstance(node, Convolution) and node.precision == "nvfp4" for node in graph.steps)
    convolutions = sum(isinstance(node, Convolution) for node in graph.steps)
    share = file.weight_bytes / properties["weight_bytes_fp16"]
    last = (
        f"{packed} of {convolutions} convolutions in FP4; the weights have {share:.3f} times the bytes of FP16 weights."
    )
    return properties, COLUMNS, rows, last


def _row(file: PackedFile, node: Node) -> tuple[Any, ...]:
    graph = file.graph
    layer = node.output if isinstance(node, Concat) else node.layer
    precision = "FP4" if isinstance(node, Convolution) and node.precision == "nvfp4" else "FP16"
    names = tensors_of(node, graph.images)
    written = ", ".join(_form(graph.images[name]) for name in outputs_of(node)) or "logits"
    own = [name for name in names if name.startswith(f"{layer}.weight")]
    shape: list[int] = list(graph.tensors[own[0]].shape) if own else []
    if precision == "FP4":
        shape[-1] = sum(graph.images[name].channels for name in node.inputs)
    count = sum(file.tensors[name].nbytes for name in names)
    return layer, node.op, precision, shape, written, count, "ok" if names else "-"


def _form(activation: Activation) -> str:
    return f"{'FP16' if activation.amax is None else 'packed'} {activation.channels} at 1/{activation.stride}"
