"""data.repeat: an epoch has every training image several times, each time augmented otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fp4deploy.data import generate_shapes
from fp4deploy.runs import create_run
from fp4deploy.train import Config, load_config, train_models
from fp4deploy.train.batches import make_loaders
from fp4deploy.train.models import open_splits
from tests.train.small_network import SPEC

SETTINGS = ["data.height=32", "data.width=32", "train.batch_size=4", "train.epochs=1", "telemetry.every=0"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shapes") / "data"
    generate_shapes(folder, train=8, val=4, size=32, seed=0)
    return folder


def config_of(data: Path, repeat: int) -> Config:
    return load_config(None, [f"data.root={data}", f"model.spec={SPEC}", f"data.repeat={repeat}", *SETTINGS])


def test_an_epoch_has_each_image_as_often_and_validation_once(data: Path) -> None:
    train, val = open_splits(config_of(data, 3))
    loaders = make_loaders(config_of(data, 3), train, val)
    assert [len(loader) for loader in loaders] == [6, 1]
    loaders[0].sampler.set_epoch(0)  # type: ignore[attr-defined]
    assert sorted(index % 8 for _, index in loaders[0].sampler) == sorted([*range(8)] * 3)
    images = torch.cat([batch[0] for batch in loaders[0]])
    assert len({image.numpy().tobytes() for image in images}) == 24


def test_training_counts_the_repeated_images(data: Path, tmp_path: Path) -> None:
    run = create_run(tmp_path / "run")
    train_models(config_of(data, 2), run, ("fp16",))
    (line,) = [
        json.loads(line) for line in (run.model_dir("fp16") / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert line["step"] == 4
