"""Telemetry on the command line: train, draw again, study; flags and bad input."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tests.cli.command_line import Invoke
from tests.train.small_network import SPEC

TINY = (
    "--set", "data.height=32", "--set", "data.width=32", "--set", "data.workers=0",
    "--set", "train.epochs=1", "--set", "train.finetune_epochs=1", "--set", "train.batch_size=2",
    "--set", f"model.spec={SPEC}",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(app: Any, tmp_path_factory: pytest.TempPathFactory, shapes: Path) -> Path:
    """A run of both models, sampled at every second step."""
    folder = tmp_path_factory.mktemp("telemetry") / "run"
    command = ("train", "--data", str(shapes), "--out", str(folder), "--telemetry-every", "2", *TINY)
    result = CliRunner().invoke(app, command, prog_name="fp4deploy")
    assert result.exit_code == 0, result.stderr
    assert "All heatmaps on one page: " in result.stderr
    assert f"as single files: fp4deploy telemetry plot {folder}" in result.stderr
    return folder


def test_train_tracks_and_draws(run: Path) -> None:
    for model in ("fp16", "nvfp4"):
        lines = [json.loads(line) for line in (run / model / "telemetry.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if line["kind"] == "look"] == [1, 3, 4]
    assert sorted(path.name for path in (run / "plots").iterdir()) == ["telemetry.html"], "a short training"
    assert yaml.safe_load((run / "config.yaml").read_text())["telemetry"]["every"] == 2


def test_the_report_shows_them(run: Path, invoke: Invoke, tmp_path: Path) -> None:
    assert invoke("report", run, "--out", tmp_path / "page.html").exit_code == 0
    assert "<h2>Telemetry</h2>" in (tmp_path / "page.html").read_text()


def test_heatmaps_are_drawn_from_the_files_of_a_run(run: Path, invoke: Invoke, tmp_path: Path) -> None:
    run = shutil.copytree(run, tmp_path / "copy")
    shutil.rmtree(run / "plots")
    result = invoke("telemetry", "plot", run, "--model", "fp16")
    assert result.exit_code == 0, result.stderr
    assert "heatmap files under" in result.stderr
    assert sorted(path.name for path in (run / "plots" / "heatmaps").iterdir()) == ["fp16", "plotly.min.js"]
    for name in ("weights/prequantize/semantic_head", "gradients/semantic_std"):
        for suffix in ("png", "html", "json"):
            assert (run / "plots" / "heatmaps" / "fp16" / f"{name}.{suffix}").is_file()


def test_the_study_of_a_checkpoint(run: Path, invoke: Invoke, tmp_path: Path) -> None:
    result = invoke("telemetry", "study", run / "fp16" / "best.safetensors", "--images", 2, "--out", tmp_path / "study")
    assert result.exit_code == 0, result.stderr
    assert "| output layer | 1 |" in result.stdout
    assert json.loads((tmp_path / "study" / "kurtosis.json").read_text())["images"] == 2
    assert (tmp_path / "study" / "kurtosis.png").is_file()


def test_a_run_without_telemetry(invoke: Invoke, shapes: Path, tmp_path: Path) -> None:
    arguments = ("train", "--data", shapes, "--out", "plain", "--models", "fp16", "--telemetry-every", 0, *TINY)
    result = invoke(*arguments)
    assert result.exit_code == 0, result.stderr
    assert not list(Path("plain").rglob("telemetry*"))
    assert not Path("plain/plots").exists()
    result = invoke("telemetry", "plot", "plain")
    assert result.exit_code == 2
    assert "holds no telemetry" in result.stderr
    assert "--telemetry-every" in result.stderr


def test_bad_flags(invoke: Invoke, shapes: Path, run: Path) -> None:
    for arguments, told in (
        (("train", "--data", shapes, "--tracker", "csv"), "'jsonl', 'tensorboard', 'wandb' or 'mlflow'"),
        (("train", "--data", shapes, "--telemetry-every", "-1"), "telemetry-every"),
        (("telemetry", "plot", run, "--model", "nvfp5"), "fp16, nvfp4"),
        (("telemetry", "plot", "nowhere"), "is not a run"),
        (("telemetry", "plot"), "no run under"),
        (("telemetry", "study", "none.safetensors", "--data", shapes), "no checkpoint"),
        (("telemetry", "study", run / "fp16" / "best.safetensors", "--images", 0), "images"),
    ):
        result = invoke(*arguments)
        assert result.exit_code == 2, arguments
        assert told in result.stderr, (arguments, result.stderr)
    assert not Path("runs").exists()


def test_a_tracker_comes_beside_the_file(
    app: Any, monkeypatch: pytest.MonkeyPatch, invoke: Invoke, shapes: Path
) -> None:
    """The package is checked before a run folder is left behind."""

    monkeypatch.setitem(sys.modules, "wandb", None)
    result = invoke("train", "--data", shapes, "--out", "run", "--tracker", "wandb", *TINY)
    assert result.exit_code == 3
    assert "pip install -e '.[wandb]' -c constraints.txt" in result.stderr
    assert not Path("run").exists()
