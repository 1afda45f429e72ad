"""Every quantising kernel gives the bytes of the reference, whatever the layout, dtype, shape and content."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fp4deploy import formats
from fp4deploy.formats import FourOverSix, swizzle_scales
from fp4deploy.plugins import available
from fp4deploy.plugins.quantize import dispatch, operators

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not available(), reason="no NVIDIA GPU that kernels run on"),
]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CHOICES = [FourOverSix(m, e, f) for m in ("mae", "mse") for e in (256, 448) for f in (False, True)]
SHAPES = [(1, 16), (3, 17), (64, 256), (5, 1), (1, 1), (129, 4096), (2, 3, 40), (7,), (4097,)]


def sample(shape: tuple[int, ...], dtype: torch.dtype, kind: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(shape, generator=generator, device="cuda")
    if kind == "heavy":
        x = x * torch.exp(2 * torch.randn(shape, generator=generator, device="cuda"))
    elif kind == "ties":
        values = torch.tensor([0, 0.25, 0.5, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, 448, -0.25, -5], device="cuda")
        x = values[torch.randint(len(values), shape, generator=generator, device="cuda")]
    elif kind == "rows":
        x = x * torch.logspace(-6, 4, shape[0], device="cuda").view(-1, *[1] * (len(shape) - 1))
    elif kind == "broken":
        x = x.flatten()
        x[:: max(1, x.numel() // 5)] = torch.tensor(float("nan"))
        x[x.numel() // 2] = float("inf")
        x = x.view(shape)
    elif kind in ("tiny", "huge"):
        x = x * (1e-30 if kind == "tiny" else 1e30)
    return x.to(dtype)


def assert_same(actual: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    """Bitwise, the sign of a zero and the payload of a NaN excepted; names the first difference."""
    assert actual.shape == expected.shape, what
    assert actual.dtype == expected.dtype, what
    same = (actual == expected) | (actual != actual) & (expected != expected)
    if not same.all():
        at = tuple((~same).nonzero()[0].tolist())
        raise AssertionError(f"{what}: {int((~same).sum())} differ, first {at}: {actual[at]} instead of {expected[at]}")


def poison() -> None:
    """Fill freed memory with garbage, so that an element a kernel does not write is seen."""
    torch.full((1 << 22,), float("nan"), device="cuda")


@pytest.mark.parametrize("kind", ["normal", "heavy", "ties", "rows", "broken", "tiny", "huge"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fake_quantisation_along_the_last_axis(dtype: torch.dtype, kind: str) -> None:
    for seed, shape in enumerate(SHAPES):
        x = sample(shape, dtype, kind, seed)
        for amax in (None, 0.7):
            poison()
            values, _ = dispatch.fake_quantize_nvfp4(x, amax=amax)
            expected, _ = formats.fake_quantize_nvfp4(x, amax=amax)
            assert_same(values, expected, (shape, amax))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["nchw", "channels_last", "strided", "oihw", "iohw"])
def test_fake_quantisation_along_channels(layout: str, dtype: torch.dtype) -> None:
    for shape in [(2, 64, 9, 11), (1, 17, 1, 1), (3, 40, 8, 12), (2, 16, 1, 7), (1, 96, 2, 2)]:
        for kind in ("heavy", "broken"):
            x = sample(shape, dtype, kind)
            axis = 0 if layout == "iohw" else 1
            if layout == "channels_last":
                x = x.to(memory_format=torch.channels_last)
            if layout == "strided":
                x = x[:, :, :, ::2]
            poison()
            values, bits = dispatch.fake_quantize_nvfp4(x, (axis,), 1.5)
            expected, inside = formats.fake_quantize_nvfp4(x, (axis,), 1.5)
            assert_same(values, expected, (layout, shape, kind))
            gradient = sample(shape, dtype, "normal", 3)[..., : x.shape[-1]]
            masked = dispatch.mask_gradient(gradient, bits, values.stride(), axis)
            assert_same(masked, gradient * inside, (layout, shape, "mask"))


VARIANTS: list[dict[str, Any]] = [
    *({"four_over_six": choice} for choice in CHOICES),
    {"row_scaled": True},
    {"rounding": "stochastic", "seed": 2**63 + 12345, "offset": 7},
    {"row_scaled": True, "four_over_six": FourOverSix()},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_variant_in_every_layout(dtype: torch.dtype, variant: dict[str, Any]) -> None:
    for kind in ("normal", "rows", "broken", "ties"):
        for shape, axis in [((33, 48), -1), ((20, 17), 0), ((2, 40, 5, 6), 1), ((2, 64, 3, 5), 1)]:
            x = sample(shape, dtype, kind)
            for y in (x, x.to(memory_format=torch.channels_last) if x.ndim == 4 else x.T):
                values, _ = dispatch.fake_quantize_nvfp4(y, (axis,), **variant)
                expected, _ = formats.fake_quantize_nvfp4(y, (axis,), **variant)
                assert_same(values, expected, (kind, shape, axis, variant))


@pytest.mark.parametrize("variant", [{}, *VARIANTS], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_bytes(dtype: torch.dtype, variant: dict[str, Any]) -> None:
    for kind in ("normal", "heavy", "broken", "tiny"):
        for shape, axis in [((33, 48), -1), ((20, 17), 0), ((2, 40, 5, 6), 1), ((1, 1), -1), ((2, 64, 3, 5), 1)]:
            x = sample(shape, dtype, kind)
            for y in (x, x.to(memory_format=torch.channels_last) if x.ndim == 4 else x):
                packed = dispatch.quantize_nvfp4(y, axis=axis, **variant)
                expected = formats.quantize_nvfp4(y.movedim(axis, -1), **variant)
                assert_same(packed.codes, expected.codes, (kind, shape, axis, variant, "codes"))
                assert_same(packed.scales.view(torch.uint8), expected.scales.view(torch.uint8), (kind, shape, "scales"))
                assert_same(packed.amax, expected.amax, (kind, shape, "amax"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_every_length_in_one_pass_or_two(dtype: torch.dtype) -> None:
    """A row is of lanes, a warp, a block, or too long for one; or it begins between words, or is strided."""
    for shape in [(1, 16), (129, 48), (7, 1040), (5, 8224), (3, 24576), (2, 24576 + 16), (2, 49152), (1, 65536 + 32)]:
        for kind in ("rows", "broken"):
            x = sample(shape, dtype, kind)
            x[0, : shape[1] // 2] = 0
            for y in (x, x.flatten()[3 : shape[0] * 16 - 13].view(-1, 16) if shape[0] > 1 else x, x.T.contiguous().T):
                for variant in ({}, {"hadamard": True}, {"rounding": "stochastic", "seed": 5}):
                    poison()
                    packed = dispatch.quantize_nvfp4(y, row_scaled=True, **variant)
                    rest = {name: value for name, value in variant.items() if name != "hadamard"}
                    source = formats.random_hadamard(y) if "hadamard" in variant else y
                    expected = formats.quantize_nvfp4(source, row_scaled=True, **rest)
                    assert_same(packed.codes, expected.codes, (shape, kind, variant, "codes"))
                    assert_same(
                        packed.scales.view(torch.uint8), expected.scales.view(torch.uint8), (shape, kind, variant)
                    )
                    assert_same(packed.amax, expected.amax, (shape, kind, variant, "amax"))


@pytest.mark.parametrize("choice", [None, *CHOICES], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_dimensional_blocks(dtype: torch.dtype, choice: FourOverSix | None) -> None:
    for kind in ("heavy", "broken", "ties"):
        for shape in [(16, 16), (33, 50), (1, 1), (48, 160)]:
            x = sample(shape, dtype, kind)
            packed = dispatch.quantize_nvfp4(x, "2d", four_over_six=choice)
            expected = formats.quantize_nvfp4(x, "2d", four_over_six=choice)
            assert_same(packed.codes, expected.codes, (kind, shape, "codes"))
            assert_same(packed.scales.view(torch.uint8), expected.scales.view(torch.uint8), (kind, shape, "scales"))
        for axes in ((0, 1), (1, 0)):
            for layout in (torch.contiguous_format, torch.channels_last):
                x = sample((40, 24, 3, 3), dtype, kind).to(memory_format=layout)
                for amax in (None, 1.0):
                    values, inside = dispatch.fake_quantize_nvfp4(x, axes, amax, four_over_six=choice)
                    expected_values, expected_inside = formats.fake_quantize_nvfp4(x, axes, amax, four_over_six=choice)
                    assert_same(values, expected_values, (kind, axes, amax))
                    assert torch.equal(inside, expected_inside)


@pytest.mark.parametrize("rule", ["floor", "ceil"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_mxfp4(dtype: torch.dtype, rule: str) -> None:
    for kind in ("normal", "heavy", "broken", "tiny", "huge", "ties"):
        for shape, axis in [((33, 64), -1), ((20, 17), 0), ((2, 40, 5, 6), 1), ((1, 1), -1), ((2, 96, 3, 5), 1)]:
            x = sample(shape, dtype, kind)
            for options in ({}, {"rounding": "stochastic", "seed": 11, "offset": 2**40}):
                for y in (x, x.to(memory_format=torch.channels_last) if x.ndim == 4 else x):
                    values = dispatch.fake_quantize_mxfp4(y, axis, rule, **options)
                    assert_same(values, formats.fake_quantize_mxfp4(y, axis, rule, **options), (kind, shape, axis))
                    packed = dispatch.quantize_mxfp4(y, rule, axis=axis, **options)
                    expected = formats.quantize_mxfp4(y.movedim(axis, -1), rule, **options)
                    assert_same(packed.codes, expected.codes, (kind, shape, "codes"))
                    assert_same(packed.scales, expected.scales, (kind, shape, "scales"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_hadamard_fused_before_quantising(dtype: torch.dtype) -> None:
    for shape, axis in [((33, 48), -1), ((20, 17), 0), ((2, 40, 5, 6), 1)]:
        x = sample(shape, dtype, "heavy")
        for options in ({}, {"rounding": "stochastic", "seed": 5}, {"row_scaled": True}):
            values, _ = dispatch.fake_quantize_nvfp4(x, (axis,), hadamard=True, **options)
            transformed = formats.random_hadamard(x, axis)
            expected, _ = formats.fake_quantize_nvfp4(transformed, (axis,), **options)
            assert_same(values, expected.to(dtype), (shape, options))
        values = dispatch.fake_quantize_mxfp4(x, axis, "ceil", hadamard=True)
        transformed = formats.random_hadamard(x, axis)
        assert_same(values, formats.fake_quantize_mxfp4(transformed, axis, "ceil").to(dtype), (shape, "mx"))


def test_swizzled_scales() -> None:
    for shape in [(1, 16), (130, 80), (256, 64), (300, 1000)]:
        x = sample(shape, torch.bfloat16, "heavy")
        amax = dispatch.finite_amax(x)
        _, scales = torch.ops.fp4deploy.pack_along(x, 1, amax, None, [0, 448, 0, 0, 0, 0], True)
        expected = formats.quantize_nvfp4(x).scales.view(torch.uint8)
        assert_same(scales, swizzle_scales(expected), shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_amax_of_the_tensor_and_of_rows(dtype: torch.dtype) -> None:
    for shape in [(1,), (7,), (100_003,), (33, 48), (2, 5, 3, 7)]:
        for kind in ("heavy", "broken"):
            x = sample(shape, dtype, kind)
            for y in (x, x[1:] if x.numel() > 1 and x.shape[0] > 1 else x):
                assert dispatch.finite_amax(y) == formats.finite_amax(y), (shape, kind)
                for axis in range(y.ndim):
                    assert torch.equal(operators._row_amax(y, axis), formats.finite_amax(y, axis))


def laid_out(x: torch.Tensor, layout: str) -> tuple[torch.Tensor, int, bool]:
    """[N, C, H, W] otherwise in memory, the axis of C, and whether one kernel quantises and measures it."""
    whole, pairs = x.shape[1] % 16 == 0, x.element_size() == 2
    if layout == "rows":
        return x.movedim(1, 3).contiguous(), 3, whole
    if layout == "channels_last":
        return x.contiguous(memory_format=torch.channels_last), 1, whole
    if layout == "oihw":
        x = x.transpose(0, 1).contiguous()
        return x, 0, whole and (x[0].numel() == 1 or (pairs and x[0].numel() % 2 == 0))
    x = x[:, :, :, ::2] if layout == "strided" else x
    inner = x.shape[2] * x.shape[3]
    return x, 1, whole and (inner == 1 or (pairs and inner % 2 == 0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["rows", "nchw", "channels_last", "oihw", "strided"])
def test_quantising_and_the_amax_of_the_same_pass(
    layout: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where whole blocks lie in rows, or in pairs of 16-bit columns, nothing else reads the tensor."""
    alone: list[torch.Size] = []
    find = operators._find_amax
    monkeypatch.setattr(operators, "_find_amax", lambda x, *rest: (alone.append(x.shape), find(x, *rest)))
    amax = torch.tensor(0.7, device="cuda")
    for shape in [(2, 64, 9, 10), (1, 17, 1, 1), (3, 48, 8, 12), (2, 16, 1, 7), (1, 96, 1, 1), (5, 320, 33, 34)]:
        for kind in ("heavy", "broken", "tiny", "huge"):
            x, axis, one_pass = laid_out(sample(shape, dtype, kind), layout)
            alone.clear()
            poison()
            values, bits, own = dispatch.fake_quantize_and_amax(x, (axis,), amax)
            assert bool(alone) != one_pass, (layout, shape)
            expected, inside = formats.fake_quantize_nvfp4(x, (axis,), amax)
            assert_same(values, expected, (layout, shape, kind))
            assert own == formats.finite_amax(x), (layout, shape, kind)
            assert own.dtype == torch.float32
            gradient = laid_out(sample(shape, dtype, "normal", 3), layout)[0]
            masked = dispatch.mask_gradient(gradient, bits, values.stride(), axis)
            assert_same(masked, gradient * inside, (layout, shape, "mask"))


