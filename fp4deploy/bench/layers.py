"""Where a packed network's time goes: each step's time, bytes and operations, and what the machine could do at most.

A step is what runs: a node of the graph, or on a GPU several in one kernel (`packed.producers`). It runs alone, on the
activations that the steps before it wrote, its kernels many times in one CUDA graph on a GPU,
so that launches from Python do not count. Its **bytes** are what it must move at least (operands, weights and results,
each once), its **operations** two for each multiply-accumulate.

    share = max(bytes / bandwidth, operations / rate) / time           1: as fast as the machine allows

The two limits are measured on the same machine just before: a large copy, and a large matrix product in the type that
the network computes in (FP16 on a GPU, FP32 on the CPU). Data of small networks stays in the cache between two steps,
which is faster than memory: a share may then be above 1. The whole network is timed too; it differs from the sum of
its steps by the gaps between kernels.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fp4deploy.bench.latency import time_cpu, time_cuda
from fp4deploy.errors import InputError
from fp4deploy.packed import PackedNetwork, read_packed
from fp4deploy.packed.capture import CapturedNetwork, Replay, graphs_enabled
from fp4deploy.packed.graph import ConvTranspose2d, Form, Layer, Linear, tensors_of
from fp4deploy.packed.memory import feature_map_bytes, input_shapes
from fp4deploy.packed.producers import Step, label, nodes_of, operation
from fp4deploy.packed.shapes import Shapes, weight_shape

REPEATS = {"cuda": 10, "cpu": 1}  # of a step's kernels in one timed run
COLUMNS = ("layer", "op", "precision", "ms", "of total", "MB", "GFLOP", "share", "bound by")
TEXTS = frozenset({"layer", "op", "precision", "bound by"})


@dataclass(frozen=True)
class Limits:
    """What the machine reached: bytes a second of a copy, read and written; operations a second of a matrix product."""

    bandwidth: float
    rate: float


@dataclass(frozen=True)
class LayerTime:
    """One step. ms: median; bytes, operations: see above; share: of the nearer limit; bound_by: which one that is."""

    layer: str
    op: str
    precision: str
    writes: tuple[str, ...]
    ms: float
    bytes: int
    operations: int
    share: float
    bound_by: str


@dataclass(frozen=True)
class LayerTimes:
    """All steps of a network; whole_ms: the network as it runs, in one CUDA graph on a GPU."""

    path: str
    device: str
    batch: int
    limits: Limits
    whole_ms: float
    layers: tuple[LayerTime, ...]

    def to_json(self) -> dict[str, Any]:
        """As `profile --json` writes it."""
        return asdict(self)


def layer_times(path: Path, batch: int = 1, iterations: int = 20) -> LayerTimes:
    """Time every step of a packed network on random images of its own size.

    Raises:
        InputError: no packed network, or one whose inputs are no images.
    """
    if path.suffix != ".fp4":
        raise InputError(f"profile times packed networks (.fp4), not {path.name}. Make one with: fp4deploy export")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = PackedNetwork(read_packed(path), device)
    card, graph = network.file.card, network.graph
    size = card.size if card else tuple(graph.inputs[0].shape[2:4])
    if len(size) < 2:
        raise InputError(f"{path.name} does not read images.")
    shapes = input_shapes(graph, size, batch)
    inputs = [torch.randn(shapes[each.name]).to(device, network.dtype) for each in graph.inputs]
    run = CapturedNetwork(network, graphs_enabled()).prepared(*inputs)
    whole = _median_ms(run, device, iterations)
    found = measured_limits(device)
    with torch.inference_mode():
        rows = _steps(network, inputs, found, iterations)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return LayerTimes(str(path), name, batch, found, whole, tuple(rows))


def _steps(network: PackedNetwork, inputs: list[torch.Tensor], limits: Limits, iterations: int) -> list[LayerTime]:
    device, sizes = network.device, network.sizes(inputs)
    live: dict[str, Any] = {}
    moments: dict[str, Any] = {}
    shapes: Shapes = {}

    def keep(forms: list[Form], results: Sequence[object]) -> None:
        for form, x in zip(forms, results, strict=True):
            live[form.name], shapes[form.name] = x, _shape(form, x)

    for each, x in zip(network.inputs, inputs, strict=True):
        keep(each.outputs, network.read_input(each, x, network.pack))
    rows = []
    for step in network.steps:
        read = [live[name] for name in step.inputs]
        given = {name: moments[name] for name in step.inputs if name in moments}
        once = partial(_run, network, step, read, sizes, given)
        ms = _median_ms(_repeated(once, device), device, iterations) / REPEATS[device.type]
        keep(step.outputs, network.run_step(step, read, sizes, moments))
        rows.append(_row(network, step, shapes, limits, ms))
    return rows


def _shape(form: Form, x: Any) -> tuple[int, ...]:
    """With torch's axes; what is packed along the channels has them last."""
    shape = tuple(x.shape)
    return (shape[0], shape[-1], *shape[1:-1]) if form.amax and form.axis == "channels" else shape


def _run(network: PackedNetwork, step: Step, read: list[Any], sizes: dict[str, int], moments: dict[str, Any]) -> object:
    return network.run_step(step, read, sizes, dict(moments))


