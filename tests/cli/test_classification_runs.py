"""`--task classification` on folders of images, from `data check` to prediction and report; what it does not take."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fp4deploy.data.folders import FolderDataset
from fp4deploy.errors import InputError
from fp4deploy.models import read_card, spec
from fp4deploy.models.heads import ClassHead
from tests.cli.command_line import Invoke, run_in

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, 16, 4, 4), nn.Conv2d(16, 32, 1)
        self.head = nn.Linear(32, num_classes)

    def forward(self, x):
        return self.head(torch.relu(self.body(torch.relu(self.stem(x)))).mean((2, 3)))

def maps(num_classes):
    return nn.Conv2d(3, num_classes, 1)
"""
MODEL = ("--task", "classification", "--model", "net.py:Net")
TINY = (
    "--size", "16x16", "--set", "data.workers=0", "--set", "train.epochs=2", "--set", "train.finetune_epochs=1",
    "--set", "train.batch_size=8", "--set", "train.jitter=0", "--set", "train.lr=0.01", "--telemetry-every", "0",
)  # fmt: skip
COLOURS = {"apple": (200, 20, 20), "leaf": (20, 180, 30), "sky": (60, 90, 220)}
COUNTS = {"train": 8, "val": 4}


def forget() -> None:
    """A new process knows no names."""
    spec._named.clear()
    spec._expected.clear()


