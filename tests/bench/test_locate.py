"""Names and files to runs, models and data."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fp4deploy.bench.locate import data_of, find_artifact, model_of, or_of_latest_run, run_artifacts
from fp4deploy.errors import InputError
from fp4deploy.predict.choose import candidates
from fp4deploy.runs import Run, run_of


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs; the first was configured later, so it is the latest."""
    monkeypatch.chdir(tmp_path)
    for name, files in (
        (
            "a",
            (
                "fp16/best.safetensors",
                "nvfp4/best.safetensors",
                "export/unet.nvfp4.onnx",
                "engines/unet.nvfp4.sm120.plan",
            ),
        ),
        ("b", ("fp16/best.safetensors", "export/unet.fp16.onnx")),
    ):
        for file in ("config.yaml", *files):
            path = tmp_path / "runs" / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("x")
    os.utime(tmp_path / "runs" / "b" / "config.yaml", (1, 1))
    return Path("runs")


def test_a_path_that_exists_is_itself(root: Path) -> None:
    path = root / "b" / "export" / "unet.fp16.onnx"
    assert find_artifact(path) == path


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("unet.nvfp4.sm120.plan", "engines/unet.nvfp4.sm120.plan"),
        ("unet.nvfp4.onnx", "export/unet.nvfp4.onnx"),
        ("nvfp4.sm120.plan", "engines/unet.nvfp4.sm120.plan"),
        ("nvfp4.onnx", "export/unet.nvfp4.onnx"),
        ("nvfp4", "nvfp4/best.safetensors"),
        ("fp16.safetensors", "fp16/best.safetensors"),
    ],
)
def test_a_name_is_looked_up_in_the_latest_run(root: Path, name: str, found: str) -> None:
    assert find_artifact(Path(name)) == root / "a" / found


def test_a_name_without_a_file_is_the_latest_run_s(root: Path) -> None:
    assert or_of_latest_run(Path("unet.nvfp4.onnx")) == root / "a" / "export" / "unet.nvfp4.onnx"
    for other in (Path("absent.onnx"), Path("folder/unet.nvfp4.onnx"), root / "b" / "export" / "unet.fp16.onnx"):
        assert or_of_latest_run(other) == other
    Path("unet.nvfp4.onnx").write_text("x")
    assert or_of_latest_run(Path("unet.nvfp4.onnx")) == Path("unet.nvfp4.onnx")


def test_a_name_of_an_older_run_is_not_taken(root: Path) -> None:
    with pytest.raises(InputError, match=r"runs/a has: .*unet\.nvfp4\.sm120\.plan"):
        find_artifact(Path("unet.fp16.onnx"))


def test_a_misspelled_name_is_answered_with_the_nearest(root: Path) -> None:
    with pytest.raises(InputError, match=r"Did you mean 'unet\.nvfp4\.onnx'"):
        find_artifact(Path("unet.nvpf4.onnx"))


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("other.onnx", "Export the models with: fp4deploy export"),
        ("other.plan", "Export the models with: fp4deploy export, then build an engine with: fp4deploy build"),
        ("other.fp4", "Pack the models with: fp4deploy export --format packed"),
        ("other.safetensors", "Name one of these, or the path of a file."),
    ],
)
def test_without_exports_the_next_command_is_export(root: Path, name: str, advice: str) -> None:
    (root / "a" / "export" / "unet.nvfp4.onnx").unlink()
    with pytest.raises(InputError) as error:
        find_artifact(Path(name))
    assert str(error.value).endswith(advice)


def test_a_folder_is_refused(root: Path) -> None:
    with pytest.raises(InputError, match="is a folder"):
        find_artifact(root / "a")


def test_without_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="no run under runs/") as error:
        find_artifact(Path("unet.nvfp4.sm120.plan"))
    assert "fp4deploy train" not in str(error.value)
    (tmp_path / "unet.onnx").touch()
    with pytest.raises(InputError, match=r"Did you mean 'unet\.onnx'"):
        find_artifact(Path("umet.onnx"))


