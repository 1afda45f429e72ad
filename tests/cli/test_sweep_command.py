"""`fp4deploy sweep`, `fp4deploy estimate` and `train --dry-run` from the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path

from fp4deploy.train.estimate import EFFICIENCY
from tests.cli.command_line import Invoke
from tests.train.small_network import SPEC

TINY = "data.height: 32, data.width: 32, train.epochs: 1, train.finetune_epochs: 1, telemetry.every: 0"
SMALL = ("--set", f"model.spec={SPEC}", "--set", "data.height=32", "--set", "data.width=32")


def test_a_sweep_ends_in_a_table_and_its_files(invoke: Invoke, tmp_path: Path, shapes: Path) -> None:
    file = tmp_path / "two.yaml"
    file.write_text(
        f"set: {{{TINY}}}\nagainst: control\nvariants:\n  control: {{model: fp16_control}}\n  qat: {{model: nvfp4}}\n"
        "  bad: {set: {quant.exclude: [nothing]}}\n"
    )
    sweep = ("sweep", file, "--data", shapes, "--seeds", "0,1", "--set", f"model.spec={SPEC}")
    result = invoke(*sweep, "--only", "qat,control")
    assert result.exit_code == 0, result.stderr
    assert "| qat | nvfp4 |" in result.stdout
    assert "2/2" in result.stdout
    assert {path.name for path in Path("runs/two").iterdir()} == {
        ".lock", "sweep.yaml", "sweep.json", "sweep.md", "sweep.png", "fp16", "control", "qat",
    }  # fmt: skip
    failing = invoke(*sweep)
    assert failing.exit_code == 1
    assert "2 of the runs failed: bad (seed 0), bad (seed 1)" in failing.stderr
    assert json.loads(Path("runs/two/sweep.json").read_text())["variants"]["qat"]["runs"]["1"]["status"] == "done"


def test_wrong_sweeps(invoke: Invoke, tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("variants: {a: {}}\n")
    for arguments, message in (
        (("none.yaml",), "There is no sweep file"),
        ((file, "--seeds", "a"), "--seeds takes whole numbers"),
        ((file, "--minutes", "0"), "--minutes is 0"),
        ((file, "--set", "train.lrr=1"), "did you mean train.lr?"),
    ):
        result = invoke("sweep", *arguments)
        assert result.exit_code == 2, result.stderr
        assert message in result.stderr


def test_an_estimate_for_a_set_that_is_not_here(invoke: Invoke, shapes: Path) -> None:
    options = ("--gpus", 8, "--images", 118287, "--val-images", 5000, "--steps", 2, "--models", "fp16")
    result = invoke("estimate", "--data", shapes, *SMALL, *options, "--json")
    assert result.exit_code == 0, result.stderr
    facts = json.loads(result.stdout)
    assert facts["for"] == {"images": 118287, "val_images": 5000, "gpus": 8, "efficiency": EFFICIENCY}
    (row,), (speed,) = facts["estimated"], facts["measured"]
    assert row["images_per_s"] == speed["training"] * 8 * EFFICIENCY
    assert not Path("runs").exists()
    text = invoke("estimate", "--data", shapes, *SMALL, *options)
    assert f"8 GPUs work at {EFFICIENCY:g} x 8 the speed of one (assumed, not measured here)" in text.stdout
    assert f"[default: ({EFFICIENCY:g}, what" in invoke("estimate", "--help").stdout


def test_a_dry_run_trains_nothing(invoke: Invoke, shapes: Path) -> None:
    result = invoke("train", "--data", shapes, *SMALL, "--dry-run", "--models", "fp16", "--for", "rtx")
    assert result.exit_code == 0, result.stderr
    assert re.search(r"total.*\n.*\n.* fp16 .*[\d.]+ s ", result.stdout), "hours of a short training are 0.00"
    assert "For rtx sm120, --conv auto: " in result.stderr, "what is measured has those formats"
    assert not Path("runs").exists()
    without = invoke("train", "--dry-run")
    assert without.exit_code == 2
    assert "An estimate needs data to read" in without.stderr
    ptq = invoke("estimate", "--data", shapes, "--models", "nvfp4_ptq")
    assert ptq.exit_code == 2
    assert "nothing to estimate" in ptq.stderr
