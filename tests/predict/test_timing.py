"""Latency from file to mask, by stage."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fp4deploy.errors import InputError
from fp4deploy.predict.decode import PILLOW
from fp4deploy.predict.predictor import load
from fp4deploy.predict.timing import STAGES, stage_times
from fp4deploy.runs import Run
from tests.contract.invoke import fp4deploy


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{number}.png" for number in range(3)]
    for number, path in enumerate(paths):
        pixels = np.random.default_rng(number).integers(0, 255, (40 + number, 56, 3), np.uint8)
        Image.fromarray(pixels).save(path)
    return paths


def test_every_stage_is_timed(untrained: Run, photos: list[Path]) -> None:
    found, decoders = stage_times(load(untrained.checkpoint("fp16")), photos)
    assert decoders == {PILLOW: len(photos)}
    assert [row.stage for row in found] == list(STAGES)
    assert all(0 < row.p50 <= row.p90 <= row.p99 for row in found)
    assert found[-1].p99 >= max(row.p99 for row in found[:-1])


def test_no_image(untrained: Run) -> None:
    with pytest.raises(InputError, match="no image to time"):
        stage_times(load(untrained.checkpoint("fp16")), [])


def test_the_command_writes_no_masks(untrained: Run, photos: list[Path], tmp_path: Path) -> None:
    done = fp4deploy(
        "predict", *photos, "--model", untrained.checkpoint("fp16"), "--times", "--json", folder=tmp_path
    )  # fmt: skip
    assert done.code == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["images"], found["decoders"]) == (len(photos), {PILLOW: len(photos)})
    assert [row["stage"] for row in found["stages"]] == list(STAGES)
    assert not (tmp_path / "predictions").exists()
