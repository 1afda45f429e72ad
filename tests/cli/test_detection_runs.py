"""`--task detection` from training to artefacts, prediction and report, and what does not go with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest

from fp4deploy.data import open_boxes
from fp4deploy.export import to_onnx
from fp4deploy.instances import average_precision
from fp4deploy.models import DetectionHead, read_card
from tests.cli.command_line import Invoke, run_in, without_engines, without_pictures
from tests.export.exported_models import traced_once

TINY = (
    "--set", "model.scale=0.125", "--set", "data.height=32", "--set", "data.width=32", "--set", "data.workers=0",
    "--set", "train.epochs=2", "--set", "train.finetune_epochs=1", "--set", "train.batch_size=4",
    "--set", "detection.width=16", "--set", "detection.depth=1", "--set", "detection.threshold=0.001",
    "--set", "telemetry.every=0",
)  # fmt: skip
FORMS = (".onnx", ".portable.onnx", ".fp4")
ARTEFACTS = ("nvfp4", *(f"unet.nvfp4{suffix}" for suffix in FORMS))


@pytest.fixture(scope="module")
def home(app: Any, tmp_path_factory: pytest.TempPathFactory, shapes: Path) -> Path:
    """A folder in which one command trained, exported, built, measured and reported a detector; of two models in
    `test_instance_runs`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(to_onnx, "export_graph", traced_once(to_onnx.export_graph))
        without_engines(patch)
        return run_in(
            tmp_path_factory.mktemp("home"),
            app,
            (
                "run",
                "--task",
                "detection",
                "--data",
                str(shapes),
                "--out",
                "runs/one",
                "--models",
                "nvfp4",
                "--from-scratch",
                *TINY,
            ),
            ("export", "--format", "onnx", "--portable", "--images", "2"),
        )


def test_one_command_goes_all_the_way(home: Path) -> None:
    run = home / "runs" / "one"
    facts = json.loads((run / "report.json").read_text())
    assert facts["task"] == "detection"
    assert facts["models"]["nvfp4"]["ap"] is not None
    page, written = (run / "report.html").read_text(), (run / "report.md").read_text()
    for text in (page, written):
        assert "Kinds of errors" in text
        assert "Commonest confusions" in text
        assert "mIoU" not in without_pictures(text)


