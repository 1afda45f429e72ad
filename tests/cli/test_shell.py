"""Completion, `--quiet`, `--device`, the short flags of settings, `settings` and `open`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cli import completion
from cli.settings import SettingOptions, use_device
from cli.settings import settings as resolve
from fp4deploy.errors import InputError, UnavailableError
from fp4deploy.qat.recipes import RECIPES, RULES
from fp4deploy.train.config import Config, setting_names
from tests.cli.command_line import ENVIRONMENT, PACKAGE, ROOT, Invoke

INSTRUCTION = {"bash": "complete_bash", "zsh": "complete_zsh", "fish": "complete_fish"}


class Context:
    """What a completer reads of Typer's context: the values of the options before it."""

    def __init__(self, **params: Any) -> None:
        self.params = params


def test_recipes_settings_architectures_and_models_complete() -> None:
    assert completion.recipes(Context(), "tetra") == ["tetrajet", "tetrajet_v2", "tetrajet_v2_outcontrol"]
    assert set(completion.recipes(Context(), "")) == {*RECIPES, *RULES}
    assert completion.settings(Context(), "train.l") == ["train.lr=", "train.label_smoothing="]
    assert "sm120" in completion.architectures(Context(), "sm1")
    assert completion.models(Context(), "fp16,nv") == ["fp16,nvfp4", "fp16,nvfp4_ptq"]
    assert completion.models(Context(), "fp16,fp16") == ["fp16,fp16_control"]


def test_classes_are_those_of_the_data_on_the_line(shapes: Path) -> None:
    found = completion.classes(Context(data=shapes), "")
    assert found
    first, second = found[:2]
    assert completion.classes(Context(data=shapes), f"{first},{second[0]}") == [
        f"{first},{name}" for name in found if name.startswith(second[0]) and name != first
    ]
    assert completion.classes(Context(data=None), "") == []


def test_names_that_a_shell_would_act_on_are_not_offered(tmp_path: Path) -> None:
    names = ["road", "a $(touch x)", "`x`", "a;b", "line\nbreak", "\x1b[31m", "traffic light", "straße"]
    categories = [{"id": number, "name": name} for number, name in enumerate(names)]
    (tmp_path / "a.json").write_text(json.dumps({"categories": categories}))
    assert completion.classes(Context(data=tmp_path), "") == ["road", "traffic light", "straße"]


