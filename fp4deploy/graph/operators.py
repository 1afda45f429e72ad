"""How an ATen call becomes a node: one name an operation, attributes spelled out, axes counted from the front.

| node | ATen | attributes |
|---|---|---|
| `conv` | conv1d, conv2d, conv3d | stride, padding, dilation, groups, weight_shape |
| `conv_transpose` | conv_transpose1d/2d/3d | the same and output_padding |
| `linear` | linear | weight_shape |
| `batch_norm`, `group_norm`, `instance_norm`, `layer_norm` | the same, in evaluation | eps, num_groups, ... |
| `relu`, `leaky_relu`, `silu`, `gelu`, `hardswish`, ... | the same (`ACTIVATIONS`) | those of the schema |
| `add`, `sub`, `mul`, `div` | the same | `number` where one operand is one |
| `concat` | cat | dim |
| `max_pool`, `avg_pool` | max_pool2d, avg_pool2d | kernel_size, stride, padding, dilation, ceil_mode, ... |
| `adaptive_avg_pool`, `adaptive_max_pool` | adaptive_..._pool2d | output_size |
| `mean` | mean over axes | dim, keepdim |
| `resize` | upsample_nearest2d, upsample_bilinear2d, ... | mode, size or scale, align_corners |
| `pixel_shuffle`, `pixel_unshuffle` | the same | factor |
| `reshape` | view, reshape, flatten, unflatten, squeeze, unsqueeze | shape |
| `expand` | expand, broadcast_to | shape |
| `permute` | permute, transpose, t, mT | dims |
| `slice` | slice, split, chunk, narrow, select (and a reshape) | dim, start, end, step |
| `pad` | pad, constant_pad_nd, reflection_pad2d, ... | pad (last axis first, as in torch), mode, value |
| `matmul`, `softmax`, `attention` | matmul, bmm, softmax, scaled_dot_product_attention | dim; is_causal, scale |
| `cast` | to, to dtype | dtype |

What changes no value (dropout in evaluation, contiguous, clone, a cast to the same type) is left out. Any other call is
a node with ATen's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fp4deploy.graph.sizes import Size

ACTIVATIONS = (
    "relu", "relu6", "leaky_relu", "elu", "selu", "silu", "gelu", "hardswish", "hardsigmoid", "hardtanh", "sigmoid",
    "tanh", "softplus", "mish", "prelu", "clamp",
)  # fmt: skip
ARITHMETIC = ("add", "sub", "mul", "div")
ALIASES = (
    "dropout", "feature_dropout", "alpha_dropout", "native_dropout", "contiguous", "clone", "alias", "detach",
    "detach_", "lift_fresh_copy", "lift_fresh", "identity", "positive",
)  # fmt: skip
RESHAPES = (
    "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "_unsafe_view", "view_as", "reshape_as",
)  # fmt: skip
NO_OUTPUT = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range_for_size")


@dataclass(frozen=True)
class Call:
    """A bound ATen call.

    tensors: role -> (name, True for an activation and False for a parameter). arguments: everything else by name.
    shapes: of the tensors. shape: of the output; of each output where there are several.
    """

    name: str
    op: str
    tensors: Mapping[str, tuple[str, bool]]
    arguments: Mapping[str, Any]
    shapes: Mapping[str, tuple[Size, ...]]
    shape: tuple[Size, ...]
    dtype: torch.dtype
    several: tuple[tuple[Size, ...], ...] = ()


@dataclass(frozen=True)
class Step:
    """One node of a call: operator, attributes, the roles it reads; `after` reads the output of the step before."""

    op: str
    attributes: dict[str, Any] = field(default_factory=dict)
    roles: Mapping[str, str] | None = None  # role of the node -> role of the call; None: all as they are
    shape: tuple[Size, ...] | None = None  # None: that of the call
    after: bool = False


def steps_of(call: Call) -> list[Step] | None:
    """The nodes of a call, in order; [] where its output is its input; None where it is no known operation."""
    if call.op in ALIASES:
        return []
    if call.op in ACTIVATIONS:
        return [Step(call.op, dict(call.arguments))]
    if call.op in RESHAPES and "dtype" not in call.arguments:
        return [Step("reshape", {"shape": call.shape}, {"input": "self"})]
    known = _KNOWN.get(call.op)
    return known(call) if known else None


def parts_of(call: Call) -> list[Step] | None:
    """The slices of a call with several outputs (split, chunk, unbind); None for any other."""
    if call.op not in ("split", "chunk", "split_with_sizes", "tensor_split", "unbind"):
        return None
    axis = int(call.arguments.get("dim", 0)) % len(call.shapes["self"])
    start, found = 0, []
    for at, shape in enumerate(call.several):
        length = 1 if call.op == "unbind" else shape[axis]
        if not isinstance(length, int):
            return None
        attributes = {"dim": axis, "start": start, "end": start + length, "step": 1}
        if call.op == "unbind":
            attributes = {"dim": axis, "index": at}
        found.append(Step("select" if call.op == "unbind" else "slice", attributes, {"input": "self"}, shape))
        start += length
    return found


def _conv(call: Call) -> list[Step]:
    arguments, weight = call.arguments, call.shapes["weight"]
    taps = [int(size) for size in weight[2:] if isinstance(size, int)]
    stride, dilation = (_each(arguments[name], len(taps)) for name in ("stride", "dilation"))
    attributes = {"stride": stride, "dilation": dilation, "groups": arguments["groups"], "weight_shape": tuple(weight)}
    if arguments["padding"] == "same":
        total = [d * (k - 1) for d, k in zip(dilation, taps, strict=True)]
        before, after = [t // 2 for t in total], [t - t // 2 for t in total]
        if before == after:
            return [Step("conv", attributes | {"padding": tuple(before)})]
        pad = tuple(size for pair in zip(reversed(before), reversed(after), strict=True) for size in pair)
        padded = tuple(_plus(*each) for each in zip(call.shapes["input"], (0, 0, *total), strict=True))
        return [
            Step("pad", {"pad": pad, "mode": "constant", "value": 0.0}, {"input": "input"}, padded),
            Step("conv", attributes | {"padding": (0,) * len(taps)}, after=True),
        ]
    padding = (0,) * len(taps) if arguments["padding"] == "valid" else _each(arguments["padding"], len(taps))
    return [Step("conv", attributes | {"padding": padding})]


def _conv_transpose(call: Call) -> list[Step]:
    arguments, weight = call.arguments, call.shapes["weight"]
    names = ("stride", "padding", "output_padding", "dilation")
    attributes = {name: _each(arguments[name], len(weight) - 2) for name in names}
    return [Step("conv_transpose", attributes | {"groups": arguments["groups"], "weight_shape": tuple(weight)})]


def _linear(call: Call) -> list[Step]:
    return [Step("linear", {"weight_shape": tuple(call.shapes["weight"])})]


def _batch_norm(call: Call) -> list[Step]:
    training = bool(call.arguments.get("training", False)) or "running_mean" not in call.tensors
    return [Step("batch_norm", {"eps": call.arguments["eps"], "training": training})]


def _instance_norm(call: Call) -> list[Step]:
    own = bool(call.arguments["use_input_stats"])
    return [Step("instance_norm", {"eps": call.arguments["eps"], "use_input_stats": own})]


def _kept(*names: str) -> Callable[[Call], list[Step]]:
    """A node of ATen's name with these attributes."""
    return lambda call: [Step(call.op, {name: call.arguments[name] for name in names})]


