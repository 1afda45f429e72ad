"""Milliseconds of each step of a packed network on a GPU that need not be here.

Steps are those that a GPU runs (`packed.producers`): layers by the kernels that `launches` finds for them, layers that
are not quantised as those of a library, everything else by the bytes that it moves. Activations that fit the L2 cache
are taken to be in it, as between the steps of a network.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

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
)
from fp4deploy.packed.memory import feature_map_bytes, input_shapes
from fp4deploy.packed.network import dilation_of, has_kernel
from fp4deploy.packed.producers import Produce, Step, label, operation, plan
from fp4deploy.packed.shapes import Shapes, shapes_of, weight_shape
from fp4deploy.packed.wide import wide_activations
from fp4deploy.peaks import Gpu
from fp4deploy.precisions import LABELS
from fp4deploy.rest import rest_of
from fp4deploy.timing.launches import Shape, moving, works
from fp4deploy.timing.library import BYTES, library_work
from fp4deploy.timing.model import NOTHING, Time, Work, fitted, time_of

VIEWS = ("reshape", "permute", "expand", "slice", "select", "constant")
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
    _, steps = plan(graph, wide_activations(graph, file.tensors, rest_of(graph)))
    rows, total = [], NOTHING
    for step in steps:
        found, outside = _works(graph, step, shapes, gpu)
        times = [time_of(work, gpu) for work in found]
        whole = sum(times, NOTHING)
        total += whole
        precision = LABELS.get(step.precision if isinstance(step, Layer) else "", rest_of(graph).label)
        kernels = tuple(work.family for work in found)
        note = outside or next((work.outside for work in found if work.outside), "")
        rows.append(StepTime(label(step), operation(step), precision, kernels, whole.ms, whole.low, whole.high, note))
    label_of_all = "estimated" if gpu.name == fitted()["gpu"] else "projected"
    return NetworkTime(gpu.name, label_of_all, batch, total, tuple(rows))


def _works(graph: Graph, step: Step, shapes: Shapes, gpu: Gpu) -> tuple[list[Work], str]:
    """What the kernels of a step do, and why they were not timed."""
    forms = [form for form in step.outputs if form.amax]
    moved, packed = _bytes(graph, step, shapes), sum(_elements(form, shapes) for form in forms)
    if operation(step) in VIEWS:
        return [], "a view, or a copy that is not counted"
    if not isinstance(step, Layer):
        norm = operation(step) in NORMS or (isinstance(step, Produce) and isinstance(step.first, Norm))
        timed = norm or isinstance(step, Produce)
        return [moving(moved, packed, gpu, norm)], "" if timed else "an operator of torch"
    axis = -1 if isinstance(step, Linear) else 1
    sources = [shapes[name] for name in step.inputs]
    weight = weight_shape(graph, step, sum(shape[axis] for shape in sources))
    taps = weight[1:-1]
    if step.precision == "nvfp4" and has_kernel(step, taps) and len(taps) != 1:
        fused = len(step.outputs) == 1 and bool(forms)
        parts = [moving(_bytes(graph, step, shapes, written=True), packed, gpu)] if forms and not fused else []
        return works(_shape(step, sources, weight, fused), gpu) + parts, ""
    result = shapes[step.outputs[0].name]
    outputs = result[axis]
    rows = math.prod(result) / outputs
    transposed = isinstance(step, ConvTranspose2d)
    pixels = math.prod(sources[0]) // sources[0][axis] if transposed else rows
    macs = pixels * math.prod(weight)
    work = library_work(
        "FP16",
        rows,
        outputs,
        macs / math.prod(result),
        moved + BYTES["FP16"] * math.prod(weight),
        gpu,
        transposed,
    )
    return [work], _untimed(graph, step)


def _untimed(graph: Graph, step: Layer) -> str:
    """Why a layer outside of our kernels was not timed; "" where cuDNN and cuBLAS were timed on such layers."""
    if step.precision == "nvfp4":
        return "decoded to FP16, by cuDNN"
    if quantizes_itself(step):
        return f"{LABELS[step.precision]}, as a layer in FP16"
    if rest_of(graph).label == "FP32":
        return "FP32: the time is that of FP16"
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
