"""What a packed file holds, node by node, for people and for JSON."""

from __future__ import annotations

from collections import Counter
from typing import Any

from fp4deploy.models.volumes import VOLUME
from fp4deploy.packed.file import PackedFile
from fp4deploy.packed.graph import (
    Form,
    Layer,
    Linear,
    Node,
    is_quantized,
    named,
    quantizes_itself,
    tensors_of,
)
from fp4deploy.packed.memory import activation_bytes, full_precision, plain_bytes
from fp4deploy.packed.network import has_kernel, has_mixed_kernel
from fp4deploy.packed.shapes import Shape, Shapes, shapes_of, weight_shape
from fp4deploy.precisions import LABELS
from fp4deploy.rest import rest_of

COLUMNS = ("layer", "op", "precision", "shape", "writes", "bytes", "sha256")


def describe_packed(file: PackedFile) -> tuple[dict[str, object], tuple[str, ...], list[tuple[object, ...]], str]:
    """Facts, columns, one row for each node, and a closing line; the digests were checked when the file was read."""
    graph, card = file.graph, file.card
    example = next((each.shape[2:4] for each in graph.inputs if len(each.shape) == 4), [1, 1])
    size = card.size if card else tuple(example)
    layers = [node for node in graph.nodes if isinstance(node, Layer)]
    packed = [node for node in layers if is_quantized(node)]
    facts: dict[str, Any] = {
        "file": str(file.path),
        "bytes": file.path.stat().st_size,
        "written_by": f"fp4deploy {file.version}",
        "precision": card.precision if card else ("nvfp4" if packed else "fp16"),
        "rest": graph.rest,
    }
    if card:
        facts |= {
            "scale": card.scale,
            "digits": card.digits,
            "task": card.task,
            "classes": len(card.class_names),
            "channels": card.channels,
        }
    plain = plain_bytes(graph)
    facts |= {
        **({"depth": size[0]} if len(size) == VOLUME else {}),
        "height": size[-2],
        "width": size[-1],
        "weight_bytes": file.weight_bytes,
        "weight_bytes_fp16": plain,
        "activation_bytes": activation_bytes(graph, *size),
        "activation_bytes_fp16": activation_bytes(full_precision(graph), *size),
    }
    shapes = shapes_of(graph)
    rows = [_row(file, node, shapes) for node in graph.nodes]
    decoded = sum(row[2] == "FP4 decoded" for row in rows)
    wide = "FP16" if graph.rest == "fp16" else "FP32"
    note = f" {decoded} in FP4 are decoded and multiplied in {wide}: no packed kernel has their form."
    note = note if decoded else ""
    counts = Counter(LABELS[node.precision] for node in packed)
    others = "".join(f", {counts[name]} in {name}" for name in LABELS.values() if name != "FP4" and counts[name])
    last = (
        f"{counts['FP4']} of {len(layers)} layers that multiply in FP4{others}; the weights have "
        f"{file.weight_bytes / plain:.3f} times the bytes of FP16 weights.{note}"
    )
    return facts, COLUMNS, rows, last


def _row(file: PackedFile, node: Node, shapes: Shapes) -> tuple[Any, ...]:
    names = tensors_of(node)
    written = ", ".join(_form(form, shapes[form.name], rest_of(file.graph).label) for form in node.outputs)
    precision, shape = rest_of(file.graph).label, list[int]()
    if isinstance(node, Layer):
        axis = -1 if isinstance(node, Linear) else 1
        shape = weight_shape(file.graph, node, sum(shapes[name][axis] for name in node.inputs))
        if quantizes_itself(node):
            name = LABELS[node.precision]
            precision = name if has_mixed_kernel(node) else f"{name} decoded"
        elif node.precision == "nvfp4":
            precision = "FP4" if has_kernel(node, shape[1:-1]) else "FP4 decoded"
    elif f"{named(node)}.weight" in names:
        shape = list(file.tensors[f"{named(node)}.weight"].shape)
    count = sum(file.tensors[name].nbytes for name in names)
    return named(node), node.op, precision, shape, written, count, "ok" if names else "-"


def _form(form: Form, shape: Shape, plain: str) -> str:
    return f"{plain if form.amax is None else 'packed'} {'x'.join(map(str, shape[1:]))}"