def _binary(call: Call) -> list[Step]:
    arguments = call.arguments
    op = call.op
    attributes: dict[str, Any] = {}
    if arguments.get("rounding_mode"):
        return [Step(f"{op} {arguments['rounding_mode']}", dict(arguments))]
    if arguments.get("alpha", 1) != 1:
        attributes["alpha"] = arguments["alpha"]
    if "other" not in call.tensors:
        attributes["number"] = arguments["other"]
    return [Step(op, attributes, {"input": "self"} | ({"other": "other"} if "other" in call.tensors else {}))]


def _reversed_subtraction(call: Call) -> list[Step]:
    """rsub: number - x = x * -1 + number."""
    if "other" in call.tensors or call.arguments.get("alpha", 1) != 1:
        return [Step("rsub", dict(call.arguments))]
    return [
        Step("mul", {"number": -1}, {"input": "self"}),
        Step("add", {"number": call.arguments["other"]}, {}, after=True),
    ]


def _concat(call: Call) -> list[Step]:
    return [Step("concat", {"dim": int(call.arguments["dim"]) % len(call.shape)})]


def _max_pool(call: Call) -> list[Step]:
    return [Step("max_pool", _window(call) | {"dilation": _each(call.arguments["dilation"], 2)}, {"input": "self"})]


