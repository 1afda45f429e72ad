"""Convolutions by wgmma on a GPU: against the reference and the moments of their output, on awkward shapes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.plugins.gemm.convolution import decoded, warpgroup
from fp4deploy.plugins.gemm.convolution.decoded_weight import decode_weight
from fp4deploy.plugins.gemm.reference import conv2d_reference, conv_transpose2d_reference
from fp4deploy.plugins.quantize.dispatch import quantize_nvfp4
from fp4deploy.plugins.quantize.norm_pack import affine
from fp4deploy.plugins.quantize.statistics import combine
from fp4deploy.plugins.runtime import launch, nvcc
from tests.plugins.gemm.test_decoded_gpu import operands

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no GPU of SM90"
    ),
]
SHAPES = [  # N, H, W, channels of each source, outputs, kernel, dilation
    (1, 1, 1, (64,), 64, 3, 1),
    (3, 17, 33, (64,), 64, 3, 1),
    (2, 22, 30, (128, 64), 128, 3, 1),
    (1, 40, 31, (64, 192), 192, 3, 2),
    (1, 5, 300, (128,), 256, 1, 1),
    (5, 9, 70, (64,), 128, 5, 1),
]
TILES = [(True, 24), (False, 24), (True, 20), (False, 16), (True, 8), (False, 4)]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Every variant of the tables: nvcc takes seconds for one, so several at a time."""
    count, found = launch.num_sms(torch.device("cuda", 0)), set()
    shapes = [
        warpgroup.Shape(shape[:3], tuple(c // 64 for c in shape[3]), shape[4], (shape[5], shape[5]), shape[6])
        for shape in SHAPES
    ]
    for shape in (*shapes, warpgroup.Shape((2, 13, 37), (2,), 128, (1, 1), transposed=True)):
        for joint, height in TILES:
            each = None if joint and shape.outputs % 128 else warpgroup.fitted(shape, joint, height, 1, count)
            if each is not None:
                found |= {tuple(each.macros(torch.float16, moments).items()) for moments in (False, True)}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda macros: nvcc.compile_cubin(warpgroup.SOURCE, "sm_90a", dict(macros)), found))


def moments_near(y: torch.Tensor, moments: Any) -> None:
    """What a GroupNorm makes of them, beside its own in float64."""
    outputs = y.shape[-1]
    gamma, beta, groups = torch.randn(outputs, device="cuda"), torch.randn(outputs, device="cuda"), 8
    ab = combine(moments, y.shape, None, gamma, beta, groups, 1e-5)
    exact = affine(y.double(), None, gamma.double(), beta.double(), groups, 1e-5)
    assert float((ab.double() - exact).norm() / exact.norm()) < 1e-5


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_convolutions(shape: tuple, tile: tuple[bool, int]) -> None:
    *_, channels, outputs, k, dilation = shape
    assert warpgroup.supports(channels, outputs, (k, k), 1, dilation)
    if tile[0] and outputs % 128:
        pytest.skip("consumers do not share these outputs")
    sources, weight = operands(*shape[:6])
    planes, bias, padding = decode_weight(weight, channels), torch.randn(outputs, device="cuda"), k // 2 * dilation
    num_sms = launch.num_sms(weight.codes.device)
    whole = warpgroup.shape_of(tuple(sources), planes, (padding, padding), dilation, False, False)
    chosen = warpgroup.fitted(whole, *tile, 1, num_sms)
    if chosen is None:
        pytest.skip("the tile does not fit into shared memory")
    expected = conv2d_reference(tuple(sources), weight, bias, 1, padding, dilation, True, torch.float32)
    place = (sources, planes, bias, (padding, padding), dilation, True)
    torch.full((1 << 24,), float("nan"), device="cuda")  # poison
    results = [warpgroup.conv2d(*place, moments=True, chosen=chosen) for _ in range(3)]  # type: ignore[arg-type]
    y, _, moments = results[0]
    assert isinstance(expected, torch.Tensor)
    assert all(torch.equal(y, again) for again, *_ in results)
    assert float((y.float() - expected).norm() / expected.norm()) < 6e-4
    moments_near(y, moments)
    amax = torch.tensor(90.0, device="cuda")
    codes, scales, _ = warpgroup.conv2d(*place, out_amax=amax, chosen=chosen)  # type: ignore[arg-type]
    wanted = quantize_nvfp4(y, amax=amax)
    assert torch.equal(codes, wanted.codes)
    assert scales is not None
    assert torch.equal(scales, wanted.scales.view(torch.uint8))


