"""A foreign ONNX file through audit, quantize, build and bench on the command line."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import onnx
import pytest

from fp4deploy.export.onnx.layers import inspect_onnx
from tests.cli.command_line import Invoke
from tests.interop.onnx_files import Onnx, segmenter


def test_a_foreign_file_from_audit_to_bench(invoke: Invoke, shapes: Path, tmp_path: Path) -> None:
    onnx.save(segmenter(7, size=("N", 3, 32, 32)), tmp_path / "net.onnx")
    result = invoke("audit", "net.onnx", "--json")
    assert result.exit_code == 0, result.stderr
    assert {row["requested"] for row in json.loads(result.stdout)["rows"]} == {"FP32"}
    result = invoke("quantize", "net.onnx", "--data", shapes, "--images", 4, "--method", "sweep")
    assert result.exit_code == 0, result.stderr
    assert "net.nvfp4.onnx (sweep, 3 layers quantised, 4 images" in result.stdout
    assert "equal to torch on" in result.stdout
    assert re.search(r"class unchanged against net.onnx on [\d.]+ % of the pixels; mIoU", result.stderr)
    precisions = {layer.name: layer.precision for layer in inspect_onnx(Path("net.nvfp4.onnx"))}
    assert {name for name, precision in precisions.items() if precision == "FP4"} == {"block.conv", "gate", "up"}
    result = invoke("audit", "net.nvfp4.onnx")
    assert result.exit_code == 0, result.stderr
    result = invoke("bench", "--engine", "net.nvfp4.onnx", "--data", shapes, "--iterations", 1)
    assert result.exit_code == 0, result.stderr
    if importlib.util.find_spec("tensorrt_rtx") is None:
        pytest.skip("TensorRT-RTX is not installed (pip install tensorrt-rtx)")
    result = invoke("build", "net.nvfp4.onnx", "--strict", "--conv", "gemm")
    assert result.exit_code == 0, result.stderr
    assert Path("net.nvfp4.sm120.plan").is_file()


def test_what_the_command_refuses(invoke: Invoke, shapes: Path, tmp_path: Path) -> None:
    net = Onnx(size=("N", 3, "H", "W"))
    onnx.save(net.model(net.conv("conv", "image", 3, 8)), tmp_path / "open.onnx")
    (tmp_path / "cut.onnx").write_bytes((tmp_path / "open.onnx").read_bytes()[:-9])
    (tmp_path / "empty").mkdir()
    for arguments, message in (
        (("open.onnx", "--data", shapes), "leaves the size of its images open"),
        (("open.onnx", "--data", shapes, "--size", "32x32", "--mean", "1,2"), "is not R,G,B"),
        (
            ("open.onnx", "--data", shapes, "--size", "32x32", "--digits"),
            "--config, --digits and --rest are for checkpoints",
        ),
        (("open.onnx", "--data", shapes, "--size", "32x32", "--out", "open.onnx"), "another one than the source"),
        (("open.onnx", "--data", "empty", "--size", "32x32"), "is no dataset and holds no image"),
        (("open.onnx", "--data", "absent", "--size", "32x32"), "There is no folder absent"),
        (("open.onnx",), "does not say what its images are"),
        (("cut.onnx", "--data", shapes), "is not an ONNX file"),
        (("absent.onnx", "--data", shapes), "absent.onnx does not exist"),
    ):
        result = invoke("quantize", *arguments)
        assert result.exit_code == 2, (arguments, result.stderr)
        assert message in result.stderr
        assert len(result.stderr.strip().splitlines()) <= 3
    assert {path.name for path in tmp_path.glob("*.onnx")} == {"open.onnx", "cut.onnx"}


def test_a_foreign_file_is_measured_like_another(invoke: Invoke, shapes: Path, tmp_path: Path) -> None:
    onnx.save(segmenter(7, size=("N", 3, 32, 32)), tmp_path / "net.onnx")
    (tmp_path / "like.yaml").write_text(
        "class_names: [background, circle, square, triangle, star, ring, cross]\nbackground: true\n"
    )
    common = ("bench", "--engine", "net.onnx", "--data", shapes, "--iterations", 1)
    refused = invoke(*common)
    assert refused.exit_code == 2
    assert "--like FILE" in refused.stderr
    assert invoke(*common, "--like", "like.yaml", "--baseline", "net.onnx").exit_code == 0
    result = invoke(*common, "--like", "like.yaml", "--results", "kept", "--json", "-")
    assert result.exit_code == 0, result.stderr
    (entry,) = json.loads(result.stdout)["artifacts"]
    assert 0 <= entry["miou"] <= 1
    assert list((tmp_path / "kept" / "lost").glob("*.png"))
