"""The commands one by one end with results: bench keeps what it measured, report shows it, verify walks the files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command_line import Invoke, run_in

SETS = ("--epochs", "1", "--size", "32x32", "--set", "model.scale=0.125", "--set", "telemetry.plots=false")


@pytest.fixture(scope="module")
def made(app: Any, tmp_path_factory: pytest.TempPathFactory, shapes: Path) -> Path:
    """A folder with a run: a checkpoint and its ONNX file, measured by `fp4deploy bench`."""
    return run_in(
        tmp_path_factory.mktemp("made"),
        app,
        ("train", "--models", "fp16", "--data", str(shapes), "--out", "runs/one", *SETS),
        ("export", "--no-verify"),
        ("bench", "--engine", "fp16", "--engine", "unet.fp16.onnx", "--iterations", "2"),
    )


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy of that run, in the current folder of `invoke`."""
    shutil.copytree(made / "runs", tmp_path / "runs")
    return Path("runs/one")


def test_bench_report_and_verify(run: Path, invoke: Invoke, shapes: Path) -> None:
    lines = [json.loads(line) for line in (run / "bench.jsonl").read_text().splitlines()]
    assert [line["entry"]["path"] for line in lines] == ["fp16/best.safetensors", "export/unet.fp16.onnx"]

    result = invoke("report")
    assert result.exit_code == 0, result.stderr
    data = json.loads((run / "report.json").read_text())
    entries = {entry["path"]: entry for entry in data["artifacts"]}
    assert entries["fp16/best.safetensors"]["miou"] == lines[0]["entry"]["miou"] == data["models"]["fp16"]["miou"]
    assert entries["export/unet.fp16.onnx"]["latency_ms"] == lines[1]["entry"]["latency_ms"]
    assert data["environment"] == lines[1]["environment"]
    assert not any("not been measured" in remark for remark in data["remarks"])

    assert invoke("bench", "--engine", "fp16", "--split", "val", "--data", shapes, "--iterations", 1).exit_code == 0
    assert invoke("report").exit_code == 0
    again = json.loads((run / "report.json").read_text())
    newest = json.loads((run / "bench.jsonl").read_text().splitlines()[-1])
    shown = [entry for entry in again["artifacts"] if entry["path"] == "fp16/best.safetensors"]
    assert [entry["latency_ms"] for entry in shown] == [newest["entry"]["latency_ms"]]

    verified = invoke("verify", "--json")
    assert verified.exit_code == 0, verified.stderr
    assert [link["path"] for link in json.loads(verified.stdout)["links"]] == [
        "fp16/best.safetensors", "export/unet.fp16.onnx",
    ]  # fmt: skip

    assert json.loads(verified.stdout)["unnamed"] == []
    (run / "engines").mkdir()
    (run / "engines" / "copied.plan").write_bytes(b"machine code")
    other = invoke("verify")
    assert other.exit_code == 0
    assert "engines/copied.plan: no stage recorded it" in " ".join(other.stdout.split())
    assert "does not name 1 file" in " ".join(other.stderr.split())
    assert json.loads(invoke("verify", "--json").stdout)["unnamed"] == ["engines/copied.plan"]

    with (run / "fp16" / "best.safetensors").open("ab") as file:
        file.write(b"\0")
    broken = invoke("verify")
    assert broken.exit_code == 1
    assert "fp16/best.safetensors is not the file that train wrote" in broken.stderr
    assert (
        "was made of another fp16/best.safetensors"
        in invoke("bench", "--engine", "unet.fp16.onnx", "--iterations", 1).stderr
    )


def test_measurements_on_other_data_are_named_and_not_shown(run: Path, invoke: Invoke, tmp_path: Path) -> None:
    from fp4deploy.data import generate_shapes

    generate_shapes(tmp_path / "other", train=2, val=2, size=32, seed=5)
    assert invoke("bench", "--engine", "fp16", "--data", "other", "--iterations", 1).exit_code == 0
    first = json.loads((run / "bench.jsonl").read_text().splitlines()[0])
    assert invoke("report").exit_code == 0
    data = json.loads((run / "report.json").read_text())
    assert data["models"]["fp16"]["miou"] == first["entry"]["miou"]
    assert any(str(tmp_path / "other") in remark and "not shown" in remark for remark in data["remarks"])


def test_a_run_of_an_older_version_has_nothing_to_verify(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.yaml").write_text("seed: 0\n")
    result = invoke("verify", "old")
    assert (result.exit_code, "nothing to verify" in result.stderr) == (2, True)
