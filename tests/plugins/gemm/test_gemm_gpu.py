"""The Triton GEMM kernels on a GPU against float64 of the decoded operands."""

from __future__ import annotations

import threading

import pytest
import torch

from fp4deploy.formats import FourOverSix, Nvfp4Tensor
from fp4deploy.plugins.aot import load as aot
from fp4deploy.plugins.gemm import arguments, dispatch
from fp4deploy.plugins.gemm.reference import conv2d_reference, conv_transpose2d_reference, matmul_reference
from fp4deploy.plugins.gemm.triton.tiles import TALL_NARROW, gemm_tile
from fp4deploy.plugins.quantize.dispatch import quantize_nvfp4

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not aot.available(), reason="no NVIDIA GPU that kernels run on"
    ),
]
LIMIT = 1e-3


def packed(*shape: int, scale: float = 1.0, **options: object) -> Nvfp4Tensor:
    return quantize_nvfp4(scale * torch.randn(*shape, device="cuda"), **options)  # type: ignore[arg-type]


def poison() -> None:
    """Fill what the allocator will hand out next with NaN."""
    blocks = [torch.full((1 << n,), float("nan"), device="cuda") for n in range(8, 24)]
    del blocks


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def same_bytes(found: Nvfp4Tensor, unfused: torch.Tensor) -> bool:
    expected = quantize_nvfp4(unfused, amax=found.amax)
    return torch.equal(found.codes, expected.codes) and torch.equal(
        found.scales.view(torch.uint8), expected.scales.view(torch.uint8)
    )


