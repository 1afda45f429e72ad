"""Times of layers: every column of a small layer is a time or says who refused it, and a file is completed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_layers_are_timed_and_a_file_is_completed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import layer_times

    case = layer_times.Case
    convolution = case(1, 6, 8, (32, 32), 16, stride=2)
    todo = [convolution, case(1, 3, 4, (32,), 16, 2, 2, transposed=True), case(1, 1, 8, (32,), 16, 1, linear=True)]
    path, cpu = tmp_path / "times.json", torch.device("cpu")
    assert len({each.name for each in layer_times.cases()}) == len(layer_times.cases()) >= 120
    with torch.inference_mode():
        left_out = layer_times.run(todo, path, cpu, 0.0, 0)
        assert "left_out" in left_out
        found = layer_times.run(todo, path, cpu, 60.0, 0)
        first, second, third = found["rows"]
        times = [first["ours"], first["implicit"], first["cudnn_fp16"], second["ours"], second["implicit"]]
        times += [second["cudnn_fp16"], third["ours"], third["cublas_fp16"], second["pack"]]
        assert all(each["cold_us"] > 0 for each in times), found
        assert "cudnn" in first["cudnn_fp8"]["refused"]  # no module of that name, or no cuDNN behind it
        assert "implicit" not in third
        monkeypatch.setattr(layer_times, "measure", lambda *_: {"cold_us": -1.0})
        again = layer_times.run(todo[:1], path, cpu, 60.0, 0)["rows"][0]
    assert again["ours"] == json.loads(path.read_text())["rows"][0]["ours"] == first["ours"]
    assert again["cudnn_fp8"] == {"cold_us": -1.0}


def test_packed_operands_are_copied_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import layer_times

    (_, operands) = layer_times.Operands(layer_times.Case(1, 2, 2, (16,), 16, 1), torch.device("cpu")).of("implicit")
    own = layer_times.copied(operands)
    assert own[1].codes.data_ptr() != operands[1].codes.data_ptr()
    assert torch.equal(own[1].codes, operands[1].codes)
    assert own[0][0].shape == operands[0][0].shape
    assert layer_times.bytes_of(own) == layer_times.bytes_of(operands) == 4 * 9 + 4 + 16 * 9 + 4
