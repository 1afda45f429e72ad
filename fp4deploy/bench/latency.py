"""Latency: warm up, run many times, take quantiles.

The median (p50) says what a run costs, p90 and p99 what the unlucky ones cost; the mean hides both. On a GPU every run
lies between two CUDA events on the runtime's own stream, so that the queue of launches stays full and the host does not
count; on a CPU the clock is `time.perf_counter`. Copies between host and GPU are left out on purpose.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

    from fp4deploy.bench.runtimes.protocol import Array, Runtime

MIN_RUNS = 3


@dataclass(frozen=True)
class Latency:
    """Quantiles in milliseconds of one run over a batch of `batch` images, from `runs` timed runs."""

    p50: float
    p90: float
    p99: float
    batch: int
    runs: int
    device: str

    @property
    def images_per_s(self) -> float:
        """Throughput of the median run."""
        return 1000 * self.batch / self.p50


def measure(
    runtime: Runtime, batch: int = 1, warmup: int = 3, iterations: int = 50, max_seconds: float = 5.0
) -> Latency:
    """Time a runtime on random images of its own size."""
    times = runtime.time(random_images(runtime, batch), warmup, iterations, max_seconds)
    p50, p90, p99 = (float(np.quantile(times, q)) for q in (0.5, 0.9, 0.99))
    return Latency(p50, p90, p99, batch, len(times), runtime.device)


def random_images(runtime: Runtime, batch: int) -> Array:
    """Normalised images [batch, *input_shape] of the runtime's own size."""
    size = (batch, *runtime.card.input_shape)
    images: Array = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    return images


def time_cpu(call: Callable[[], object], warmup: int, iterations: int, max_seconds: float) -> list[float]:
    """Milliseconds of each call by the clock; at least `MIN_RUNS`, even when `max_seconds` is over."""
    for _ in range(warmup):
        call()
    times: list[float] = []
    stop = time.perf_counter() + max_seconds
    while len(times) < iterations and (len(times) < MIN_RUNS or time.perf_counter() < stop):
        start = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - start))
    return times


def time_cuda(
    call: Callable[[], object], stream: torch.cuda.Stream, warmup: int, iterations: int, max_seconds: float
) -> list[float]:
    """Milliseconds of each call between two CUDA events on `stream`; `call` must launch its work there."""
    import torch

    for _ in range(warmup):
        call()
    stream.synchronize()
    start = time.perf_counter()
    call()
    stream.synchronize()
    affordable = int(max_seconds / max(time.perf_counter() - start, 1e-6))
    runs = max(MIN_RUNS, min(iterations, affordable))
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(runs)]
    for begin, end in events:
        begin.record(stream)
        call()
        end.record(stream)
    stream.synchronize()
    return [begin.elapsed_time(end) for begin, end in events]
