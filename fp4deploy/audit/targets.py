"""What a runtime makes of a layer that asks for a precision, and how that is known.

"measured" rules were found by building engines without a GPU and reading the compiler's log of kernels, or by running
ONNX Runtime on a CPU; "documented" rules are the vendor's own statement. None was observed on a Blackwell GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fp4deploy.audit.operands import INTEGER_OPS, Multiplication, Operand
from fp4deploy.export.lowering.fp8 import why_not_fp8
from fp4deploy.formats import NVFP4_BLOCK
from fp4deploy.precisions import OF_ENGINES

NO_FP4 = "ONNX Runtime has no FP4 on the CPU; fp4deploy export --portable decomposes it"
NO_BLOCKS = "its blocks cannot be followed through the graph"


@dataclass(frozen=True)
class Verdict:
    """What a layer runs in, why, and whether that is less than what the file asks for without an error.

    fixable: `audit --fix` writes a file without the reason.
    """

    runs: str
    reason: str = ""
    fixable: bool = False

    def fell_back(self, requested: str) -> bool:
        """A quantised GEMM was asked for, and the target multiplies in something wider, or refuses the file."""
        return requested in OF_ENGINES and self.runs != requested


@dataclass(frozen=True)
class Target:
    """A runtime, its rule for a layer, and why it refuses a file for an FP4 quantiser ("" where it takes it)."""

    name: str
    title: str
    evidence: str
    rule: Callable[[Multiplication], Verdict]
    refuses: Callable[[Operand], str]


def _tensorrt(layer: Multiplication) -> Verdict:
    if layer.bias and layer.decoded:
        return Verdict("refused", f"its bias is decoded from {layer.bias}", layer.constant_bias)
    if layer.bias:
        return Verdict("refused", f"its bias is {layer.bias}, and its operands are of another type")
    for what, operand in (("weight", layer.weight), ("activation", layer.activation)):
        if operand.shifted:
            return Verdict("refused", f"the {what} has a zero point that is not 0", operand.fixable)
    requested = layer.requested
    if layer.operator in INTEGER_OPS or layer.operator == "MatMulNBits":
        return Verdict("refused", f"its ONNX parser has no {layer.operator}; write Q/DQ nodes instead")
    if requested == "FP4":
        return _tensorrt_fp4(layer)
    if requested.endswith(" weights"):
        return Verdict(
            _wide(layer.activation), f"weights are stored in {requested.removesuffix(' weights')} and decoded"
        )
    if requested in ("FP8", "INT8"):
        problem = _eight_bit_problem(layer)
        return Verdict("FP16", problem) if problem else Verdict(requested)
    if " x " in requested:
        return Verdict("FP16", f"operands of two formats ({requested}) have no common product")
    return Verdict(requested)


def _tensorrt_fp4(layer: Multiplication) -> Verdict:
    operands = {"weight": layer.weight, "activation": layer.activation}
    for what, operand in operands.items():
        problem = _refused(operand)
        if problem:
            return Verdict("refused", f"the {what} {problem}")
    for what, operand in operands.items():
        if operand.contracted is False:
            along = " and ".join(operand.axes)
            return Verdict(
                "FP16", f"the {what}'s blocks run along {along}, not along the contraction axis: no FP4 GEMM exists"
            )
        if operand.contracted is None:
            return Verdict("FP16", f"the {what}: {NO_BLOCKS}")
    if not layer.activation.dynamic:
        return Verdict("FP16", "the activation's block scales are constants; TRT_FP4DynamicQuantize computes them")
    if layer.operator == "Conv" and layer.weight_shape[2:] and set(layer.weight_shape[2:]) == {1}:
        return Verdict(
            "refused", "a 1x1 convolution with FP4 weights does not build; fp4deploy build makes it a MatMul"
        )
    if layer.operator in ("Conv", "ConvTranspose"):
        return Verdict(
            "FP16",
            "there is no FP4 convolution: the plan stores FP4 weights and the convolution computes in FP16. "
            "fp4deploy build --conv gemm makes it an FP4 GEMM",
        )
    return Verdict("FP4")


def _refused(operand: Operand) -> str:
    """What TensorRT refuses about an FP4 operand; "" where it builds."""
    if operand.scales == "E8M0":
        return "is MXFP4 (E8M0 scales), which does not build"
    if operand.scaling != f"block of {NVFP4_BLOCK}":
        return f"has a {operand.scaling}; NVFP4 has blocks of {NVFP4_BLOCK}"
    if operand.rank and operand.axis < -2:
        return f"is quantised along axis {operand.axis} of {operand.rank}; blocks run along one of the last two"
    if operand.dynamic and operand.rank > 3:
        return f"is quantised with {operand.rank} axes; TRT_FP4DynamicQuantize takes 2 or 3"
    if operand.dynamic and operand.extent % NVFP4_BLOCK:
        return f"has {operand.extent} elements along its blocks, not a multiple of {NVFP4_BLOCK}"
    return ""


def _tensorrt_refuses(operand: Operand) -> str:
    problem = _refused(operand)
    return f"its input {problem}" if problem else ""


def _eight_bit_problem(layer: Multiplication) -> str:
    if layer.activation.scaling != "tensor":
        return f"the activation has one scale for each {layer.activation.scaling}, and needs one for the tensor"
    if layer.weight.scaling not in ("tensor", "channel"):
        return f"the weight has one scale for each {layer.weight.scaling}, and needs one for the tensor or a channel"
    if "Conv" not in layer.operator:
        return ""
    return why_not_fp8(layer.weight_shape[2:], layer.operator == "ConvTranspose", layer.requested)


def _ort_cpu(layer: Multiplication) -> Verdict:
    if "FP4" in (layer.weight.format, layer.activation.format):
        return Verdict("refused", NO_FP4)
    if layer.weight.tensorrt or layer.activation.tensorrt:
        return Verdict("refused", "its quantisers are operators of TensorRT, which ONNX Runtime does not have")
    if layer.requested == "INT8":
        return Verdict("INT8")
    if layer.weight.quantized or layer.activation.quantized:
        return Verdict("FP32", f"{layer.requested} is decoded before the product")
    return Verdict("FP32" if layer.requested in ("FP16", "BF16") else layer.requested)


def _wide(operand: Operand) -> str:
    return operand.format or "FP16"


TARGETS = {
    target.name: target
    for target in (
        Target(
            "tensorrt-rtx",
            "TensorRT-RTX 1.7, SM120/SM121",
            "measured: engines built without a GPU, kernels read from the build log",
            _tensorrt,
            _tensorrt_refuses,
        ),
        Target(
            "tensorrt",
            "TensorRT 10.8 to 11.4, SM100 and later",
            "documented by NVIDIA; not built here",
            _tensorrt,
            _tensorrt_refuses,
        ),
        Target("onnxruntime", "ONNX Runtime 1.31, CPU", "measured on a CPU", _ort_cpu, lambda operand: NO_FP4),
    )
}
