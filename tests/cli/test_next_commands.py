"""What a command prints to go on with names what it has written, and can be run as it stands."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
from fp4deploy.cli.artifacts import named_next

from tests.cli.command_line import Invoke


def test_new_files_are_named_unless_they_are_of_the_latest_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    alone = [Path("a.onnx"), Path("b c.onnx")]
    assert named_next(alone) == " a.onnx 'b c.onnx'"
    for at, name in enumerate(("runs/old", "runs/new", "elsewhere")):
        (tmp_path / name / "export").mkdir(parents=True)
        (tmp_path / name / "config.yaml").touch()
        os.utime(tmp_path / name / "config.yaml", ns=(at, at))
    of = {name: Path(name, "export", "unet.onnx") for name in ("runs/old", "runs/new", "elsewhere")}
    assert named_next([of["runs/new"], of["runs/new"]]) == ""
    assert named_next([of["runs/old"]]) == " runs/old"
    assert named_next([of["elsewhere"]]) == " elsewhere"
    assert named_next([of["runs/new"], *alone[:1]]) == f" {of['runs/new']} a.onnx"
    assert named_next([of["runs/new"], of["runs/old"]]) == f" {of['runs/new']} {of['runs/old']}"


def test_a_folder_of_any_name_can_be_copied_into_a_shell(invoke: Invoke) -> None:
    name = "it's a $HOME; set"
    result = invoke("data", "shapes", name, "--train", "2", "--val", "1", "--size", "32")
    command = next(line for line in result.stderr.splitlines() if "Train on them" in line).partition("with: ")[2]
    assert shlex.split(command) == ["fp4deploy", "train", "--data", name]