@pytest.fixture(autouse=True)
def _nothing_named() -> Iterator[None]:
    yield
    forget()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Noise in the colour of its class."""
    root, random = tmp_path_factory.mktemp("folders") / "data", np.random.default_rng(0)
    for split, count in COUNTS.items():
        for name, colour in COLOURS.items():
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = np.clip(random.normal(colour, 25, (20, 24, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def home(app: Any, tmp_path_factory: pytest.TempPathFactory, folders: Path) -> Path:
    """A folder in which commands trained, exported and reported classifiers."""
    home = tmp_path_factory.mktemp("home")
    (home / "net.py").write_text(NET)
    given = ("--data", str(folders), "--out", "runs/one", *MODEL, *TINY)
    files = [("export", "--format", form, "--images", "4", "--model", "net.py:Net") for form in ("onnx", "packed")]
    try:
        return run_in(home, app, ("train", *given), *files, ("report", "--model", "net.py:Net"))
    finally:
        forget()


def test_a_run_says_what_was_trained(home: Path) -> None:
    run = home / "runs" / "one"
    facts = json.loads((run / "report.json").read_text())
    assert facts["task"] == "classification"
    assert facts["models"]["nvfp4"]["top1"] > 0.9
    assert set(facts["models"]["nvfp4"]["per_class"]) == set(COLOURS)
    for text in ((run / "report.html").read_text(), (run / "report.md").read_text()):
        assert "top-1" in text
    card = read_card(run / "nvfp4" / "best.safetensors")
    assert card.task == "classification"
    assert card.head == ClassHead("label", 3)
    assert card.class_names == tuple(COLOURS)


def test_every_artefact_has_the_same_top1_and_passes_the_gate(at_home: Invoke, home: Path) -> None:
    files = ("nvfp4", "net.nvfp4.onnx", "net.nvfp4.fp4")
    engines = [part for name in files for part in ("--engine", name)]
    given = ("--model", "net.py:Net", "--iterations", 1, "--json", home / "bench.json")
    result = at_home("bench", *engines, *given, "--baseline", "nvfp4", "--max-drop", 1)
    assert result.exit_code == 0, result.stderr
    assert "Within 1 points of the baseline's" in result.stderr
    document = json.loads((home / "bench.json").read_text())
    assert {entry["top1"] for entry in document["artifacts"]} == {document["artifacts"][0]["top1"]}
    assert document["evidence"][0]["kind"] == "labels"
    kept = at_home(
        "bench",
        "--engine",
        "net.nvfp4.fp4",
        "--baseline",
        home / "bench.json",
        "--max-drop",
        0,
        "--baseline-artefact",
        "net.nvfp4.onnx",
    )
    assert kept.exit_code == 0, kept.stderr


def test_predictions_are_the_likeliest_classes(at_home: Invoke, home: Path, folders: Path, tmp_path: Path) -> None:
    result = at_home("predict", folders / "val" / "leaf", "--model", "net.nvfp4.onnx", "--out", tmp_path)
    assert result.exit_code == 0, result.stderr
    entries = json.loads((tmp_path / "predictions.json").read_text())["images"]
    assert [entry["classes"][0]["name"] for entry in entries] == ["leaf"] * 4
    assert [sum(each["score"] for each in entry["classes"]) for entry in entries] == pytest.approx([1] * 4)
    assert entries[0]["mask"] is None
    assert np.asarray(Image.open(tmp_path / entries[0]["overlay"])).shape == (20, 24, 3)
    assert "score" in result.stdout


def test_a_checkpoint_is_quantised_without_training(at_home: Invoke, home: Path, tmp_path: Path) -> None:
    given = ("--data", "--method", "gptq", "--out", tmp_path / "q.safetensors", "--model", "net.py:Net")
    data = json.loads((home / "runs" / "one" / "report.json").read_text())["data"]
    result = at_home("quantize", "runs/one/fp16/best.safetensors", given[0], data, *given[1:])
    assert result.exit_code == 0, result.stderr
    assert "% of the images; top-1" in result.stdout + result.stderr


def test_a_search_scores_placements_by_top1(at_home: Invoke, home: Path, tmp_path: Path) -> None:
    given = ("--budget", "drop=100", "--images", 4, "--out", tmp_path, "--model", "net.py:Net")
    result = at_home("search", "runs/one/fp16/best.safetensors", *given)
    assert result.exit_code == 0, result.stderr
    assert "top-1" in result.stdout
    document = json.loads((tmp_path / "search.json").read_text())
    assert document["fp16"]["top1"] > 0.9
    chosen = (document["chosen"][name] for name in ("layers", "w4a8", "fp8", "int8"))
    assert set().union(*chosen) == {"stem", "body", "head"}


def test_a_named_classifier_is_checked_before_training(at_home: Invoke) -> None:
    given = ("--classes", 3, "--size", "16x16", "--json")
    result = at_home("check", "net.py:Net", "--task", "classification", *given)
    assert result.exit_code == 0, result.stderr
    layers = {layer["name"]: layer["precision"] for layer in json.loads(result.stdout)["layers"]}
    assert layers == {"stem": "FP16", "body": "FP4", "head": "FP16"}


def test_defects_of_folders_are_listed(invoke: Invoke, folders: Path, tmp_path: Path) -> None:
    fine = invoke("data", "check", folders, "--task", "classification", "--json")
    assert fine.exit_code == 0, fine.stderr
    assert json.loads(fine.stdout)["splits"][1]["annotations"] == dict.fromkeys(COLOURS, COUNTS["val"])
    broken = shutil.copytree(folders, tmp_path / "broken")
    shutil.copytree(broken / "val" / "sky", broken / "val" / "cloud")
    shutil.rmtree(broken / "val" / "apple")
    (broken / "train" / "sky" / "0.png").write_bytes(b"no image")
    shutil.copy(broken / "train" / "leaf" / "0.png", broken / "val" / "leaf" / "copy.png")
    found = invoke("data", "check", broken, "--json")
    assert found.exit_code == 1
    kinds = {defect["kind"] for defect in json.loads(found.stdout)["defects"]}
    assert {"unknown-class", "missing-class", "shared-image"} < kinds
    assert len(kinds) == 4, "and the image that is none"
    with pytest.raises(InputError, match="class 'cloud', and training has not"):
        FolderDataset(broken, "val")


def test_what_does_not_go_together_says_so(invoke: Invoke, folders: Path, tmp_path: Path, shapes: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    for given, message in {
        ("--data", folders): "--task classification",
        ("--data", shapes, "--task", "classification"): "no folders of two classes",
        ("--data", folders, "--task", "classification"): "a classifier one class an image. Take timm:NAME, hf:NAME",
        (
            "--data",
            folders,
            "--task",
            "classification",
            "--model",
            "net.py:maps",
            "--size",
            "16x16",
        ): "logits of images",
        ("--data", folders, *MODEL, "--set", "augment.mosaic=0.5"): "one class an image",
    }.items():
        forget()
        result = invoke("train", *given, "--out", tmp_path / "run")
        assert result.exit_code == 2, (given, result.stderr)
        assert message in result.stderr, (given, result.stderr)
