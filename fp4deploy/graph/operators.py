"""How an ATen call becomes a node: one name an operation, attributes spelled out, axes counted from the front.

| node | ATen | attributes |
|---|---|---|
| `conv` | conv1d, conv2d, conv3d | stride, padding, dilation, groups, weight_shape |
| `conv_transpose` | conv_transpose1d/2d/3d | the same and output_padding |
| `linear` | linear | weight_shape |
| `batch_norm`, `group_norm`, `instance_norm`, `layer_norm` | the same, in evaluation | eps, num_groups, ... |
| `relu`, `leaky_relu`, `silu`, `gelu`, `hardswish`, ... | the same (`ACTIVATIONS`) | those of the schema |
| `abs`, `exp`, `sqrt`, ... (`UNARY`) | the same | |
| `add`, `sub`, `mul`, `div`, `pow`, `maximum`, `minimum` | the same | `number` where one operand is one |
| `gt`, `ge`, `lt`, `le`, `eq`, `ne`, `where` | the same | `number` |
| `concat` | cat; slice_scatter, with the parts around as slices, or with `take` where its step is not 1 | dim |
| `max_pool`, `avg_pool` | max_pool1d/2d/3d, avg_pool1d/2d/3d | kernel_size, stride, padding, dilation, ceil_mode, ... |
| `adaptive_avg_pool`, `adaptive_max_pool` | adaptive_..._pool1d/2d/3d | output_size |
| `mean`, `sum`, `amax`, `amin`, `norm`, `var`, `cumsum` | over axes; max, min, vector_norm, ... | dim, keepdim |
| `argmax` | argmax, argmin over an axis; logsumexp is `amax`, `sub`, `exp`, `sum`, `log` and `add` | dim, keepdim |
| `resize` | upsample_nearest1d/2d/3d, upsample_bilinear2d, ... | mode, size or scale, align_corners |
| `pixel_shuffle`, `pixel_unshuffle` | the same | factor |
| `unfold`, `fold` | im2col, col2im of a batch | kernel_size, stride, padding, dilation; output_size |
| `reshape` | view, reshape, flatten, unflatten, squeeze, unsqueeze | shape |
| `expand` | expand, broadcast_to; copy; full, zeros_like, new_ones, ... | shape |
| `arange` | the same, of whole numbers | start, end, step |
| `permute` | permute, transpose, movedim, t, mT; also the last node of Tensor.unfold | dims |
| `slice` | slice, split, chunk, narrow, select (and a reshape) | dim, start, end, step |
| `roll`, `flip`, `repeat` | the same | shifts, dims; dims; repeats |
| `take` | index_select, index with one constant tensor of positions (and a reshape) | dim, and the constant "index" |
| `pad` | pad, constant_pad_nd, reflection_pad2d, ... | pad (last axis first, as in torch), mode, value |
| `matmul`, `softmax`, `log_softmax`, `attention` | matmul, bmm, softmax, ... | dim; is_causal, scale |
| `cast` | to floating point numbers; to bool it is `ne`, to whole numbers `sign`, `abs`, `floor` and `mul` | dtype |

What changes no value (dropout in evaluation, contiguous, clone, a cast to the same type) is left out. Any other call is
decomposed by torch's own table where that has it (einsum, glu, stack, channel_shuffle, ...), and else a node with
ATen's name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from fp4deploy.graph.sizes import Size

ACTIVATIONS = (
    "relu", "relu6", "leaky_relu", "elu", "selu", "silu", "gelu", "hardswish", "hardsigmoid", "hardtanh", "sigmoid",
    "tanh", "softplus", "mish", "prelu", "clamp",
)  # fmt: skip
UNARY = (
    "abs", "neg", "sign", "exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "reciprocal", "square", "erf", "sin", "cos",
    "floor", "ceil", "round",
)  # fmt: skip
ARITHMETIC = ("add", "sub", "mul", "div", "pow", "maximum", "minimum", "gt", "ge", "lt", "le", "eq", "ne")
ALIASES = (
    "dropout", "feature_dropout", "alpha_dropout", "native_dropout", "contiguous", "clone", "alias", "detach",
    "detach_", "lift_fresh_copy", "lift_fresh", "identity", "positive",
)  # fmt: skip
RESHAPES = (
    "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "_unsafe_view", "view_as", "reshape_as",
)  # fmt: skip
SEVERAL = ("split", "chunk", "split_with_sizes", "tensor_split", "unbind")
FILLED = ("full", "full_like", "empty", "empty_permuted")  # what zeros, new_ones, empty_like, ... are decomposed to
ALIAS = "alias"  # a step whose output is what it reads
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
    """One node of a call: operator, attributes, the roles it reads; `after` reads the output of the step before.

    roles: a number is an earlier step of the call, whose output is read. constants: role -> a tensor that the call
    makes.
    """

    op: str
    attributes: dict[str, Any] = field(default_factory=dict)
    roles: Mapping[str, str | int] | None = None  # role of the node -> role of the call; None: all as they are
    shape: tuple[Size, ...] | None = None  # None: that of the call
    after: bool = False
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)


def steps_of(call: Call) -> list[Step] | None:
    """The nodes of a call, in order; [] where its output is its input; None where it is no known operation."""
    if call.op in ALIASES:
        return []
    if call.op in ACTIVATIONS:
        return [Step(call.op, dict(call.arguments))]
    if call.op in UNARY and not call.arguments.get("decimals"):
        return [Step(call.op, {}, {"input": "self"})]
    if call.op in RESHAPES and "dtype" not in call.arguments:
        return [Step("reshape", {"shape": call.shape}, {"input": "self"})]
    known = _KNOWN.get(call.op)
    return known(call) if known else None


def is_known(name: str, overload: str = "") -> bool:
    """Whether a call of this ATen operator has nodes of its own."""
    if name == "where" and overload != "self":  # torch has tables for numbers in place of tensors
        return False
    listed = (*ALIASES, *ACTIVATIONS, *UNARY, *RESHAPES, *SEVERAL, *NO_OUTPUT)
    return name in _KNOWN or name in listed or name.startswith("sym_")


def parts_of(call: Call) -> list[Step] | None:
    """The slices of a call with several outputs (split, chunk, unbind); None for any other."""
    if call.op not in SEVERAL:
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
    if "self" not in call.tensors:
        return [Step(f"aten.{op}", dict(arguments))]
    if op == "pow":
        arguments = {"other": arguments.get("exponent")}
        both = {"input": "self", "other": "exponent"}
        return [Step(op, {} if "exponent" in call.tensors else {"number": arguments["other"]}, both)]
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
    """Without parts that have no elements, as of an encoder that has no features of the first resolution."""
    parts = [role for role in call.tensors if 0 not in call.shapes[role]] or list(call.tensors)
    if len(parts) == 1:  # a dense block's first layer
        return [Step(ALIAS, {}, {"input": parts[0]})]
    roles = {f"tensors.{at}": role for at, role in enumerate(parts)}
    return [Step("concat", {"dim": int(call.arguments["dim"]) % len(call.shape)}, roles)]


def _filled(call: Call) -> list[Step] | None:
    """One number everywhere, in a shape that depends on the inputs'; what is left uninitialised is 0."""
    number = call.arguments.get("fill_value", 0)
    if not isinstance(number, int | float) or not call.shape:
        return None
    return [Step("expand", {"shape": call.shape}, {}, constants={"input": torch.tensor([float(number)])})]


