"""`--task instance` from training to report, and what does not go with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fp4deploy.data import open_instances
from fp4deploy.export import to_onnx
from fp4deploy.instances import average_precision, read_results
from fp4deploy.models import read_card
from tests.bench.perfect import perfect
from tests.cli.command_line import Invoke, run_in, without_engines, without_pictures
from tests.export.exported_models import traced_once
from tests.instances.panoptic_files import from_rgb, read_panoptic

FORMS = (".onnx", ".portable.onnx", ".fp4")
TINY = (
    "--set", "model.scale=0.125", "--set", "data.height=32", "--set", "data.width=32", "--set", "data.workers=0",
    "--set", "train.epochs=3", "--set", "train.finetune_epochs=1", "--set", "train.batch_size=4",
    "--set", "instance.threshold=0.02", "--set", "instance.max_detections=300", "--set", "telemetry.every=0",
)  # fmt: skip
RUN = ("run", "--task", "instance", "--out", "runs/one", *TINY)
ARTEFACTS = ("fp16", "nvfp4", *(f"unet.{model}{suffix}" for model in ("nvfp4", "fp16") for suffix in FORMS))


@pytest.fixture(scope="module")
def home(app: Any, tmp_path_factory: pytest.TempPathFactory, shapes: Path) -> Path:
    """A folder in which one command trained, exported, built, measured and reported instance models."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["fp4deploy", *RUN, "--data", str(shapes)])
        patch.setattr(to_onnx, "export_graph", traced_once(to_onnx.export_graph))
        without_engines(patch)
        return run_in(
            tmp_path_factory.mktemp("home"),
            app,
            (*RUN, "--data", str(shapes)),
            ("export", "--format", "onnx", "--portable", "--images", "2"),
        )


def test_one_command_goes_all_the_way(home: Path) -> None:
    run = home / "runs" / "one"
    facts = json.loads((run / "report.json").read_text())
    assert facts["task"] == "instance"
    assert facts["models"]["nvfp4"]["ap"] is not None
    assert facts["commands"][0].startswith("fp4deploy run --task instance")
    page = (run / "report.html").read_text()
    assert "AP per class" in page
    assert "mIoU" not in without_pictures(page)
    samples = page.partition("<h2>Samples</h2>")[2].partition("<h2>")[0]
    assert samples.count("data:image/png;base64") == 20
    written = (run / "report.md").read_text()
    assert " AP" in written
    assert "mIoU" not in written
    assert facts["remarks"] == [
        f"unet.{model}.sm120.plan was not built: TensorRT-RTX is missing. Add it with: pip install tensorrt-rtx"
        for model in ("fp16", "nvfp4")
    ]
    assert not [entry for entry in facts["artifacts"] if entry["path"].endswith(".plan")]
    assert "pip install tensorrt-rtx" in page


def test_the_best_checkpoint_is_that_with_the_highest_ap(home: Path) -> None:
    run = home / "runs" / "one"
    for model in ("fp16", "nvfp4"):
        lines = [json.loads(line) for line in (run / model / "metrics.jsonl").read_text().splitlines()]
        assert all({"ap", "ap50", "ap75", "per_class"} <= line.keys() and "miou" not in line for line in lines)
        card = read_card(run / model / "best.safetensors")
        assert card.task == "instance"
        assert card.head is not None
        assert (card.head.method, card.head.classes, card.channels) == ("centres", 7, 10)
        assert card.head.max_detections == 300


def test_every_artefact_is_scored_by_the_same_code(at_home: Invoke, home: Path) -> None:
    engines = [part for name in ARTEFACTS for part in ("--engine", name)]
    result = at_home("bench", *engines, "--json", "-", "--iterations", 1)
    assert result.exit_code == 0, result.stderr
    assert "AP50" in result.stderr
    assert "mIoU" not in result.stderr
    entries = json.loads(result.stdout)["artifacts"]
    assert len(entries) == 8
    for entry in entries:
        assert entry["miou"] is None
        assert entry["instances"]["max_detections"] == 300
        assert entry["instances"]["detections"] > 0
        assert set(entry["per_class"]) == {"circle", "square", "triangle", "star", "ring", "cross"}
    by_model = {model: [entry["ap"] for entry in entries if entry["model"] == model] for model in ("fp16", "nvfp4")}
    assert by_model["fp16"] == pytest.approx([by_model["fp16"][0]] * 4, abs=0.02)


def test_results_are_files_that_other_tools_read(at_home: Invoke, home: Path, shapes: Path) -> None:
    result = at_home("bench", "--engine", "unet.nvfp4.onnx", "--results", "kept", "--max-dets", 20, "--iterations", 1)
    assert result.exit_code == 0, result.stderr
    found = read_results(home / "kept" / "results.json")
    dataset = open_instances(shapes, "val")
    scores = json.loads((home / "kept" / "scores.json").read_text())
    assert scores["max_detections"] == 20
    again = average_precision(dataset.ground_truth(), found, 20)
    assert again.ap == pytest.approx(scores["ap"])
    assert again.detections == scores["detections"]
    sizes = {image.id: [image.height, image.width] for image in dataset.images}
    assert all(entry["segmentation"]["size"] == sizes[entry["image_id"]] for entry in found)
    segments = read_panoptic(home / "kept")["annotations"]
    assert len(segments) == len(dataset)
    listed = sum(len(record["segments_info"]) for record in segments)
    assert listed == len(found)
    for record in segments:
        ids = from_rgb(np.asarray(Image.open(home / "kept" / "panoptic" / record["file_name"])))
        assert set(np.unique(ids).tolist()) - {0} == {segment["id"] for segment in record["segments_info"]}
    assert len(list((home / "kept" / "overlays").glob("*.png"))) == len(dataset)


