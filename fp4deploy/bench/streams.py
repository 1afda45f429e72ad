"""Throughput of a packed network with several CUDA streams at once, with GPU memory and energy.

One stream leaves multiprocessors idle where a layer of a small batch has few tiles; another batch on another stream
fills them. Each stream has a CUDA graph of its own, with its own activations; weights are shared. Graphs are replayed
in turn for some seconds, and every stream is synchronised at the end.

Latency in such a loop is not that of one request: it is the number of streams over the throughput. Energy is the
difference of NVML's counter over the loop (the whole board, also what it needs idle); without the package nvidia-ml-py,
or on a GPU without the counter, there is none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from fp4deploy.errors import InputError, UnavailableError
from fp4deploy.packed import PackedNetwork, read_packed
from fp4deploy.packed.capture import CapturedNetwork
from fp4deploy.packed.memory import input_shapes

COLUMNS = ("streams", "batch", "images/s", "ms a batch", "MiB", "J/image")
AHEAD = 4  # replays of a stream that wait in its queue


@dataclass(frozen=True)
class Throughput:
    """Of one number of streams.

    bytes: peak of weights, graphs and activations. joules_per_image: None where nothing tells it.
    """

    streams: int
    batch: int
    images_per_s: float
    ms_per_batch: float
    bytes: int
    joules_per_image: float | None

    def cells(self) -> tuple[str, ...]:
        """In the order of `COLUMNS`."""
        energy = "–" if self.joules_per_image is None else f"{self.joules_per_image:.3g}"
        speed = (f"{self.images_per_s:.1f}", f"{self.ms_per_batch:.3f}")
        return (str(self.streams), str(self.batch), *speed, f"{self.bytes / 2**20:.0f}", energy)

    def to_json(self) -> dict[str, object]:
        """As `throughput --json` writes it."""
        return asdict(self)


def throughputs(path: Path, streams: list[int], batch: int = 1, seconds: float = 1.0) -> list[Throughput]:
    """Throughput for each number of streams, on random images of the network's own size.

    Raises:
        InputError: no packed network, or a number of streams below 1.
        UnavailableError: there is no GPU.
    """
    if path.suffix != ".fp4":
        raise InputError(f"throughput measures packed networks (.fp4), not {path.name}.")
    if min(streams) < 1:
        raise InputError(f"--streams is {min(streams)}; at least one stream is needed.")
    if not torch.cuda.is_available():
        raise UnavailableError("throughput needs a GPU: a CPU has no streams.")
    return [_throughput(path, count, batch, seconds) for count in streams]


def _throughput(path: Path, count: int, batch: int, seconds: float) -> Throughput:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    network = PackedNetwork(read_packed(path), device)
    card = network.file.card
    size = card.size if card else network.graph.inputs[0].shape[2:4]
    shapes = input_shapes(network.graph, size, batch)
    inputs = [torch.randn(shapes[each.name]).to(device, network.dtype) for each in network.graph.inputs]
    runs = [CapturedNetwork(network).prepared(*inputs) for _ in range(count)]
    lanes = [(torch.cuda.Stream(device), run) for run in runs]
    torch.cuda.synchronize(device)
    _replay(lanes, 0.1)
    energy = energy_counter(device)
    start, joules = time.perf_counter(), energy()
    done = _replay(lanes, seconds)
    took, used = time.perf_counter() - start, energy()
    images = done * batch
    peak = torch.cuda.max_memory_allocated(device) - before
    spent = None if joules is None or used is None else (used - joules) / images
    return Throughput(count, batch, images / took, 1e3 * took / done, peak, spent)


def _replay(lanes: Sequence[tuple[torch.cuda.Stream, Callable[[], object]]], seconds: float) -> int:
    """How many replays were made in about so many seconds; all have ended."""
    done, stop = 0, time.perf_counter() + seconds
    queued: list[list[torch.cuda.Event]] = [[] for _ in lanes]
    while not done or time.perf_counter() < stop:
        for (stream, run), events in zip(lanes, queued, strict=True):
            if len(events) == AHEAD:
                events.pop(0).synchronize()
            with torch.cuda.stream(stream):
                run()
                event = torch.cuda.Event()
                event.record(stream)
            events.append(event)
            done += 1
    for stream, _ in lanes:
        stream.synchronize()
    return done


def energy_counter(device: torch.device) -> Callable[[], float | None]:
    """Joules that a GPU has used so far, by NVML; None where nothing tells them."""
    try:
        import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except Exception:  # no package, no driver library, no permission, no counter: each is "unknown"
        return lambda: None
    return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3
