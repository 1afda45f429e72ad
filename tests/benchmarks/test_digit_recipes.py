"""Recipes of digits that were trained apart become one file, whose FP32 is the same in all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import digit_recipes
from benchmarks.digit_recipes import joined, main, rows_of


def part(recipe: str, loss: float = 0.5) -> dict[str, Any]:
    run = {"accuracy": 90.0, "loss": loss, "seconds": 1.0, "losses": [2 * loss, loss]}
    return {"command": "python examples/vit_digits.py", "date": "2026-01-02", "runs": {"fp32": [run], recipe: [run]}}


def test_parts_are_one_file_and_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digit_recipes, "trained", lambda network, more, folder, recipe: part(recipe))
    options = ["--networks", "vit", "--recipes", "tetrajet", "nvfp4_sr", "--jobs", "2"]
    main([*options, "--folder", str(tmp_path), "--curves", str(tmp_path / "digits.png")])
    document = json.loads((tmp_path / "digits_vit_cpu.json").read_text())
    assert list(document["runs"]) == ["fp32", "tetrajet", "nvfp4_sr"]
    assert (document["date"], document["command"]) == ("2026-01-02", "python examples/vit_digits.py")
    assert document["commit"]
    curves = [row["curve"] for row in rows_of(tmp_path, "vit")]
    assert curves == [[{"epoch": 1, "loss": 1.0}, {"epoch": 2, "loss": 0.5}]] * 3
    assert (tmp_path / "digits.png").is_file()


def test_an_fp32_that_differs_is_refused() -> None:
    with pytest.raises(ValueError, match="FP32 is not the same"):
        joined([part("tetrajet"), part("nvfp4_sr", 0.4)])
