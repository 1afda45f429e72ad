"""Frames to masks on a GPU: bit for bit what the host makes of the same logits, overlapped, from several threads."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fp4deploy.bench.runtimes.open import open_runtime
from fp4deploy.data import EvalTransform, LetterboxTransform
from fp4deploy.data.sample import Sample
from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.models.boxes import DetectionHead
from fp4deploy.models.heads import InstanceHead
from fp4deploy.packed import write_packed
from fp4deploy.plugins import available
from fp4deploy.plugins.frames import class_map, prepare
from fp4deploy.plugins.quantize import input_encoding
from fp4deploy.predict.pipeline import AHEAD, Pipeline
from fp4deploy.predict.predictor import Predictor
from fp4deploy.predict.sources import find_sources
from fp4deploy.predict.write import predict_files
from fp4deploy.runs import Run
from tests.packed.small_networks import packed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not available(), reason="no NVIDIA GPU that kernels run on"),
]

SIZES = [(50, 70), (33, 20), (480, 640), (64, 64), (20, 300)]
SLEEP = 2_000_000_000  # cycles: about a second


def pixels(count: int, size: tuple[int, int], seed: int = 0) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).integers(0, 256, (count, *size, 3), np.uint8))


def by_host(runtime: Any, images: list[np.ndarray], kind: type[EvalTransform] = EvalTransform) -> list[np.ndarray]:
    """Masks of one batch, resized by Pillow, of the logits that come to the host."""
    card = runtime.card
    transform = kind(*card.size, card.mean, card.std)
    inputs = [transform(Sample(each, np.zeros(each.shape[:2], np.uint8), ""))[0] for each in images]
    logits = torch.from_numpy(runtime.infer(torch.stack(inputs).numpy()))
    return [
        class_map.class_map_reference(each[None], image.shape[:2], torch.uint8)[0].numpy()
        for each, image in zip(logits, images, strict=True)
    ]


def opened(run: Run, suffix: str) -> Any:
    if suffix == "digits":  # the image is read as FP4 terms
        path = run.exported("nvfp4").parents[2] / "digits.fp4"
        if not path.exists():
            write_packed(replace(packed("nvfp4_qat", 0.25, True, True)[1], path=path))
        return open_runtime(path)
    return open_runtime({"fp4": run.exported("nvfp4").with_suffix(".fp4")}.get(suffix, run.checkpoint(suffix)))


@pytest.mark.parametrize("suffix", ["fp16", "nvfp4", "fp4", "digits"])
def test_masks_are_those_of_the_host(untrained: Run, suffix: str) -> None:
    runtime = opened(untrained, suffix)
    batches = [pixels(3, size, number) for number, size in enumerate(SIZES)]
    batches.append([batch[0] for batch in batches] + pixels(2, (41, 43)))
    found = list(Predictor(runtime).predict_batches(batches))
    for batch, predictions in zip(batches, found, strict=True):
        for mask, prediction in zip(by_host(runtime, batch), predictions, strict=True):
            assert np.array_equal(mask, prediction.mask)  # type: ignore[union-attr]
    for fallback in (class_map.fallback, prepare.fallback, prepare.packed_fallback, input_encoding.fallback):
        assert not fallback.missed(torch.device("cuda"))
        assert not fallback.refused(torch.device("cuda"))


@pytest.mark.parametrize("graphs", ["on", "off"])
def test_frames_are_packed_for_a_network_that_reads_them_so(
    untrained: Run, graphs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No image is written; logits are those of images, bit for bit."""
    monkeypatch.setenv("FP4DEPLOY_GRAPHS", graphs)
    runtime, seen = opened(untrained, "digits"), []
    whole, batches = runtime.on_device, [pixels(3, (50, 70)), [pixels(1, size)[0] for size in SIZES]]

    def logits(operand: Nvfp4Tensor) -> torch.Tensor:
        seen.append(whole(operand).clone())
        return seen[-1]

    monkeypatch.setattr(runtime, "on_device", logits)
    pipeline = Pipeline(runtime)
    monkeypatch.setattr("fp4deploy.predict.pipeline.prepare", None)
    found = [each.outputs for each in pipeline(batches)]
    monkeypatch.undo()
    transform = EvalTransform(*runtime.card.size, runtime.card.mean, runtime.card.std)
    for batch, given, masks in zip(batches, seen, found, strict=True):
        inputs = [transform(Sample(each, np.zeros(each.shape[:2], np.uint8), ""))[0] for each in batch]
        assert torch.equal(given, runtime.on_device(torch.stack(inputs).cuda()))
        assert all(mask is not None for mask in masks)


