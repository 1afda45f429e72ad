"""Commands, options and exit codes, and the JSON that a run leaves.

Tested elsewhere and not again here: what `--help` imports (tests/cli/test_main.py), resuming bit for bit
(tests/train/test_training.py, test_interruption.py), every refusal of bad input (tests/cli/test_bad_input.py).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from fp4deploy.export import load_ledger
from tests.bench.perfect import perfect
from tests.contract import frozen, schemas
from tests.contract.invoke import fp4deploy
from tests.shallow import levels

pytestmark = pytest.mark.timeout(1200)  # the shared fixture takes half a minute, on a busy machine more


def test_commands_and_options() -> None:
    assert frozen.lost(frozen.recorded("commands"), frozen.command_line()) == []


def test_0_is_done(tmp_path: Path) -> None:
    done = fp4deploy("check", "unet:0.125", "--json", folder=tmp_path)
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout)["layers"]


def test_1_is_a_gate_that_failed(small_run: Path) -> None:
    home = small_run.parent
    engine = ("--engine", "run/fp16/best.safetensors", "--iterations", 1)
    with levels(3):
        measured = json.loads(fp4deploy("bench", *engine, "--json", "-", folder=home).stdout)
        (home / "baseline.json").write_text(json.dumps(perfect(measured)), encoding="utf-8")
        done = fp4deploy("bench", *engine, "--baseline", "baseline.json", "--json", "-", folder=home)
    assert done.code == 1, done.stderr
    assert json.loads(done.stdout)["artifacts"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("no-such-command",),
        ("train", "--no-such-option"),
        ("train", "--set", "train.no_such_setting=1"),
        ("train", "--data", "absent"),
        ("build", "absent.onnx"),
        ("build", "absent.onnx", "--backend", "other"),
        ("export", "absent.safetensors"),
        ("kernels", "--arch", "sm75"),
    ],
    ids=" ".join,
)
def test_2_is_wrong_usage_or_input(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = fp4deploy(*arguments, folder=tmp_path)
    assert done.code == 2, done.stderr
    assert (done.stdout, "Traceback" in done.stderr) == ("", False)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, which may run the engine")
def test_3_is_an_engine_without_its_gpu(small_run: Path) -> None:
    if not (small_run / "engines" / "unet.nvfp4.sm120.plan").is_file():
        pytest.skip("TensorRT-RTX is not installed, so no engine was built")
    alone = small_run.parent / "alone"  # without its source, of which its arithmetic could be emulated
    alone.mkdir()
    for name in ("unet.nvfp4.sm120.plan", "unet.nvfp4.sm120.ledger.json"):
        shutil.copy(small_run / "engines" / name, alone)
    done = fp4deploy("bench", "--engine", "alone/unet.nvfp4.sm120.plan", "--data", "run/data", folder=small_run.parent)
    shutil.rmtree(alone)
    assert (done.code, done.stdout) == (3, ""), done.stderr


def test_keys_and_types_of_report_json(small_run: Path) -> None:
    assert frozen.schema_lost(frozen.recorded("schemas")["report"], schemas.of_run(small_run)["report"]) == []


def test_keys_and_types_of_a_rewritten_report_json(small_run: Path) -> None:
    done = fp4deploy("report", "run", "--json", "again.json", folder=small_run.parent)
    assert done.code == 0, done.stderr
    now = schemas.of_file(small_run.parent / "again.json")
    assert frozen.schema_lost(frozen.recorded("schemas")["report"], now) == []


def test_keys_and_types_of_a_ledger(small_run: Path) -> None:
    found = schemas.of_run(small_run)
    if "ledger" not in found:
        pytest.skip("TensorRT-RTX is not installed, so no ledger was written")
    assert frozen.schema_lost(frozen.recorded("schemas")["ledger"], found["ledger"]) == []
    assert load_ledger(small_run / "engines" / "unet.nvfp4.sm120.ledger.json").layers


def test_the_comparison_of_schemas() -> None:
    def of(value: object) -> frozen.Schema:
        return frozen.schema(value, lambda where: where == "/models")

    before = of({"models": {"fp16": {"miou": 0.5}, "nvfp4": {"miou": None}}, "rows": [{"a": "x"}], "none": None})
    assert before["models"]["*"]["miou"] == {frozen.LEAF: "null|number"}
    more = {"models": {"other": {"miou": 1, "new": 2}}, "rows": [], "none": {"a": 1}, "added": True}
    assert frozen.schema_lost(before, of(more)) == []
    assert frozen.schema_lost(before, of({**more, "models": {"other": {"new": 2}}})) == ["/models/*/miou is gone"]
    assert len(frozen.schema_lost(before, of({**more, "rows": [{"a": 1}]}))) == 1
    assert len(frozen.schema_lost(before, of({**more, "rows": [{"b": "x"}]}))) == 1
    assert len(frozen.schema_lost(before, of({**more, "rows": "text"}))) == 1
