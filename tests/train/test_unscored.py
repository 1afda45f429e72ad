"""A validation split in which nothing can be scored: it is said, and the last weights are kept."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors import safe_open

from fp4deploy.runs import create_run
from fp4deploy.train import Config, train_models, with_settings
from fp4deploy.train.logging.running_statistics import EpochStatistics

CROWD = {"size": [32, 32], "counts": [0, 32 * 32]}  # the whole image: every pixel is ignored


def without_scores(data: Path, folder: Path) -> Path:
    shutil.copytree(data, folder)
    path = folder / "annotations" / "instances_val2017.json"
    content = json.loads(path.read_text())
    category = content["categories"][0]["id"]
    content["annotations"] = [
        {"id": number, "image_id": image["id"], "category_id": category, "iscrowd": 1, "segmentation": CROWD,
         "area": 32 * 32, "bbox": [0, 0, 32, 32]}
        for number, image in enumerate(content["images"], start=1)
    ]  # fmt: skip
    path.write_text(json.dumps(content))
    return folder


def test_the_last_weights_are_kept_and_it_is_said(
    tiny_data: Path, tiny: Config, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = with_settings(tiny, [f"data.root={without_scores(tiny_data, tmp_path / 'data')}"])
    run = create_run(tmp_path / "run")
    result = train_models(config, run, ("fp16",))["fp16"]
    with safe_open(run.checkpoint("fp16"), framework="pt") as file:
        assert file.metadata()["fp4deploy.epoch"] == "2"
    lines = [json.loads(line) for line in (run.model_dir("fp16") / "metrics.jsonl").read_text().splitlines()]
    assert [(line["epoch"], line["miou"]) for line in lines] == [(1, None), (2, None)]
    assert not result.best_score >= 0
    assert capfd.readouterr().err.count("the validation split has no miou: nothing in it can be scored") == 2


def test_of_equal_scores_the_first_is_the_best(tiny: Config, tmp_path: Path) -> None:
    """As the history of a run says: what is trained longer has to be better to be kept."""
    run = create_run(tmp_path / "run")
    train_models(with_settings(tiny, ["train.lr=1e-30", "train.epochs=3"]), run, ("fp16",))
    lines = [json.loads(line) for line in (run.model_dir("fp16") / "metrics.jsonl").read_text().splitlines()]
    assert len({line["miou"] for line in lines}) == 1
    with safe_open(run.checkpoint("fp16"), framework="pt") as file:
        assert file.metadata()["fp4deploy.epoch"] == "1"


@pytest.mark.parametrize(("loss", "batches", "said"), [(0.0, 3, True), (1e-9, 3, False), (0.0, 0, False)])
def test_a_loss_of_0_is_no_success(loss: float, batches: int, said: bool) -> None:
    warning = EpochStatistics(loss=loss, batches=batches).warning()
    assert ("nothing was learned" in str(warning)) == said
