"""The packed network of a captured graph: which operation is written by which function."""

from __future__ import annotations

from torch import nn

from fp4deploy.export.packing import norms, operators
from fp4deploy.export.packing.operators import as_written
from fp4deploy.export.packing.writer import Tensors, Write, Writer
from fp4deploy.graph import ir
from fp4deploy.graph.capture import Dynamic
from fp4deploy.graph.operators import UNARY
from fp4deploy.packed import graph as packed
from fp4deploy.packed.graph import Graph
from fp4deploy.packed.operators import ATEN
from fp4deploy.rest import FP16, Rest


def packed_graph(
    captured: ir.Graph,
    model: nn.Module,
    digits: bool = False,
    free: bool = True,
    rest: Rest = FP16,
    dynamic: Dynamic | None = None,
) -> tuple[Graph, Tensors]:
    """The packed network of a model.

    Args:
        captured: the graph of the model with plain layers.
        model: the same model with its quantised layers, its parameters as deployed (`qat.round_to_deployed`).
        digits: its input is encoded as multi-term FP4 before the graph begins.
        free: a graph of fixed sizes takes any height and width if none of its nodes holds one.
        rest: the precision of what is not packed.
        dynamic: axes that the graph was captured with as open by request.

    Raises:
        InputError: an operation that no node computes, a layer whose recipe has no packed form, a value that is not
            finite.
    """
    return Writer(captured, model, digits, WRITERS, free, rest, dynamic or {}).write()


WRITERS: dict[str, Write] = {
    "conv": operators.write_conv,
    "conv_transpose": operators.write_conv_transpose,
    "linear": operators.write_linear,
    "group_norm": norms.write_group_norm,
    "instance_norm": norms.write_instance_norm,
    "layer_norm": norms.write_layer_norm,
    "batch_norm": norms.write_batch_norm,
    **dict.fromkeys(
        ("relu", "relu6", "leaky_relu", "elu", "selu", "silu", "gelu", "hardswish", "hardsigmoid", "hardtanh",
         "sigmoid", "tanh", "softplus", "mish", "clamp", *UNARY), operators.write_activation
    ),
    "prelu": operators.write_prelu,
    **dict.fromkeys(("add", "sub", "mul", "div", "pow", "maximum", "minimum"), operators.write_arithmetic),
    **dict.fromkeys(operators.COMPARISONS, operators.write_compare),
    "where": as_written(packed.Where, roles=("condition", "input", "other")),
    "var": as_written(packed.Variance, dims="dim", keep="keepdim", correction="correction"),
    "cumsum": as_written(packed.CumulativeSum, dim="dim"),
    "argmax": as_written(packed.ArgMax, dim="dim", keep="keepdim"),
    "roll": as_written(packed.Roll, shifts="shifts", dims="dims"),
    "flip": as_written(packed.Flip, dims="dims"),
    "repeat": as_written(packed.Repeat, counts="repeats"),
    "take": operators.write_take,
    "cast": operators.write_cast,
    "concat": as_written(packed.Concat, dim="dim"),
    **dict.fromkeys(("max_pool", "avg_pool"), operators.write_pool),
    "adaptive_avg_pool": as_written(packed.AdaptivePool, always={"function": "avg"}, size="output_size"),
    "adaptive_max_pool": as_written(packed.AdaptivePool, always={"function": "max"}, size="output_size"),
    **dict.fromkeys(
        ("mean", "sum", "amax", "amin", "norm"), as_written(packed.Reduce, "function", dims="dim", keep="keepdim")
    ),
    "resize": as_written(packed.Resize, mode="mode", size="size", scale="scale", align_corners="align_corners"),
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle"), as_written(packed.PixelShuffle, "op", factor="factor")),
    "unfold": as_written(packed.Unfold, kernel="kernel_size", stride="stride", padding="padding", dilation="dilation"),
    "fold": as_written(
        packed.Fold, size="output_size", kernel="kernel_size", stride="stride", padding="padding", dilation="dilation"
    ),
    **dict.fromkeys(("reshape", "expand"), as_written(packed.Reshape, "op", shape="shape")),
    "permute": as_written(packed.Permute, dims="dims"),
    "slice": as_written(packed.Slice, dim="dim", start="start", end="end", step="step"),
    "select": as_written(packed.Select, dim="dim", index="index"),
    "pad": operators.write_pad,
    "matmul": as_written(packed.Matmul),
    **dict.fromkeys(("softmax", "log_softmax"), as_written(packed.Softmax, "op", dim="dim")),
    "attention": operators.write_attention,
    "arange": operators.write_arange,
    **{f"aten.{name}": operators.write_aten for name in ATEN},
}  # fmt: skip
