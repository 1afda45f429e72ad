"""Frames as a network reads them: Pillow's bytes, the padding of a letterbox, and the host's normalisation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fp4deploy.data import EvalTransform, LetterboxTransform
from fp4deploy.data.augmentation.transforms import scale_and_offset
from fp4deploy.data.sample import IMAGE_MEAN, IMAGE_STD, Sample
from fp4deploy.errors import UnavailableError
from fp4deploy.formats import quantize_nvfp4
from fp4deploy.models.input_encoding import encode_input
from fp4deploy.plugins.frames import prepare as module
from fp4deploy.plugins.frames.prepare import prepare, prepare_and_pack, prepare_kernel, resized, supports
from fp4deploy.plugins.quantize.input_encoding import packed_image
from fp4deploy.plugins.runtime.fallback import Fallback

SIZES = [
    *[((97, 131), (32, 48)), ((480, 640), (352, 480)), ((30, 41), (64, 96)), ((64, 50), (64, 32)), ((7, 9), (3, 1))],
    *[((100, 90), (60, 100)), ((64, 48), (51, 52)), ((50, 37), (48, 48)), ((60, 50), (40, 40)), ((61, 50), (40, 40))],
]


def frames(count: int, height: int, width: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(height).integers(0, 256, (count, height, width, 3), np.uint8))


@pytest.mark.parametrize(("size", "target"), SIZES)
def test_frames_are_resized_as_by_pillow(size: tuple[int, int], target: tuple[int, int]) -> None:
    given = frames(2, *size)
    images = [Image.fromarray(each.numpy()).resize(target[::-1], Image.Resampling.BILINEAR) for each in given]
    assert torch.equal(resized(given, target), torch.from_numpy(np.stack([np.asarray(each) for each in images])))


@pytest.mark.parametrize("kind", [EvalTransform, LetterboxTransform])
@pytest.mark.parametrize(("size", "target"), SIZES)
def test_a_network_reads_what_it_was_evaluated_on(
    kind: type[EvalTransform], size: tuple[int, int], target: tuple[int, int]
) -> None:
    """Bit for bit."""
    transform, given = kind(*target), frames(1, *size)
    (expected, _) = transform(Sample(given[0].numpy(), np.zeros(size, np.uint8), ""))
    normalisation = scale_and_offset(given.device, IMAGE_MEAN, IMAGE_STD)
    found = prepare(given, target, transform.part(size), transform.padding, *normalisation)
    assert torch.equal(found, expected[None])


def test_what_the_kernel_takes() -> None:
    x = torch.empty(1, 4, 5, 3, dtype=torch.uint8, device="meta")
    assert supports(x, (5, 6))
    assert not supports(x[:0], (5, 6))
    assert not supports(x.expand(1 << 16, 4, 5, 3), (5, 6))
    assert not supports(torch.empty(1, 1 << 15, 1 << 15, 3, device="meta"), (5, 6))


def test_the_kernel_reads_whole_frames_and_writes_float32_whatever_the_default_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched: list[tuple[Any, ...]] = []

    class Recorder:
        def launch(self, *arguments: Any) -> None:
            launched.append(arguments[2:])

    monkeypatch.setattr(module, "kernel", lambda *_: Recorder())
    given = frames(2, 6, 5).permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        images = prepare_kernel(given, (4, 7), (4, 7), (0, 0, 0), torch.ones(3), torch.ones(3))
    finally:
        torch.set_default_dtype(default)
    read, written, down, across = launched[0][:4]
    assert written is images
    assert images.dtype == torch.float32
    assert read.is_contiguous()
    assert torch.equal(read, given)
    assert down.dtype == across.dtype == torch.int32


@pytest.mark.parametrize(("size", "target"), SIZES)
def test_an_operand_is_that_of_the_prepared_image(size: tuple[int, int], target: tuple[int, int]) -> None:
    """As a runtime makes it, whose graph reads the image in FP16."""
    given, amax = frames(2, *size), torch.tensor(6.0)
    part = (max(1, target[0] // 2), target[1])
    common = (given, target, part, (124, 116, 104), *scale_and_offset(given.device, IMAGE_MEAN, IMAGE_STD))
    found, encoded = prepare_and_pack(*common, amax), encode_input(prepare(*common).half())
    expected = quantize_nvfp4(encoded.permute(0, 2, 3, 1), amax=amax)
    assert found.shape == expected.shape
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.scales.view(torch.uint8), expected.scales.view(torch.uint8))


def test_an_operand_is_written_by_two_kernels_where_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise UnavailableError("no compiler")

    monkeypatch.setattr(module, "packed_fallback", fallback := Fallback("Frames", "two kernels"))
    monkeypatch.setattr(fallback, "runs", lambda device: not fallback.refused(device))
    monkeypatch.setattr(module, "kernel", refused)
    given = (frames(1, 6, 5), (4, 7), (4, 7), (0, 0, 0), torch.ones(3), torch.ones(3))
    with pytest.warns(UserWarning, match="Frames fall back to two kernels on cpu: no compiler"):
        found = prepare_and_pack(*given, torch.tensor(6.0))
    assert torch.equal(found.codes, packed_image(prepare(*given), torch.tensor(6.0)).codes)


def test_a_colour_beyond_eight_bits_is_the_nearest() -> None:
    assert EvalTransform(4, 4, (-0.1, 0.5, 200.0), IMAGE_STD).padding == (0, 128, 255)


def test_what_normalises_frames_may_be_trained_through_afterwards() -> None:
    scale_and_offset.cache_clear()
    with torch.inference_mode():
        scale_and_offset(torch.device("cpu"), IMAGE_MEAN, IMAGE_STD)
    x = torch.ones(3, requires_grad=True)
    (x * scale_and_offset(torch.device("cpu"), IMAGE_MEAN, IMAGE_STD)[0]).sum().backward()
    assert x.grad is not None
