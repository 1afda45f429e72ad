"""`fp4deploy report` on the command line: one run, several, bad input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command_line import Invoke


@pytest.fixture
def runs(tmp_path: Path, checkpoint: Path, shapes: Path) -> list[Path]:
    """Two runs of one untrained FP16 model, the second scored higher."""
    found = []
    for name, score in (("one", 0.25), ("two", 0.5)):
        run = tmp_path / "runs" / name
        (run / "fp16").mkdir(parents=True)
        shutil.copy(checkpoint, run / "fp16" / "best.safetensors")
        (run / "config.yaml").write_text(f"data: {{root: {shapes}}}\ntrain: {{epochs: 1, lr: {score}}}\n")
        line: dict[str, Any] = {"epoch": 1, "loss": 1.0, "miou": score, "per_class": {"circle": score}}
        (run / "fp16" / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        found.append(run)
    return found


def test_the_latest_run(runs: list[Path], invoke: Invoke) -> None:
    result = invoke("report")
    assert result.exit_code == 0, result.stderr
    assert "Report: runs/two/report.html" in result.stdout
    assert json.loads((runs[1] / "report.json").read_text())["models"]["fp16"]["miou"] == 0.5
    assert not (runs[0] / "report.html").exists()


def test_several_runs(runs: list[Path], invoke: Invoke) -> None:
    result = invoke("report", *runs, "--json", "-")
    assert result.exit_code == 0, result.stderr
    facts = json.loads(result.stdout)
    assert facts["scores"][1]["best_to_first"] == 0.25
    assert [entry["key"] for entry in facts["differences"]] == ["train.lr"]
    assert "FP16 reaches 50.00 % mIoU, 25.00 points above one (25.00 %)" in result.stderr
    page = (runs[0].parent / "report-one-two.html").read_text()
    assert page.count('src="data:image/png;base64,') == 3 * 4
    assert sorted(path.name for path in runs[0].iterdir()) == ["config.yaml", "fp16"], "the runs stay as they are"


def test_files_go_where_they_are_asked_for(runs: list[Path], invoke: Invoke) -> None:
    result = invoke("report", *runs, "--out", "a/b.html", "--json", "a/b.json")
    assert result.exit_code == 0, result.stderr
    assert Path("a/b.html").read_text().startswith("<!doctype html>")
    assert len(json.loads(Path("a/b.json").read_text())["runs"]) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("runs/one", "runs/nope"), "runs/nope is not a run"),
        (("runs", "runs/one"), "runs is a folder of runs; give them by name: runs/one runs/two"),
        (("runs/one", "runs/one"), "given twice"),
        (("runs/one", "--out", "page.txt"), "--out takes the HTML file"),
        (("runs/one", "--json", "runs"), "--json takes the file"),
        (("runs/one", "--out", "runs/one/config.yaml/page.html"), "could not be written"),
    ],
)
def test_bad_input(runs: list[Path], invoke: Invoke, arguments: tuple[str, ...], said: str) -> None:
    result = invoke("report", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert not list(runs[0].parent.rglob("*.html"))
