"""The app in this process and in a process of its own."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.cli.command_line import ENVIRONMENT, PACKAGE, Invoke
from tests.contract.internals import short_measurements


@pytest.fixture(scope="session", autouse=True)
def _short_measurements() -> Iterator[None]:
    """What is timed here is also tested in tests/bench."""
    with short_measurements():
        yield


@pytest.fixture(scope="session")
def app() -> Any:
    """The Typer app."""
    return importlib.import_module(f"{PACKAGE}.main").app


@pytest.fixture
def invoke(app: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Run one command in an empty folder; the result has exit_code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()

    def call(*arguments: object) -> Any:
        return runner.invoke(app, [str(argument) for argument in arguments], prog_name="fp4deploy")

    return call


@pytest.fixture
def process(tmp_path: Path) -> Invoke:
    """Run one command in a process of its own."""

    def call(
        *arguments: object, python: tuple[str, ...] = (), cwd: Path = tmp_path
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *python, "-m", PACKAGE, *map(str, arguments)]
        return subprocess.run(
            command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=240, check=False
        )

    return call


@pytest.fixture(scope="session")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight training and four validation scenes of 32 x 32 pixels."""
    from fp4deploy.data import generate_shapes

    folder = tmp_path_factory.mktemp("data") / "shapes"
    generate_shapes(folder, train=8, val=4, size=32, seed=0)
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, shapes: Path) -> Path:
    """An untrained FP16 checkpoint of scale 0.125."""
    from fp4deploy.data import IMAGE_MEAN, IMAGE_STD, open_dataset
    from fp4deploy.models import ModelCard, build_unet, save_checkpoint

    names = open_dataset(shapes, "val").class_names
    path = tmp_path_factory.mktemp("checkpoints") / "best.safetensors"
    card = ModelCard("fp16", 0.125, names, 32, 48, IMAGE_MEAN, IMAGE_STD, True)
    save_checkpoint(path, build_unet(len(names), 0.125), card)
    return path


@pytest.fixture
def at_home(home: Path, app: Any, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Run one command in `home`, the folder that a test file fills once."""
    monkeypatch.chdir(home)
    return lambda *arguments: CliRunner().invoke(app, [str(part) for part in arguments], prog_name="fp4deploy")