def _avg_pool(call: Call) -> list[Step]:
    extra = {name: call.arguments[name] for name in ("count_include_pad", "divisor_override")}
    return [Step("avg_pool", _window(call) | extra, {"input": "self"})]


def _window(call: Call) -> dict[str, Any]:
    arguments = call.arguments
    kernel = _each(arguments["kernel_size"], 2)
    return {
        "kernel_size": kernel,
        "stride": _each(arguments["stride"], 2) if arguments["stride"] else kernel,
        "padding": _each(arguments["padding"], 2),
        "ceil_mode": bool(arguments["ceil_mode"]),
    }


def _adaptive(call: Call) -> list[Step]:
    kind = "adaptive_avg_pool" if "avg" in call.op else "adaptive_max_pool"
    return [Step(kind, {"output_size": tuple(call.shape[-2:])}, {"input": "self"})]


def _mean(call: Call) -> list[Step] | None:
    dims = call.arguments.get("dim")
    rank = len(call.shapes["self"])
    axes = tuple(range(rank)) if not dims else tuple(sorted(int(dim) % rank for dim in dims))
    return [Step(call.op, {"dim": axes, "keepdim": bool(call.arguments.get("keepdim"))}, {"input": "self"})]


def _resize(call: Call) -> list[Step]:
    mode = {"upsample_nearest2d": "nearest", "_upsample_nearest_exact2d": "nearest-exact"}.get(call.op)
    mode = mode or call.op.removeprefix("upsample_").removesuffix("2d")
    scales = call.arguments.get("scale_factors")
    if not scales and call.arguments.get("scales_h"):
        scales = (call.arguments["scales_h"], call.arguments["scales_w"])
    attributes = {
        "mode": mode,
        "size": None if scales else tuple(call.shape[-2:]),
        "scale": tuple(float(scale) for scale in scales) if scales else None,
        "align_corners": bool(call.arguments.get("align_corners")),
    }
    return [Step("resize", attributes, {"input": "input" if "input" in call.tensors else "self"})]


def _shuffle(call: Call) -> list[Step]:
    name = "upscale_factor" if call.op == "pixel_shuffle" else "downscale_factor"
    return [Step(call.op, {"factor": call.arguments[name]}, {"input": "self"})]


def _permute(call: Call) -> list[Step]:
    rank, arguments = len(call.shapes["self"]), call.arguments
    order = list(range(rank))
    if "dims" in arguments:
        order = [int(dim) % rank for dim in arguments["dims"]]
    elif rank > 1:
        a, b = (int(arguments.get(name, default)) % rank for name, default in (("dim0", -2), ("dim1", -1)))
        order[a], order[b] = order[b], order[a]
    return [Step("permute", {"dims": tuple(order)}, {"input": "self"})]


