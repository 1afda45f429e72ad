"""A tiny set of generated shapes and a configuration that trains on it in a second."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp4deploy.data import generate_shapes
from fp4deploy.train import Config, load_config

TINY = (
    "model.scale=0.125",
    "data.height=32",
    "data.width=32",
    "train.epochs=2",
    "train.finetune_epochs=2",
    "train.batch_size=4",
)


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "data"
    generate_shapes(folder, train=8, val=4, size=32, seed=0)
    return folder


@pytest.fixture(scope="session")
def tiny(tiny_data: Path) -> Config:
    return load_config(None, [f"data.root={tiny_data}", *TINY])
