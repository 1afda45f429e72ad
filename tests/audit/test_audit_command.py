"""`fp4deploy audit`: a table, JSON, and exit 1 with --strict."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from fp4deploy.export.onnx.graph import export_graph
from fp4deploy.qat import calibrate, prepare
from tests.audit.test_audit import _matmul
from tests.cli.command_line import PACKAGE
from tests.interop.test_placement import Quantized


@pytest.fixture
def run() -> Any:
    app = importlib.import_module(f"{PACKAGE}.main").app
    return lambda *arguments: CliRunner().invoke(app, ["audit", *map(str, arguments)], prog_name="fp4deploy")


def test_strict_accepts_what_runs_as_requested(run: Any, tmp_path: Path) -> None:
    onnx.save(_matmul(), tmp_path / "model.onnx")
    result = run(tmp_path / "model.onnx", "--strict")
    assert result.exit_code == 0, result.stderr
    assert "1 of 1 layers run in FP4." in result.stdout


def test_strict_refuses_a_fallback_and_names_it(run: Any, tmp_path: Path) -> None:
    onnx.save(_matmul(axis_w=1), tmp_path / "model.onnx")
    assert run(tmp_path / "model.onnx").exit_code == 0
    result = run(tmp_path / "model.onnx", "--strict", "--json")
    assert result.exit_code == 1
    assert "product" in result.stderr
    document = json.loads(result.stdout)
    assert document["rows"][0]["fell_back"] is True
    assert "1 fall back" in document["summary"]
    assert run(tmp_path / "model.onnx", "--target", "onnxruntime", "--strict").exit_code == 1


def test_fix_writes_another_file_and_says_what_is_changed(run: Any, tmp_path: Path) -> None:
    net = Quantized((1, 16, 8, 8), opset=21)
    source, target = tmp_path / "a.onnx", tmp_path / "b.onnx"
    onnx.save(net.model(net.layer(net.node("Relu", net.pair(net.layer(net.pair("image")))))), source)
    assert run(source, "--strict").exit_code == 0  # weights alone are requested of the second layer
    result = run(source, "--fix", target)
    assert result.exit_code == 0, result.stderr
    assert "2 in INT8." in result.stdout
    assert "quantised after Relu, right before it (the same numbers)" in result.stderr
    assert f"2 changes. Engines of both: fp4deploy build {source} {target}" in result.stderr.replace("\n", " ")
    kept = target.read_bytes()
    for arguments in ((source, "--fix", source), (source, "--fix", tmp_path / "b.json"), (target, "--fix", target)):
        assert run(*arguments).exit_code == 2
    assert target.read_bytes() == kept


def test_of_a_file_that_build_changes_first_it_names_check(run: Any, tmp_path: Path) -> None:
    """As it is the engine refuses its 1x1 convolutions; `build` makes them MatMuls."""
    torch.manual_seed(0)
    network = prepare(nn.Sequential(nn.Conv2d(16, 16, 1), nn.ReLU(), nn.Conv2d(16, 16, 1)).eval(), include="*")
    calibrate(network, torch.randn(1, 16, 8, 8))
    onnx.save(export_graph(network, (16, 8, 8)), tmp_path / "model.onnx")
    result = run(tmp_path / "model.onnx")
    assert "2 refused." in result.stdout
    assert f"fp4deploy check {tmp_path / 'model.onnx'}" in result.stderr
    assert "fp4deploy check" not in run(tmp_path / "model.onnx", "--json").stderr
    onnx.save(_matmul(axis_w=1), tmp_path / "model.onnx")
    assert "fp4deploy check" not in run(tmp_path / "model.onnx").stderr