def _slice(call: Call) -> list[Step]:
    shape, arguments = call.shapes["self"], call.arguments
    axis = int(arguments["dim"]) % len(shape)
    if call.shape == shape and arguments.get("step", 1) == 1:
        return []
    if call.op == "narrow":
        start = arguments["start"]
        end = start + arguments["length"] if isinstance(start, int) and isinstance(arguments["length"], int) else None
        return [Step("slice", {"dim": axis, "start": start, "end": end, "step": 1}, {"input": "self"})]
    start, end = arguments["start"], arguments["end"]
    attributes = {"dim": axis, "start": start or 0, "end": end, "step": arguments["step"]}
    if isinstance(end, int) and end >= 1 << 31:
        attributes["end"] = None
    return [Step("slice", attributes, {"input": "self"})]


def _select(call: Call) -> list[Step]:
    axis = int(call.arguments["dim"]) % len(call.shapes["self"])
    return [Step("select", {"dim": axis, "index": call.arguments["index"]}, {"input": "self"})]


def _pad(call: Call) -> list[Step]:
    mode = {"constant_pad_nd": "constant", "reflection_pad2d": "reflect", "replication_pad2d": "replicate"}.get(call.op)
    arguments = call.arguments
    value = arguments.get("value")
    attributes = {
        "pad": tuple(arguments["pad" if "pad" in arguments else "padding"]),
        "mode": mode or arguments["mode"],
        "value": 0.0 if value is None else float(value),
    }
    return [Step("pad", attributes, {"input": "self"})]


def _softmax(call: Call) -> list[Step]:
    return [Step("softmax", {"dim": int(call.arguments["dim"]) % len(call.shape)}, {"input": "self"})]


def _attention(call: Call) -> list[Step]:
    attributes = {name: call.arguments.get(name) for name in ("is_causal", "scale", "enable_gqa")}
    return [Step("attention", attributes)]


def _cast(call: Call) -> list[Step]:
    return [Step("cast", {"dtype": call.dtype}, {"input": "self"})]


def _expand(call: Call) -> list[Step]:
    return [Step("expand", {"shape": call.shape}, {"input": "self"})]


def _matmul(call: Call) -> list[Step]:
    return [Step("matmul", {}, {"input": "self", "other": "mat2" if "mat2" in call.tensors else "other"})]


_KNOWN: dict[str, Callable[[Call], list[Step] | None]] = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _conv),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _conv_transpose),
    "linear": _linear,
    **dict.fromkeys(("batch_norm", "_native_batch_norm_legit_no_training"), _batch_norm),
    "instance_norm": _instance_norm,
    "group_norm": _kept("num_groups", "eps"),
    "layer_norm": _kept("normalized_shape", "eps"),
    **dict.fromkeys(ARITHMETIC, _binary),
    "rsub": _reversed_subtraction,
    **dict.fromkeys(("cat", "concat", "concatenate"), _concat),
    "max_pool2d": _max_pool,
    "avg_pool2d": _avg_pool,
    **dict.fromkeys(("adaptive_avg_pool2d", "_adaptive_avg_pool2d", "adaptive_max_pool2d"), _adaptive),
    **dict.fromkeys(("mean", "amax", "amin", "sum"), _mean),
    **dict.fromkeys(
        ("upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_bilinear2d", "upsample_bicubic2d"), _resize
    ),
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle"), _shuffle),
    **dict.fromkeys(("permute", "transpose", "t", "mT", "numpy_T", "swapaxes"), _permute),
    **dict.fromkeys(("slice", "narrow"), _slice),
    "select": _select,
    **dict.fromkeys(("pad", "constant_pad_nd", "reflection_pad2d", "replication_pad2d"), _pad),
    **dict.fromkeys(("softmax", "_softmax"), _softmax),
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(("to", "_to_copy", "type_as"), _cast),
    **dict.fromkeys(("expand", "broadcast_to", "expand_as"), _expand),
    **dict.fromkeys(("matmul", "bmm"), _matmul),
}


def _plus(size: Size, extra: int) -> Size:
    if isinstance(size, int):
        return size + extra
    return (*size, extra, "+") if extra else size


def _each(value: Any, axes: int) -> tuple[int, ...]:
    """One number an axis."""
    if isinstance(value, int):
        return (value,) * axes
    return tuple(value) if len(value) == axes else (value[0],) * axes
