"""The packed network of a captured graph: which operation is written by which function."""

from __future__ import annotations

from torch import nn

from fp4deploy.export.packing import norms, operators
from fp4deploy.export.packing.writer import Tensors, Write, Writer
from fp4deploy.graph import ir
from fp4deploy.graph.capture import Dynamic
from fp4deploy.graph.operators import UNARY
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
    "where": operators.write_where,
    "var": operators.write_variance,
    "cumsum": operators.write_cumulative_sum,
    "argmax": operators.write_argmax,
    "roll": operators.write_roll,
    "flip": operators.write_flip,
    "repeat": operators.write_repeat,
    "take": operators.write_take,
    "cast": operators.write_cast,
    "concat": operators.write_concat,
    **dict.fromkeys(("max_pool", "avg_pool"), operators.write_pool),
    **dict.fromkeys(("adaptive_avg_pool", "adaptive_max_pool"), operators.write_adaptive),
    **dict.fromkeys(("mean", "sum", "amax", "amin", "norm"), operators.write_reduce),
    "resize": operators.write_resize,
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle"), operators.write_shuffle),
    "unfold": operators.write_unfold,
    "fold": operators.write_fold,
    **dict.fromkeys(("reshape", "expand"), operators.write_reshape),
    "permute": operators.write_permute,
    "slice": operators.write_slice,
    "select": operators.write_select,
    "pad": operators.write_pad,
    "matmul": operators.write_matmul,
    **dict.fromkeys(("softmax", "log_softmax"), operators.write_softmax),
    "attention": operators.write_attention,
    "arange": operators.write_arange,
    **{f"aten.{name}": operators.write_aten for name in ATEN},
}  # fmt: skip
