"""The text of the comparison table."""

from __future__ import annotations

from typing import Any

import pytest

from fp4deploy.bench import tables


def entry(model: str, miou: float | None, path: str = "x.onnx") -> dict[str, Any]:
    return {
        "model": model, "path": path, "backend": "b", "precision": "p", "size_bytes": 1234567, "miou": miou,
        "latency_ms": {"p50": 2.345, "p90": 3, "p99": 4}, "images_per_s": 426.4, "status": "ok",
    }  # fmt: skip


def test_rows_against_fp16() -> None:
    first, second = tables.rows([entry("fp16", 0.81234), entry("nvfp4", 0.81)])
    assert first == ("fp16", "x.onnx", "b", "p", "1.23 MB", "81.23", "+0.00", "2.35", "426", "ok")
    assert second[5:7] == ("81.00", "+0.23")


def test_the_control_is_the_fairer_baseline() -> None:
    rows = tables.rows([entry("fp16", 0.8), entry("nvfp4", 0.82), entry("fp16_control", 0.83)])
    assert [row[6] for row in rows] == ["+3.00", "+1.00", "+0.00"]


def test_rows_without_numbers() -> None:
    idle = entry("nvfp4", None) | {"latency_ms": None, "images_per_s": None, "status": "built, not run"}
    assert tables.rows([idle])[0][5:] == ("–", "–", "–", "–", "built, not run")


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (3_104_000, "3.1 MB"), (2.5e9, "2.5 GB"), (None, "–")],
)
def test_size(count: int | None, text: str) -> None:
    assert tables.size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.42, "0.4 s"), (59.4, "59.4 s"), (95.2, "1 min 35 s"), (7320.0, "2 h 2 min")]
)
def test_duration(seconds: float, text: str) -> None:
    assert tables.duration(seconds) == text


def test_markdown_aligns_numbers_right() -> None:
    assert tables.markdown(("model", "mIoU"), [("a", "1")]) == "| model | mIoU |\n| --- | ---: |\n| a | 1 |\n"


def test_a_network_in_words() -> None:
    assert tables.network({"scale": 0.25, "digits": False}) == "UNet of scale 0.25"
    assert tables.network({"scale": 1.0, "digits": True}) == "UNet of scale 1, digits"