_BOUNDS = ("start", "end", "step")


def _arange(call: Call) -> list[Step] | None:
    """Positions along an axis of open size: whole numbers, as long as no operator computes with them."""
    given = {"start": 0, "step": 1} | {name: each for name, each in call.arguments.items() if name in _BOUNDS}
    if any(not isinstance(each, int | tuple) for each in given.values()):
        return None
    steps = [Step("arange", given, {})]
    return [*steps, Step("cast", {"dtype": call.dtype}, {}, after=True)] if call.dtype.is_floating_point else steps


def _slice_scatter(call: Call) -> list[Step] | None:
    """x with x[..., start:end:step, ...] replaced: the parts around, concatenated, or positions of a concatenation."""
    shape, source, arguments = call.shapes["self"], call.shapes["src"], call.arguments
    axis = int(arguments["dim"]) % len(shape)
    size, length = shape[axis], source[axis]
    if source == shape:
        return [Step(ALIAS, {}, {"input": "src"})]
    start, step = arguments["start"] or 0, int(arguments["step"])
    if not isinstance(start, int) or not isinstance(length, int) or (start < 0 and not isinstance(size, int)):
        return None
    if isinstance(size, int):
        start = min(start + size if start < 0 else start, size)
    if step > 1:
        return _interleaved(axis, size, range(start, start + length * step, step)) if isinstance(size, int) else None
    steps = []
    roles: dict[str, str | int] = {}
    before, after = (*shape[:axis], start, *shape[axis + 1 :]), start + length
    if start:
        steps.append(Step("slice", {"dim": axis, "start": 0, "end": start, "step": 1}, {"input": "self"}, before))
        roles["tensors.0"] = 0
    roles[f"tensors.{len(roles)}"] = "src"
    if size != after:
        rest = (*shape[:axis], _plus(size, -after), *shape[axis + 1 :])
        roles[f"tensors.{len(roles)}"] = len(steps)
        steps.append(Step("slice", {"dim": axis, "start": after, "end": None, "step": 1}, {"input": "self"}, rest))
    return [*steps, Step("concat", {"dim": axis}, roles)]


