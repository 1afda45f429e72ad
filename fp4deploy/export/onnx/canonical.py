"""What every canonical file has in common, and parsing one; imports no torch.

A layer with weights is one of four operators that contract a weight with an activation, `GEMM_OPS`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import onnx
from onnx.external_data_helper import (
    ExternalDataInfo,
    _get_all_tensors,
    load_external_data_for_model,
    uses_external_data,
)

from fp4deploy.errors import Fp4DeployError, InputError, first_line, named_cause
from fp4deploy.rest import Rest, rest_of
from fp4deploy.system.schema import parse_json

OPSET = 23  # the first with FLOAT4E2M1
IR_VERSION = 11
GEMM_OPS = {"Conv": "Conv2d", "ConvTranspose": "ConvTranspose2d", "MatMul": "Linear", "Gemm": "Linear"}  # -> torch
MAX_BYTES = 2 << 30  # of a protobuf message
MAX_EXTERNAL_BYTES = 8 << 30  # of a file's weights outside of it
MAX_EXPANDED = 20_000  # nodes after its functions are expanded, or
MAX_EXPANSION = 64  # times those in the file
GRAPHS = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)
LARGEST_ELEMENT = 16  # bytes: complex128
FORM_KEY = "fp4deploy.form"  # metadata: which of the two graphs of a network it is
CANONICAL, DECOMPOSED = "canonical", "decomposed"
LAYERS_KEY = "fp4deploy.layers"  # metadata: torch layer name -> {kind, precision, reason, largest}
REST_KEY = "fp4deploy.rest"  # metadata: the precision of the rest (`fp4deploy.rest`); absent: FP16
WIDE_KEY = "fp4deploy.fp32"  # metadata: modules whose code computes in FP32 (`Rest.wide`), a line each


@contextmanager
def foreign_graph(source: object) -> Iterator[None]:
    """Around work on a graph that may be anyone's: whatever onnx, onnx-ir, ONNX Runtime or a lookup in the graph raises
    becomes one `InputError` that begins with `source`; the exception is its cause.
    """
    try:
        yield
    except Fp4DeployError:
        raise
    except Exception as error:
        raise InputError(
            f"{source} is not a graph that can be used here ({named_cause(error, 160)}). "
            "Write one with: fp4deploy export"
        ) from error


def is_canonical(model: onnx.ModelProto) -> bool:
    """Whether this is the canonical graph rather than the decomposed FP32 one: what the file says of itself.

    One that says nothing, of another tool or an older version, is where FP16 goes in or out or a weight is in FP4.
    """
    form = next((entry.value for entry in model.metadata_props if entry.key == FORM_KEY), None)
    if form is not None:
        return form == CANONICAL
    half, fp4 = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT4E2M1
    ends = (*model.graph.input, *model.graph.output)
    return any(value.type.tensor_type.elem_type == half for value in ends) or any(
        tensor.data_type == fp4 for tensor in model.graph.initializer
    )


def rest_of_file(model: onnx.ModelProto) -> Rest:
    """The precision of the rest that a file says it has; FP16 of one that says nothing."""
    metadata = {entry.key: entry.value for entry in model.metadata_props if entry.key in (REST_KEY, WIDE_KEY)}
    rest = rest_of(metadata.get(REST_KEY))
    return replace(rest, wide=tuple(metadata[WIDE_KEY].split("\n"))) if WIDE_KEY in metadata else rest


def parse_onnx(path: Path) -> onnx.ModelProto:
    """Parse an ONNX file, unchecked.

    Raises:
        InputError: the file is missing, truncated, not ONNX, or holds no operators.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(
            f"{path} does not exist: no file has that name. Write one with: fp4deploy export --format onnx"
        )
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"it is larger than {MAX_BYTES >> 30} GiB, the limit of the format")
        model = onnx.load(path, load_external_data=False)
        _check_functions(model)
        _check_acyclic(model.graph.node)
        _check_external(model, path.parent)
        load_external_data_for_model(model, str(path.parent))
    except Exception as error:  # protobuf's, onnx's own, and of files with external data
        raise not_onnx(path, error) from error
    if not model.graph.node or not model.graph.output:
        raise InputError(f"{path} is not an ONNX model: it holds no operators. Write one with: fp4deploy export")
    return model