def test_several_artefacts_keep_their_results_apart(at_home: Invoke, home: Path) -> None:
    result = at_home("bench", "--engine", "fp16", "--engine", "unet.nvfp4.onnx", "--results", "both", "--iterations", 1)
    assert result.exit_code == 0, result.stderr
    assert {path.name for path in (home / "both").iterdir()} == {"fp16-checkpoint", "unet.nvfp4.onnx"}


@pytest.mark.variants
def test_the_gate_is_judged_by_ap(at_home: Invoke, tmp_path: Path) -> None:
    baseline = tmp_path / "base.json"
    measured = json.loads(at_home("bench", "--engine", "unet.nvfp4.onnx", "--iterations", 1, "--json", "-").stdout)
    best = perfect(measured)
    baseline.write_text(json.dumps(best))
    result = at_home(
        "bench", "--engine", "unet.nvfp4.onnx", "--baseline", baseline, "--iterations", 1, "--results", "gate"
    )
    assert result.exit_code == 1
    assert list(Path("gate/lost").glob("*.png"))
    assert "AP, " in result.stderr
    assert "below the baseline's 100.00" in result.stderr
    assert "images that lost most (objects)" in result.stdout
    best["artifacts"][0].update(ap=None, miou=1.0)
    best["evidence"][0].update(kind="pixels", lines=["5/5/5"] * len(best["evidence"][0]["lines"]), classes=["a"])
    baseline.write_text(json.dumps(best))
    result = at_home("bench", "--engine", "unet.nvfp4.onnx", "--baseline", baseline, "--iterations", 1)
    assert result.exit_code == 2
    assert "different tasks" in result.stderr


@pytest.mark.parametrize("name", ["unet.nvfp4.onnx", "unet.nvfp4.fp4", "fp16.safetensors"])
def test_inspect_names_the_task(at_home: Invoke, name: str) -> None:
    result = at_home("inspect", name, "--json")
    assert result.exit_code == 0, result.stderr
    facts = json.loads(result.stdout)
    assert facts.get("card", facts)["task"] == "instance"
    assert at_home("inspect", name).exit_code == 0


def test_check_reads_the_head_from_the_card(at_home: Invoke) -> None:
    result = at_home("check", "runs/one/fp16/best.safetensors")
    assert result.exit_code == 0, result.stderr
    assert "head" in result.stdout


def test_resuming_a_finished_run_changes_nothing(at_home: Invoke, home: Path) -> None:
    before = (home / "runs/one/nvfp4/best.safetensors").read_bytes()
    result = at_home("train", "--resume", "--out", "runs/one")
    assert result.exit_code == 0, result.stderr
    assert "best AP" in result.stdout
    assert (home / "runs/one/nvfp4/best.safetensors").read_bytes() == before
    result = at_home("train", "--resume", "--out", "runs/one", "--task", "semantic")
    assert result.exit_code == 2
    assert "task: instance -> semantic" in result.stderr


def test_a_checkpoint_of_another_task_gives_one_clear_error(
    invoke: Invoke, home: Path, shapes: Path, checkpoint: Path
) -> None:
    start = ("train", "--data", shapes, "--models", "nvfp4", *TINY)
    result = invoke(*start, "--task", "instance", "--set", f"train.init_checkpoint={checkpoint}")
    assert result.exit_code == 2
    assert "was trained for the semantic task, and this run is for the instance task" in result.stderr
    trained = home / "runs" / "one" / "fp16" / "best.safetensors"
    result = invoke(*start, "--set", f"train.init_checkpoint={trained}")
    assert "was trained for the instance task, and this run is for the semantic task" in result.stderr
    result = invoke(
        *start, "--task", "instance", "--set", "instance.method=set", "--set", f"train.init_checkpoint={trained}"
    )
    assert result.exit_code == 2
    assert "has the head 'centres' and 7 semantic channels, and this run 'set' of 20 masks" in result.stderr
    assert not list(Path("runs").glob("*/*/best.safetensors"))


def test_options_of_instances_are_refused_for_semantic_models(invoke: Invoke, checkpoint: Path, shapes: Path) -> None:
    result = invoke("bench", "--engine", checkpoint, "--data", shapes, "--max-dets", 5)
    assert result.exit_code == 2
    assert "--max-dets is for instance models" in result.stderr


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("instance.method=centers", "instance.method"),
        ("instance.nms=4", "odd side"),
        ("instance.max_detections=0", "instance.max_detections"),
        ("instance.stuff=[rong]", "Did you mean 'ring'"),
        ("task=boxes", "task = boxes"),
    ],
)
def test_wrong_settings_are_named(invoke: Invoke, shapes: Path, setting: str, message: str) -> None:
    result = invoke("train", "--task", "instance", "--data", shapes, *TINY, "--set", setting)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_the_set_head_says_once_that_it_has_too_few_channels(invoke: Invoke, shapes: Path) -> None:
    result = invoke(
        "train", "--task", "instance", "--data", shapes, "--models", "fp16", *TINY,
        "--set", "instance.method=set", "--set", "instance.channels=2",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert result.stderr.count("more objects than the 2 mask channels") == 1
    (path,) = Path("runs").glob("*/fp16/best.safetensors")
    assert read_card(path).channels == 9
    bench = invoke("bench", "--iterations", 1)
    assert bench.exit_code == 0, bench.stderr
