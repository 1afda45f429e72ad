"""One result for every layout, dtype, axis and piece: fake-quantise equals the packed tensor of a moved axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fp4deploy.errors import InputError
from fp4deploy.formats import (
    FourOverSix,
    Mxfp4Tensor,
    Nvfp4Tensor,
    blocks,
    fake_quantize_mxfp4,
    fake_quantize_nvfp4,
    quantize_mxfp4,
    quantize_nvfp4,
)
from tests.formats.hard_cases import generator
from tests.samples import sample

OPTIONS: dict[str, dict[str, Any]] = {
    "nearest": {},
    "static": {"amax": 1.5},
    "rows": {"row_scaled": True},
    "4/6": {"four_over_six": FourOverSix()},
    "4/6 fast static": {"four_over_six": FourOverSix("mse", 448, True), "amax": 1.5},
    "4/6 rows": {"four_over_six": FourOverSix("mse"), "row_scaled": True},
    "stochastic": {"rounding": "stochastic", "seed": 11, "offset": 3},
}
MX_OPTIONS: dict[str, dict[str, Any]] = {
    "floor": {"scale_rule": "floor"},
    "ceil": {"scale_rule": "ceil"},
    "stochastic": {"scale_rule": "ceil", "rounding": "stochastic", "seed": 11, "offset": 3},
}
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 3).contiguous().transpose(0, 3),
    "every second": lambda x: x.repeat_interleave(2, 2)[:, :, ::2],
    "offset": lambda x: torch.nn.functional.pad(x, (3, 2, 1, 0))[:, :, 1:, 3:-2],
}


def image(channels: int = 40, seed: int = 0) -> torch.Tensor:
    return torch.randn(3, channels, 4, 6, generator=generator(seed))


def poisoned() -> torch.Tensor:
    x = image()
    x[0, 3, 1, 1], x[2, 39, 0, 5], x[1, 20, 2, 2] = torch.nan, torch.inf, -torch.inf
    return x


def same(found: Nvfp4Tensor | Mxfp4Tensor, expected: Nvfp4Tensor | Mxfp4Tensor) -> None:
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.scales.view(torch.uint8), expected.scales.view(torch.uint8))


def not_saturated(x: torch.Tensor, packed: Nvfp4Tensor) -> torch.Tensor:
    """|x * e| <= 6 with e = 1 / (d8 * (1 / S)), from the packed tensor's scales."""
    encode = torch.tensor(6.0 * packed.e4m3_max) / packed.amax
    d8 = packed.scales.float()
    e = 1 / (d8 * (1 / (encode.unsqueeze(-1) if encode.ndim else encode)))
    return (x * e.repeat_interleave(16, -1)[..., : x.shape[-1]]).abs() <= 6


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("axis", [1, -1, 0])
def test_nvfp4_along_any_axis_of_any_layout(layout: str, options: str, axis: int) -> None:
    x = LAYOUTS[layout](image())
    assert torch.equal(x, image())
    fake, inside = fake_quantize_nvfp4(x, (axis,), **OPTIONS[options])
    packed = quantize_nvfp4(x.movedim(axis, -1), **OPTIONS[options])
    assert torch.equal(fake.movedim(axis, -1), packed.dequantize())
    assert torch.equal(inside.movedim(axis, -1), not_saturated(x.movedim(axis, -1), packed))
    same(packed, quantize_nvfp4(image().movedim(axis, -1).contiguous(), **OPTIONS[options]))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", MX_OPTIONS)
@pytest.mark.parametrize("axis", [1, -1, 0])
def test_mxfp4_along_any_axis_of_any_layout(layout: str, options: str, axis: int) -> None:
    x = LAYOUTS[layout](image())
    fake = fake_quantize_mxfp4(x, axis, **MX_OPTIONS[options])
    packed = quantize_mxfp4(x.movedim(axis, -1), **MX_OPTIONS[options])
    assert torch.equal(fake.movedim(axis, -1), packed.dequantize())
    same(packed, quantize_mxfp4(image().movedim(axis, -1).contiguous(), **MX_OPTIONS[options]))


