"""Quantiles, throughput and the limits of the timer."""

from __future__ import annotations

import time

import numpy as np
import pytest

from fp4deploy.bench.latency import MIN_RUNS, measure, time_cpu
from fp4deploy.models import ModelCard


class Stopwatch:
    """A runtime whose timed runs are given."""

    name, device, precision = "stopwatch", "nowhere", "FP32"
    card = ModelCard("fp16", 1.0, ("a", "b"), 16, 32, (0.5, 0.5, 0.5), (1.0, 1.0, 1.0), False)

    def __init__(self, times: list[float]) -> None:
        self.times = times
        self.shape: tuple[int, ...] = ()

    def infer(self, images: np.ndarray) -> np.ndarray:
        raise AssertionError("latency is measured by time()")

    def time(self, images: np.ndarray, warmup: int, iterations: int, max_seconds: float) -> list[float]:
        self.shape = images.shape
        return self.times


def test_quantiles_and_throughput() -> None:
    watch = Stopwatch([float(value) for value in range(1, 102)])
    latency = measure(watch, batch=4)
    assert (latency.p50, latency.p90, latency.p99) == (51.0, 91.0, 100.0)
    assert latency.images_per_s == pytest.approx(4000 / 51)
    assert (latency.batch, latency.runs, latency.device) == (4, 101, "nowhere")
    assert watch.shape == (4, 3, 16, 32)


def test_timer_warms_up_and_stops() -> None:
    calls: list[int] = []
    assert len(time_cpu(lambda: calls.append(1), warmup=2, iterations=5, max_seconds=60)) == 5
    assert len(calls) == 7


def test_timer_keeps_to_its_time_but_never_below_the_least_runs() -> None:
    assert len(time_cpu(lambda: time.sleep(0.01), warmup=0, iterations=1000, max_seconds=0.0)) == MIN_RUNS


def test_timer_counts_milliseconds() -> None:
    times = time_cpu(lambda: time.sleep(0.02), warmup=0, iterations=3, max_seconds=5)
    assert all(20 <= value < 200 for value in times)
