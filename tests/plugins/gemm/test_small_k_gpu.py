"""FP16 convolutions of small K on a GPU: bit-equal to the reference where sums are exact, on awkward shapes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fp4deploy.architecture import Architecture
from fp4deploy.plugins.gemm.convolution import small_k
from fp4deploy.plugins.quantize.norm_pack import affine
from fp4deploy.plugins.quantize.statistics import combine
from fp4deploy.plugins.runtime import nvcc

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]
SHAPES = [  # N, H, W, C; O, KH, KW; stride, padding
    ((1, 1, 1, 3), (64, 3, 3), 1, (1, 1)),
    ((3, 37, 61, 3), (64, 3, 3), 1, (1, 1)),
    ((2, 352, 480, 3), (64, 3, 3), 1, (1, 1)),
    ((1, 1030, 2050, 3), (16, 3, 3), 1, (1, 1)),
    ((2, 65, 129, 3), (64, 7, 7), 2, (3, 3)),
    ((2, 224, 225, 3), (32, 3, 3), 2, (1, 1)),
    ((2, 31, 33, 1), (100, 5, 5), 1, (2, 2)),
    ((1, 40, 50, 13), (48, 3, 3), 1, (1, 1)),
    ((2, 33, 70, 16), (64, 3, 3), 1, (1, 1)),
    ((2, 33, 70, 24), (21, 2, 3), 1, (0, 1)),
    ((1, 17, 19, 5), (1, 3, 2), 1, (1, 0)),
    ((1, 1, 1, 64), (12, 1, 1), 1, (0, 0)),
    ((16, 352, 480, 64), (12, 1, 1), 1, (0, 0)),
    ((3, 33, 47, 64), (21, 1, 1), 1, (0, 0)),
    ((2, 100, 100, 16), (1, 1, 1), 1, (0, 0)),
    ((2, 51, 50, 48), (100, 1, 1), 1, (0, 0)),
    ((1, 51, 50, 208), (67, 1, 1), 1, (0, 0)),
    ((1, 51, 50, 24), (128, 1, 1), 1, (0, 0)),
    ((1, 51, 50, 16), (70, 1, 1), 2, (0, 0)),
    ((5, 7, 9, 16), (12, 1, 1), 1, (1, 1)),
]


def multiples(*shape: int, step: float = 0.25) -> torch.Tensor:
    """On the GPU; small enough for exact sums of products in FP32."""
    return torch.randint(-8, 9, shape, device="cuda") * step


def poison() -> None:
    """Memory that the next outputs get."""
    torch.full((1 << 26,), float("nan"), device="cuda")


def expected(x: torch.Tensor, weight: torch.Tensor, *how: object) -> torch.Tensor:
    """The reference item by item: float64 takes four times the memory."""
    return torch.cat([small_k.conv2d_reference(item[None], weight, *how) for item in x])  # type: ignore[arg-type]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Every variant of the table: nvcc takes seconds for one, so several at a time."""
    chosen = [
        small_k.variant(image[3], *filters[:1], filters[1:], stride, padding)
        for image, filters, stride, padding in SHAPES
    ]
    found = {tuple(each.macros(torch.float16, moments).items()) for each in chosen for moments in (False, True)}
    target = Architecture.of_device(0).nvcc_target
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda macros: nvcc.compile_cubin("small_k_conv.cu", target, dict(macros)), found))


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("moments", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bit_equal_to_the_reference(shape: tuple, moments: bool, relu: bool) -> None:
    image, filters, stride, padding = shape
    torch.manual_seed(sum(image))
    x, weight = multiples(*image).half(), multiples(*filters, image[3], step=0.125).half()
    bias = multiples(filters[0]) if relu else None
    strides = (stride, stride)
    assert small_k.supports(image[3], filters[0], filters[1:], strides, padding)
    assert small_k.is_aligned(x, weight, strides, padding)
    poison()
    y, found = small_k.conv2d(x, weight, bias, strides, padding, relu, moments)
    assert torch.equal(y, expected(x, weight, bias, strides, padding, relu))
    again, more = small_k.conv2d(x, weight, bias, strides, padding, relu, moments)
    assert torch.equal(y, again)
    assert (found is None) != moments
    if found is None or more is None:
        return
    assert torch.equal(found.parts[:, 0], more.parts[:, 0])
    check_moments(y, found)


def check_moments(y: torch.Tensor, found: object) -> None:
    """Means and squared deviations of items and channels, combined in float64 from those of the parts."""
    height, width = found.tile  # type: ignore[attr-defined]
    n, h, w, _ = y.shape
    parts = found.parts[:, 0].double().view(n, found.per_item, 2, -1)  # type: ignore[attr-defined]
    if width:
        rows = [
            min(height, h - top) * min(width, w - left) for top in range(0, h, height) for left in range(0, w, width)
        ]
    else:
        rows = [min(found.rows, h * w - first) for first in range(0, h * w, found.rows)]  # type: ignore[attr-defined]
    assert len(rows) == found.per_item  # type: ignore[attr-defined]
    count = torch.tensor(rows, device="cuda").double()[:, None]
    mean = (parts[:, :, 0] * count).sum(1) / (h * w)
    square = (parts[:, :, 1] + count * (parts[:, :, 0] - mean[:, None]).square()).sum(1)
    wide = y.double().flatten(1, 2)
    exact = (wide - wide.mean(1, keepdim=True)).square().sum(1)
    torch.testing.assert_close(mean, wide.mean(1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(square, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("planes", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_images_of_any_strides(dtype: torch.dtype, planes: bool) -> None:
    """NCHW, channels_last, slices and transposed axes; FP32 is rounded to FP16 as `.half()` rounds it."""
    x = torch.randn(2, 3, 50, 70, device="cuda").to(dtype)
    if not planes:
        x = x.contiguous(memory_format=torch.channels_last)
    weight, bias = torch.randn(64, 3, 3, 3, device="cuda").half(), torch.randn(64, device="cuda")
    for view in (x, x[:, :, 1::2, 3:], x.transpose(2, 3), x.flip(1)[1:]):
        nhwc = view.permute(0, 2, 3, 1)
        y, _ = small_k.conv2d(nhwc, weight, bias, padding=(1, 1))
        same, _ = small_k.conv2d(nhwc.half().contiguous(), weight, bias, padding=(1, 1))
        assert torch.equal(y, same)
        wanted = expected(nhwc, weight, bias, (1, 1), (1, 1))
        assert float((y.float() - wanted.float()).norm() / wanted.float().norm()) < 6e-4


@pytest.mark.parametrize("channels", [8, 64])
def test_vectors_are_aligned(channels: int) -> None:
    """Feature maps in NCHW, in FP32, or at an odd address are copied before 16-byte loads read them."""
    flat = multiples(1 + 2 * 9 * 11 * channels).half()
    odd = flat[1:].view(2, 9, 11, channels)
    weight = multiples(12, 1, 1, channels, step=0.125).half()
    for x in (odd, odd.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1), odd.float()):
        assert torch.equal(small_k.conv2d(x, weight)[0], small_k.conv2d_reference(x, weight))


@pytest.mark.parametrize("value", [0.0, 3.0, 1000.0])
def test_moments_of_outputs_far_from_zero(value: float) -> None:
    """A mean that is large beside the deviation, and one pixel that differs from all others, the first of its tile."""
    x = torch.full((1, 64, 64, 4), value, device="cuda").half()
    x[0, 0, 0] = value + 5
    x[0, 33:, 40] += 1
    weight = torch.eye(4, device="cuda").half()[:, None, None].repeat(4, 1, 1, 1)
    y, found = small_k.conv2d(x, weight, moments=True)
    check_moments(y, found)
    gamma, beta = torch.randn(16, device="cuda"), torch.randn(16, device="cuda")
    assert found is not None
    ab = combine(found, y.shape, None, gamma, beta, 4, 1e-5)
    exact = affine(y.double(), None, gamma.double(), beta.double(), 4, 1e-5)
    assert float((ab.double() - exact).norm() / exact.norm()) < 1e-4


def test_nan_and_inf() -> None:
    """They reach the outputs whose filter reads them and no other; ReLU keeps a NaN."""
    x = multiples(1, 40, 40, 3).half()
    x[0, 7, 9, 1], x[0, 20, 20, 2] = float("nan"), float("inf")
    weight = multiples(64, 3, 3, 3, step=0.125).half()
    for relu in (False, True):
        how = (None, (1, 1), (1, 1), relu)
        y, wanted = small_k.conv2d(x, weight, *how)[0], small_k.conv2d_reference(x, weight, *how)
        assert torch.equal(y.isnan(), wanted.isnan())
        assert torch.equal(y.nan_to_num(7, 8, 9), wanted.nan_to_num(7, 8, 9))
        assert int(y.isnan().any(-1).sum()) >= 9


def test_every_choice_gives_the_same_bytes() -> None:
    """Tiles, stores and the blocks of a multiprocessor do not enter the order of the sum."""
    choices = ((32, 2, 8, 2), (32, 1, 4, 3), (64, 4, 8, 2), (16, 2, 4, 2), (32, 2, 0, 1))
    x, bias = torch.randn(2, 50, 70, 3, device="cuda").half(), torch.randn(24, device="cuda")
    weight = torch.randn(24, 3, 3, 3, device="cuda").half()
    results = []
    for columns, rows, store, resident in choices:
        chosen = small_k.Variant(3, (3, 3), 1, columns, rows, store, False, resident)
        results.append(small_k.conv2d(x, weight, bias, padding=(1, 1), relu=True, chosen=chosen)[0])
    assert all(torch.equal(each, results[0]) for each in results)
    assert bool(results[0].isfinite().all())