def test_runs_and_artifacts_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert completion.runs(Context(), "") == []
    run = tmp_path / "runs" / "one"
    for name in ("fp16/best.safetensors", "export/unet.nvfp4.onnx", "engines/unet.nvfp4.sm120.plan", "config.yaml"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("")
    assert completion.runs(Context(), "runs/o") == ["runs/one"]
    assert completion.artifacts(Context(), "")[:3] == ["fp16", "unet.nvfp4.onnx", "unet.nvfp4.sm120.plan"]


def test_unreadable_data_completes_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    assert completion.classes(Context(data=tmp_path), "") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_its_completion(process: Invoke, shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    line = {"COMP_WORDS": "fp4deploy tr", "COMP_CWORD": "1"}
    line |= {"_TYPER_COMPLETE_ARGS": "fp4deploy tr", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    from tests.cli import command_line

    for key, value in {**line, "_FP4DEPLOY_COMPLETE": INSTRUCTION[shell]}.items():
        monkeypatch.setitem(command_line.ENVIRONMENT, key, value)
    assert re.search(r"\btrain\b", process().stdout)


def test_ctrl_c_while_a_shell_waits_for_a_completion_prints_nothing() -> None:
    code = f"""
import signal
import {PACKAGE}.main as command
command.app = lambda prog_name: signal.raise_signal(signal.SIGINT)
command.main()
"""
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_short_flags_are_settings_and_set_wins() -> None:
    config = resolve(SettingOptions(sets=["train.epochs=7"], epochs=3, batch_size=5, size="64x32"))
    assert (config.train.epochs, config.train.batch_size, config.data.height, config.data.width) == (7, 5, 64, 32)
    square = resolve(SettingOptions(size="64")).data
    assert (square.height, square.width) == (64, 64)
    for text in ("64x", "64x32x3x2", "0", "wide"):
        with pytest.raises(InputError, match="--size takes HEIGHTxWIDTH"):
            resolve(SettingOptions(size=text))


def test_every_setting_is_listed_with_its_meaning(invoke: Invoke) -> None:
    result = invoke("settings", "--set", "train.lr=0.5", "--json")
    rows = {row["key"]: row for row in json.loads(result.stdout)}
    assert list(rows) == setting_names()
    assert all(row["meaning"] and row["valid"] for row in rows.values())
    assert (rows["train.lr"]["value"], rows["train.lr"]["default"]) == (0.5, Config().train.lr)
    assert rows["instance.method"]["valid"] == "centres or set"
    assert rows["train.batch_size"]["valid"] == "int >= 1, <= 65536"
    assert "train.lr" in invoke("settings", "train").stdout
    unknown = invoke("settings", "trian")
    assert (unknown.exit_code, "Did you mean" in unknown.stderr) == (2, True)


def test_quiet_leaves_results_and_errors(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP4DEPLOY_QUIET", "0")
    flags = ("--epochs", 1, "--size", "32x32", "--set", "model.scale=0.125", "--set", "telemetry.plots=false")
    loud = invoke("train", "--models", "fp16", "--resume")
    assert loud.exit_code == 2
    assert loud.stderr
    from fp4deploy.data import generate_shapes

    generate_shapes(tmp_path / "data", train=4, val=2, size=32, seed=0)
    result = invoke("train", "--quiet", "--models", "fp16", "--data", "data", "--device", "cpu", *flags)
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    assert "fp16: best mIoU" in result.stdout
    assert "Error" in invoke("-q", "train", "--data", "absent").stderr


def test_a_device_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    with pytest.raises(InputError, match="it takes cpu, cuda"):
        use_device("tpu")
    use_device("cpu")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    use_device("cuda:1")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "6"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UnavailableError, match="no such GPU"):
        use_device("cuda:7")


def test_open_shows_a_report(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: shown.append(url) or True)
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("seed: 0\n")
    missing = invoke("open")
    assert (missing.exit_code, "fp4deploy report" in missing.stderr) == (2, True)
    (run / "report.html").write_text("<html></html>")
    assert invoke("open").exit_code == 0
    assert shown == [(run / "report.html").as_uri()]
    monkeypatch.setattr("webbrowser.open", lambda url: False)
    assert invoke("open", run / "report.html").exit_code == 3
    assert invoke("open", "absent.html").exit_code == 2


def test_data_check_lists_the_set_and_draws_it(invoke: Invoke, shapes: Path, tmp_path: Path) -> None:
    from PIL import Image

    result = invoke("data", "check", shapes, "--sheet", "sheet.png")
    assert result.exit_code == 0, result.stderr
    assert "train: 8 images, width x height 32 x 32" in result.stdout
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.size[0] == 4 * 320
    assert invoke("data", "check", shapes, "--sheet", "sheet.pdf").exit_code == 2
    facts = json.loads(invoke("data", "check", shapes, "--json").stdout)
    assert [split["images"] for split in facts["splits"]] == [8, 4]


def test_data_check_of_boxes_alone(invoke: Invoke, shapes: Path, tmp_path: Path) -> None:
    """A set of boxes without masks is for detection; a box among masks is a defect for the other tasks."""
    from PIL import Image

    for split in ("train", "val"):
        (tmp_path / "boxes" / f"{split}2017").parent.mkdir(exist_ok=True)
        (tmp_path / "boxes" / f"{split}2017").symlink_to(shapes / f"{split}2017")
        content = json.loads((shapes / "annotations" / f"instances_{split}2017.json").read_text())
        for annotation in content["annotations"][1:]:
            del annotation["segmentation"]
        target = tmp_path / "boxes" / "annotations" / f"instances_{split}2017.json"
        target.parent.mkdir(exist_ok=True)
        target.write_text(json.dumps(content))
    refused = invoke("data", "check", "boxes")
    assert refused.exit_code == 1
    assert "no-segmentation" in refused.stdout
    assert refused.stderr.rstrip().endswith("--task detection")
    assert invoke("data", "check", "boxes", "--task", "detection").exit_code == 0
    for split in ("train", "val"):
        target = tmp_path / "boxes" / "annotations" / f"instances_{split}2017.json"
        content = json.loads(target.read_text())
        content["annotations"][0].pop("segmentation")
        target.write_text(json.dumps(content))
    assert "--task detection" in invoke("data", "check", "boxes").stderr
    found = invoke("data", "check", "boxes", "--task", "detection", "--sheet", "sheet.png")
    assert (found.exit_code, "no-segmentation" in found.stdout) == (0, False), found.stderr
    with Image.open(tmp_path / "sheet.png") as sheet:
        counts = {colour: count for count, colour in sheet.convert("RGB").getcolors(1 << 24) or ()}
    assert counts[76, 110, 245] > 13 * 13  # the first class: more than its square in the legend
    del content["annotations"][0]["bbox"]
    target.write_text(json.dumps(content))
    assert "[no-box]" in invoke("data", "check", "boxes", "--task", "detection").stdout


def test_data_import(invoke: Invoke, shapes: Path, tmp_path: Path) -> None:
    source = ("--train-json", shapes / "annotations" / "instances_train2017.json", "--images", shapes / "train2017")
    result = invoke("data", "import", *source, "--val-share", 0.25, "--out", "set")
    assert result.exit_code == 0, result.stderr
    assert invoke("data", "check", "set").exit_code == 0
    assert invoke("data", "import", *source, "--out", "set").exit_code == 2


def test_json_of_a_command_without_a_json_of_its_own(invoke: Invoke) -> None:
    arguments = ("data", "shapes", "new", "--train", 1, "--val", 1, "--size", 32)
    result = invoke(*arguments, "--json")
    found = json.loads(result.stdout)
    assert found["command"] == "data shapes"
    assert [entry["folder"] for entry in found["results"]] == ["new"]
    assert "new: 1 training" in result.stderr
    refused = invoke("--json", *arguments)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "other: 1 training" in invoke("data", "shapes", "other", *arguments[3:]).stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["bench", "--json"], ["bench", "--json", "-"]),
        (["bench", "--json", "--engine", "a"], ["bench", "--json", "-", "--engine", "a"]),
        (["bench", "--json", "-"], ["bench", "--json", "-"]),
        (["bench", "--json", "out.json"], ["bench", "--json", "out.json"]),
        (["report", "run", "--json"], ["report", "run", "--json", "-"]),
        (["--json", "report", "run"], ["report", "--json", "-", "run"]),
        (["--json", "check", "unet:0.25"], ["check", "--json", "unet:0.25"]),
        (["data", "--json", "check", "folder"], ["data", "check", "--json", "folder"]),
        (["data", "check", "--json", "folder"], ["data", "check", "--json", "folder"]),
        (["build", "--json", "model.onnx"], ["build", "model.onnx"]),
        (["--json", "telemetry", "plot"], ["telemetry", "plot"]),
    ],
)
def test_json_alone_is_stdout_everywhere(arguments: list[str], expected: list[str], app: Any) -> None:
    from typer.main import get_command

    group: Any = get_command(app)
    context = SimpleNamespace(obj={"json": None})
    assert group._read_json(context, arguments) == expected
    assert context.obj["json"] == {"build": "build", "telemetry": "telemetry plot"}.get(expected[0])
