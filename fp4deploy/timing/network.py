"""Milliseconds of each step of a packed network on a GPU that need not be here.

Steps are those that a GPU runs (`packed.producers`, with a rest in FP32 the nodes): layers by the kernels that
`launches` finds for them, layers that are not quantised or that are decoded as those of a library, in the format in
which the network multiplies them, everything else by the bytes that it moves. Activations that fit the L2 cache are
taken to be in it, as between the steps of a network.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch

from fp4deploy.packed.file import PackedFile
from fp4deploy.packed.graph import (
    Conv2d,
    ConvTranspose2d,
    Form,
    Graph,
    Layer,
    Linear,
    Norm,
    quantizes_itself,
    weight_names,
)
from fp4deploy.packed.memory import feature_map_bytes, input_shapes
from fp4deploy.packed.network import dilation_of, has_kernel, has_mixed_kernel, is_decoded, is_flat
from fp4deploy.packed.own_quantizer import kernel_weight, multiply, own_weight
from fp4deploy.packed.producers import Produce, Step, label, operation, plan
from fp4deploy.packed.shapes import Shapes, shapes_of, weight_shape
from fp4deploy.packed.wide import wide_activations
from fp4deploy.peaks import Gpu
from fp4deploy.plugins.gemm.triton.tiles import NATIVE_FROM
from fp4deploy.precisions import ELEMENT_BYTES, LABELS, LAYER_FORMATS
from fp4deploy.rest import rest_of
from fp4deploy.timing.launches import Shape, eight_bits, moving, works
from fp4deploy.timing.library import BYTES, library_work
from fp4deploy.timing.model import NOTHING, Time, Work, fitted, time_of
from fp4deploy.timing.passes import passes

VIEWS = ("reshape", "permute", "expand", "slice", "select", "constant")
DECODED = {"fp16": "FP16", "bf16": "TF32", "fp32": "FP32"}  # rest -> what torch multiplies decoded FP4 in
NORMS = ("group_norm_relu", "group_norm", "instance_norm")


@dataclass(frozen=True)
class StepTime:
    """One step; ms lies between low_ms and high_ms in nine of ten; outside: why that was not tested for such a step."""

    layer: str
    op: str
    precision: str
    kernels: tuple[str, ...]
    ms: float
    low_ms: float
    high_ms: float
    outside: str


@dataclass(frozen=True)
class NetworkTime:
    """All steps, one after the other; label: "projected", or of the architecture that was timed "estimated"."""

    device: str
    label: str
    batch: int
    total: Time
    layers: tuple[StepTime, ...]

    def to_json(self) -> dict[str, Any]:
        """As `fp4deploy estimate --json` prints it; `fp4deploy search --measured` reads it."""
        return asdict(self)


def estimate_network(file: PackedFile, gpu: Gpu, size: Sequence[int] | None = None, batch: int = 1) -> NetworkTime:
    """The time of a packed network.

    Args:
        size: of the first input's spatial axes; None: the network's own.

    Raises:
        InputError: a size that the network cannot take, or a kernel whose machine code is not known.
    """
    graph = file.graph
    own = file.card.size if file.card else graph.inputs[0].shape[2:]
    shapes = shapes_of(graph, input_shapes(graph, tuple(size or own), batch))
    steps: Sequence[Step] = graph.nodes
    if rest_of(graph).name != "fp32":
        _, steps = plan(graph, wide_activations(graph, file.tensors, rest_of(graph)))
    rows, total = [], NOTHING
    for step in steps:
        precision, found, outside = _works(file, step, shapes, gpu)
        times = [time_of(work, gpu) for work in found]
        whole = sum(times, NOTHING)
        total += whole
        kernels = tuple(dict.fromkeys(work.family for work in found))
        note = outside or next((work.outside for work in found if work.outside), "")
        rows.append(StepTime(label(step), operation(step), precision, kernels, whole.ms, whole.low, whole.high, note))
    label_of_all = "estimated" if gpu.name == fitted()["gpu"] else "projected"
    return NetworkTime(gpu.name, label_of_all, batch, total, tuple(rows))


def _works(file: PackedFile, step: Step, shapes: Shapes, gpu: Gpu) -> tuple[str, list[Work], str]:
    """What a step computes with, what its kernels do, and why they were not timed."""
    graph, rest = file.graph, rest_of(file.graph)
    forms = [form for form in step.outputs if form.amax]
    moved, packed = _bytes(graph, step, shapes), sum(_elements(form, shapes) for form in forms)
    if operation(step) in VIEWS:
        return rest.label, [], "a view, or a copy that is not counted"
    if not isinstance(step, Layer):
        norm = operation(step) in NORMS or (isinstance(step, Produce) and isinstance(step.first, Norm))
        timed = norm or isinstance(step, Produce)
        return rest.label, [moving(moved, packed, gpu, norm)], "" if timed else "an operator of torch"
    axis = -1 if isinstance(step, Linear) else 1
    sources = [shapes[name] for name in step.inputs]
    weight = weight_shape(graph, step, sum(shape[axis] for shape in sources))
    taps, name = weight[1:-1], LABELS.get(step.precision, "")
    if quantizes_itself(step):
        return _own_quantizer(file, step, shapes, weight, gpu)
    if name and _has_kernel(graph, step, [shape[axis] for shape in sources], taps, gpu):
        fused = len(step.outputs) == 1 and bool(forms)
        parts = [moving(_bytes(graph, step, shapes, written=True), packed, gpu)] if forms and not fused else []
        return name, works(_shape(step, sources, weight, fused), gpu) + parts, ""
    operands = DECODED[rest.name] if name else rest.label
    note = f"decoded to {operands}, by cuDNN" if name else _untimed(graph, step)
    product = _product(step, sources[0], shapes[step.outputs[0].name], weight)
    work = library_work(operands, *product, moved + BYTES[operands] * math.prod(weight), gpu, _transposed(step))
    return f"{name} as {operands}" if name else rest.label, [work], note


def _own_quantizer(
    file: PackedFile, step: Layer, shapes: Shapes, weight: Sequence[int], gpu: Gpu
) -> tuple[str, list[Work], str]:
    """A layer that quantises what it reads: by the kernel, or decoded; and torch's passes beside the product."""
    name, rest = LABELS[step.precision], rest_of(file.graph)
    result = shapes[step.outputs[0].name]
    parts = [file.tensors[each].to("meta") for each in weight_names(step)]
    x = torch.empty(shapes[step.inputs[0]], dtype=rest.dtype, device="meta")
    if has_mixed_kernel(step) and rest.name != "fp32" and gpu.arch.number >= NATIVE_FROM:
        held, linear = kernel_weight(step, parts, weight), isinstance(step, Linear)
        rows = x.flatten(0, -2)[None, None] if linear else x.movedim(1, -1)
        works = [moving(each, 0.0, gpu) for each in passes(lambda: held.quantized(rows))]
        elements = math.prod(result)
        moved = ELEMENT_BYTES[_format(step)] * x.numel() + held.nbytes + rest.bytes * elements
        sizes = () if linear else tuple(size + k - 1 for size, k in zip(result[2:], weight[1:-1], strict=True))
        first, channels = (elements // weight[0], x.shape[-1]) if linear else (result[0], x.shape[1])
        steps = () if linear else ((1, 1), (0, 0))
        shape = Shape(first, sizes, (channels,), weight[0], tuple(weight[1:-1]), *steps)
        return name, [*works, eight_bits(name, shape, moved, gpu)], ""
    own = own_weight(step, parts, weight)
    bias = torch.empty(weight[0], device="meta") if step.bias else None
    beside = [moving(each, 0.0, gpu) for each in passes(lambda: multiply(step, [x], own, bias))]
    moved = 4.0 * (x.numel() + math.prod(result) + math.prod(weight))
    product = _product(step, x.shape, result, weight)
    return (
        f"{name} as TF32",
        [*beside, library_work("TF32", *product, moved, gpu, _transposed(step))],
        f"{name}, decoded to TF32, by cuDNN and operators of torch",
    )


def _has_kernel(graph: Graph, step: Layer, channels: Sequence[int], taps: Sequence[int], gpu: Gpu) -> bool:
    """Whether `PackedNetwork` takes one of our kernels for a layer in FP4 on this GPU."""
    if rest_of(graph).name == "fp32" or not has_kernel(step, taps):
        return False
    kept = gpu.arch.number >= NATIVE_FROM or is_flat(step, taps)
    return kept or is_decoded(step, tuple(channels), taps)


def _product(
    step: Layer, source: Sequence[int], result: Sequence[int], weight: Sequence[int]
) -> tuple[float, float, float]:
    """Rows, columns and depth of a layer as one GEMM of a library."""
    axis = -1 if isinstance(step, Linear) else 1
    rows = math.prod(result) / result[axis]
    pixels = math.prod(source) / source[axis] if _transposed(step) else rows
    return rows, result[axis], pixels * math.prod(weight) / math.prod(result)


def _transposed(step: Layer) -> bool:
    return isinstance(step, ConvTranspose2d)


def _format(step: Layer) -> str:
    """Of what such a layer multiplies its weight with, as `ELEMENT_BYTES` names it."""
    return str(LAYER_FORMATS[step.precision].activation["format"])


def _untimed(graph: Graph, step: Layer) -> str:
    """Why a layer that is not quantised was not timed; "" where cuDNN and cuBLAS were timed on such layers."""
    if rest_of(graph).name != "fp16":
        return f"{rest_of(graph).label} was not timed"
    if set(step.inputs) & {form.name for each in graph.inputs for form in each.outputs}:
        return "first layers have kernels of their own"
    return "layers in groups" if getattr(step, "groups", 1) > 1 else ""


def _shape(step: Layer, sources: Sequence[tuple[int, ...]], weight: Sequence[int], packed: bool) -> Shape:
    outputs, *taps, _ = weight
    first = sources[0]
    if isinstance(step, Linear):
        return Shape(math.prod(first[:-1]), (), (first[-1],), outputs, packed=packed)
    place = cast("Conv2d | ConvTranspose2d", step)
    geometry = (tuple(first[2:]), tuple(shape[1] for shape in sources), outputs, tuple(taps))
    if isinstance(place, ConvTranspose2d):
        return Shape(first[0], *geometry, tuple(place.stride), (0,) * len(taps), 1, True, packed)
    return Shape(
        first[0], *geometry, tuple(place.stride), tuple(place.padding), dilation_of(place, taps), False, packed
    )


def _elements(form: Form, shapes: Shapes) -> int:
    """Of a form, which may be packed before what moves it: "<source>|<form>"."""
    return math.prod(shapes.get(form.name) or shapes[form.name.partition("|")[0]])


def _bytes(graph: Graph, step: Step, shapes: Shapes, written: bool = False) -> float:
    """Of all forms that a step reads and writes; written: of those that are packed after it, read once in full."""
    forms, rest = graph.forms() | {form.name: form for form in step.outputs}, rest_of(graph)
    names = [form.name for form in step.outputs] if written else [*step.inputs, *(form.name for form in step.outputs)]
    total = 0.0
    for name in names:
        whole = name.partition("|")[0]  # packed before what moves it: "<source>|<form>"
        form = forms.get(name) or forms[name.partition("|")[2]]
        total += feature_map_bytes(form, shapes.get(name) or shapes[whole], rest)
    return total