def _interleaved(axis: int, size: int, replaced: range) -> list[Step]:
    found = {position: size + at for at, position in enumerate(replaced)}
    positions = torch.tensor([found.get(position, position) for position in range(size)])
    both = Step("concat", {"dim": axis}, {"tensors.0": "self", "tensors.1": "src"})
    return [both, Step("take", {"dim": axis}, {}, after=True, constants={"index": positions})]


def _copy(call: Call) -> list[Step]:
    """The values of another tensor, in this one's shape."""
    if call.shapes["src"] == call.shape:
        return [Step(ALIAS, {}, {"input": "src"})]
    return [Step("expand", {"shape": call.shape}, {"input": "src"})]


def _max_pool(call: Call) -> list[Step]:
    dilation = _each(call.arguments["dilation"], _spatial(call))
    return _of_self("max_pool", **_window(call), dilation=dilation)


def _avg_pool(call: Call) -> list[Step]:
    extra = {name: call.arguments.get(name) for name in ("count_include_pad", "divisor_override")}
    return _of_self("avg_pool", **_window(call), **extra)


def _spatial(call: Call) -> int:
    """The number of spatial axes in the name of an operator: 2 of max_pool2d."""
    return int(next(letter for letter in call.op if letter.isdigit()))


def _window(call: Call) -> dict[str, object]:
    arguments, axes = call.arguments, _spatial(call)
    kernel = _each(arguments["kernel_size"], axes)
    return {
        "kernel_size": kernel,
        "stride": _each(arguments["stride"], axes) if arguments["stride"] else kernel,
        "padding": _each(arguments["padding"], axes),
        "ceil_mode": bool(arguments["ceil_mode"]),
    }


def _adaptive(call: Call) -> list[Step]:
    kind = "adaptive_avg_pool" if "avg" in call.op else "adaptive_max_pool"
    return _of_self(kind, output_size=tuple(call.shape[-_spatial(call) :]))


def _over(op: str, call: Call, **more: Any) -> list[Step]:
    """A reduction over the axes of `dim`, all where there are none."""
    rank, dims = len(call.shapes["self"]), call.arguments.get("dim")
    axes = tuple(sorted(int(dim) % rank for dim in _listed(dims))) if dims or dims == 0 else tuple(range(rank))
    return _of_self(op, dim=axes, keepdim=bool(call.arguments.get("keepdim")), **more)


def _of_self(op: str, **attributes: Any) -> list[Step]:
    return [Step(op, attributes, {"input": "self"})]


def _axis(call: Call) -> int:
    return int(call.arguments["dim"]) % len(call.shapes["self"])


def _extreme(call: Call) -> list[Step] | None:
    """max or min: over one axis the values alone, over all axes, or of two tensors."""
    if "other" in call.tensors:
        return [Step(f"{call.op}imum", {}, {"input": "self", "other": "other"})]
    return _over(f"a{call.op}", call)


def _position(call: Call) -> list[Step] | None:
    """argmax and argmin over one axis."""
    if call.arguments.get("dim") is None:
        return None
    attributes = {"dim": _axis(call), "keepdim": bool(call.arguments.get("keepdim"))}
    if call.op == "argmax":
        return _of_self("argmax", **attributes)
    return [Step("neg", {}, {"input": "self"}, call.shapes["self"]), Step("argmax", attributes, {}, after=True)]