def test_hidden_partial_files_are_no_artefacts(root: Path) -> None:
    (root / "a" / "engines" / ".unet.nvfp4.sm120.plan.123.partial").write_text("x")
    (root / "a" / "engines" / ".half.plan").write_text("x")
    assert ".half.plan" not in run_artifacts(Run(root / "a"))


def test_run_and_model_of_a_file(root: Path, tmp_path: Path) -> None:
    run = run_of(root / "a" / "export" / "unet.nvfp4.onnx")
    assert run is not None
    assert run.path == tmp_path / "runs" / "a"
    assert model_of(root / "a" / "export" / "unet.nvfp4.onnx", run) == "nvfp4"
    assert model_of(root / "a" / "export" / "unet.nvfp4.portable.onnx", run) == "nvfp4"
    assert model_of(root / "a" / "fp16" / "best.safetensors", run) == "fp16"
    assert model_of(root / "a" / "export" / "other.onnx", run) is None
    assert model_of(root / "a" / "export" / "unet.fp16.nvfp4.onnx", run) is None, "quantize made it of unet.fp16.onnx"
    assert run_of(tmp_path / "loose.onnx") is None


def configured(run: Path, data: str) -> Path:
    """A run whose configuration names `data`; returns a file in it."""
    (run / "config.yaml").parent.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text(f"data: {{root: {data}}}\n")
    return run / "export" / "unet.nvfp4.onnx"


def test_data_of_the_run_that_holds_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "set").mkdir()
    assert data_of(configured(tmp_path / "elsewhere", str(tmp_path / "set"))) == tmp_path / "set"


def test_data_of_a_loose_file_is_that_of_the_latest_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    configured(tmp_path / "runs" / "a", str(tmp_path))
    assert data_of(tmp_path / "loose.onnx") == tmp_path


def test_generated_data_moves_with_its_run(tmp_path: Path) -> None:
    file = configured(tmp_path / "moved", "runs/before/data")
    (tmp_path / "moved" / "data").mkdir()
    assert data_of(file) == (tmp_path / "moved" / "data")


def test_data_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"not there any more \(gone\).* --data DIR"):
        data_of(configured(tmp_path / "run", "gone"))


OLDER = ("export/unet.onnx", "export/unet.fp4", "engines/unet.plan", "export/unet-fp16.portable.onnx")


@pytest.mark.parametrize("spec", ["unet:0.25", "my_net.py:build"])
def test_a_run_of_before_files_were_named_by_their_network_is_read(tmp_path: Path, spec: str) -> None:
    run = Run(tmp_path)
    for file in ("fp16/best.safetensors", "nvfp4/best.safetensors", *OLDER):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    run.config_path.write_text(f"model: {{spec: '{spec}'}}")
    assert [model_of(tmp_path / file, run) for file in OLDER] == ["nvfp4", "nvfp4", "nvfp4", "fp16"]
    assert run.engines("nvfp4") == [tmp_path / "engines" / "unet.plan"]
    assert [path.name for path in candidates(run, gpu=True)] == [
        "unet.plan", "unet.fp4", "best.safetensors", "unet.onnx", "best.safetensors", "unet-fp16.portable.onnx"
    ]  # fmt: skip


def test_engines_of_several_gpus_are_of_one_model(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for model, arch in (("nvfp4", "sm121"), ("nvfp4", "sm120"), ("fp16", "sm120")):
        run.engine(model, arch).parent.mkdir(exist_ok=True)
        run.engine(model, arch).touch()
    (run.engine_dir / "unet.fp16.nvfp4.sm120.plan").touch()  # of a file that `quantize` made
    assert [path.name for path in run.engines("nvfp4")] == ["unet.nvfp4.sm120.plan", "unet.nvfp4.sm121.plan"]