def test_frames_of_a_network_that_may_be_compiled_are_images(untrained: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert opened(untrained, "digits").image_amax is not None
    monkeypatch.setenv("FP4DEPLOY_COMPILE", "on")
    assert opened(untrained, "digits").image_amax is None
    assert opened(untrained, "fp4").image_amax is None


def test_a_letterboxed_frame_is_what_the_host_prepares(untrained: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, seen = opened(untrained, "fp16"), []
    whole = runtime.on_device
    head = DetectionHead("fcos", classes=3)
    monkeypatch.setattr(runtime, "card", replace(runtime.card, task="detection", head=head))
    monkeypatch.setattr(runtime, "on_device", lambda images: (seen.append(images.cpu()), whole(images))[1])
    images = [pixels(1, size)[0] for size in SIZES]
    (answer,) = Pipeline(runtime)([images])
    transform = LetterboxTransform(*runtime.card.size, runtime.card.mean, runtime.card.std)
    expected = [transform(Sample(each, np.zeros(each.shape[:2], np.uint8), ""))[0] for each in images]
    assert torch.equal(seen[0], torch.stack(expected))
    assert all(output is not None and output.dtype == np.float32 for output in answer.outputs)


@pytest.mark.parametrize("suffix", ["fp16", "fp4", "digits"])
def test_batches_are_read_while_the_gpu_is_busy(untrained: Run, suffix: str) -> None:
    """Nothing waits for the GPU before `AHEAD` batches are behind it: neither masks nor whether they are finite."""
    pipeline = Pipeline(opened(untrained, suffix))
    images = [pixels(2, (50, 70), seed) for seed in range(AHEAD + 3)]
    expected = [next(each.outputs for each in pipeline([batch])) for batch in images]
    list(pipeline(images))  # pinned memory for all that are in flight
    busy, asked = torch.cuda.Event(), []

    def batches() -> Iterator[list[np.ndarray]]:
        for batch in images:
            asked.append(not busy.query())
            yield batch

    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP)
    busy.record()
    found = [each.outputs for each in pipeline(batches())]
    assert asked[: AHEAD + 1] == [True] * (AHEAD + 1)
    for masks, wanted in zip(found, expected, strict=True):
        assert all(np.array_equal(*each) for each in zip(masks, wanted, strict=True))


def test_outputs_are_copied_before_the_next_call_overwrites_them(
    untrained: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a network whose output is float32 in memory of its own, as of a CUDA graph, and large."""
    runtime = opened(untrained, "fp16")
    monkeypatch.setattr(runtime, "card", replace(runtime.card, head=InstanceHead("centres", 2)))
    static, calls = torch.zeros(2, 30, 512, 512, device="cuda"), iter(range(100))
    monkeypatch.setattr(runtime, "on_device", lambda images: static.fill_(next(calls)))
    found = list(Pipeline(runtime)([pixels(2, (50, 70))] * 12))
    assert [{float(value) for each in answer.outputs for value in (each.min(), each.max())} for answer in found] == [  # type: ignore[union-attr]
        {float(number)} for number in range(12)
    ]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_an_image_without_an_answer_is_named(
    untrained: Run, number: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = opened(untrained, "fp4")
    for name, each in zip("abc", pixels(3, (50, 70)), strict=True):
        Image.fromarray(each).save(tmp_path / f"{name}.png")
    sources, whole = find_sources([str(tmp_path)]), runtime.on_device
    good, _ = predict_files(Predictor(runtime), Path("m"), sources, tmp_path / "good", 3, overlays=False)

    def spoiled(images: torch.Tensor) -> torch.Tensor:
        logits = whole(images).clone()
        logits[1, -1, 3, 5] = number
        return logits

    monkeypatch.setattr(runtime, "on_device", spoiled)
    found, failures = predict_files(Predictor(runtime), Path("m"), sources, tmp_path / "bad", 3, overlays=False)
    assert len(failures) == 1
    assert "b.png: The network answers NaN or Inf" in failures[0]
    assert [entry.get("classes") for entry in found["images"]] == [  # type: ignore[union-attr, attr-defined]
        None if name == "b" else entry["classes"]
        for name, entry in zip("abc", good["images"], strict=True)  # type: ignore[call-overload]
    ]
    assert not (tmp_path / "bad" / "b.mask.png").exists()


@pytest.mark.parametrize("own_streams", [False, True])
@pytest.mark.parametrize("suffix", ["fp16", "fp4", "digits"])
def test_threads_share_a_predictor(untrained: Run, suffix: str, own_streams: bool) -> None:
    predictor = Predictor(opened(untrained, suffix))
    batches = [pixels(2, size, seed) for size in SIZES[:3] for seed in range(6)]
    expected = [[each.mask for each in predictor.predict_batch(batch)] for batch in batches]

    def repeated(start: int) -> bool:
        with torch.cuda.stream(torch.cuda.Stream() if own_streams else None):
            order = [(start + at) % len(batches) for at in range(len(batches))]
            found = predictor.predict_batches(batches[at] for at in order)
            return all(
                np.array_equal(mask, each.mask)  # type: ignore[union-attr]
                for at, predictions in zip(order, found, strict=True)
                for mask, each in zip(expected[at], predictions, strict=True)
            )

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(repeated, range(8)))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("suffix", ["nvfp4", "fp4", "digits"])
def test_graphs_are_captured_while_other_threads_predict(untrained: Run, suffix: str) -> None:
    """A batch of another size is another graph, and the last one of a folder is smaller."""
    batches = [pixels(count, (50, 70), count) for count in (1, 2, 3, 4)]
    expected = [[each.mask for each in Predictor(opened(untrained, suffix)).predict_batch(batch)] for batch in batches]
    predictor = Predictor(opened(untrained, suffix))

    def predicted(start: int) -> bool:
        order = [(start + at) % len(batches) for at in range(len(batches))] * 5
        found = predictor.predict_batches(batches[at] for at in order)
        return all(
            np.array_equal(mask, each.mask)  # type: ignore[union-attr]
            for at, predictions in zip(order, found, strict=True)
            for mask, each in zip(expected[at], predictions, strict=True)
        )

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(predicted, range(4)))