def _log_sum_exp(call: Call) -> list[Step]:
    """max + log(sum(exp(x - max))), whose exponentials do not overflow; the sum of more than 65504 may in FP16."""
    shape = call.shapes["self"]
    dims = sorted(int(dim) % len(shape) for dim in _listed(call.arguments["dim"]))
    one = tuple(1 if axis in dims else size for axis, size in enumerate(shape))
    over = {"dim": tuple(dims), "keepdim": True}
    steps = [
        Step("amax", over, {"input": "self"}, one),
        Step("sub", {}, {"input": "self", "other": 0}, shape),
        Step("exp", {}, {"input": 1}, shape),
        Step("sum", over, {"input": 2}, one),
        Step("log", {}, {"input": 3}, one),
        Step("add", {}, {"input": 4, "other": 0}, one),
    ]
    return steps if call.arguments.get("keepdim") else [*steps, Step("reshape", {"shape": call.shape}, {}, after=True)]


def _variance(call: Call) -> list[Step] | None:
    if "correction" not in call.arguments and "unbiased" not in call.arguments:
        return None
    correction = call.arguments.get("correction", float(bool(call.arguments.get("unbiased", True))))
    steps = _over("var", call, correction=1.0 if correction is None else float(correction))
    return [*steps, Step("sqrt", {}, {}, after=True)] if call.op == "std" else steps


def _norm_of(call: Call) -> list[Step] | None:
    euclidean = call.arguments.get("ord", call.arguments.get("p", 2)) in (2, None)
    return _over("norm", call) if euclidean and isinstance(call.arguments.get("dim"), tuple | None) else None


def _turned(call: Call) -> list[Step] | None:
    """roll: with axes."""
    rank, dims = len(call.shapes["self"]), call.arguments["dims"]
    if not dims:
        return None
    return _of_self("roll", shifts=call.arguments["shifts"], dims=tuple(int(dim) % rank for dim in dims))


def _flip(call: Call) -> list[Step]:
    rank = len(call.shapes["self"])
    return _of_self("flip", dims=tuple(int(dim) % rank for dim in call.arguments["dims"]))


def _take(call: Call) -> list[Step] | None:
    """index_select, or x[:, :, positions] with one tensor of positions, whose axes take the place of that axis."""
    found = {role: at for role, at in call.shapes.items() if role == "index" or role.startswith("indices")}
    if len(found) != 1 or "self" not in call.tensors:
        return None
    ((role, places),) = found.items()
    shape = call.shapes["self"]
    axis = (int(call.arguments["dim"]) if role == "index" else int(role.rpartition(".")[2])) % len(shape)
    take = Step("take", {"dim": axis}, {"input": "self", "index": role})
    if len(places) == 1:
        return [take]
    if call.tensors[role][1] or any(not isinstance(size, int) for size in places):
        return None  # positions that depend on values, or on a size
    flat = (*shape[:axis], math.prod(cast("tuple[int, ...]", places)), *shape[axis + 1 :])
    return [replace(take, shape=flat), Step("reshape", {"shape": call.shape}, {}, after=True)]


def _windows_of_axis(call: Call) -> list[Step] | None:
    """Tensor.unfold: positions of all windows, a reshape, and the axis of a window's elements moved to the end."""
    shape, size, step = call.shapes["self"], int(call.arguments["size"]), int(call.arguments["step"])
    axis = int(call.arguments["dimension"]) % len(shape)
    before, count, after = shape[:axis], call.shape[axis], shape[axis + 1 :]
    if size == step:
        flat: Size = count * size if isinstance(count, int) else (*count, size, "*")
        part = Step(
            "slice", {"dim": axis, "start": 0, "end": flat, "step": 1}, {"input": "self"}, (*before, flat, *after)
        )
    elif isinstance(count, int):
        positions = (torch.arange(count)[:, None] * step + torch.arange(size)).flatten()
        flat = count * size
        part = Step("take", {"dim": axis}, {"input": "self"}, (*before, flat, *after), constants={"index": positions})
    else:
        return None
    windows = (*before, count, size, *after)
    order = (*range(axis + 1), *range(axis + 2, len(windows)), axis + 1)
    return [
        part,
        Step("reshape", {"shape": windows}, {}, windows, after=True),
        Step("permute", {"dims": order}, {}, after=True),
    ]


def _unfold(call: Call) -> list[Step] | None:
    return _of_self("unfold", **_blocks(call)) if len(call.shapes["self"]) == 4 else None


def _fold(call: Call) -> list[Step] | None:
    size = tuple(call.arguments["output_size"])
    return _of_self("fold", output_size=size, **_blocks(call)) if len(call.shapes["self"]) == 3 else None


