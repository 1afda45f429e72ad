"""Read the list of engine layers that TensorRT and TensorRT-RTX print, one line a kernel.

    Name: N, LayerType: gemm, Inputs: [ { Name: x, Dimensions: [-1,256], ..., Datatype: FP4E2M1, ... }], Constants:
    [...], Outputs: [...], TacticName: T, StreamId: 0, Metadata: [ONNX Layer: a][ONNX Layer: b]

With profiling verbosity DETAILED, TensorRT-RTX writes it into the verbose build log, so it can be had without a GPU;
the engine inspector of both libraries gives the same lines in its ONELINE format. Lines that do not match are passed
over.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fp4deploy.precisions import OF_ENGINES

PRECISIONS = {
    "FP4E2M1": "FP4",
    "FP4": "FP4",
    "FP8": "FP8",
    "FP8E4M3": "FP8",
    "Half": "FP16",
    "Float": "FP32",
    "BFloat16": "BF16",
    "Int8": "INT8",
}
MULTIPLYING = ("gemm", "correlation", "deconv", "conv", "convolution", "matrix_multiply", "fc")
_LINE = re.compile(r"^\s*Name: (.*?), LayerType: (\w+), (.*)$", re.MULTILINE)
_TENSOR = re.compile(r"\{ Name: (.*?), Dimensions: \[([-\d, ]*)\].*?Datatype: (\w+)")
_NODE = re.compile(r"\[ONNX Layer: ([^\]]*)\]")
_FIELDS = ("Inputs: ", "Constants: ", "Outputs: ", "TacticName: ", "Metadata: ")


@dataclass(frozen=True)
class Tensor:
    """One operand of an engine layer; `precision` is FP4, FP8, FP16, ... or the engine's own name for it."""

    name: str
    shape: tuple[int, ...]
    precision: str


@dataclass(frozen=True)
class EngineLayer:
    """One kernel of the engine, as the compiler lists it."""

    name: str
    type: str
    inputs: tuple[Tensor, ...]
    constants: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    onnx_nodes: tuple[str, ...]

    @property
    def multiplies(self) -> bool:
        """Whether this is a GEMM or convolution rather than generated pointwise code."""
        return self.type.lower() in MULTIPLYING

    @property
    def is_plugin(self) -> bool:
        """Whether this is a plugin that reads packed codes, which the engine knows as INT8."""
        return "plugin" in self.type.lower() and any(tensor.precision == "INT8" for tensor in self.inputs)

    @property
    def precision(self) -> str:
        """Precision it computes in: of both operands ("FP4 x FP16" where they differ), else of what it writes, or reads
        where it writes codes (a normalisation fused with the quantiser of the next layer).
        """
        if not self.multiplies:
            written, read = (
                max(tensors, key=lambda tensor: len(tensor.shape), default=None)  # the rest is scratch
                for tensors in (self.outputs, self.inputs)
            )
            shown = read if written is not None and written.precision in OF_ENGINES and read is not None else written
            return shown.precision if shown is not None else ""
        return " x ".join(dict.fromkeys(tensor.precision for tensor in self.operands))

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """Its first input; and a constant, in FP4 where one is, or a tensor that another kernel decoded.

        An FP4 GEMM also reads its block scales (FP8, more than two dimensions) from inputs and constants, and others a
        feature map that is added, of the shape of what they write.
        """
        packed = [tensor for tensor in self.constants if tensor.precision == "FP4"]
        constants = [tensor for tensor in self.constants if sum(size != 1 for size in tensor.shape) >= 2]
        added = {tensor.shape for tensor in self.outputs}
        others = [tensor for tensor in self.inputs[1:] if len(tensor.shape) >= 2 and tensor.shape not in added]
        decoded = [tensor for tensor in others if tensor.precision != "FP8"]
        return (*self.inputs[:1], *(packed or constants or decoded or others)[:1])


def parse_engine_layers(text: str) -> tuple[EngineLayer, ...]:
    """All engine layers in a build log or inspector text, in the order they run."""
    return tuple(_parse(name, kind, rest) for name, kind, rest in _LINE.findall(text))


def _parse(name: str, kind: str, rest: str) -> EngineLayer:
    parts = _split(rest)
    return EngineLayer(
        name=name,
        type=kind,
        inputs=_tensors(parts.get("Inputs: ", "")),
        constants=_tensors(parts.get("Constants: ", "")),
        outputs=_tensors(parts.get("Outputs: ", "")),
        onnx_nodes=tuple(dict.fromkeys(_NODE.findall(parts.get("Metadata: ", "")))),
    )


def _split(rest: str) -> dict[str, str]:
    """Cut a line at its field names; a field that the engine does not print is absent."""
    found = sorted((rest.find(field), field) for field in _FIELDS if field in rest)
    ends = [start for start, _ in found[1:]] + [len(rest)]
    return {field: rest[start + len(field) : end] for (start, field), end in zip(found, ends, strict=True)}


def _tensors(text: str) -> tuple[Tensor, ...]:
    return tuple(
        Tensor(name, tuple(int(size) for size in sizes.split(",") if size.strip()), PRECISIONS.get(kind, kind))
        for name, sizes, kind in _TENSOR.findall(text)
    )
