"""The kernel that prepares frames, also as FP4 terms, against its reference on the CPU, bit for bit."""

from __future__ import annotations

import pytest
import torch

from fp4deploy.data.augmentation.transforms import scale_and_offset
from fp4deploy.data.sample import IMAGE_MEAN, IMAGE_STD
from fp4deploy.plugins import available
from fp4deploy.plugins.frames import prepare as module
from fp4deploy.plugins.frames.prepare import prepare, prepare_and_pack, prepare_reference
from fp4deploy.plugins.quantize import input_encoding
from fp4deploy.plugins.quantize.input_encoding import packed_image
from tests.plugins.frames.test_class_map_gpu import poison
from tests.plugins.frames.test_prepare import SIZES, frames

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not available(), reason="no NVIDIA GPU that kernels run on"),
]

LARGE = [((3000, 4000), (352, 480)), ((480, 640), (352, 480)), ((1080, 1920), (512, 512)), ((200, 300), (1024, 2048))]


@pytest.mark.parametrize(("size", "target"), [*SIZES, *LARGE])
def test_every_number_is_that_of_the_reference(size: tuple[int, int], target: tuple[int, int]) -> None:
    given = frames(3, *size)
    for part in (target, (max(1, target[0] // 2), target[1]), (target[0], max(1, target[1] // 3))):
        cpu, cuda = (
            (each, target, part, (124, 116, 104), *scale_and_offset(each.device, IMAGE_MEAN, IMAGE_STD))
            for each in (given, given.cuda())
        )
        poison()
        found, expected = prepare(*cuda).cpu(), prepare_reference(*cpu)
        assert torch.equal(found, expected), part
        assert torch.equal(prepare_reference(*cuda).cpu(), expected), "by torch on a GPU, where kernels are off"
    assert not module.fallback.missed(torch.device("cuda"))
    assert not module.fallback.refused(torch.device("cuda"))


@pytest.mark.parametrize("amax", [6.0, 5.3, 40.0])
@pytest.mark.parametrize(("size", "target"), [*SIZES, *LARGE[:2], ((1, 1), (1, 1)), ((5, 3), (7, 301))])
def test_every_byte_of_an_operand_is_that_of_the_prepared_image(
    size: tuple[int, int], target: tuple[int, int], amax: float
) -> None:
    """Of frames of any colours and of black and white ones, and by two kernels."""
    cuda, largest = torch.device("cuda"), torch.tensor(amax)
    for given in (frames(3, *size), (frames(2, *size) > 127).byte() * 255):
        for part in (target, (max(1, target[0] // 2), target[1]), (target[0], max(1, target[1] // 3))):
            on_cpu, on_gpu = (
                (each, target, part, (124, 116, 104), *scale_and_offset(each.device, IMAGE_MEAN, IMAGE_STD))
                for each in (given, given.cuda())
            )
            expected = packed_image(prepare_reference(*on_cpu), largest)
            poison()
            found = prepare_and_pack(*on_gpu, largest.cuda())
            two = packed_image(prepare(*on_gpu).half(), largest.cuda())
            for each in (found, two):
                assert each.shape == expected.shape
                assert torch.equal(each.codes.cpu(), expected.codes), part
                assert torch.equal(each.scales.cpu().view(torch.uint8), expected.scales.view(torch.uint8)), part
    for fallback in (module.fallback, module.packed_fallback, input_encoding.fallback):
        assert not fallback.missed(cuda)
        assert not fallback.refused(cuda)
