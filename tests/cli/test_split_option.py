"""`fp4deploy bench --split`: said, written, checked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.command_line import Invoke


def test_the_split_is_said_and_written(invoke: Invoke, checkpoint: Path, shapes: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(shapes, data)
    for path in [*data.glob("val*"), *data.glob("annotations/instances_val*")]:
        path.rename(path.with_name(path.name.replace("val", "test")))
    arguments = ("bench", "--engine", checkpoint, "--data", data, "--iterations", 1, "--json", "out.json")
    result = invoke(*arguments, "--split", "test")
    assert result.exit_code == 0, result.stderr
    assert "the split test of" in " ".join(result.stderr.split())
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["split"] == "test"
    assert document["artifacts"][0]["miou"] is not None
    refused = invoke(*arguments)
    assert refused.exit_code == 2
    assert "val" in refused.stderr


@pytest.mark.parametrize("split", ["train", "tset"])
def test_a_split_to_measure_on_is_val_or_test(invoke: Invoke, checkpoint: Path, shapes: Path, split: str) -> None:
    result = invoke("bench", "--engine", checkpoint, "--data", shapes, "--split", split)
    assert result.exit_code == 2
    assert f"--split is '{split}'; what a model is measured on is val or test." in " ".join(result.stderr.split())