def _blocks(call: Call) -> dict[str, object]:
    names = ("kernel_size", "stride", "padding", "dilation")
    return {name: tuple(int(each) for each in call.arguments[name]) for name in names}


def _where(call: Call) -> list[Step] | None:
    roles = {"condition": "condition", "input": "self", "other": "other"}
    return [Step("where", {}, roles)] if set(roles.values()) <= set(call.tensors) else None


def _logical(op: str) -> Callable[[Call], list[Step] | None]:
    """Of bools as 0 and 1: a product is their and, the maximum their or, equal to 0 their not."""

    def steps(call: Call) -> list[Step] | None:
        if call.dtype != torch.bool or "self" not in call.tensors:
            return None
        if op == "eq":
            return [Step(op, {"number": 0}, {"input": "self"})]
        return [Step(op, {}, {"input": "self", "other": "other"})] if "other" in call.tensors else None

    return steps


def _limit(call: Call) -> list[Step] | None:
    """clamp_min and clamp_max with a number; with a tensor they are maximum and minimum."""
    side = call.op.removeprefix("clamp_")
    if side in call.tensors:
        return [Step({"min": "maximum", "max": "minimum"}[side], {}, {"input": "self", "other": side})]
    return [Step("clamp", {"min": None, "max": None} | {side: call.arguments[side]}, {"input": "self"})]


def _resize(call: Call) -> list[Step]:
    axes = _spatial(call)
    mode = call.op.lstrip("_").removeprefix("upsample_").removesuffix(f"{axes}d").replace("_", "-")
    scales = call.arguments.get("scale_factors")
    if not scales and call.arguments.get("scales_h"):
        scales = (call.arguments["scales_h"], call.arguments["scales_w"])
    if not scales and call.arguments.get("scales"):
        scales = (call.arguments["scales"],)
    if not scales and call.arguments.get("scales_d"):
        scales = tuple(call.arguments[f"scales_{axis}"] for axis in "dhw")
    attributes = {
        "mode": mode,
        "size": None if scales else tuple(call.shape[-axes:]),
        "scale": tuple(float(scale) for scale in scales) if scales else None,
        "align_corners": bool(call.arguments.get("align_corners")),
    }
    return [Step("resize", attributes, {"input": "input" if "input" in call.tensors else "self"})]


def _shuffle(call: Call) -> list[Step]:
    name = "upscale_factor" if call.op == "pixel_shuffle" else "downscale_factor"
    return _of_self(call.op, factor=call.arguments[name])


def _permute(call: Call) -> list[Step]:
    rank, arguments = len(call.shapes["self"]), call.arguments
    order = list(range(rank))
    if "source" in arguments:
        source, to = ([axis % rank for axis in _listed(arguments[name])] for name in ("source", "destination"))
        moved = dict(zip(to, source, strict=True))
        kept = iter(axis for axis in range(rank) if axis not in moved.values())
        order = [moved[axis] if axis in moved else next(kept) for axis in range(rank)]
    elif "dims" in arguments:
        order = [int(dim) % rank for dim in arguments["dims"]]
    elif rank > 1:
        a, b = (int(arguments.get(name, default)) % rank for name, default in (("dim0", -2), ("dim1", -1)))
        order[a], order[b] = order[b], order[a]
    return _of_self("permute", dims=tuple(order))


def _slice(call: Call) -> list[Step]:
    shape, arguments = call.shapes["self"], call.arguments
    axis = int(arguments["dim"]) % len(shape)
    if call.shape == shape and arguments.get("step", 1) == 1:
        return []
    if call.op == "narrow":
        start = arguments["start"]
        return _of_self("slice", dim=axis, start=start, end=_plus(start, arguments["length"]), step=1)
    end = arguments["end"] if not isinstance(arguments["end"], int) or arguments["end"] < 1 << 31 else None
    return _of_self("slice", dim=axis, start=arguments["start"] or 0, end=end, step=arguments["step"])


def _pad(call: Call) -> list[Step]:
    mode = {"constant_pad_nd": "constant", "reflection_pad2d": "reflect", "replication_pad2d": "replicate"}.get(call.op)
    arguments = call.arguments
    value = arguments.get("value")
    sides = tuple(arguments["pad" if "pad" in arguments else "padding"])
    return _of_self("pad", pad=sides, mode=mode or arguments["mode"], value=0.0 if value is None else float(value))