@pytest.mark.parametrize(
    ("shape", "outputs", "size", "options"),
    [
        ((1, 5, 7, 32), 20, 3, {"padding": 1}),
        ((2, 9, 6, 17), 16, 3, {"padding": 1, "stride": 2}),
        ((2, 33, 31, 13), 64, 3, {"padding": 1}),
        ((1, 12, 11, 3), 16, 3, {"padding": 1}),
        ((3, 12, 11, 48), 70, 5, {"padding": 4, "dilation": 2}),
        ((8, 66, 75, 16), 16, 3, {"padding": 1}),
        ((8, 66, 75, 32), 32, 3, {"padding": 2, "dilation": 2, "stride": 2}),
        ((2, 15, 14, 16), 40, 7, {"padding": 3}),
        ((1, 1, 1, 64), 10, 1, {}),
        ((16, 33, 31, 64), 64, 3, {"padding": 1}),
        ((2, 40, 50, 128), 128, 3, {"padding": 1}),
        ((4, 64, 64, 256), 256, 3, {"padding": 1}),
        ((2, 22, 30, 1024), 512, 3, {"padding": 1}),
        ((1, 15, 14, 80), 40, 7, {"padding": 3, "stride": 2}),
        ((2, 20, 20, 16), 1000, 1, {"stride": 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_convolution(shape: tuple[int, ...], outputs: int, size: int, options: dict, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, w = packed(*shape), packed(outputs, size, size, shape[3], four_over_six=FourOverSix())
    bias = torch.randn(outputs, device="cuda")
    expected = conv2d_reference((x,), w, bias, relu=True, dtype=torch.float64, accumulate=torch.float64, **options)
    poison()
    found = dispatch.conv2d((x,), w, bias, relu=True, dtype=dtype, **options)
    assert error(found, expected) < (LIMIT if dtype == torch.float16 else 4 * LIMIT)
    poison()
    fused = dispatch.conv2d((x,), w, bias, relu=True, dtype=dtype, out_amax=found.abs().max().float(), **options)
    assert isinstance(fused, Nvfp4Tensor)
    assert same_bytes(fused, found)


@pytest.mark.parametrize(
    ("first", "second", "outputs"),
    [(16, 20, 33), (64, 64, 64), (128, 128, 256), (32, 16, 16), (16, 16, 16), (32, 32, 32)],
)
def test_two_sources(first: int, second: int, outputs: int) -> None:
    torch.manual_seed(0)
    x, y, w = packed(2, 19, 21, first), packed(2, 19, 21, second, scale=30.0), packed(outputs, 3, 3, first + second)
    expected = conv2d_reference((x, y), w, None, padding=1, dtype=torch.float64, accumulate=torch.float64)
    poison()
    assert error(dispatch.conv2d((x, y), w, None, padding=1), expected) < LIMIT


@pytest.mark.parametrize(
    ("image", "channels", "outputs", "options"),
    [
        ((1, 192, 192), (64, 64), 64, {"padding": 1}),
        ((5, 83, 101), (128, 64), 50, {"padding": 1}),
        ((1, 187, 191), (32, 32), 33, {"padding": 1}),
        ((2, 131, 137), (48, 112), 61, {"padding": 2, "dilation": 2}),
        ((1, 371, 373), (64, 96), 64, {"padding": 1, "stride": 2}),
        ((1, 184, 184), (512, 512), 64, {"padding": 1}),
    ],
    ids=str,
)
def test_two_sources_in_a_tall_tile(
    image: tuple[int, int, int], channels: tuple[int, int], outputs: int, options: dict
) -> None:
    """128 accumulators a thread. K of both sources in whole steps, in several taps a step, and in neither."""
    if arguments.capability_of(torch.device("cuda", 0)) != 90:
        pytest.skip("a tile of SM90")
    torch.manual_seed(0)
    n, h, w = image
    sources = (packed(n, h, w, channels[0]), packed(n, h, w, channels[1], scale=3.0))
    weight, bias = packed(outputs, 3, 3, sum(channels)), torch.randn(outputs, device="cuda")
    expected = conv2d_reference(sources, weight, bias, dtype=torch.float64, accumulate=torch.float64, **options)
    assert isinstance(expected, torch.Tensor)
    assert gemm_tile(expected[..., 0].numel(), outputs, 90, two=True) == TALL_NARROW
    poison()
    found = dispatch.conv2d(sources, weight, bias, **options)
    assert isinstance(found, torch.Tensor)
    assert error(found, expected) < LIMIT / 3
    wrong = (found.double() - expected).abs() > LIMIT * expected.abs() + LIMIT / 10 * expected.abs().amax()
    assert not wrong.any(), f"{int(wrong.sum())} outputs, the first at {wrong.nonzero()[0].tolist()}"


def test_a_source_of_zeros_adds_nothing() -> None:
    x, w = packed(1, 6, 6, 32), packed(16, 3, 3, 64)
    zeros = quantize_nvfp4(torch.zeros(1, 6, 6, 32, device="cuda"))
    for sources in ((x, zeros), (zeros, x)):
        expected = conv2d_reference(sources, w, None, padding=1, dtype=torch.float64, accumulate=torch.float64)
        assert error(dispatch.conv2d(sources, w, None, padding=1), expected) < LIMIT


@pytest.mark.parametrize(
    ("shape", "channels", "outputs", "taps", "options"),
    [
        ((1, 5, 7, 6), (32,), 20, (3, 3, 3), {"padding": 1}),
        ((2, 1, 9, 6), (17,), 16, (3, 3, 3), {"padding": 1, "stride": 2}),
        ((1, 1, 1, 1), (64,), 10, (3, 3, 3), {"padding": 1}),
        ((2, 13, 15, 17), (16,), 24, (3, 3, 3), {"padding": 1, "stride": (1, 2, 2)}),
        ((1, 16, 33, 31), (64, 64), 64, (3, 3, 3), {"padding": 1}),
        ((1, 8, 19, 21), (48, 20), 70, (3, 3, 3), {"padding": 1, "stride": (2, 1, 2)}),
        ((2, 5, 24, 25), (64,), 40, (1, 3, 3), {"padding": (0, 1, 1), "stride": (1, 2, 2)}),
        ((2, 9, 14, 15), (96,), 64, (1, 3, 3), {"padding": (0, 1, 1), "stride": (2, 2, 1)}),
        ((1, 9, 14, 15), (64,), 128, (3, 1, 1), {"padding": (1, 0, 0)}),
        ((2, 7, 8, 9), (80,), 33, (1, 1, 1), {"stride": 2}),
        ((1, 32, 40, 48), (128,), 128, (3, 3, 3), {"padding": 1}),
        ((1, 64, 64, 64), (32,), 32, (3, 3, 3), {"padding": 1}),
        ((1, 8, 8, 8), (320, 320), 320, (3, 3, 3), {"padding": 1}),
        ((3, 50), (64,), 40, (3,), {"padding": 1, "stride": 2}),
    ],
    ids=str,
)
def test_volumes(
    shape: tuple[int, ...], channels: tuple[int, ...], outputs: int, taps: tuple[int, ...], options: dict
) -> None:
    """Anisotropic filters and strides, a depth of 1, skip connections; the last is a sequence."""
    torch.manual_seed(0)
    sources = tuple(packed(*shape, count, scale=3.0**at) for at, count in enumerate(channels))
    w, bias = packed(outputs, *taps, sum(channels)), torch.randn(outputs, device="cuda")
    expected = conv2d_reference(sources, w, bias, dtype=torch.float64, accumulate=torch.float64, **options)
    poison()
    found = dispatch.conv2d(sources, w, bias, **options)
    assert isinstance(found, torch.Tensor)
    assert isinstance(expected, torch.Tensor)
    assert error(found, expected) < LIMIT
    poison()
    fused = dispatch.conv2d(sources, w, bias, out_amax=found.abs().max().float(), **options)
    assert isinstance(fused, Nvfp4Tensor)
    assert same_bytes(fused, found)


TRANSPOSED = [
    *((shape, (2, 2)) for shape in ((1, 3, 5, 40), (2, 22, 30, 256), (3, 7, 9, 64))),
    *(((2, 5, 6, 7, 64), taps) for taps in ((2, 2, 2), (1, 2, 2), (2, 1, 2), (2, 1, 1))),
    ((2, 9, 32), (2,)),
]


@pytest.mark.parametrize(("shape", "taps"), TRANSPOSED)
@pytest.mark.parametrize("outputs", [21, 64, 128])
def test_transposed_convolution(shape: tuple[int, ...], taps: tuple[int, ...], outputs: int) -> None:
    torch.manual_seed(0)
    x, w, bias = packed(*shape), packed(outputs, *taps, shape[-1]), torch.randn(outputs, device="cuda")
    expected = conv_transpose2d_reference(x, w, bias, dtype=torch.float64, accumulate=torch.float64)
    poison()
    found = dispatch.conv_transpose2d(x, w, bias)
    assert error(found, expected) < LIMIT
    poison()
    fused = dispatch.conv_transpose2d(x, w, bias, out_amax=found.abs().max().float())
    assert isinstance(fused, Nvfp4Tensor)
    assert same_bytes(fused, found)


@pytest.mark.parametrize(("m", "k", "n"), [(1, 16, 1), (3, 17, 5), (100, 200, 70), (257, 1024, 129), (2048, 512, 1024)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_matmul(m: int, k: int, n: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    b, bias = packed(n, k), torch.randn(n, device="cuda")
    for a in (packed(m, k), torch.randn(m, 2 * k, device="cuda", dtype=dtype)[:, ::2]):
        expected = matmul_reference(a, b, bias, dtype=torch.float64, accumulate=torch.float64)
        poison()
        found = dispatch.matmul(a, b, bias, dtype=dtype)
        assert error(found, expected) < (LIMIT if dtype == torch.float16 else 4 * LIMIT)


def test_broken_blocks_reach_what_depends_on_them_and_nothing_else() -> None:
    x = torch.randn(1, 8, 8, 32, device="cuda")
    x[0, 4, 4, 3] = float("nan")
    w = packed(16, 3, 3, 32)
    broken = dispatch.conv2d((quantize_nvfp4(x),), w, None, padding=1).isnan().any(-1)[0]
    expected = torch.zeros(8, 8, dtype=torch.bool, device="cuda")
    expected[3:6, 3:6] = True
    assert torch.equal(broken, expected)
    fused = dispatch.conv2d((quantize_nvfp4(x),), w, None, padding=1, out_amax=torch.tensor(50.0, device="cuda"))
    assert isinstance(fused, Nvfp4Tensor)
    assert torch.equal(fused.dequantize().isnan().any(-1)[0], expected)


def test_streams_threads_and_graphs() -> None:
    x, w = packed(2, 24, 24, 64), packed(64, 3, 3, 64)
    expected = dispatch.conv2d((x,), w, None, padding=1)
    results: list[torch.Tensor] = []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                results.append(dispatch.conv2d((x,), w, None, padding=1))
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 80
    assert all(torch.equal(result, expected) for result in results)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = dispatch.conv2d((x,), w, None, padding=1)
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, expected)


def test_binaries_compiled_ahead_give_the_same_bits() -> None:
    x, w, bias = packed(2, 24, 24, 64), packed(64, 3, 3, 64), torch.randn(64, device="cuda")
    expected = dispatch.conv2d((x,), w, bias, padding=1)
    out = torch.full_like(expected, float("nan"))
    image = (2, 24, 24)
    capability = arguments.capability_of(torch.device("cuda", 0))
    call = arguments.gemm_call(
        *((x,), w, bias, image, image, out, None, None, torch.float16, capability), taps=(3, 3), padding=1
    )
    aot.function(call.launch, out.device).launch(call.grid, *call.values)
    assert torch.equal(out, expected)
