"""GEMM and convolution of packed tensors: the reference against a dense computation, the dispatch, every refusal."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp4deploy.errors import InputError
from fp4deploy.formats import FourOverSix, Nvfp4Tensor, quantize_nvfp4
from fp4deploy.plugins.gemm import dispatch
from fp4deploy.plugins.gemm.reference import conv2d_reference, conv_transpose2d_reference, matmul_reference

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
EXACT: dict[str, Any] = {"dtype": torch.float64, "accumulate": torch.float64}


def packed(*shape: int, scale: float = 1.0, four_over_six: FourOverSix | None = None) -> Nvfp4Tensor:
    return quantize_nvfp4(scale * torch.randn(shape), four_over_six=four_over_six)


def dense(x: Nvfp4Tensor) -> torch.Tensor:
    """Decoded by the definition, in float64, with nothing of `formats`."""
    table = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=torch.float64)
    codes = torch.stack([x.codes & 15, x.codes >> 4], -1).flatten(-2).long()
    scales = x.scales.double().repeat_interleave(16, -1)
    return (table[codes] * scales * x.amax.double() / (6 * x.e4m3_max))[..., : x.shape[-1]]


def slow_conv(
    image: torch.Tensor, filters: torch.Tensor, stride: int = 1, padding: int = 0, dilation: int = 1
) -> torch.Tensor:
    """NHWC and OHWI, tap by tap."""
    n, h, w, _ = image.shape
    outputs, kh, kw, channels = filters.shape
    wide = torch.zeros(n, h + 2 * padding, w + 2 * padding, channels, dtype=image.dtype)
    wide[:, padding : padding + h, padding : padding + w] = image
    oh, ow = ((size + 2 * padding - dilation * (taps - 1) - 1) // stride + 1 for size, taps in ((h, kh), (w, kw)))
    out = torch.zeros(n, oh, ow, outputs, dtype=image.dtype)
    for i in range(oh):
        for j in range(ow):
            for a in range(kh):
                for b in range(kw):
                    out[:, i, j] += wide[:, i * stride + a * dilation, j * stride + b * dilation] @ filters[:, a, b].T
    return out


def close(found: Any, expected: torch.Tensor, tolerance: float = 1e-6) -> None:
    assert found.shape == expected.shape
    assert ((found.double() - expected).norm() <= tolerance * expected.norm().clamp_min(1e-30)).item()


@pytest.mark.parametrize(("m", "k", "n"), [(3, 17, 5), (1, 16, 1), (20, 100, 33)])
def test_the_matrix_reference_is_the_dense_matmul(m: int, k: int, n: int) -> None:
    torch.manual_seed(0)
    a, b, bias = packed(m, k), packed(n, k, four_over_six=FourOverSix()), torch.randn(n)
    expected = dense(a) @ dense(b).T + bias
    close(matmul_reference(a, b, bias, **EXACT), expected)
    close(matmul_reference(a, b, bias, relu=True, **EXACT), expected.relu())
    plain = torch.randn(m, k)
    close(matmul_reference(plain, b, **EXACT), plain.double() @ dense(b).T)


@pytest.mark.parametrize(
    "options", [{"padding": 1}, {"stride": 2, "padding": 2}, {"dilation": 2, "padding": 1, "stride": 3}, {}], ids=str
)
def test_the_convolution_reference_is_the_sum_over_taps(options: dict[str, int]) -> None:
    torch.manual_seed(0)
    x, y, w = packed(2, 6, 7, 16), packed(2, 6, 7, 5, scale=20.0), packed(6, 3, 3, 21)
    both = torch.cat([dense(x), dense(y)], -1)
    close(conv2d_reference((x, y), w, **EXACT, **options), slow_conv(both, dense(w), **options))


def test_the_reference_of_a_volume_is_the_sum_over_taps_of_its_depth() -> None:
    torch.manual_seed(0)
    x, w = packed(2, 4, 5, 6, 20), packed(7, 3, 3, 2, 20)
    volume = torch.zeros(2, 6, 5, 6, 20, dtype=torch.float64)
    volume[:, 1:-1] = dense(x)
    planes = [sum(slow_conv(volume[:, 2 * z + tap], dense(w)[:, tap]) for tap in range(3)) for z in range(2)]
    found = conv2d_reference((x,), w, stride=(2, 1, 1), padding=(1, 0, 0), **EXACT)
    close(found, torch.stack(planes, 1))  # type: ignore[arg-type]


def test_the_transposed_reference_writes_four_pixels_for_each() -> None:
    torch.manual_seed(0)
    x, w, bias = packed(2, 3, 4, 20), packed(7, 2, 2, 20), torch.randn(7)
    expected = torch.zeros(2, 6, 8, 7, dtype=torch.float64)
    for i in range(2):
        for j in range(2):
            expected[:, i::2, j::2] = dense(x) @ dense(w)[:, i, j].T + bias
    close(conv_transpose2d_reference(x, w, bias, **EXACT), expected)


def test_a_packed_output_has_the_bytes_of_the_plain_one() -> None:
    a, b, amax = packed(9, 40), packed(24, 40), torch.tensor(3.0)
    plain, q = dispatch.matmul(a, b, relu=True), dispatch.matmul(a, b, relu=True, out_amax=amax)
    assert isinstance(plain, torch.Tensor)
    assert isinstance(q, Nvfp4Tensor)
    expected = quantize_nvfp4(plain, amax=amax)
    assert torch.equal(q.codes, expected.codes)
    assert torch.equal(q.scales.view(torch.uint8), expected.scales.view(torch.uint8))
    assert q.shape == plain.shape


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_on_the_cpu_the_reference_runs(dtype: torch.dtype) -> None:
    a, b, x = packed(2, 3, 40), packed(7, 40), torch.randn(5, 40)
    image, other, w, transposed = packed(2, 5, 6, 16), packed(2, 5, 6, 9), packed(8, 3, 3, 25), packed(8, 2, 2, 16)
    for found, expected in (
        (dispatch.matmul(a, b, dtype=dtype), matmul_reference(a, b, dtype=dtype)),
        (
            dispatch.conv2d((image, other), w, None, 2, 1, dtype=dtype),
            conv2d_reference((image, other), w, None, 2, 1, dtype=dtype),
        ),
        (
            dispatch.conv_transpose2d(image, transposed, dtype=dtype),
            conv_transpose2d_reference(image, transposed, dtype=dtype),
        ),
    ):
        assert isinstance(found, torch.Tensor)
        assert isinstance(expected, torch.Tensor)
        assert found.dtype == dtype
        assert torch.equal(found, expected)
    for half in (torch.float16, torch.bfloat16):
        weight_only = dispatch.matmul(x.to(half), b)
        assert isinstance(weight_only, torch.Tensor)
        assert weight_only.dtype == half
        assert torch.equal(weight_only, matmul_reference(x.to(half), b, dtype=half))  # type: ignore[arg-type]


def test_where_kernels_run_each_operation_is_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[tuple[Any, ...]] = []
    monkeypatch.setattr(dispatch, "runs_kernels", lambda x: True)
    monkeypatch.setattr(
        dispatch, "launch_gemm", lambda *arguments, **geometry: launches.append((*arguments[3:6], geometry))
    )
    monkeypatch.setattr(dispatch, "launch_weight_only", lambda x, *_: launches.append((x.shape,)))
    x, y = packed(2, 9, 8, 16), packed(2, 9, 8, 5)
    dispatch.matmul(packed(2, 3, 40), packed(7, 40))
    dispatch.matmul(torch.randn(2, 3, 40).half(), packed(7, 40))
    dispatch.conv2d((x, y), packed(4, 3, 5, 21), stride=2, padding=1, dilation=1, relu=True)
    dispatch.conv_transpose2d(x, packed(4, 2, 2, 16))
    dispatch.conv2d((packed(2, 3, 9, 8, 16),), packed(4, 3, 1, 3, 16), None, (2, 1, 1), (1, 0, 1))
    dispatch.conv_transpose2d(packed(2, 3, 9, 8, 16), packed(4, 1, 2, 2, 16))
    dispatch.conv2d((packed(2, 9, 16),), packed(4, 3, 16), None, 2, 1)
    geometry = {"taps": (3, 5), "stride": (2, 2), "padding": (1, 1), "dilation": 1, "relu": True}
    assert launches == [
        ((1, 1, 6), (1, 1, 6), (2, 3, 7), {"relu": False}),
        ((2, 3, 40),),
        ((2, 9, 8), (2, 5, 3), (2, 5, 3, 4), geometry),
        ((2, 9, 8), (2, 9, 8), (2, 18, 16, 4), {"taps": (1, 1), "relu": False, "transposed": True}),
        (
            *((2, 3, 9, 8), (2, 2, 9, 8), (2, 2, 9, 8, 4)),
            {"taps": (3, 1, 3), "stride": (2, 1, 1), "padding": (1, 0, 1), "dilation": 1, "relu": False},
        ),
        ((2, 3, 9, 8), (2, 3, 9, 8), (2, 3, 18, 16, 4), {"taps": (1, 1, 1), "relu": False, "transposed": True}),
        (
            *((2, 1, 9), (2, 1, 5), (2, 5, 4)),
            {"taps": (1, 3), "stride": (2, 2), "padding": (0, 1), "dilation": 1, "relu": False},
        ),
    ]


def unallocated(*shape: int) -> Nvfp4Tensor:
    """A packed tensor of any size, without memory."""
    codes = torch.empty((*shape[:-1], -(-shape[-1] // 16) * 8), dtype=torch.uint8, device="meta")
    scales = torch.empty((*shape[:-1], -(-shape[-1] // 16)), dtype=torch.float8_e4m3fn, device="meta")
    return Nvfp4Tensor(codes, scales, torch.empty((), device="meta"), torch.Size(shape))


@pytest.mark.parametrize(
    ("x", "weight", "options", "cause"),
    [
        ((1 << 12, 1 << 10, 1 << 10, 16), (16, 1, 1, 16), {}, "4294967296 output pixels"),
        ((1, 3, 1 << 14, 1 << 18), (16, 3, 3, 1 << 18), {"padding": 1}, "between the first and the last tap"),
        ((1, 40, 1 << 10, 1 << 17), (16, 3, 3, 1 << 17), {"dilation": 16}, "between the first and the last tap"),
        ((1, 8, 8, 1 << 27), (16, 7, 7, 1 << 27), {}, "bytes of a filter"),
        ((1, 8, 8, 16), (16, 1, 1, 16), {"padding": 1 << 31, "stride": 1 << 31}, "of the padded feature map"),
    ],
    ids=str,
)
def test_what_32_bits_cannot_count_is_refused_before_memory_is_taken(
    monkeypatch: pytest.MonkeyPatch, x: tuple[int, ...], weight: tuple[int, ...], options: dict[str, int], cause: str
) -> None:
    monkeypatch.setattr(dispatch, "runs_kernels", lambda _: True)
    with pytest.raises(InputError, match=cause):
        dispatch.conv2d((unallocated(*x),), unallocated(*weight), None, **options)


def test_rows_that_32_bits_cannot_count_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "runs_kernels", lambda _: True)
    for x in (unallocated(1 << 31, 16), torch.empty(1 << 31, 16, dtype=torch.float16, device="meta")):
        with pytest.raises(InputError, match="2147483648 (output pixels|rows) are too many"):
            dispatch.matmul(x, unallocated(16, 16))
    with pytest.raises(InputError, match="4294967296 output pixels"):
        dispatch.conv_transpose2d(unallocated(1 << 10, 1 << 10, 1 << 10, 16), unallocated(16, 2, 2, 16))


def test_nothing_is_launched_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("launched")

    monkeypatch.setattr(dispatch, "runs_kernels", lambda x: True)
    monkeypatch.setattr(dispatch, "launch_gemm", refuse)
    monkeypatch.setattr(dispatch, "launch_weight_only", refuse)
    bias = torch.randn(3)
    for found, shape in (
        (dispatch.matmul(packed(0, 16), packed(3, 16)), (0, 3)),
        (dispatch.matmul(packed(5, 16), packed(0, 16)), (5, 0)),
        (dispatch.matmul(torch.zeros(2, 0, 16).half(), packed(3, 16)), (2, 0, 3)),
        (dispatch.conv2d((packed(0, 4, 4, 16),), packed(3, 1, 1, 16)), (0, 4, 4, 3)),
        (dispatch.conv2d((packed(1, 0, 4, 16),), packed(3, 1, 1, 16), padding=1), (1, 2, 6, 3)),
        (dispatch.conv2d((packed(1, 4, 4, 16),), packed(0, 3, 3, 16)), (1, 2, 2, 0)),
        (dispatch.conv_transpose2d(packed(1, 0, 4, 16), packed(3, 2, 2, 16)), (1, 0, 8, 3)),
        (dispatch.conv_transpose2d(packed(1, 4, 4, 16), packed(0, 2, 2, 16)), (1, 8, 8, 0)),
    ):
        assert found.shape == shape
    for empty in (packed(5, 0), torch.zeros(5, 0).half()):
        found = dispatch.matmul(empty, packed(3, 0), bias)
        assert isinstance(found, torch.Tensor)
        assert torch.equal(found, bias.half().expand(5, 3))
    found = dispatch.conv2d((packed(1, 2, 2, 0),), packed(3, 1, 1, 0), bias)
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found, bias.half().expand(1, 2, 2, 3))


A, B, X, W = packed(4, 32), packed(6, 32), packed(1, 5, 5, 16), packed(6, 3, 3, 16)
ROWS = quantize_nvfp4(torch.randn(4, 32), row_scaled=True)
CUT = Nvfp4Tensor(A.codes[:, :-1], A.scales, A.amax, A.shape)
BYTES = Nvfp4Tensor(A.codes, A.scales.view(torch.uint8), A.amax, A.shape)
WIDE = Nvfp4Tensor(B.codes, B.scales, B.amax.double(), B.shape)
ELSEWHERE = Nvfp4Tensor(B.codes.to("meta"), B.scales.to("meta"), B.amax.to("meta"), B.shape)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: dispatch.matmul(A, torch.zeros(6, 32)), ["b must be packed", "[N, K]", "(6, 32)"]),  # type: ignore[arg-type]
        (lambda: dispatch.matmul(A, W), ["[N, K]", "(6, 3, 3, 16)"]),
        (lambda: dispatch.matmul(packed(4, 16), B), ["(16,)", "32"]),
        (lambda: dispatch.matmul(torch.zeros(4, 16).half(), B), ["(16,)", "32"]),
        (lambda: dispatch.matmul(torch.zeros(4, 32), B), ["float16 or bfloat16", "torch.float32"]),
        (lambda: dispatch.matmul(torch.zeros(4, 32).half(), B, out_amax=torch.ones(())), ["out_amax"]),
        (lambda: dispatch.matmul(ROWS, B), ["a is row-scaled"]),
        (lambda: dispatch.matmul(A, ROWS), ["b is row-scaled"]),
        (lambda: dispatch.matmul(CUT, B), ["a of shape (4, 32)", "codes (4, 16)", "(4, 15)"]),
        (lambda: dispatch.matmul(A, B, torch.zeros(5)), ["bias", "(5,)", "[6]"]),
        (lambda: dispatch.matmul(A, B, torch.zeros(6, dtype=torch.int32)), ["bias", "torch.int32"]),
        (lambda: dispatch.matmul(A, B, [0.0] * 6), ["bias", "list", "[6]"]),  # type: ignore[arg-type]
        (lambda: dispatch.matmul(BYTES, B), ["a has codes, scales and amax", "torch.uint8, torch.uint8"]),
        (lambda: dispatch.matmul(A, WIDE), ["b has codes, scales and amax", "torch.float64"]),
        (lambda: dispatch.matmul(A, B, dtype=torch.float64), ["torch.float16 or torch.bfloat16", "torch.float64"]),
        (lambda: dispatch.matmul(A, B, out_amax=torch.ones(2)), ["one float32", "(2,)"]),
        (lambda: dispatch.matmul(A, B, out_amax=torch.ones((), dtype=torch.float64)), ["one float32", "float64"]),
        (lambda: dispatch.matmul(A, ELSEWHERE), ["different devices", "cpu, meta"]),
        (lambda: dispatch.matmul(A, B, torch.zeros(6, device="meta")), ["different devices", "cpu, meta"]),
        (lambda: dispatch.conv2d((), W), ["one or two packed feature maps", "[N, H, W, C]"]),
        (lambda: dispatch.conv2d((X, X, X), W), ["one or two packed feature maps"]),
        (lambda: dispatch.conv2d((A,), W), ["[N, H, W, C]"]),
        (lambda: dispatch.conv2d((X,), B), ["[O, KH, KW, C]", "(6, 32)"]),
        (lambda: dispatch.conv2d((X, packed(1, 5, 4, 16)), W), ["differ in size", "(1, 5, 4, 16)"]),
        (lambda: dispatch.conv2d((packed(1, 5, 5, 17),), W), ["16 input channels", "17"]),
        (
            lambda: dispatch.conv2d((packed(1, 5, 5, 8), packed(1, 5, 5, 8)), W),
            ["first of two feature maps has 8 channels", "Concatenate"],
        ),
        (lambda: dispatch.conv2d((X,), W, stride=0), ["Stride 0", "at least 1"]),
        (lambda: dispatch.conv2d((X,), W, padding=-1), ["padding -1", "at least 0"]),
        (lambda: dispatch.conv2d((X,), W, dilation=0), ["dilation 0", "at least 1"]),
        (lambda: dispatch.conv2d((X,), packed(6, 5, 10, 16), padding=9), ["5x10", "49 taps"]),
        (lambda: dispatch.conv2d((X,), packed(6, 7, 7, 16)), ["5x5", "7x7"]),
        (lambda: dispatch.conv2d((X,), W, stride=(1, 2, 2)), ["(1, 2, 2)", "2 spatial axes"]),
        (lambda: dispatch.conv2d((X,), packed(6, 3, 3, 3, 16)), ["[N, D, H, W, C]"]),
        (lambda: dispatch.conv2d((packed(1, 5, 5, 5, 16),), packed(6, 5, 5, 5, 16)), ["5x5x5", "49 taps"]),
        (lambda: dispatch.conv_transpose2d(X, W), ["2x2", "3x3"]),
        (lambda: dispatch.conv_transpose2d(X, packed(6, 2, 2, 32)), ["32 input channels", "16"]),
    ],
)
def test_what_does_not_fit_is_refused_with_its_shapes(call: Any, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        call()
    for word in words:
        assert word in str(caught.value)