@pytest.mark.variants
def test_two_models_are_compared(app: Any, tmp_path: Path, shapes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_engines(monkeypatch)
    run_in(tmp_path, app, ("run", "--task", "detection", "--data", str(shapes), "--out", "runs/two", *TINY))
    page = (tmp_path / "runs" / "two" / "report.html").read_text()
    assert " % of boxes" in page
    samples = page.partition("<h2>Samples</h2>")[2].partition("<h2>")[0]
    assert samples.count("data:image/png;base64") == 20
    artefacts = json.loads((tmp_path / "runs" / "two" / "report.json").read_text())["artifacts"]
    for model in ("fp16", "nvfp4"):
        aps = [entry["ap"] for entry in artefacts if entry["model"] == model]
        assert len(aps) > 2
        assert aps == pytest.approx([aps[0]] * len(aps), abs=0.02)


def test_the_card_says_what_the_output_is(home: Path) -> None:
    card = read_card(home / "runs" / "one" / "nvfp4" / "best.safetensors")
    assert card.task == "detection"
    assert isinstance(card.head, DetectionHead)
    assert (card.head.classes, card.channels, card.head.width) == (6, 11, 16)


def test_the_output_layers_stay_in_fp16(at_home: Invoke) -> None:
    result = at_home("check", "runs/one/nvfp4/best.safetensors", "--json")
    assert result.exit_code == 0, result.stderr
    layers = {layer["name"]: layer["precision"] for layer in json.loads(result.stdout)["layers"]}
    assert layers["head.class_logits"] == layers["head.distances"] == layers["encoder.0.conv1"] == "FP16"
    assert layers["head.class_tower.0"] == layers["head.lateral.0"] == layers["head.deeper.0"] == "FP4"


def test_every_artefact_has_the_same_ap(at_home: Invoke, home: Path) -> None:
    engines = [part for name in ARTEFACTS for part in ("--engine", name)]
    result = at_home("bench", *engines, "--json", "-", "--iterations", 1)
    assert result.exit_code == 0, result.stderr
    entries = json.loads(result.stdout)["artifacts"]
    assert len(entries) == 4
    assert all(entry["instances"]["detections"] > 0 and set(entry["errors"]) >= {"missed"} for entry in entries)
    assert [entry["ap"] for entry in entries] == pytest.approx([entries[0]["ap"]] * 4, abs=0.02)


def test_the_portable_file_decodes_with_standard_operators(home: Path) -> None:
    model = onnx.load(home / "runs" / "one" / "export" / "unet.nvfp4.portable.onnx")
    assert [value.name for value in model.graph.output][1:] == ["images", "boxes", "classes", "scores"]
    assert "NonMaxSuppression" in {node.op_type for node in model.graph.node}
    assert all(node.domain in ("", "ai.onnx") for node in model.graph.node)
    canonical = onnx.load(home / "runs" / "one" / "export" / "unet.nvfp4.onnx")
    assert len(canonical.graph.output) == 1


def test_results_are_coco_json(at_home: Invoke, home: Path, shapes: Path) -> None:
    result = at_home("bench", "--engine", "unet.nvfp4.portable.onnx", "--results", "kept", "--iterations", 1)
    assert result.exit_code == 0, result.stderr
    found = json.loads((home / "kept" / "results.json").read_text())
    scores = json.loads((home / "kept" / "scores.json").read_text())
    again = average_precision(open_boxes(shapes, "val").ground_truth(), found, scores["max_detections"], "bbox")
    assert again.ap == pytest.approx(scores["ap"])
    assert len(list((home / "kept" / "overlays").glob("*.png"))) == len(open_boxes(shapes, "val"))


def test_predict_draws_boxes_and_lists_them(at_home: Invoke, home: Path, shapes: Path) -> None:
    image = next((shapes / "val2017").glob("*.jpg"))
    result = at_home("predict", image, "--model", "unet.nvfp4.onnx", "--out", "seen", "--json")
    assert result.exit_code == 0, result.stderr
    (entry,) = json.loads(result.stdout)["images"]
    assert entry["mask"] is None
    assert (home / "seen" / entry["overlay"]).is_file()
    listed = json.loads((home / "seen" / "instances.json").read_text())["annotations"]
    assert len(listed) == entry["objects"] > 0
    assert all(len(each["bbox"]) == 4 and 0 < each["score"] <= 1 for each in listed)
    result = at_home("predict", image, "--model", "unet.nvfp4.onnx", "--out", "counted")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.split()[:3] == ["class", "images", "objects"]
    table, _, total = result.stdout.partition(" objects in 1 images.")[0].rpartition("\n")
    assert sum(int(line.split()[-1]) for line in table.splitlines()[1:]) == int(total) > 0
    result = at_home("predict", image, "--model", "unet.nvfp4.onnx", "--tile")
    assert result.exit_code == 2
    assert "Boxes are not joined across tiles" in result.stderr


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("augment.rotate=10", "box around a rotated box"),
        ("train.class_balance=effective_number", "losses over pixels"),
        ("detection.width=20", "multiple of 8"),
        ("detection.nms=0", "detection.nms"),
        ("model.spec=smp:Unet/resnet18", "feature maps of several strides"),
    ],
)
def test_what_does_not_go_with_boxes(invoke: Invoke, shapes: Path, setting: str, message: str) -> None:
    result = invoke("train", "--task", "detection", "--data", shapes, *TINY, "--set", setting)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_backbone_of_ones_own(invoke: Invoke, shapes: Path) -> None:
    Path("net.py").write_text(
        "from torch import nn\n"
        "class Maps(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        sizes = [(3, 16, 4), (16, 32, 2), (32, 32, 2)]\n"
        "        self.steps = nn.ModuleList(nn.Conv2d(a, b, 3, stride=s, padding=1) for a, b, s in sizes)\n"
        "    def forward(self, x):\n"
        "        found = []\n"
        "        for step in self.steps:\n"
        "            x = step(x).relu()\n"
        "            found.append(x)\n"
        "        return found\n"
    )
    result = invoke(
        "train", "--task", "detection", "--model", "net.py:Maps", "--data", shapes, *TINY, "--models", "fp16",
        "--set", "train.epochs=1",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    Path("flat.py").write_text("from torch import nn\ndef build():\n    return nn.Conv2d(3, 8, 3, padding=1)\n")
    result = invoke("train", "--task", "detection", "--model", "flat.py:build", "--data", shapes, *TINY)
    assert result.exit_code == 2
    assert "Let the backbone return a list" in result.stderr
