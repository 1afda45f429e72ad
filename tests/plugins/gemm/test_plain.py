"""FP16 convolutions in one order of the sum, and copies: kernels, in the PTX emulator, against torch."""

from __future__ import annotations

import pytest
import torch

from fp4deploy.emulator.cases.case import Outcome, Setting
from fp4deploy.emulator.cases.cuda import emulated
from fp4deploy.models.input_encoding import encode_input
from fp4deploy.plugins.gemm import plain
from fp4deploy.plugins.runtime.nvcc import find_nvcc

needs_nvcc = pytest.mark.skipif(find_nvcc() is None, reason="no nvcc, which compiles the kernels")
PLACES = {"stride": (1, 2), "padding": (1, 0), "dilation": (2, 1)}


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("places", [{}, PLACES], ids=["plain", "stride, padding, dilation"])
def test_reference(places: dict[str, tuple[int, int]]) -> None:
    x, weight, bias = draw(2, 7, 9, 3).half(), draw(5, 3, 2, 3, seed=1).half(), draw(5, seed=2)
    y = plain.conv2d_reference(x, weight, bias, **places, relu=True)
    wanted = torch.nn.functional.conv2d(
        x.double().permute(0, 3, 1, 2), weight.double().permute(0, 3, 1, 2), bias.double(), **places
    )
    torch.testing.assert_close(y.double(), wanted.relu().permute(0, 2, 3, 1), rtol=1e-3, atol=1e-5)


@needs_nvcc
def test_convolution_in_the_emulator() -> None:
    """Every byte is the reference's: the same order, and products that are exact."""
    setting, outcome = Setting("sm_90"), Outcome()
    cases: list[tuple[tuple[int, ...], tuple[int, ...], int | None, dict[str, tuple[int, int]], bool]] = [
        ((1, 5, 7, 3), (18, 3, 3, 3), None, {"padding": (1, 1)}, False),
        ((2, 5, 4, 2), (3, 3, 2, 2), 3, PLACES, True),
        ((1, 3, 5, 16), (17, 3, 3, 16), 17, {"padding": (1, 1)}, False),  # 8 channels at once, a second step of K
    ]
    for image, filters, biases, places, relu in cases:
        x, weight = draw(*image).half(), draw(*filters, seed=1).half()
        bias = None if biases is None else draw(biases, seed=2)
        with emulated(setting, outcome):
            y = plain.conv2d(x, weight, bias, **places, relu=relu)
        wanted = plain.conv2d_reference(x, weight, bias, **places, relu=relu)
        assert torch.equal(y.view(torch.int16), wanted.view(torch.int16))


@needs_nvcc
def test_copies_in_the_emulator() -> None:
    setting, outcome = Setting("sm_90"), Outcome()
    x = draw(2, 3, 3, 5)
    x[0, :, 0, 0] = torch.tensor([5.0, -5.0, 0.0])
    x[0, 1, 0, 1] = float("nan")
    with emulated(setting, outcome):
        images = [plain.read_image(each) for each in (x, x.half())]
        terms = [plain.read_image(each, encoded=True) for each in (x, x.half())]
        joined = plain.concat(images)
        planes = [plain.write_planes(images[0], dtype) for dtype in (torch.float16, torch.float32)]
        logits = torch.tensor([[1.0, 3.0, 3.0], [float("nan"), 1.0, 2.0], [-2.0, -1.0, -3.0]]).half().view(1, 1, 3, 3)
        classes = plain.class_map(logits)
    nhwc = x.half().permute(0, 2, 3, 1).contiguous()
    for each in images:
        assert torch.equal(each.nan_to_num(9).view(torch.int16), nhwc.nan_to_num(9).view(torch.int16))
    encoded = encode_input(x.half()).permute(0, 2, 3, 1).contiguous()
    for each in terms:
        assert torch.equal(each.nan_to_num(9).view(torch.int16), encoded.nan_to_num(9).view(torch.int16))
    assert torch.equal(joined.nan_to_num(9), torch.cat([nhwc, nhwc], -1).nan_to_num(9))
    assert torch.equal(planes[0].nan_to_num(9), x.half().nan_to_num(9))
    assert torch.equal(planes[1].nan_to_num(9), x.half().float().nan_to_num(9))
    assert classes.flatten().tolist() == [1, 0, 1]
