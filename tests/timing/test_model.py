"""The formula of the time model, its error bar, and the file of its factors."""

from __future__ import annotations

import pytest

from fp4deploy.peaks import GPUS, find_gpu
from fp4deploy.timing import model
from fp4deploy.timing.library import library_time, library_work
from fp4deploy.timing.model import Time, Work, fitted, microseconds, time_of

FACTORS = {"launch": 2.0, "power": 1.0, "memory": 1.5, "cache": 0.5, "tensor": 1.25, "steps": 100.0}


def test_the_formula_by_hand() -> None:
    gpu = find_gpu("sm90")
    work = Work("own", {"tensor": 183_000.0, "steps": 60.0}, moved=50e6, cached=1e9)
    busy = (1.25 * 183_000 + 100 * 60) / 1.98e3
    memory = 1.5 * 50e6 / 4.125e6
    cache = 0.5 * 1e9 / (64 * 132 * 1.98e3)
    assert microseconds(work, FACTORS, gpu) == pytest.approx(2 + (busy**2 + memory**2 + cache**2) ** 0.5)
    small = Work("own", {"tensor": 0.0}, moved=20e6, cached=0.0)  # in the L2 cache when it is read
    assert microseconds(small, FACTORS, gpu) == pytest.approx(2)
    assert microseconds(small, FACTORS, gpu, warm=False) == pytest.approx(2 + 1.5 * 20e6 / 4.125e6)


def test_the_error_bar_is_that_of_the_held_out_half(monkeypatch: pytest.MonkeyPatch) -> None:
    families = {"own": {"factors": FACTORS, "held_out": {"p5": 0.8, "p95": 1.25, "times": 40}}}
    monkeypatch.setattr(model, "fitted", lambda: {"gpu": "H200", "families": families})
    found = time_of(Work("own", {}, 0.0, 0.0), find_gpu("sm120"))
    assert found == Time(0.002, pytest.approx(0.0016), pytest.approx(0.0025))  # a prediction 25 % too long was shorter
    assert found + found == Time(0.004, pytest.approx(0.0032), pytest.approx(0.005))
    assert model.error_bar("own") == "0.80 to 1.25 of it for nine in ten of 40 held-out times on one H200"


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_no_kernel_exceeds_what_a_gpu_reaches(gpu: model.Gpu) -> None:
    """The fit keeps that; a layer that is larger takes no less time, and a narrower type no more."""
    rows, columns, depth = 100_000, 1024, 9 * 1024
    times = {each: library_time(each, rows, columns, depth, 1e6, gpu).ms for each in ("FP16", "FP8", "FP4")}
    for precision, ms in times.items():
        assert ms / 1e3 >= 2 * rows * columns * depth / gpu.rate(precision)
    assert times["FP4"] <= times["FP8"] <= times["FP16"] or gpu.fp4 is None
    few = library_work("FP16", 64, 64, 64, 1e4, gpu)
    assert time_of(few, gpu).ms < times["FP16"]
    assert few.cycles["idle"] > few.cycles["tensor"]  # one tile, of which a quarter is asked for, on one multiprocessor


def test_the_factors_come_with_an_error_that_is_small() -> None:
    for name, family in fitted()["families"].items():
        assert min(family["factors"].values()) > 0
        if family["held_out"]["times"] >= 20:
            assert 0.9 < family["held_out"]["p50"] < 1.1, name
            assert family["held_out"]["p5"] < family["held_out"]["p50"] < family["held_out"]["p95"]