def _attention(call: Call) -> list[Step]:
    attributes = {name: call.arguments.get(name) for name in ("is_causal", "scale", "enable_gqa")}
    return [Step("attention", attributes)]


def _cast(call: Call) -> list[Step]:
    """To a truth value: not 0; to a whole number: towards 0, sign x floor of the magnitude."""
    if call.dtype == torch.bool:
        return [Step("ne", {"number": 0}, {"input": "self"})]
    if call.dtype.is_floating_point or call.dtype.is_complex:
        return [Step("cast", {"dtype": call.dtype}, {"input": "self"})]
    whole = [Step("sign", {}, {"input": "self"}), Step("abs", {}, {"input": "self"}), Step("floor", {}, {"input": 1})]
    return [*whole, Step("mul", {}, {"input": 0, "other": 2})]


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
    **dict.fromkeys(FILLED, _filled),
    "arange": _arange,
    "slice_scatter": _slice_scatter,
    "copy": _copy,
    **dict.fromkeys(("max_pool1d", "max_pool2d", "max_pool3d"), _max_pool),
    **dict.fromkeys(("avg_pool1d", "avg_pool2d", "avg_pool3d"), _avg_pool),
    **{f"{kind}{axes}d": _adaptive for kind in ("adaptive_avg_pool", "adaptive_max_pool") for axes in (1, 2, 3)},
    **{f"_adaptive_avg_pool{axes}d": _adaptive for axes in (2, 3)},
    **dict.fromkeys(("mean", "amax", "amin", "sum"), lambda call: _over(call.op, call)),
    **dict.fromkeys(("max", "min"), _extreme),
    **dict.fromkeys(("argmax", "argmin"), _position),
    "logsumexp": _log_sum_exp,
    **dict.fromkeys(("var", "std"), _variance),
    **dict.fromkeys(("linalg_vector_norm", "norm"), _norm_of),
    "cumsum": lambda call: _of_self("cumsum", dim=_axis(call)),
    "where": _where,
    **dict.fromkeys(("logical_and", "bitwise_and"), _logical("mul")),
    **dict.fromkeys(("logical_or", "bitwise_or"), _logical("maximum")),
    **dict.fromkeys(("logical_not", "bitwise_not"), _logical("eq")),
    "roll": _turned,
    "flip": _flip,
    "repeat": lambda call: _of_self("repeat", repeats=call.arguments["repeats"]),
    **dict.fromkeys(("index_select", "index"), _take),
    **dict.fromkeys(("clamp_min", "clamp_max"), _limit),
    **{f"upsample_nearest{axes}d": _resize for axes in (1, 2, 3)},
    **{f"_upsample_nearest_exact{axes}d": _resize for axes in (1, 2, 3)},
    **dict.fromkeys(
        ("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"), _resize
    ),
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle"), _shuffle),
    "unfold": _windows_of_axis,
    "im2col": _unfold,
    "col2im": _fold,
    **dict.fromkeys(("permute", "transpose", "t", "mT", "numpy_T", "swapaxes", "movedim"), _permute),
    **dict.fromkeys(("slice", "narrow"), _slice),
    "select": lambda call: _of_self("select", dim=_axis(call), index=call.arguments["index"]),
    **dict.fromkeys(("pad", "constant_pad_nd", "reflection_pad2d", "replication_pad2d"), _pad),
    **dict.fromkeys(
        ("softmax", "_softmax", "log_softmax", "_log_softmax"),
        lambda call: _of_self(call.op.removeprefix("_"), dim=_axis(call)),
    ),
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(("to", "_to_copy", "type_as"), _cast),
    **dict.fromkeys(("expand", "broadcast_to", "expand_as"), lambda call: _of_self("expand", shape=call.shape)),
    **dict.fromkeys(("matmul", "bmm"), _matmul),
}


def _plus(size: Size, extra: Size) -> Size:
    if isinstance(size, int) and isinstance(extra, int):
        return size + extra
    one, other = ((each,) if isinstance(each, int) else each for each in (size, extra))
    return (*one, *other, "+") if extra else size


def _listed(value: Any) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)


def _each(value: Any, axes: int) -> tuple[int, ...]:
    """One number an axis."""
    if isinstance(value, int):
        return (value,) * axes
    return tuple(value) if len(value) == axes else (value[0],) * axes