def _repeated(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """`run` ten times as one CUDA graph; once on the CPU, or where it cannot be captured."""
    if device.type == "cpu":
        return run

    def several() -> None:
        for _ in range(REPEATS["cuda"]):
            run()

    several()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph):
        several()
    return Replay(graph, run)


def _median_ms(run: Callable[[], object], device: torch.device, iterations: int) -> float:
    if device.type == "cpu":
        times = time_cpu(run, 1, iterations, 5.0)
    else:
        times = time_cuda(run, torch.cuda.current_stream(device), 2, iterations, 5.0)
    return sorted(times)[len(times) // 2]


def measured_limits(device: torch.device) -> Limits:
    """The limits of a device, each the best of a few runs."""
    cuda = device.type == "cuda"
    count, size, dtype = (1 << 28, 8192, torch.float16) if cuda else (1 << 24, 1024, torch.float32)
    source = torch.empty(count, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    copy, product = (_fastest_ms(run, device) for run in (partial(target.copy_, source), partial(torch.mm, a, b)))
    return Limits(2 * count / copy * 1e3, 2 * size**3 / product * 1e3)


def _fastest_ms(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cpu":
        return min(time_cpu(run, 1, 5, 2.0))
    return min(time_cuda(run, torch.cuda.current_stream(device), 2, 10, 2.0))


def _row(network: PackedNetwork, step: Step, shapes: Shapes, limits: Limits, ms: float) -> LayerTime:
    moved, operations = step_bytes(network, step, shapes), step_operations(network, step, shapes)
    by_bytes, by_operations = moved / limits.bandwidth, operations / limits.rate
    nearer = max(by_bytes, by_operations)
    return LayerTime(
        layer=label(step),
        op=operation(step),
        precision=network.precision_of(step),
        writes=tuple("packed" if form.amax else "plain" for form in step.outputs),
        ms=ms,
        bytes=moved,
        operations=operations,
        share=nearer / (ms / 1e3),
        bound_by="bytes" if by_bytes >= by_operations else "operations",
    )


def step_bytes(network: PackedNetwork, step: Step, shapes: Shapes) -> int:
    """Bytes of what a step reads and writes, each once; plain activations in the type that the device computes in."""
    forms = {form.name: form for each in (*network.inputs, *network.steps) for form in each.outputs}
    total, wide = 0, network.dtype.itemsize
    for name in [*step.inputs, *(form.name for form in step.outputs)]:
        form = forms[name]
        total += feature_map_bytes(form, shapes[name]) if form.amax else wide * math.prod(shapes[name])
    if isinstance(step, Layer):
        vectors = [step.bias] if step.bias else []
        total += network.weight_bytes(step)
    else:
        vectors = [name for node in nodes_of(step) for name in tensors_of(node)]
    return total + sum(network.file.tensors[name].nbytes for name in vectors)


def step_operations(network: PackedNetwork, node: Step, shapes: Shapes) -> int:
    """Two for each multiply-accumulate of a layer; other steps are counted by their bytes alone."""
    if not isinstance(node, Layer):
        return 0
    axis = -1 if isinstance(node, Linear) else 1
    weight = weight_shape(network.graph, node, sum(shapes[name][axis] for name in node.inputs))
    if isinstance(node, ConvTranspose2d):
        return 2 * math.prod(shapes[node.inputs[0]]) * math.prod(weight[:-1])
    return 2 * math.prod(shapes[node.outputs[0].name]) * math.prod(weight[1:])


def table_rows(found: LayerTimes) -> list[tuple[str, ...]]:
    """Cells in the order of `COLUMNS`."""
    total = sum(row.ms for row in found.layers)
    return [
        (
            *(row.layer, row.op, row.precision, f"{row.ms:.4f}", f"{100 * row.ms / total:.1f} %"),
            *(f"{row.bytes / 1e6:.2f}", f"{row.operations / 1e9:.2f}", f"{row.share:.2f}", row.bound_by),
        )
        for row in found.layers
    ]


def summary(found: LayerTimes) -> str:
    """The sentence below the table."""
    total = sum(row.ms for row in found.layers)
    floor = sum(row.share * row.ms for row in found.layers)
    return (
        f"{found.path}, batch {found.batch} on {found.device}: {total:.3f} ms in its steps, {found.whole_ms:.3f} ms as "
        f"a whole, {floor:.3f} ms at the limits of {found.limits.bandwidth / 1e9:.0f} GB/s and "
        f"{found.limits.rate / 1e12:.3g} TFLOP/s."
    )


def chrome_trace(found: LayerTimes) -> str:
    """The steps one after the other in the trace event format, for chrome://tracing and Perfetto."""
    events: list[dict[str, Any]] = []
    start = 0.0
    for row in found.layers:
        about = {key: value for key, value in asdict(row).items() if key not in ("layer", "ms")}
        event = {"name": row.layer, "cat": row.op, "ph": "X", "ts": start, "dur": 1e3 * row.ms, "pid": 0, "tid": 0}
        events.append(event | {"args": about})
        start += 1e3 * row.ms
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"
