"""Frames to masks on one device: Pillow's bytes, `predict`'s masks, in order, and what each part took."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from cli.commands.stages.pipeline import _images
from fp4deploy.bench.environment import cpu_name
from fp4deploy.bench.runtimes.open import open_runtime
from fp4deploy.bench.runtimes.packed import PackedRuntime
from fp4deploy.bench.runtimes.pytorch import TorchRuntime
from fp4deploy.data import EvalTransform
from fp4deploy.data.augmentation.transforms import scale_and_offset
from fp4deploy.data.sample import Sample, class_type
from fp4deploy.errors import InputError
from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.models.heads import ClassHead, InstanceHead
from fp4deploy.packed import write_packed
from fp4deploy.packed.network import packed_form
from fp4deploy.plugins.frames.class_map import class_map_reference
from fp4deploy.plugins.quantize.input_encoding import packed_image
from fp4deploy.predict import pipeline as module
from fp4deploy.predict.pipeline import PARTS, PartTimes, Pipeline, classes_of, frames_of
from fp4deploy.predict.predictor import Predictor
from fp4deploy.runs import Run
from tests.contract.invoke import fp4deploy
from tests.packed.small_networks import packed


def frames(count: int, height: int, width: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(height).integers(0, 256, (count, height, width, 3), np.uint8))


@pytest.mark.parametrize("tile", [False, True])
def test_a_batch_of_nothing_has_no_predictions(untrained: Run, tile: bool) -> None:
    predictor, image = Predictor(open_runtime(untrained.checkpoint("nvfp4")), tile=tile), frames(1, 40, 50).numpy()[0]
    assert [len(found) for found in predictor.predict_batches([[image], [], [image, image]])] == [1, 0, 2]


@pytest.mark.parametrize("suffix", ["safetensors", "fp4", "onnx"])
def test_masks_are_of_the_evaluated_network(untrained: Run, suffix: str) -> None:
    """Bit for bit: resized by the transform of `bench`, in the same batches, and enlarged as `class_map` defines it."""
    path = {
        "safetensors": untrained.checkpoint("nvfp4"),
        "fp4": untrained.exported("nvfp4").with_suffix(".fp4"),
        "onnx": untrained.exported("nvfp4").with_suffix(".portable.onnx"),
    }[suffix]
    runtime = open_runtime(path)
    card, pipeline = runtime.card, Pipeline(runtime)
    transform = EvalTransform(*card.size, card.mean, card.std)
    first, others = list(frames(2, 50, 70).numpy()), list(frames(2, 33, 20).numpy())
    batches = [first, frames(2, 50, 70) // 2, [first[0], *others, first[1]], others[:1]]
    found = list(pipeline(batches))
    assert [each.sizes for each in found] == [[each.shape[:2] for each in batch] for batch in batches]
    for batch, answer in zip(batches, found, strict=True):
        inputs = [transform(Sample(np.asarray(each), np.zeros(each.shape[:2], np.uint8), ""))[0] for each in batch]
        logits = torch.from_numpy(runtime.infer(torch.stack(inputs).numpy()))
        assert answer.channels == logits.shape[1]
        for each, size, mask in zip(logits, answer.sizes, answer.outputs, strict=True):
            assert mask is not None
            assert mask.dtype == np.uint8
            assert np.array_equal(mask, class_map_reference(each[None], size, torch.uint8)[0].numpy())


def test_only_the_frame_without_an_answer_has_none(untrained: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (float("nan"), float("inf"), float("-inf")):
        runtime = open_runtime(untrained.checkpoint("fp16"))
        whole = runtime.on_device

        def spoiled(images: torch.Tensor, number: float = number, whole: Any = whole) -> torch.Tensor:
            logits = whole(images).clone()
            logits[1, -1, 3, 5] = number
            return logits

        good = next(iter(Pipeline(runtime)([frames(3, 20, 30)]))).outputs
        monkeypatch.setattr(runtime, "on_device", spoiled)
        found = next(iter(Pipeline(runtime)([frames(3, 20, 30)]))).outputs
        assert [each is None for each in found] == [False, True, False]
        assert np.array_equal(found[2], good[2])


def test_outputs_of_another_kind_come_as_they_are(untrained: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = open_runtime(untrained.checkpoint("fp16"))
    monkeypatch.setattr(runtime, "card", replace(runtime.card, head=InstanceHead("centres", 2)))
    (found,) = Pipeline(runtime)([frames(2, 20, 30)])
    height, width = runtime.card.size
    assert [each.shape for each in found.outputs] == [(found.channels, height, width)] * 2
    assert found.outputs[0].dtype == np.float32
    assert not np.array_equal(*found.outputs)


def test_every_part_is_timed_from_the_command_line(untrained: Run, tmp_path: Path) -> None:
    for name, split, size in (("a", "test", (40, 56)), ("b", "train", (33, 20)), ("c", "train", (33, 20))):
        for kind in ("images", "masks"):
            (tmp_path / kind / split).mkdir(parents=True, exist_ok=True)
        Image.fromarray(frames(1, *size)[0].numpy()).save(tmp_path / "images" / split / f"{name}.png")
        Image.new("L", size[::-1]).save(tmp_path / "masks" / split / f"{name}.png")
    assert _images(tmp_path, "test")[1] == 1  # no mask, and none of another split
    command = ("bench", untrained.checkpoint("fp16"), "--pipeline", "--batch", 3, "--data", tmp_path, "--split", "test")
    done = fp4deploy(*command, "--json", "-", folder=tmp_path)
    assert done.code == 0, done.stderr
    document = json.loads(done.stdout)
    (row,) = document["pipeline"]
    assert (document["height"], document["width"], row["batch"]) == (40, 56, 3)
    assert set(row["share"]) == set(PARTS)
    assert sum(row["share"].values()) == pytest.approx(1)
    if not torch.cuda.is_available():
        assert row["ms"].pop("overlapped") is None
        assert row["images_per_s"] == pytest.approx(3000 / sum(row["ms"].values()))
        assert set(row["devices"].values()) == {cpu_name()}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--limit", 2, "--iterations", 7), "--pipeline takes no --limit, --iterations"),
        (("--max-dets", 2, "--results", "kept", "--max-drop", 1), "--max-drop"),
        (("--data", "clip.mp4"), "is a video"),
        (("--data", ".", "--split", "test"), "--split is of a data set"),
    ],
)
def test_what_does_not_apply_is_refused(
    untrained: Run, tmp_path: Path, options: tuple[object, ...], expected: str
) -> None:
    (tmp_path / "clip.mp4").touch()
    Image.new("RGB", (9, 8)).save(tmp_path / "a.png")
    done = fp4deploy("bench", untrained.checkpoint("fp16"), "--pipeline", *options, folder=tmp_path)
    assert done.code == 2, done.stderr
    assert expected in " ".join(done.stderr.split())


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


def digits(path: Path) -> PackedRuntime:
    """A network that reads its image as FP4 terms, whose activations are codes, as on a GPU."""
    write_packed(replace(packed("nvfp4_qat", 0.25, True, True)[1], path=path))
    runtime = PackedRuntime(path)
    runtime._network.network.pack = packed_form
    return runtime


def test_a_runtime_takes_images_that_are_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, x = digits(tmp_path / "digits.fp4"), torch.randn(2, 3, 32, 32)
    amax = runtime.image_amax
    assert amax is not None
    assert torch.equal(runtime.on_device(packed_image(x, amax)), runtime.on_device(x))
    with pytest.raises(InputError, match="multiples of 4"):
        runtime.on_device(packed_image(x[..., 1:], amax))
    port = replace(runtime.inputs[0], extents=(4, *runtime.inputs[0].extents[1:]))  # type: ignore[index]
    monkeypatch.setattr(runtime, "inputs", (port,))
    assert runtime.image_amax is None
    with pytest.raises(InputError, match="takes float32 .4, 3"):
        runtime.on_device(packed_image(x, amax))


def test_frames_are_packed_for_a_network_that_reads_them_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: of several sizes one operand, that of their images."""
    runtime = digits(tmp_path / "digits.fp4")
    pipeline, host = Pipeline(runtime), torch.device("cpu")
    monkeypatch.setattr(pipeline, "device", SimpleNamespace(type="cuda"))
    monkeypatch.setattr(module, "scale_and_offset", lambda _, *given: scale_and_offset(host, *given))
    for runs in ([frames(2, 50, 70)], [frames(2, 50, 70), frames(1, 33, 20)]):
        operand = pipeline._prepare(runs)
        assert isinstance(operand, Nvfp4Tensor)
        pipeline._amax = None
        images = pipeline._prepare(runs)
        assert isinstance(images, torch.Tensor)
        pipeline._amax = runtime.image_amax
        assert torch.equal(operand.codes, packed_image(images, operand.amax).codes)
        assert torch.equal(runtime.on_device(operand), runtime.on_device(images))