def _check_functions(model: onnx.ModelProto) -> None:
    """Refuse functions that stand for far more nodes than are in the file: 30 that call the next twice are 2^30."""
    bodies = {(each.domain, each.name, each.overload): each.node for each in model.functions}
    sizes: dict[tuple[str, str, str], int] = {}
    stored = 0

    def expanded(nodes: Iterable[onnx.NodeProto]) -> int:
        nonlocal stored
        total = 0
        for node in nodes:
            stored += 1
            graphs = [graph for each in node.attribute for graph in (each.g, *each.graphs) if each.type in GRAPHS]
            key = (node.domain, node.op_type, node.overload)
            if key in bodies and key not in sizes:
                sizes[key] = 0  # a function that calls itself is refused by ONNX's own checker
                sizes[key] = expanded(bodies[key])
            total += 1 + sizes.get(key, 0) + sum(expanded(graph.node) for graph in graphs)
        return total

    total = expanded(model.graph.node)
    if total > (most := max(MAX_EXPANDED, MAX_EXPANSION * stored)):
        raise ValueError(f"its functions stand for more than {most} nodes, and it holds {stored}")


def _check_acyclic(nodes: Sequence[onnx.NodeProto]) -> None:
    """Refuse values that depend on themselves: following one to where it comes from would not end."""
    producers = {name: number for number, node in enumerate(nodes) for name in node.output if name}
    above = [{producers[name] for name in node.input if name in producers} for node in nodes]
    if all(max(numbers, default=-1) < at for at, numbers in enumerate(above)):
        return  # in the order that ONNX asks for
    try:
        tuple(TopologicalSorter(dict(enumerate(above))).static_order())
    except CycleError as error:
        raise ValueError(f"'{nodes[error.args[1][0]].output[0][:80]}' depends on itself") from error


def _check_external(model: onnx.ModelProto, folder: Path) -> None:
    """Compare external data with the tensors before any is read: a sparse file of terabytes takes no disk."""
    total = 0
    for tensor in _get_all_tensors(model):
        if uses_external_data(tensor):
            info = ExternalDataInfo(tensor)
            size = (folder / info.location).stat().st_size if info.length is None else info.length
            total += size
            if size > LARGEST_ELEMENT * math.prod(tensor.dims) or total > MAX_EXTERNAL_BYTES:
                raise ValueError(
                    f"the external data of '{tensor.name[:80]}' has {size} bytes; {MAX_EXTERNAL_BYTES >> 30} GiB in "
                    "all is the limit"
                )


def metadata_object(model: onnx.ModelProto, key: str) -> dict[str, Any] | None:
    """The JSON object in a metadata entry of a file, None where it has none.

    Raises:
        InputError: the entry is no JSON object.
    """
    text = next((entry.value for entry in model.metadata_props if entry.key == key), None)
    if text is None:
        return None
    advice = "Export it again: fp4deploy export --format onnx"
    found = parse_json(text, f"The metadata '{key}' of the file", advice)
    if not isinstance(found, dict):
        raise InputError(f"The metadata '{key}' of the file is no JSON object. {advice}")
    return found


def not_onnx(path: Path, error: Exception) -> InputError:
    """The error for a file that cannot be parsed or breaks ONNX's rules."""
    return InputError(
        f"{path} is not an ONNX file, or not a whole one ({first_line(error, 120)}). Write one with: fp4deploy export"
    )


def read_onnx(path: Path) -> onnx.ModelProto:
    """Read and check an ONNX file.

    Raises:
        InputError: the file is missing, truncated, not ONNX, or breaks its rules.
    """
    model = parse_onnx(path)
    try:
        onnx.checker.check_model(model)
    except Exception as error:  # ValidationError, and what its C++ code raises
        raise not_onnx(path, error) from error
    return model