@pytest.mark.parametrize("splits", [2, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_divided_channels(splits: int, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through `decoded`, which adds the parts."""
    sources, weight = operands(2, 22, 30, (128, 128), 128, 3)
    planes, bias = decode_weight(weight, (128, 128)), torch.randn(128, device="cuda")

    def divided(shape: warpgroup.Shape, num_sms: int) -> warpgroup.Variant | None:
        return warpgroup.fitted(shape, True, 12, splits, num_sms)

    monkeypatch.setattr(warpgroup, "variant", divided)
    amax = torch.tensor(90.0, device="cuda") if packed else None
    y, moments = decoded.conv2d(tuple(sources), planes, bias, padding=1, relu=True, out_amax=amax, moments=not packed)
    expected = conv2d_reference(tuple(sources), weight, bias, 1, 1, 1, True, torch.float32)
    assert isinstance(expected, torch.Tensor)
    if isinstance(y, Nvfp4Tensor):
        plain, _ = decoded.conv2d(tuple(sources), planes, bias, padding=1, relu=True)
        assert isinstance(plain, torch.Tensor)
        wanted = quantize_nvfp4(plain, amax=amax)
        assert torch.equal(y.codes, wanted.codes)
        assert torch.equal(y.scales.view(torch.uint8), wanted.scales.view(torch.uint8))
        return
    assert float((y.float() - expected).norm() / expected.norm()) < 6e-4
    moments_near(y, moments)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_transposed(tile: tuple[bool, int]) -> None:
    sources, weight = operands(2, 13, 37, (128,), 128, 2)
    planes, bias, amax = (
        decode_weight(weight, (128,), transposed=True),
        torch.randn(128, device="cuda"),
        torch.tensor(9.0),
    )
    amax = amax.cuda()
    whole = warpgroup.shape_of(tuple(sources), planes, (0, 0), 1, True, False)
    chosen = warpgroup.fitted(whole, *tile, 1, launch.num_sms(bias.device))
    if chosen is None:
        pytest.skip("the tile does not fit into shared memory")
    y, _, none = warpgroup.conv2d(tuple(sources), planes, bias, transposed=True, moments=True, chosen=chosen)
    expected = conv_transpose2d_reference(sources[0], weight, bias, False, torch.float32)
    assert none is None
    assert isinstance(expected, torch.Tensor)
    assert float((y.float() - expected).norm() / expected.norm()) < 6e-4
    codes, scales, _ = warpgroup.conv2d(tuple(sources), planes, bias, transposed=True, out_amax=amax, chosen=chosen)
    wanted = quantize_nvfp4(y, amax=amax)
    assert scales is not None
    assert torch.equal(codes, wanted.codes)
    assert torch.equal(scales, wanted.scales.view(torch.uint8))


def test_nan_and_zero_sources() -> None:
    """A NaN reaches the outputs whose filter reads it and no other; a source of zeros adds nothing."""
    sources, weight = operands(1, 20, 40, (64, 64), 64, 3)
    x = torch.zeros(1, 20, 40, 64, device="cuda").half()
    empty = quantize_nvfp4(x)
    planes = decode_weight(weight, (64, 64))
    y, _ = decoded.conv2d((sources[0], empty), planes, padding=1)
    expected = conv2d_reference((sources[0], empty), weight, None, 1, 1, 1, False, torch.float32)
    assert isinstance(y, torch.Tensor)
    assert isinstance(expected, torch.Tensor)
    assert float((y.float() - expected).norm() / expected.norm()) < 6e-4
    x[0, 7, 9, 3] = float("nan")
    broken = quantize_nvfp4(x, amax=torch.tensor(1.0, device="cuda"))
    y, _ = decoded.conv2d((sources[0], broken), planes, padding=1)
    assert isinstance(y, torch.Tensor)
    is_nan = y.isnan().any(-1)[0]
    assert is_nan[6:9, 8:11].all()
    assert int(is_nan.sum()) == 9


def test_replayed_from_a_cuda_graph() -> None:
    sources, weight = operands(1, 44, 60, (512,), 512, 3)
    planes = decode_weight(weight, (512,))
    y, _ = decoded.conv2d(tuple(sources), planes, padding=1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = decoded.conv2d(tuple(sources), planes, padding=1)
    assert isinstance(captured, torch.Tensor)
    captured.fill_(float("nan"))
    graph.replay()
    assert torch.equal(captured, y)  # type: ignore[arg-type]
