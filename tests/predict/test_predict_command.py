"""`fp4deploy predict` on files, folders, patterns and pipes."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from PIL import Image

from fp4deploy.predict.choose import candidates
from fp4deploy.predict.predictor import load
from fp4deploy.runs import Run
from tests.cli.command_line import ENVIRONMENT, PACKAGE
from tests.predict.pointwise import photo


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run `predict` in an empty folder; the result has exit_code, stdout and stderr."""
    import importlib

    from typer.testing import CliRunner

    monkeypatch.chdir(tmp_path)
    app = importlib.import_module(f"{PACKAGE}.main").app

    def call(*arguments: object) -> Any:
        return CliRunner().invoke(app, ["predict", *map(str, arguments)], prog_name="fp4deploy")

    return call


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    Image.fromarray(photo(40, 60)).save(folder / "a.png")
    Image.fromarray(photo(33, 47, 1)).save(folder / "b.jpg")
    Image.fromarray(photo(50, 50, 2)).save(folder / "b.png")
    Image.fromarray(photo(20, 20, 3)).save(folder / "more" / "a.png")
    (folder / "notes.txt").write_text("no image")
    return folder


@pytest.mark.parametrize("batch", [1, 3])
def test_a_folder(run: Any, images: Path, untrained: Run, tmp_path: Path, batch: int) -> None:
    model = untrained.export_dir / "unet.nvfp4.portable.onnx"
    result = run(images, "--model", model, "--batch", batch)
    assert result.exit_code == 0, result.stderr
    out = tmp_path / "predictions"
    document = json.loads((out / "predictions.json").read_text())
    assert document["schema"] == "fp4deploy.predictions/1"
    assert [Path(entry["file"]).name for entry in document["images"]] == ["a.png", "b.jpg", "b.png", "a.png"]
    assert [entry["mask"] for entry in document["images"]] == [
        "a.mask.png", "b.jpg.mask.png", "b.png.mask.png", "more/a.mask.png",
    ]  # fmt: skip
    predictor = load(model)
    for entry in document["images"]:
        mask = Image.open(out / entry["mask"])
        expected = predictor.predict(entry["file"])
        assert (np.asarray(mask) == expected.mask).all()
        assert (entry["height"], entry["width"]) == expected.mask.shape
        drawn = np.asarray(Image.open(out / entry["overlay"]))
        assert (drawn == expected.overlay(np.asarray(Image.open(entry["file"]).convert("RGB")))).all()
    assert "4 of 4" in result.stdout
    assert "ONNX Runtime" in result.stderr


def test_json_alone_on_stdout_and_no_overlays(run: Any, images: Path, untrained: Run, tmp_path: Path) -> None:
    model = untrained.checkpoint("nvfp4")
    result = run(images / "a.png", "--model", model, "--json", "--no-overlays", "--out", "here", "--tile")
    document = json.loads(result.stdout)
    assert document == json.loads((tmp_path / "here" / "predictions.json").read_text())
    assert document["tile"] == {"overlap": 8}
    assert document["images"][0]["overlay"] is None
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == ["a.mask.png", "predictions.json"]


def test_a_pattern(run: Any, images: Path, untrained: Run) -> None:
    result = run(f"{images}/**/a.png", "--model", untrained.checkpoint("fp16"), "--json", "--no-overlays")
    assert result.exit_code == 2
    assert "called a" in result.stderr
    result = run(f"{images}/b.*", "--model", untrained.checkpoint("fp16"), "--json", "--no-overlays")
    assert len(json.loads(result.stdout)["images"]) == 2


