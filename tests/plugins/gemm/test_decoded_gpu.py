"""Convolutions with decoded weights on a GPU: against the reference, bit by bit between tiles, and their moments."""

from __future__ import annotations

import math

import pytest
import torch

from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.plugins.gemm import dispatch
from fp4deploy.plugins.gemm.convolution import decoded
from fp4deploy.plugins.gemm.convolution.decoded import Plan
from fp4deploy.plugins.gemm.convolution.decoded_weight import decode_weight, supports
from fp4deploy.plugins.gemm.reference import conv2d_reference, conv_transpose2d_reference
from fp4deploy.plugins.gemm.triton.tiles import Tile
from fp4deploy.plugins.quantize.dispatch import quantize_nvfp4
from tests.plugins.gemm.interpreted_decoded import moments_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]


def operands(
    n: int, h: int, w: int, channels: tuple[int, ...], outputs: int, k: int
) -> tuple[list[Nvfp4Tensor], Nvfp4Tensor]:
    torch.manual_seed(0)
    sources = [quantize_nvfp4(torch.randn(n, h, w, c, device="cuda").half() * (1 + i)) for i, c in enumerate(channels)]
    return sources, quantize_nvfp4(torch.randn(outputs, k, k, sum(channels), device="cuda").half())


SHAPES = [
    (1, 22, 30, (256,), 256, 3),
    (3, 11, 15, (128, 128), 64, 3),
    (1, 40, 40, (16,), 16, 3),
    (2, 24, 20, (32, 32), 32, 3),
    (2, 17, 19, (64,), 48, 3),
    (2, 20, 20, (64,), 12, 1),
    (1, 44, 60, (512,), 512, 3),
]


