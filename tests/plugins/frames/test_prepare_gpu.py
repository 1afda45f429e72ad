"""The kernel that prepares frames against its reference on the CPU, bit for bit."""

from __future__ import annotations

import pytest
import torch

from fp4deploy.data.augmentation.transforms import scale_and_offset
from fp4deploy.data.sample import IMAGE_MEAN, IMAGE_STD
from fp4deploy.plugins import available
from fp4deploy.plugins.frames import prepare as module
from fp4deploy.plugins.frames.prepare import prepare, prepare_reference
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