def test_a_broken_image_does_not_stop_the_others(run: Any, images: Path, untrained: Run, tmp_path: Path) -> None:
    whole = (images / "a.png").read_bytes()
    (images / "a.png").write_bytes(whole[: len(whole) // 2])
    result = run(images, "--model", untrained.checkpoint("fp16"), "--batch", 2)
    assert result.exit_code == 2
    assert "1 of 4 files could not be predicted" in result.stderr
    entries = json.loads((tmp_path / "predictions" / "predictions.json").read_text())["images"]
    assert ["error" in entry for entry in entries] == [True, False, False, False]
    assert all((tmp_path / "predictions" / entry["mask"]).is_file() for entry in entries[1:])


def test_the_latest_run_gives_the_model(run: Any, images: Path, untrained: Run, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(untrained.path, tmp_path / "runs" / "one")
    (tmp_path / "runs" / "one" / "config.yaml").write_text("{}")
    result = run(images / "a.png", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["model"].endswith("unet.nvfp4.portable.onnx")
    assert "unet.nvfp4.portable.onnx on ONNX Runtime" in result.stderr


def test_the_order_of_artefacts(untrained: Run) -> None:
    assert [path.name for path in candidates(untrained, gpu=False)][:4] == [
        "unet.nvfp4.portable.onnx", "unet.nvfp4.onnx", "unet.nvfp4.fp4", "best.safetensors",
    ]  # fmt: skip
    assert [path.name for path in candidates(untrained, gpu=True)][:2] == ["unet.nvfp4.fp4", "best.safetensors"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere.png",), "There is no file or folder nowhere.png"),
        (("*.png",), "No image matches"),
        (("-", "a.png"), "give it alone"),
        (("notes.txt",), "neither an image nor a video"),
        (("empty",), "holds no image"),
    ],
)
def test_wrong_sources(run: Any, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    (tmp_path / "notes.txt").write_text("text")
    (tmp_path / "empty").mkdir()
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_a_pipe(images: Path, untrained: Run, tmp_path: Path) -> None:
    model = untrained.export_dir / "unet.nvfp4.portable.onnx"
    command = [sys.executable, "-m", PACKAGE, "predict", "-", "--model", str(model)]
    content = (images / "a.png").read_bytes()
    found = subprocess.run(command, input=content, capture_output=True, env=ENVIRONMENT, cwd=tmp_path, timeout=240)
    assert found.returncode == 0, found.stderr
    assert (np.asarray(Image.open(io.BytesIO(found.stdout))) == load(model).predict(images / "a.png").mask).all()
    assert not (tmp_path / "predictions").exists()


def test_a_video(run: Any, images: Path, untrained: Run, tmp_path: Path) -> None:
    cv2 = pytest.importorskip("cv2", reason="OpenCV is not installed (pip install opencv-python-headless)")
    writer = cv2.VideoWriter(str(tmp_path / "clip.mp4"), cv2.VideoWriter.fourcc(*"mp4v"), 10.0, (64, 48))
    for number in range(5):
        writer.write(photo(48, 64, number))
    writer.release()
    result = run(
        tmp_path / "clip.mp4", images / "a.png", "--model", untrained.checkpoint("nvfp4"), "--json", "--batch", 2
    )
    assert result.exit_code == 0, result.stderr
    video, image = json.loads(result.stdout)["images"]
    assert (video["frames"], video["height"], video["width"]) == (5, 48, 64)
    assert sum(each["share"] for each in video["classes"]) == pytest.approx(1)
    assert cv2.VideoCapture(str(tmp_path / "predictions" / "clip.overlay.mp4")).get(cv2.CAP_PROP_FRAME_COUNT) == 5
    assert image["mask"] == "a.mask.png"


def test_a_camera_that_is_not_there_records_nothing(run: Any, untrained: Run, monkeypatch: Any) -> None:
    cv2 = MagicMock()
    cv2.VideoCapture.return_value.isOpened.return_value = False
    monkeypatch.setitem(sys.modules, "cv2", cv2)
    result = run("camera:0", "--model", untrained.checkpoint("nvfp4"))
    assert result.exit_code == 2
    assert "camera:0 cannot be opened as a camera" in result.stderr
    assert "Recording" not in result.stderr
    assert not Path("predictions").exists()


def test_a_video_without_opencv_says_what_to_install(
    run: Any, untrained: Run, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setitem(sys.modules, "cv2", None)
    (tmp_path / "clip.mp4").write_bytes(b"\0" * 100)
    result = run(tmp_path / "clip.mp4", "--model", untrained.checkpoint("nvfp4"))
    assert result.exit_code == 3
    assert "pip install opencv-python-headless" in result.stderr
