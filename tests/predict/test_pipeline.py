"""Frames to masks on one device: Pillow's bytes, `predict`'s masks, in order, and what each part took."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fp4deploy.bench.runtimes.open import open_runtime
from fp4deploy.bench.runtimes.pytorch import TorchRuntime
from fp4deploy.errors import InputError
from fp4deploy.models.heads import ClassHead
from fp4deploy.predict.pipeline import AHEAD, PARTS, Pipeline, frames_of, resized
from fp4deploy.predict.predictor import load
from fp4deploy.runs import Run
from tests.contract.invoke import fp4deploy


def frames(count: int, height: int, width: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(height).integers(0, 256, (count, height, width, 3), np.uint8))


@pytest.mark.parametrize(
    ("size", "target"),
    [((97, 131), (32, 48)), ((480, 640), (352, 480)), ((30, 41), (64, 96)), ((64, 50), (64, 32)), ((7, 9), (3, 1))],
)
def test_frames_are_resized_as_by_pillow(size: tuple[int, int], target: tuple[int, int]) -> None:
    given = frames(2, *size)
    images = [Image.fromarray(each.numpy()).resize(target[::-1], Image.Resampling.BILINEAR) for each in given]
    assert torch.equal(resized(given, target), torch.from_numpy(np.stack([np.asarray(each) for each in images])))


@pytest.mark.parametrize("suffix", ["safetensors", "fp4", "onnx"])
def test_masks_are_those_of_predict(untrained: Run, suffix: str) -> None:
    path = {
        "safetensors": untrained.checkpoint("nvfp4"),
        "fp4": untrained.exported("nvfp4").with_suffix(".fp4"),
        "onnx": untrained.exported("nvfp4").with_suffix(".portable.onnx"),
    }[suffix]
    batches = [frames(2, 50, 70) // (number + 1) for number in range(AHEAD + 2)]
    found = list(Pipeline(open_runtime(path))(batches))
    expected = [each.mask for batch in batches for each in load(path).predict_batch(list(batch.numpy()))]
    assert found[0].dtype == torch.uint8
    assert np.mean(torch.cat(found).numpy() != np.stack(expected)) < 1e-3  # sums of another order, at a tie


def test_every_part_is_timed_from_the_command_line(untrained: Run, tmp_path: Path) -> None:
    for number, size in enumerate([(40, 56), (40, 56), (33, 20)]):
        Image.fromarray(frames(1, *size)[0].numpy()).save(tmp_path / f"{number}.png")
    command = ("bench", untrained.checkpoint("fp16"), "--pipeline", "--batch", 3, "--data", tmp_path, "--json")
    done = fp4deploy(*command, "-", folder=tmp_path)
    assert done.code == 0, done.stderr
    document = json.loads(done.stdout)
    (row,) = document["pipeline"]
    assert (document["height"], document["width"], row["batch"]) == (40, 56, 3)
    assert set(row["share"]) == set(PARTS)
    assert sum(row["share"].values()) == pytest.approx(1)
    assert row["images_per_s"] == pytest.approx(3000 / row["ms"]["overlapped"])
    assert row["images_per_s_with_decoding"] <= row["images_per_s"]


def test_a_captured_checkpoint_runs_inside_and_outside_of_inference_mode(
    untrained: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where a form other than eager copies into the input of its graph."""
    runtime = TorchRuntime(untrained.checkpoint("fp16"))
    monkeypatch.setattr(runtime, "_graph", True)
    monkeypatch.setattr("fp4deploy.bench.runtimes.pytorch.captured", lambda call, device: call)
    x = torch.randn(1, 3, 32, 48)
    with torch.inference_mode():
        assert torch.equal(runtime.on_device(x.clone()), torch.from_numpy(runtime.infer(x.numpy())))
    for each in (x, -x):
        assert torch.equal(runtime.on_device(each), torch.from_numpy(runtime.infer(each.numpy())))


def test_fewer_images_than_a_batch(tmp_path: Path) -> None:
    Image.fromarray(frames(1, 8, 9)[0].numpy()).save(tmp_path / "a.png")
    found, milliseconds = frames_of([tmp_path / "a.png"], 3)
    assert found.shape == (3, 8, 9, 3)
    assert milliseconds > 0


def test_models_without_a_map_of_classes(untrained: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = open_runtime(untrained.checkpoint("fp16"))
    monkeypatch.setattr(runtime, "card", replace(runtime.card, head=ClassHead("label", 3)))
    with pytest.raises(InputError, match="another output"):
        Pipeline(runtime)
