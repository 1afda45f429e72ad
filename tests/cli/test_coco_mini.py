"""A detector from training to prediction on photographs of COCO 2017, with crowds and unused categories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command_line import ROOT, run_in

DATA = ROOT.parent / "shared" / "data" / "coco2017_mini"
SMALL = (
    "--set", "model.scale=0.125", "--set", "data.height=64", "--set", "data.width=64", "--set", "data.workers=0",
    "--set", "train.epochs=1", "--set", "train.batch_size=8", "--set", "detection.width=16",
    "--set", "detection.depth=1", "--set", "detection.threshold=0.001", "--set", "telemetry.every=0",
)  # fmt: skip


@pytest.mark.nightly  # `test_detection_runs` goes the same way on shapes, tests of `data` read these photographs
@pytest.mark.skipif(not DATA.is_dir(), reason="images of COCO 2017 are not at ../shared/data/coco2017_mini")
def test_the_whole_path_on_photographs(app: Any, tmp_path: Path) -> None:
    image = min((DATA / "val2017").glob("*.jpg"))
    home = run_in(
        tmp_path,
        app,
        (
            "train", "--task", "detection", "--data", str(DATA), "--classes", "person,dog", "--models", "nvfp4",
            "--from-scratch", "--out", "runs/one", *SMALL,
        ),
        ("export", "--format", "onnx", "--portable", "--images", "2"),
        ("bench", "--engine", "unet.nvfp4.portable.onnx", "--json", "bench.json", "--iterations", "1"),
        ("predict", str(image), "--model", "unet.nvfp4.portable.onnx", "--out", "seen"),
    )  # fmt: skip
    (entry,) = json.loads((home / "bench.json").read_text())["artifacts"]
    assert entry["ap"] is not None
    assert entry["instances"]["detections"] > 0
    assert list((home / "seen").rglob("*.png"))
