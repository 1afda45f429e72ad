"""What ONNX operators without weights compute, in torch.

A value is a tensor, or, where it is a shape or computed from one, a NumPy array of integers (`Host`): shape arithmetic
stays out of the traced graph, and a dynamic batch passes through it as the symbol that torch.export uses. Each entry of
`OPERATORS` takes a `Call` and returns its outputs; what is not listed is refused by name before anything runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp4deploy.errors import InputError

Host = NDArray[Any]
MAX_HOST = 4096  # elements of a shape value
FLOATS = (1, 10, 11, 16)  # ONNX element types that are computed in FP32
TORCH_MODES = {"linear": "bilinear", "cubic": "bicubic"}
RESIZED = {"antialias": 0, "axes": None, "cubic_coeff_a": -0.75, "exclude_outside": 0,
           "keep_aspect_ratio_policy": "stretch"}  # as F.interpolate computes it  # fmt: skip
ONLY_CUBIC = ("cubic_coeff_a", "exclude_outside")  # say nothing in other modes


@dataclass(frozen=True)
class Call:
    """One node at work: operator, its name for messages, inputs (None where left out), attributes, outputs."""

    op: str
    name: str
    inputs: tuple[Any, ...]
    attributes: Mapping[str, Any]
    outputs: int = 1

    def tensor(self, at: int) -> Tensor:
        """An input as a tensor."""
        return as_tensor(self.inputs[at], self._device())

    def optional(self, at: int) -> Any:
        """An input, None where it is left out."""
        return self.inputs[at] if at < len(self.inputs) else None

    def ints(self, at: int, attribute: str = "") -> list[Any] | None:
        """Integers of an input, or of the attribute that older opsets have in its place; None where neither is."""
        value = self.optional(at)
        if value is None:
            found = self.attributes.get(attribute)
            return None if found is None else list(found)
        return as_list(value, self)

    def get(self, name: str, default: object) -> Any:
        """An attribute."""
        return self.attributes.get(name, default)

    def refuse(self, why: str) -> InputError:
        """The error for what this reader does not know."""
        return InputError(f"{self.name} ({self.op}): {why}.")

    def _device(self) -> torch.device:
        return next((each.device for each in self.inputs if isinstance(each, Tensor)), torch.device("cpu"))


Operator = Callable[[Call], object]


def as_tensor(value: Any, device: torch.device) -> Tensor:
    """A tensor of a value; whole numbers as int64."""
    if isinstance(value, Tensor):
        return value
    found = torch.tensor(value.tolist(), device=device)
    return found.float() if found.is_floating_point() else found


def as_list(value: Any, call: Call) -> list[Any]:
    """A shape value as a list of numbers."""
    if isinstance(value, Tensor):
        raise call.refuse("it needs a shape that is a constant or comes from Shape")
    return list(value.reshape(-1))


def host(values: object) -> Host:
    """A shape value."""
    found = np.array(values, dtype=object)
    if found.size > MAX_HOST:
        raise InputError(f"A shape with {found.size} elements: at most {MAX_HOST} are read.")
    return found


def _elementwise(torch_function: Callable[..., object], host_function: Callable[..., object]) -> Operator:
    def run(call: Call) -> object:
        if all(isinstance(each, np.ndarray) for each in call.inputs):
            return host(host_function(*call.inputs))
        return torch_function(*(call.tensor(at) for at in range(len(call.inputs))))

    return run


def _divide(x: Tensor, y: Tensor) -> Tensor:
    whole = not (x.is_floating_point() or y.is_floating_point())
    return torch.div(x, y, rounding_mode="trunc") if whole else x / y


def _divide_host(x: Host, y: Host) -> Host:
    whole = not any(isinstance(each, float) for each in (*x.reshape(-1), *y.reshape(-1)))
    return np.frompyfunc(_truncated, 2, 1)(x, y) if whole else x / y


def _truncated(x: Any, y: Any) -> object:
    """The quotient of two whole numbers, rounded towards zero; no condition on a size is added to the traced graph."""
    if y < 0:
        x, y = -x, -y
    if statically_known_true(x >= 0):
        return x // y
    return torch.sym_max(x, 0) // y - torch.sym_max(-x, 0) // y


def _unary(function: Callable[[Tensor], Tensor]) -> Operator:
    return lambda call: function(call.tensor(0))


def _fold(function: Callable[[Tensor, Tensor], Tensor]) -> Operator:
    def run(call: Call) -> Tensor:
        found = call.tensor(0)
        for at in range(1, len(call.inputs)):
            found = function(found, call.tensor(at))
        return found

    return run


def _clip(call: Call) -> Tensor:
    low, high = (
        call.get(name, None) if call.optional(at) is None else _number(call, at)
        for at, name in ((1, "min"), (2, "max"))
    )
    return call.tensor(0) if low is None and high is None else call.tensor(0).clamp(low, high)


def _number(call: Call, at: int) -> Any:
    value = call.inputs[at]
    return value if isinstance(value, Tensor) else float(value.reshape(-1)[0])


def _cast(call: Call) -> object:
    kind, x = call.get("to", 1), call.inputs[0]
    if isinstance(x, np.ndarray):
        convert: Any = float if kind in FLOATS else _whole if kind in (6, 7) else bool if kind == 9 else None
        if convert is None:
            raise call.refuse(f"element type {kind}")
        flat = [convert(each) for each in x.reshape(-1)]
        return host(flat).reshape(x.shape)
    kinds = dict.fromkeys(FLOATS, torch.float32) | {6: torch.int32, 7: torch.int64, 9: torch.bool, 2: torch.uint8}
    if kind not in kinds:
        raise call.refuse(f"element type {kind}")
    return x.to(kinds[kind])


def _whole(value: object) -> object:
    return int(value) if isinstance(value, (float, bool)) else value


def _shape(call: Call) -> Host:
    x = call.inputs[0]
    sizes = list(x.shape)
    return host(sizes[call.get("start", 0) : call.get("end", None)])


def _reshape(call: Call) -> object:
    x, sizes = call.inputs[0], call.ints(1, "shape") or []
    if not call.get("allowzero", 0):
        sizes = [x.shape[at] if _is(size, 0) else size for at, size in enumerate(sizes)]
    return x.reshape([_integer(size) for size in sizes])


def _is(size: object, number: int) -> bool:
    return isinstance(size, (int, float)) and size == number


def _integer(size: object) -> object:
    return int(size) if isinstance(size, float) else size


def _flatten(call: Call) -> Tensor:
    x, axis = call.tensor(0), call.get("axis", 1)
    if axis == 1 and x.ndim > 1:
        return x.flatten(1)
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


def _transpose(call: Call) -> object:
    x = call.inputs[0]
    order = call.get("perm", list(reversed(range(x.ndim))))
    return x.transpose(*order) if isinstance(x, np.ndarray) else x.permute(*order)


def _squeeze(call: Call) -> object:
    x, axes = call.inputs[0], call.ints(1, "axes")
    chosen = [at for at, size in enumerate(x.shape) if size == 1] if axes is None else [at % x.ndim for at in axes]
    kept = [size for at, size in enumerate(x.shape) if at not in chosen]
    if any(not _is(x.shape[at], 1) for at in chosen):
        raise call.refuse("it squeezes an axis that is not of size 1")
    return x.reshape(kept)


def _unsqueeze(call: Call) -> object:
    x, axes = call.inputs[0], call.ints(1, "axes") or []
    rank = x.ndim + len(axes)
    places = {at % rank for at in axes}
    sizes = iter(x.shape)
    return x.reshape([1 if at in places else next(sizes) for at in range(rank)])


def _concat(call: Call) -> object:
    axis = call.get("axis", 0)
    if all(isinstance(each, np.ndarray) for each in call.inputs):
        return host(np.concatenate([np.atleast_1d(each) for each in call.inputs], axis))
    return torch.cat([call.tensor(at) for at in range(len(call.inputs))], axis)


def _slice(call: Call) -> object:
    x = call.inputs[0]
    starts, ends = call.ints(1, "starts") or [], call.ints(2, "ends") or []
    axes = call.ints(3, "axes") or list(range(len(starts)))
    steps = call.ints(4) or [1] * len(starts)
    index: list[Any] = [slice(None)] * x.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if not _is(step, step) or step < 1:
            raise call.refuse(f"a step of {step}; known are positive ones")
        index[axis % x.ndim] = slice(start, end, step)
    return x[tuple(index)]


def _split(call: Call) -> object:
    x, axis = call.tensor(0), call.get("axis", 0)
    sizes = call.ints(1, "split")
    if sizes is None:
        count = call.get("num_outputs", call.outputs)
        each = -(-x.shape[axis] // count)
        sizes = [min(each, x.shape[axis] - each * at) for at in range(count)]
    return tuple(torch.split(x, sizes, axis))


def _gather(call: Call) -> object:
    x, index, axis = call.inputs[0], call.inputs[1], call.get("axis", 0)
    if isinstance(x, np.ndarray):
        chosen = np.array(as_list(index, call), dtype=np.int64).reshape(index.shape)
        return np.asarray(np.take(x, chosen, axis), dtype=object)
    if isinstance(index, np.ndarray) and index.ndim == 0:
        return x.select(axis, int(index))
    places = as_tensor(index, x.device).long()
    size = x.shape[axis]
    flat = torch.where(places < 0, places + size, places).reshape(-1)
    found = x.index_select(axis, flat)
    place = axis % x.ndim
    return found.reshape(*x.shape[:place], *places.shape, *x.shape[place + 1 :])


def _expand(call: Call) -> Tensor:
    x, sizes = call.tensor(0), call.ints(1) or []
    missing = max(0, x.ndim - len(sizes))
    sizes = [1] * missing + sizes
    own = [1] * (len(sizes) - x.ndim) + list(x.shape)
    return x.expand([have if _is(size, 1) else size for have, size in zip(own, sizes, strict=True)])


def _constant_of_shape(call: Call) -> object:
    sizes = call.ints(0) or []
    value = np.asarray(call.get("value", np.zeros(1, np.float32))).reshape(-1)[0]
    if np.issubdtype(type(value), np.integer):
        if len(sizes) > 1 or any(not isinstance(size, int) or not 0 <= size <= MAX_HOST for size in sizes):
            raise call.refuse("a constant of whole numbers larger than a shape")
        return host(np.full(sizes, int(value), dtype=object))
    return torch.full(sizes, float(value))


def _pad(call: Call) -> Tensor:
    x, pads, mode = call.tensor(0), call.ints(1, "pads") or [], call.get("mode", "constant")
    axes = call.ints(3) or list(range(x.ndim))
    before, after = pads[: len(axes)], pads[len(axes) :]
    sides = {axis % x.ndim: pair for axis, pair in zip(axes, zip(before, after, strict=True), strict=True)}
    first = min((axis for axis, pair in sides.items() if tuple(pair) != (0, 0)), default=x.ndim)
    flat = [side for axis in reversed(range(first, x.ndim)) for side in sides.get(axis, (0, 0))]
    if not flat:
        return x
    if mode == "constant":
        fill = call.get("value", 0.0) if call.optional(2) is None else _number(call, 2)
        return F.pad(x, flat, value=float(fill))
    if mode not in ("reflect", "edge"):
        raise call.refuse(f"mode {mode}")
    return F.pad(x, flat, "reflect" if mode == "reflect" else "replicate")


def same_pads(
    call: Call, sizes: Sequence[int], kernel: Sequence[int], strides: Sequence[int], taps: Sequence[int]
) -> list[int]:
    """ONNX pads (all begins, then all ends): explicit, or those of auto_pad."""
    kind = call.get("auto_pad", "NOTSET")
    if kind == "VALID":
        return [0] * (2 * len(kernel))
    if kind == "NOTSET":
        return list(call.get("pads", [0] * (2 * len(kernel))))
    totals = [
        max(0, (-(-size // step) - 1) * step + (length - 1) * gap + 1 - size)
        for size, length, step, gap in zip(sizes, kernel, strides, taps, strict=True)
    ]
    less, more = [total // 2 for total in totals], [total - total // 2 for total in totals]
    return [*less, *more] if kind == "SAME_UPPER" else [*more, *less]


def padded(x: Tensor, pads: Sequence[int], value: float = 0.0) -> tuple[Tensor, list[int]]:
    """(x with what both sides do not share, padding of both sides) of ONNX pads."""
    axes = len(pads) // 2
    even = [min(pads[at], pads[at + axes]) for at in range(axes)]
    excess = [side for at in reversed(range(axes)) for side in (pads[at] - even[at], pads[at + axes] - even[at])]
    return (F.pad(x, excess, value=value) if any(excess) else x), even


def _pool_geometry(call: Call, x: Tensor) -> tuple[list[int], list[int], list[int], list[int]]:
    kernel = list(call.get("kernel_shape", []))
    strides, taps = list(call.get("strides", [1] * len(kernel))), list(call.get("dilations", [1] * len(kernel)))
    if len(kernel) != 2 or x.ndim != 4:
        raise call.refuse("pooling over other than two axes")
    return kernel, strides, taps, same_pads(call, x.shape[2:], kernel, strides, taps)


def _max_pool(call: Call) -> Tensor:
    x = call.tensor(0)
    kernel, strides, taps, pads = _pool_geometry(call, x)
    if call.outputs > 1:
        raise call.refuse("its second output, the indices")
    x, even = padded(x, pads, -math.inf)
    if any(2 * edge > length for edge, length in zip(even, kernel, strict=True)):
        x, even = F.pad(x, [even[1], even[1], even[0], even[0]], value=-math.inf), [0, 0]
    return F.max_pool2d(x, kernel, strides, even, taps, bool(call.get("ceil_mode", 0)))


def _average_pool(call: Call) -> Tensor:
    x = call.tensor(0)
    kernel, strides, taps, pads = _pool_geometry(call, x)
    include = bool(call.get("count_include_pad", 0))
    if taps != [1, 1]:
        raise call.refuse("dilations")
    x, even = padded(x, pads)
    if (even != pads[:2] or even != pads[2:]) and not include:
        raise call.refuse("uneven padding that is not counted")
    return F.avg_pool2d(x, kernel, strides, even, bool(call.get("ceil_mode", 0)), include)


def _resize(call: Call) -> Tensor:
    x, old = call.tensor(0), call.op == "Upsample" or len(call.inputs) == 2
    scales, sizes = (call.optional(1), None) if old else (call.optional(2), call.optional(3))
    mode, rounding = call.get("mode", "nearest"), "floor" if old else call.get("nearest_mode", "round_prefer_floor")
    place = "asymmetric" if old else call.get("coordinate_transformation_mode", "half_pixel")
    unknown = [
        name
        for name, usual in RESIZED.items()
        if call.get(name, usual) != usual and (mode == "cubic" or name not in ONLY_CUBIC)
    ]
    if unknown or x.ndim != 4:
        raise call.refuse(", ".join(unknown) or "other than two axes to resize")
    if sizes is not None and np.size(sizes):
        wanted = as_list(sizes, call)[2:]
        factors = [target / size for size, target in zip(x.shape[2:], wanted, strict=True)]
    elif scales is not None:
        factors = (scales.tolist() if isinstance(scales, Tensor) else as_list(scales, call))[2:]
        wanted = [math.floor(size * factor) for size, factor in zip(x.shape[2:], factors, strict=True)]
    else:
        raise call.refuse("neither sizes nor scales")
    sides = [*zip(x.shape[2:], wanted, factors, strict=True)]
    centred, torch_mode = place in ("half_pixel", "pytorch_half_pixel"), TORCH_MODES.get(mode)
    fixed = all(isinstance(size, int) and isinstance(target, int) for size, target, _ in sides)
    if mode == "nearest":
        exact = centred and any(target % size for size, target, _ in sides)
        torch_mode = "nearest-exact" if exact else "nearest"
        if fixed and not all(_is_nearest_of_torch(*side, place, rounding, exact) for side in sides):
            raise call.refuse(f"coordinates '{place}' rounded by '{rounding}', from {[*x.shape[2:]]} to {wanted}")
        return F.interpolate(x, tuple(wanted), mode=torch_mode)
    if torch_mode is None or not (centred or place == "align_corners"):
        raise call.refuse(f"coordinates '{place}' of mode '{mode}'")
    if (
        fixed
        and centred
        and any(
            abs(factor * size - target) > 1e-3 or (target == 1 < size and place != "half_pixel")
            for size, target, factor in sides
        )
    ):
        raise call.refuse(f"coordinates '{place}', from {[*x.shape[2:]]} to {wanted} by {factors}")
    return F.interpolate(x, tuple(wanted), mode=torch_mode, align_corners=place == "align_corners")


def _is_nearest_of_torch(size: int, target: int, factor: float, place: str, rounding: str, exact: bool) -> bool:
    """Whether ONNX's formula gives the pixels that `F.interpolate` reads: floor(i size / target), exact: of i + 0.5.

    Both in float32, as torch and ONNX Runtime compute them: whole numbers may come out just below.
    """
    at, half, scale = np.arange(target, dtype=np.float32), np.float32(0.5), np.float32(factor)
    own = np.floor((at + half * exact) * (np.float32(size) / np.float32(target))).clip(0, size - 1)
    adjusted = np.float32(target) / (scale * np.float32(size))  # what flooring has left of the side
    centred = (at + half) / scale - half
    x = {
        "align_corners": at * np.float32(size - 1) / np.float32(max(target - 1, 1)),
        "asymmetric": at / scale,
        "half_pixel_symmetric": np.float32(size) / 2 * (1 - adjusted) + centred,
        "pytorch_half_pixel": centred if target > 1 else 0 * at,
        "half_pixel": centred,
        "tf_half_pixel_for_nn": (at + half) / scale,
    }.get(place)
    rules: dict[str, Callable[[Any], Any]] = {
        "ceil": np.ceil, "floor": np.floor, "round_prefer_ceil": lambda x: np.floor(x + 0.5),
        "round_prefer_floor": lambda x: np.ceil(x - 0.5),
    }  # fmt: skip
    return x is not None and rounding in rules and np.array_equal(rules[rounding](x).clip(0, size - 1), own)


def _reduce(function: Callable[..., Tensor]) -> Operator:
    def run(call: Call) -> Tensor:
        x, axes = call.tensor(0), call.ints(1, "axes")
        if axes is None and call.get("noop_with_empty_axes", 0):
            return x
        chosen = list(range(x.ndim)) if not axes else [int(axis) for axis in axes]
        return function(x, chosen, bool(call.get("keepdims", 1)))

    return run


def _softmax(call: Call) -> Tensor:
    return call.tensor(0).softmax(call.get("axis", -1))


def _depth_to_space(call: Call) -> Tensor:
    x, size, mode = call.tensor(0), call.get("blocksize", 1), call.get("mode", "DCR")
    if mode == "CRD":
        return F.pixel_shuffle(x, size)
    n, c, h, w = x.shape
    deep = x.reshape(n, size, size, c // (size * size), h, w).permute(0, 3, 4, 1, 5, 2)
    return deep.reshape(n, c // (size * size), h * size, w * size)


def _gelu(call: Call) -> Tensor:
    return F.gelu(call.tensor(0), approximate=call.get("approximate", "none"))


def _prelu(call: Call) -> Tensor:
    x, slope = call.tensor(0), call.tensor(1)
    return torch.where(x < 0, x * slope, x)


def _layer_norm(call: Call) -> Tensor:
    x, axis = call.tensor(0), call.get("axis", -1)
    bias = None if call.optional(2) is None else call.tensor(2)
    shape = x.shape[axis % x.ndim :]
    return F.layer_norm(x, list(shape), call.tensor(1), bias, call.get("epsilon", 1e-5))


def _where(call: Call) -> object:
    if all(isinstance(each, np.ndarray) for each in call.inputs):
        return host(np.where(call.inputs[0].astype(bool), call.inputs[1], call.inputs[2]))
    return torch.where(call.tensor(0).bool(), call.tensor(1), call.tensor(2))


def _identity(call: Call) -> object:
    return call.inputs[0]


def _hard_sigmoid(call: Call) -> Tensor:
    return (call.get("alpha", 0.2) * call.tensor(0) + call.get("beta", 0.5)).clamp(0, 1)


def _global(function: Callable[..., Tensor]) -> Operator:
    return lambda call: function(call.tensor(0), list(range(2, call.tensor(0).ndim)), True)


OPERATORS: dict[str, Operator] = {
    "Abs": _unary(torch.abs),
    "Add": _elementwise(torch.add, lambda x, y: x + y),
    "AveragePool": _average_pool,
    "Cast": _cast,
    "Ceil": _elementwise(torch.ceil, lambda x: np.vectorize(math.ceil, otypes=[object])(x)),
    "Clip": _clip,
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "DepthToSpace": _depth_to_space,
    "Div": _elementwise(_divide, _divide_host),
    "Dropout": _identity,
    "Elu": lambda call: F.elu(call.tensor(0), call.get("alpha", 1.0)),
    "Equal": _elementwise(torch.eq, lambda x, y: x == y),
    "Erf": _unary(torch.erf),
    "Exp": _unary(torch.exp),
    "Expand": _expand,
    "Flatten": _flatten,
    "Floor": _elementwise(torch.floor, lambda x: np.vectorize(math.floor, otypes=[object])(x)),
    "Gather": _gather,
    "Gelu": _gelu,
    "GlobalAveragePool": _global(torch.mean),
    "GlobalMaxPool": _global(torch.amax),
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _unary(F.hardswish),
    "Identity": _identity,
    "LayerNormalization": _layer_norm,
    "LeakyRelu": lambda call: F.leaky_relu(call.tensor(0), call.get("alpha", 0.01)),
    "Log": _unary(torch.log),
    "LogSoftmax": lambda call: call.tensor(0).log_softmax(call.get("axis", -1)),
    "Max": _fold(torch.maximum),
    "MaxPool": _max_pool,
    "Min": _fold(torch.minimum),
    "Mish": _unary(F.mish),
    "Mul": _elementwise(torch.mul, lambda x, y: x * y),
    "Neg": _unary(torch.neg),
    "PRelu": _prelu,
    "Pad": _pad,
    "Pow": lambda call: torch.pow(call.tensor(0), call.tensor(1)),
    "Reciprocal": _unary(torch.reciprocal),
    "ReduceMax": _reduce(torch.amax),
    "ReduceMean": _reduce(torch.mean),
    "ReduceMin": _reduce(torch.amin),
    "ReduceSum": _reduce(torch.sum),
    "ReduceSumSquare": _reduce(lambda x, *rest: x.square().sum(*rest)),
    "Relu": _unary(torch.relu),
    "Reshape": _reshape,
    "Resize": _resize,
    "Shape": _shape,
    "Sigmoid": _unary(torch.sigmoid),
    "Slice": _slice,
    "Softmax": _softmax,
    "Softplus": _unary(F.softplus),
    "Split": _split,
    "Sqrt": _unary(torch.sqrt),
    "Squeeze": _squeeze,
    "Sub": _elementwise(torch.sub, lambda x, y: x - y),
    "Sum": _fold(torch.add),
    "Tanh": _unary(torch.tanh),
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
    "Upsample": _resize,
    "Where": _where,
}