def test_fewer_images_than_a_batch() -> None:
    found = frames_of(list(frames(2, 8, 9).numpy()).__getitem__, 2, 3)
    assert torch.equal(found, frames(2, 8, 9)[[0, 1, 0]])
    with pytest.raises(InputError, match="no image"):
        frames_of([].__getitem__, 0, 3)


@pytest.mark.parametrize("classes", [255, 256, 2**15 + 1])
def test_masks_have_the_type_of_the_classes(classes: int) -> None:
    logits = torch.zeros(1, classes, 1, 1)
    logits[:, -1] = 1
    found = classes_of(logits, (2, 3)).numpy()
    assert (found.dtype, found.max()) == (class_type(classes), classes - 1)


def test_models_without_a_map_of_classes(untrained: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = open_runtime(untrained.checkpoint("fp16"))
    monkeypatch.setattr(runtime, "card", replace(runtime.card, head=ClassHead("label", 3)))
    with pytest.raises(InputError, match="is of another output"):
        Pipeline(runtime).times(frames(2, 8, 9), 1)


def test_outputs_that_are_no_map(untrained: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a packed classifier without a card: only its output says so."""
    runtime = open_runtime(untrained.checkpoint("fp16"))
    monkeypatch.setattr(runtime, "on_device", lambda images: images.mean((2, 3)))
    with pytest.raises(InputError, match=r"output is \[2, 3\]"):
        Pipeline(runtime).times(frames(2, 8, 9), 1)


@pytest.mark.parametrize("overlapped", [None, 2.5, 10.0])
def test_throughput_is_of_what_is_waited_for(overlapped: float | None) -> None:
    """Of all parts one after another, or of the same overlapped; shares are of the parts."""
    parts = dict(zip(PARTS, (1.0, 2.0, 4.0, 0.5, 0.5), strict=True))
    found = PartTimes(parts, overlapped, 8).to_json()
    whole = overlapped or 8.0
    assert (found["images_per_s"], found["over_network"]) == (pytest.approx(8000 / whole), whole / parts["network"])
    assert found["share"] == {part: value / 8.0 for part, value in parts.items()}
    assert (found["batch"], found["ms"]) == (8, {**parts, "overlapped": overlapped})