@pytest.mark.parametrize("options", [name for name in OPTIONS if "rows" not in name])
@pytest.mark.parametrize("axes", [(0, 1), (1, 0), (2, 3), (-1, 1)])
def test_tiles_over_any_two_axes(options: str, axes: tuple[int, int]) -> None:
    x = torch.randn(20, 33, 3, 18, generator=generator(1))
    fake, _ = fake_quantize_nvfp4(x, axes, **OPTIONS[options])
    tiles = quantize_nvfp4(x.movedim(axes, (-2, -1)), "2d", **OPTIONS[options])
    if options != "stochastic":  # there the rows are numbered over all other axes in the tensor's own order
        assert torch.equal(fake.movedim(axes, (-2, -1)), tiles.dequantize())


def test_a_matrix_and_its_transpose_quantise_alike_in_tiles_and_not_in_blocks() -> None:
    w = torch.randn(48, 64, generator=generator(2))
    for choice in (None, FourOverSix()):
        fake = fake_quantize_nvfp4(w, (0, 1), four_over_six=choice)[0]
        transposed = fake_quantize_nvfp4(w, (1, 0), four_over_six=choice)[0]
        assert (fake != transposed).float().mean() < 0.01  # 4/6 adds its errors in another order
    assert torch.equal(fake_quantize_nvfp4(w, (0, 1))[0], fake_quantize_nvfp4(w.T, (0, 1))[0].T)
    assert not torch.equal(fake_quantize_nvfp4(w, (1,))[0], fake_quantize_nvfp4(w, (0,))[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_computed_in_float32_and_cast_at_the_end(dtype: torch.dtype) -> None:
    x = image().to(dtype)
    for options in OPTIONS.values():
        fake, _ = fake_quantize_nvfp4(x, (1,), **options)
        assert torch.equal(fake, fake_quantize_nvfp4(x.float(), (1,), **options)[0].to(dtype))
        assert fake.dtype == dtype
        packed = quantize_nvfp4(x, **options)
        same(packed, quantize_nvfp4(x.float(), **options))
        assert packed.dequantize(dtype).dtype == dtype
    fake = fake_quantize_mxfp4(x, 1)
    assert torch.equal(fake, fake_quantize_mxfp4(x.float(), 1).to(dtype))


def test_the_layout_of_the_input_is_kept_and_the_input_too() -> None:
    x = image().contiguous(memory_format=torch.channels_last)
    before = x.clone()
    for fake in (fake_quantize_nvfp4(x, (1,))[0], fake_quantize_mxfp4(x, 1)):
        assert fake.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(x, before)
    expanded = torch.randn(1, 32, generator=generator(3)).expand(5, 32)
    assert torch.equal(fake_quantize_nvfp4(expanded)[0], fake_quantize_nvfp4(expanded.contiguous())[0])
    assert torch.equal(fake_quantize_mxfp4(expanded), fake_quantize_mxfp4(expanded.contiguous()))


@pytest.mark.parametrize(("layout", "piece"), [*sample(LAYOUTS, [100], every=2), ("contiguous", 1)])
def test_piece_by_piece_equals_the_whole(monkeypatch: pytest.MonkeyPatch, layout: str, piece: int) -> None:
    x = LAYOUTS[layout](poisoned())
    if piece == 1:  # as many pieces as elements
        x = x[..., :2, :2].contiguous()
    flat, matrix = x.flatten()[:500], x.flatten(1)

    def everything() -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for options in OPTIONS.values():
            for axis in (1, -1):
                found += fake_quantize_nvfp4(x, (axis,), **options)
            packed = [quantize_nvfp4(t, **options) for t in (x, flat, matrix, matrix.T)]
            if "row_scaled" not in options:
                found += [*fake_quantize_nvfp4(x, (0, 1), **options), *fake_quantize_nvfp4(matrix, (1, 0), **options)]
                packed += [quantize_nvfp4(t, "2d", **options) for t in (x, matrix, matrix.T)]
            found += [t for q in packed for t in (q.codes, q.scales.view(torch.uint8), q.amax)]
        for options in MX_OPTIONS.values():
            found += [fake_quantize_mxfp4(t, axis, **options) for t in (x, matrix) for axis in (0, 1)]
            found += [t for q in (quantize_mxfp4(t, **options) for t in (x, flat)) for t in (q.codes, q.scales)]
        return found

    whole = everything()
    monkeypatch.setattr(blocks, "PIECE", piece)
    for index, (cut, at_once) in enumerate(zip(everything(), whole, strict=True)):
        assert torch.equal(cut.nan_to_num(99), at_once.nan_to_num(99)), f"result {index}"


def test_a_tensor_of_many_pieces_equals_its_rows() -> None:
    x = torch.randn(3 * blocks.PIECE // 512 + 7, 512, generator=generator(4))
    q = quantize_nvfp4(x)
    for rows in (slice(0, 3), slice(505, 520), slice(-3, None)):
        part = quantize_nvfp4(x[rows], amax=q.amax)
        assert torch.equal(q.codes[rows], part.codes)
        assert torch.equal(q.dequantize()[rows], fake_quantize_nvfp4(x)[0][rows])


def test_a_static_amax_for_each_row() -> None:
    x, amax = torch.randn(5, 40, generator=generator(5)), torch.tensor([0.5, 1, 2, 4, 0])
    q = quantize_nvfp4(x, amax=amax, row_scaled=True)
    assert torch.equal(q.amax, amax)
    fake, inside = fake_quantize_nvfp4(x, amax=amax.unsqueeze(1), row_scaled=True)
    assert torch.equal(fake, q.dequantize())
    for row in range(5):
        same(quantize_nvfp4(x[row : row + 1], amax=float(amax[row])), quantize_nvfp4(x[row : row + 1], amax=amax[row]))
        assert torch.equal(q.codes[row : row + 1], quantize_nvfp4(x[row : row + 1], amax=amax[row]).codes)
    assert not inside[0].all()
    with pytest.raises(InputError, match=r"one value a row, \(5, 1\)"):
        fake_quantize_nvfp4(x, amax=amax, row_scaled=True)
    with pytest.raises(InputError, match="a single value"):
        quantize_nvfp4(x, amax=amax)


@pytest.mark.parametrize("shape", [(0, 16), (3, 0), (0,), (2, 0, 16), (0, 32, 0, 4), (1,), (1, 1)])
def test_empty_and_single(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    for options in OPTIONS.values():
        q = quantize_nvfp4(x, **options)
        assert q.codes.shape == (*shape[:-1], -(-shape[-1] // 16) * 8)
        assert q.scales.shape == (*shape[:-1], -(-shape[-1] // 16))
        assert q.dequantize().shape == fake_quantize_nvfp4(x, **options)[0].shape == shape
    for options in MX_OPTIONS.values():
        packed = quantize_mxfp4(x, **options)
        assert packed.codes.shape == (*shape[:-1], -(-shape[-1] // 32) * 16)
        assert packed.dequantize().shape == fake_quantize_mxfp4(x, **options).shape == shape
    if len(shape) > 1:
        assert quantize_nvfp4(x, "2d").dequantize().shape == shape


def test_what_is_not_floating_point_or_has_no_axis_is_refused() -> None:
    for wrong, reason in ((torch.ones(16, dtype=torch.int32), "floating-point"), (torch.tensor(1.0), "ax[ie]s")):
        for quantize in (quantize_nvfp4, fake_quantize_nvfp4, quantize_mxfp4, fake_quantize_mxfp4):
            with pytest.raises(InputError, match=reason):
                quantize(wrong)
    with pytest.raises(InputError, match="1-D blocks"):
        quantize_nvfp4(torch.ones(16, 16), "2d", row_scaled=True)
    with pytest.raises(InputError, match="floor, ceil"):
        quantize_mxfp4(torch.ones(32), "round")
    with pytest.raises(InputError, match="mae, mse"):
        FourOverSix("max")
    with pytest.raises(InputError, match="256, 448"):
        FourOverSix(e4m3_max=400)
