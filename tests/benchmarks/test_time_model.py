"""Fitting the time model: what is held out, that known factors are found again, and the columns of a file of times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fp4deploy.peaks import find_gpu
from fp4deploy.timing.model import Work, microseconds

FOLDER = Path(__file__).parents[2] / "benchmarks"
FACTORS = {"launch": 3.0, "power": 0.5, "memory": 1.2, "cache": 0.7, "tensor": 1.3, "steps": 150.0}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    import time_model

    return time_model


def samples(script: Any, slow: float = 1.0) -> list[Any]:
    """Layers that take what `FACTORS` say, cold and warm; slow: every second one so many times as long."""
    gpu, found = find_gpu("sm90"), []
    for number in range(24):
        size = 1.6**number
        work = Work("own", {"tensor": 90 * size, "steps": 20 + 3 * number}, 4e4 * size, 2e5 * size)
        for warm in (False, True):
            time = microseconds(work, FACTORS, gpu, warm) * (slow if number % 2 else 1)
            found.append(script.Sample(f"layer {number}", "ours", [work], warm, time))
    return found


def test_known_factors_are_found_again(script: Any) -> None:
    found = script.fit(samples(script), find_gpu("sm90"))["own"]
    for half in ("fit", "held_out"):
        assert found[half]["times"] == 24
        assert 0.97 < found[half]["p5"] <= found[half]["p50"] <= found[half]["p95"] < 1.03
    assert found["factors"]["tensor"] == pytest.approx(1.3, rel=0.1)
    assert found["factors"]["launch"] == pytest.approx(3, rel=0.1)


def test_half_is_held_out_whatever_its_times_are(script: Any) -> None:
    own = samples(script)
    apart = script.held_out(own)
    assert apart == script.held_out(samples(script, slow=7.0))
    assert len(apart) == 12
    error = script.fit(samples(script, slow=2.0), find_gpu("sm90"))["own"]["held_out"]
    assert error["p95"] / error["p5"] > 1.5  # an error that the formula cannot explain is in the bar


def test_columns_of_a_file_of_times(script: Any) -> None:
    convolution = {"case": "one", "batch": 1, "height": 8, "width": 8, "channels": [32, 32], "outputs": 16, "taps": 3}
    convolution |= {"stride": 1, "dilation": 1, "transposed": False, "linear": False}
    columns: dict[str, Any] = {name: {"cold_us": 5.0, "warm_us": 4.0} for name in ("implicit", "cudnn_fp16", "pack")}
    columns |= {"ours": {"cold_us": 3.0}, "cudnn_fp8": {"refused": "no kernel"}}
    found = list(script.layers([convolution | columns], find_gpu("sm90")))
    assert sorted((each.family, each.warm, each.measured) for each in found) == [
        ("decoded", False, 3.0),
        *(
            (family, warm, 4.0 if warm else 5.0)
            for family in ("implicit", "library", "moves")
            for warm in (False, True)
        ),
    ]
    (packed,) = {each.works[0].moved for each in found if each.family == "moves"}
    assert packed == 64 * 32 * (2 + 0.5625)
