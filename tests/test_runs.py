"""Run folders, atomic writes and the error tree."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fp4deploy.errors import GateError, InputError, UnavailableError, suggest
from fp4deploy.runs import Run, artifact_stem, create_run, latest_run, open_run


def test_exit_codes() -> None:
    assert (GateError.exit_code, InputError.exit_code, UnavailableError.exit_code) == (1, 2, 3)


def test_suggestions() -> None:
    assert suggest("nvfp5", ["fp16", "nvfp4"]) == " Did you mean 'nvfp4'?"
    assert suggest("zzz", ["fp16", "nvfp4"]) == ""


def test_runs_never_overwrite_each_other(tmp_path: Path) -> None:
    first, second = create_run(root=tmp_path), create_run(root=tmp_path)
    assert first.path != second.path
    (first.path / "config.yaml").write_text("a: 1")
    with pytest.raises(InputError, match="never overwrites"):
        create_run(first.path)


def test_latest_run_is_the_one_configured_last(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="fp4deploy train"):
        latest_run(tmp_path)
    for age, name in ((2, "new"), (1, "old")):
        run = create_run(tmp_path / name)
        run.config_path.write_text("")
        os.utime(run.config_path, (age, age))
    assert latest_run(tmp_path).path.name == "new"
    assert open_run(tmp_path / "old").path.name == "old"
    with pytest.raises(InputError, match="not a run"):
        open_run(tmp_path)


def test_models_are_those_with_a_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for model in ("nvfp4", "fp16"):
        run.model_dir(model).mkdir()
        run.checkpoint(model).touch()
    assert run.models() == ["fp16", "nvfp4"]
    assert [artifact_stem(model) for model in run.models()] == ["unet-fp16", "unet"]


def test_what_was_asked_for_is_remembered(tmp_path: Path) -> None:
    run = create_run(tmp_path / "mine")
    assert run.asked_models() == ()
    run.ask_models(["fp16"])
    run.ask_models(["fp16_control", "fp16"])
    assert run.asked_models() == ("fp16", "fp16_control")
    run.models_path.write_text("{truncated")
    with pytest.raises(InputError, match=r"models.json is no list of models.*--models"):
        run.asked_models()