@pytest.mark.parametrize("options", [{"four_over_six": FourOverSix()}, {"rounding": "stochastic"}], ids=str)
def test_the_amax_beside_what_one_pass_does_not_do(options: dict[str, Any]) -> None:
    x = sample((33, 64), torch.bfloat16, "broken")
    amax = torch.tensor(0.7, device="cuda")
    values, _, own = dispatch.fake_quantize_and_amax(x, (1,), amax, **options)
    assert own == formats.finite_amax(x)
    if "four_over_six" in options:
        assert_same(values, formats.fake_quantize_nvfp4(x, (1,), amax, **options)[0], options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_previous_amax_or_the_first(dtype: torch.dtype) -> None:
    for shape in [(1,), (100_003,), (2, 5, 3, 7)]:
        x = sample(shape, dtype, "broken")
        for previous in (3.0, 1e-30, 0.0):
            found = dispatch.previous_amax(x, torch.tensor(previous, device="cuda"))
            expected = dispatch.previous_amax(x.cpu(), torch.tensor(previous))
            assert found.cpu() == expected, (shape, previous)
    half = torch.tensor(3.0, device="cuda", dtype=torch.float16)
    assert dispatch.previous_amax(x, half) == 3


def test_empty_and_foreign_tensors_go_to_the_reference() -> None:
    for x in (torch.empty(0, 16, device="cuda"), torch.randn(4, 32, dtype=torch.float64, device="cuda")):
        values, _ = dispatch.fake_quantize_nvfp4(x)
        assert_same(values, formats.fake_quantize_nvfp4(x)[0], x.shape)


def test_more_elements_than_32_bits_count() -> None:
    if torch.cuda.get_device_properties(0).total_memory < 40e9:
        pytest.skip("needs 40 GB of GPU memory")
    x = torch.randn(1 << 12, 16, device="cuda").half().repeat(((1 << 31) + 32) // (1 << 16) + 1, 1)
    assert x.numel() > 1 << 31
    values, _ = dispatch.fake_quantize_nvfp4(x, amax=5.0)
    expected, _ = formats.fake_quantize_nvfp4(x[: 1 << 12], amax=5.0)
    assert torch.equal(values.view(-1, 1 << 12, 16).amax(0), values.view(-1, 1 << 12, 16).amin(0))
    assert_same(values[-(1 << 12) :], expected, "the last rows")


def test_in_a_graph_and_compiled() -> None:
    x = sample((64, 128), torch.bfloat16, "normal")

    def run(y: torch.Tensor) -> torch.Tensor:
        return dispatch.fake_quantize_nvfp4(y * 2, mask=False)[0]

    expected = run(x)
    graph, static = torch.cuda.CUDAGraph(), x.clone()
    with torch.cuda.graph(graph):
        captured = run(static)
    static.copy_(x)
    captured.zero_()
    graph.replay()
    assert_same(captured, expected, "graph")
    compiled: Callable[[torch.Tensor], torch.Tensor] = torch.compile(run, fullgraph=True)
    assert_same(compiled(x), expected, "compiled")
