"""Volumes on the command line: `data check` of a set, options of `predict` and `train` that do not go together."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.commands.stages.predict import _print
from tests.cli.command_line import Invoke
from tests.volumes import write_set


def test_check_and_options(invoke: Invoke, tmp_path: Path) -> None:
    data = write_set(tmp_path / "set", shape=(12, 10, 6), spacing=(1.0, 1.0, 2.5))
    sheet = tmp_path / "sheet.png"
    found = invoke("data", "check", str(data), "--sheet", str(sheet))
    assert sheet.is_file(), "a slice of each volume"
    assert found.exit_code == 0, found.stderr
    assert "train: 4 volumes, width x height x depth 12 x 10 x 6, voxels of 1 x 1 x 2.5 mm" in found.stdout
    (data / "labelsTr" / "case_003.nii.gz").unlink()
    found = invoke("data", "check", str(data))
    assert found.exit_code == 1
    assert "labelsTr/case_003.nii.gz: does not exist" in found.stdout
    found = invoke("predict", str(data / "imagesTs"), "--tile")
    assert found.exit_code == 2
    assert "volumes are always cut into windows" in found.stderr
    found = invoke("predict", str(data / "scan.png"), "--mirror")
    assert found.exit_code == 2
    assert "--mirror is of volumes" in found.stderr
    found = invoke("train", "--data", str(data), "--size", "1x2x3x4")
    assert found.exit_code == 2
    assert "of volumes DEPTHxHEIGHTxWIDTH" in found.stderr


def test_a_table_of_volumes_counts_voxels(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    classes = [{"id": 0, "name": "background", "share": 1.0}]
    _print({"images": [{"files": ["a.nii"], "spacing_mm": [1, 1, 1], "classes": classes}]}, tmp_path)
    assert capsys.readouterr().out.split()[:6] == ["class", "volumes", "voxels", "background", "1", "100.0"]
    _print({"images": [{"files": ["a.nii"], "error": "a.nii is truncated"}]}, tmp_path)
    assert capsys.readouterr().out.startswith("0 of 1 predicted"), "and no empty table"