@pytest.mark.parametrize("splits", [None, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_convolutions(shape: tuple, splits: int | None) -> None:
    channels, outputs, k = shape[3:]
    if not supports(channels, k * k):
        pytest.skip("no such kernel")
    sources, weight = operands(*shape)
    bias = torch.randn(outputs, device="cuda")
    planes = decode_weight(weight, channels)
    rows, depths = math.prod(shape[:3]), tuple(x.codes.shape[-1] for x in sources)
    chosen = decoded.chosen_plan(rows, outputs, depths, k * k, False, weight.codes.device)
    if splits is not None:
        chosen = Plan(Tile(128, 64 if outputs >= 64 else 16, 32, 4, 3), splits)
    expected = conv2d_reference(tuple(sources), weight, bias, 1, k // 2, 1, True, torch.float32)
    torch.full((1 << 24,), float("nan"), device="cuda")  # poison
    y, moments = decoded.conv2d(tuple(sources), planes, bias, padding=k // 2, relu=True, moments=True, chosen=chosen)
    again, _ = decoded.conv2d(tuple(sources), planes, bias, padding=k // 2, relu=True, moments=True, chosen=chosen)
    assert isinstance(y, torch.Tensor)
    assert isinstance(again, torch.Tensor)
    assert isinstance(expected, torch.Tensor)
    assert torch.equal(y, again)
    assert float((y.float() - expected).norm() / expected.norm()) < 6e-4
    assert moments is not None
    assert moments_error(y.cpu(), type(moments)(moments.parts.cpu(), moments.rows)) < 1e-4


def test_tiles_of_one_step_give_the_same_bits_as_each_other_and_as_packed_weights() -> None:
    sources, weight = operands(1, 40, 48, (128,), 128, 3)
    planes = decode_weight(weight, (128,))
    tiles = (Tile(128, 128, 32, 8, 3), Tile(256, 128, 32, 8, 3), Tile(128, 64, 32, 4, 3), Tile(256, 64, 32, 8, 3))
    results = [decoded.conv2d(tuple(sources), planes, padding=1, chosen=Plan(tile))[0] for tile in tiles]
    former = dispatch.conv2d(tuple(sources), weight, padding=1)  # its tile has steps of 32 bytes as well
    for one in results:
        assert isinstance(one, torch.Tensor)
        assert isinstance(former, torch.Tensor)
        assert torch.equal(one, former)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("dilation", [12, 24, 36])
def test_rows_of_padding_change_no_bits(dilation: int, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left out or multiplied, as in atrous pyramids; their tiles touch one or two batch items."""
    sources, weight = operands(3, 44, 60, (256,), 128, 3)
    planes, bias, chosen = decode_weight(weight, (256,)), torch.randn(128, device="cuda"), Plan(decoded.LARGE, splits)
    assert decoded.leaves_out_rows(decoded.LARGE, (3, 3), 60, dilation)
    geometry = {"padding": dilation, "dilation": dilation, "chosen": chosen}
    y, _ = decoded.conv2d(tuple(sources), planes, bias, **geometry)
    monkeypatch.setattr(decoded, "leaves_out_rows", lambda *_: False)
    whole, _ = decoded.conv2d(tuple(sources), planes, bias, **geometry)
    expected = conv2d_reference(tuple(sources), weight, bias, 1, dilation, dilation, False, torch.float32)
    assert isinstance(y, torch.Tensor)
    assert isinstance(whole, torch.Tensor)
    assert isinstance(expected, torch.Tensor)
    assert torch.equal(y, whole)
    assert float((y.float() - expected).norm() / expected.norm()) < 6e-4


@pytest.mark.parametrize("tile", [decoded.SMALL, Tile(256, 64, 32, 4, 3), Tile(256, 128, 32, 8, 3)], ids=str)
def test_every_run_gives_the_same_bits_on_a_busy_gpu(tile: Tile) -> None:
    """Registers that wgmma reads must not be reused (`triton.decode.finished`): what is wrong then depends on time."""
    sources, weight = operands(1, 192, 192, (64, 64), 64, 3)
    planes, other = decode_weight(weight, (64, 64)), torch.randn(4096, 4096, device="cuda").half()
    expected = conv2d_reference(tuple(sources), weight, padding=1, dtype=torch.float64, accumulate=torch.float64)
    first, _ = decoded.conv2d(tuple(sources), planes, padding=1, chosen=Plan(tile))
    assert isinstance(first, torch.Tensor)
    assert isinstance(expected, torch.Tensor)
    assert float((first.double() - expected).norm() / expected.norm()) < 6e-4
    beside = torch.cuda.Stream()
    for _ in range(40):
        with torch.cuda.stream(beside):
            other @ other
        again, _ = decoded.conv2d(tuple(sources), planes, padding=1, chosen=Plan(tile))
        assert torch.equal(first, again)  # type: ignore[arg-type]


@pytest.mark.parametrize("channels", [16, 32, 64, 128])
def test_packed_output_and_transposed(channels: int) -> None:
    sources, weight = operands(2, 12, 10, (channels,), 64, 2)
    bias, amax = torch.randn(64, device="cuda"), torch.tensor(9.0, device="cuda")
    planes = decode_weight(weight, (channels,), transposed=True)
    chosen = decoded.chosen_plan(2 * 12 * 10, 64, (channels // 2,), 1, True, weight.codes.device)
    plain, _ = decoded.conv2d(tuple(sources), planes, bias, transposed=True, chosen=chosen)
    expected = conv_transpose2d_reference(sources[0], weight, bias, False, torch.float32)
    assert isinstance(plain, torch.Tensor)
    assert isinstance(expected, torch.Tensor)
    assert float((plain.float() - expected).norm() / expected.norm()) < 6e-4
    got, _ = decoded.conv2d(tuple(sources), planes, bias, out_amax=amax, transposed=True, chosen=chosen)
    reference = quantize_nvfp4(plain, amax=amax)
    assert isinstance(got, Nvfp4Tensor)
    differing = (got.codes != reference.codes).float().mean()  # another tile may have another order of the sum
    assert float(differing) < 2e-3
