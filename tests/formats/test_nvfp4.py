"""NVFP4 against golden bytes, against a scalar transcription of the contract, and on awkward input."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4deploy.errors import InputError
from fp4deploy.formats import E2M1_VALUES, fake_quantize_nvfp4, quantize_nvfp4, unpack_codes

F32 = np.float32
FLT_MAX = np.finfo(np.float32).max


def e4m3_table() -> np.ndarray:
    """The 127 finite non-negative E4M3 values, from the definition of the format."""
    low = [m / 8 * 2.0**-6 for m in range(8)]
    return np.array(
        low + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:119], dtype=np.float64
    )


def nearest_even(value: float, table: np.ndarray) -> int:
    """Index of the entry nearest to `value`; a tie goes to the even index."""
    distance = np.abs(table - float(value))
    best = np.flatnonzero(distance == distance.min())
    return int(best[0] if len(best) == 1 or best[0] % 2 == 0 else best[1])


@np.errstate(over="ignore", divide="ignore", under="ignore")
def scalar_block(block: np.ndarray, amax: np.float32) -> tuple[list[int], int]:
    """Codes and scale byte of one block, one element after the other, straight from the contract."""
    if amax == 0:
        return [0] * len(block), 0
    scale = min(F32(2688) / amax, F32(FLT_MAX))
    decode = F32(1) / scale
    step = F32(np.abs(block).max() * (scale * F32(1 / 6)))
    byte = nearest_even(min(step, F32(448)), e4m3_table())
    d8 = F32(e4m3_table()[byte])
    if byte == 0:
        return [0] * len(block), 0
    encode = min(F32(1) / (d8 * decode), F32(FLT_MAX))
    codes = []
    for value in block:
        u = np.clip(F32(value * encode), F32(-6), F32(6))
        codes.append(nearest_even(abs(u), np.array(E2M1_VALUES)) + (8 if u < 0 else 0))
    return codes, byte


def check_against_scalar(x: torch.Tensor, amax: float | None = None) -> None:
    q = quantize_nvfp4(x, amax=amax)
    a = F32(x.abs().max().item() if amax is None else amax)
    codes = unpack_codes(q.codes).numpy().reshape(-1, 16)
    scales = q.scales.view(torch.uint8).numpy().ravel()
    for index, block in enumerate(x.float().numpy().reshape(-1, 16)):
        expected, byte = scalar_block(block, a)
        assert scales[index] == byte, f"scale of block {index}: {scales[index]:#x}, expected {byte:#x}, {block}"
        assert codes[index].tolist() == expected, f"codes of block {index} differ, {block}"


@pytest.mark.parametrize("block", ["1d", "2d"])
def test_golden_vectors(shared: Path, block: str) -> None:
    cases = json.loads((shared / "vectors" / "nvfp4_golden.json").read_text())["cases"]
    tile = [1, 16] if block == "1d" else [16, 16]
    chosen = {name: case for name, case in cases.items() if case["tile"] == tile and not case["row_scaled"]}
    assert chosen
    for name, case in chosen.items():
        raw = bytes.fromhex("".join(case["x_f32_hex"]))
        x = torch.from_numpy(np.frombuffer(raw, "<f4").copy()).reshape(case["shape"])
        q = quantize_nvfp4(x, block=block)
        expected = case["expected"]["std"]
        assert q.codes.numpy().tobytes().hex() == "".join(expected["data_hex"]), name
        assert q.scales.view(torch.uint8).numpy().tobytes().hex() == "".join(expected["scale_hex"]), name
        assert q.amax.item() == case["amax"], name


@pytest.mark.parametrize("magnitude", [1.0, 1e-30, 1e30, 6.0, 448.0, 3e38])
def test_random_blocks_against_the_scalar_contract(magnitude: float) -> None:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(24, 16, generator=generator) * torch.logspace(-4, 0, 24).unsqueeze(1)
    check_against_scalar((x / x.abs().max()) * magnitude)
    check_against_scalar(x, amax=magnitude)


def test_ties_and_neighbours_of_powers_of_two_against_the_scalar_contract() -> None:
    ties = torch.tensor([0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, 6])
    near = torch.tensor([1.0, 2.0, 4.0, 0.5]).repeat(4)
    x = torch.stack([ties, ties / 4, near, torch.nextafter(near, near * 2), torch.nextafter(near, near / 2)])
    check_against_scalar(x)
    check_against_scalar(x, amax=6.0)
    check_against_scalar(x, amax=1536.0)


def test_every_e4m3_scale_against_the_scalar_contract() -> None:
    steps = torch.tensor(e4m3_table()[1:], dtype=torch.float32)
    check_against_scalar(torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)]) * steps.unsqueeze(1))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=16, max_size=16), st.integers(-20, 20))
def test_scaling_by_a_power_of_two_leaves_codes_unchanged(values: list[float], power: int) -> None:
    x = torch.tensor(values)
    if 0 < x.abs().max() < 1e-10:
        return
    x = torch.where(x.abs() < 1e-10, 0.0, x)
    q, scaled = quantize_nvfp4(x), quantize_nvfp4(x * 2.0**power)
    assert torch.equal(q.codes, scaled.codes)
    assert torch.equal(q.scales.view(torch.uint8), scaled.scales.view(torch.uint8))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-100, 100, width=32), min_size=16, max_size=48).filter(lambda v: len(v) % 16 == 0))
def test_sign_symmetry_and_bounded_scales(values: list[float]) -> None:
    x = torch.tensor(values)
    q, mirrored = quantize_nvfp4(x), quantize_nvfp4(-x)
    assert torch.equal(q.dequantize(), -mirrored.dequantize())
    assert (q.scales.view(torch.uint8) <= 0x7E).all()


def test_quantising_twice_changes_nothing() -> None:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    once = quantize_nvfp4(x, amax=4.0).dequantize()
    assert torch.equal(once, quantize_nvfp4(once, amax=4.0).dequantize())


@pytest.mark.parametrize("columns", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("block", ["1d", "2d"])
def test_ragged_axis_is_padded_with_zeros(columns: int, block: str) -> None:
    x = torch.randn(19, columns, generator=torch.Generator().manual_seed(columns))
    q = quantize_nvfp4(x, block=block)
    blocks = -(-columns // 16)
    assert q.codes.shape == (19, 8 * blocks)
    assert q.scales.shape == (19, blocks)
    padded = torch.zeros(32, 16 * blocks)
    padded[:19, :columns] = x
    whole = quantize_nvfp4(padded, block=block)
    assert torch.equal(whole.codes[:19], q.codes)
    assert torch.equal(whole.dequantize()[:19, :columns], q.dequantize())


@pytest.mark.parametrize("shape", [(0, 16), (3, 0), (0,), (2, 0, 16)])
def test_empty_tensors(shape: tuple[int, ...]) -> None:
    q = quantize_nvfp4(torch.empty(shape))
    assert q.codes.shape == (*shape[:-1], shape[-1] // 2)
    assert q.dequantize().shape == shape


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_and_strides(dtype: torch.dtype) -> None:
    x = torch.randn(64, 48, generator=torch.Generator().manual_seed(3)).to(dtype)
    q, strided = quantize_nvfp4(x.T), quantize_nvfp4(x.T.contiguous())
    assert torch.equal(q.codes, strided.codes)
    assert torch.equal(q.codes, quantize_nvfp4(x.T.float()).codes)
    assert q.dequantize(dtype).dtype == dtype


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_block_decodes_to_nan_and_harms_no_other(poison: float) -> None:
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(5))
    dirty = x.clone()
    dirty[1, 3] = poison
    q = quantize_nvfp4(dirty)
    assert q.scales.view(torch.uint8)[1, 0] == 0x7F
    assert unpack_codes(q.codes)[1, :16].sum() == 0
    assert q.dequantize()[1, :16].isnan().all()
    zeroed = x.clone()
    zeroed[1, 3] = 0
    clean = quantize_nvfp4(zeroed).dequantize()
    mask = torch.ones_like(x, dtype=torch.bool)
    mask[1, :16] = False
    assert torch.equal(q.dequantize()[mask], clean[mask])
    fake, _ = fake_quantize_nvfp4(dirty)
    assert torch.equal(fake.isnan(), q.dequantize().isnan())


def test_a_static_amax_of_zero_gives_zeros() -> None:
    q = quantize_nvfp4(torch.ones(2, 16), amax=0.0)
    assert q.codes.sum() == 0
    assert q.scales.view(torch.uint8).sum() == 0


def test_relative_error_on_normal_data_is_the_known_one() -> None:
    x = torch.randn(2048, 1024, generator=torch.Generator().manual_seed(11))
    for block, known in (("1d", 0.009090), ("2d", 0.012422)):
        error = (quantize_nvfp4(x, block=block).dequantize() - x).square().mean() / x.square().mean()
        assert error.item() == pytest.approx(known, rel=0.01)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("channels", [3, 16, 24, 48])
@pytest.mark.parametrize("amax", [None, 1.5])
def test_fake_quantise_along_channels_equals_packed(
    layout: torch.memory_format, channels: int, amax: float | None
) -> None:
    x = torch.randn(2, channels, 5, 7, generator=torch.Generator().manual_seed(channels)).to(memory_format=layout)
    fake, inside = fake_quantize_nvfp4(x, (1,), amax)
    packed = quantize_nvfp4(x.permute(0, 2, 3, 1), amax=amax).dequantize().permute(0, 3, 1, 2)
    assert torch.equal(fake, packed)
    assert (x.abs() >= fake.abs() * (1 - 1e-6))[~inside].all()
    if amax is not None:
        assert not inside[x.abs() > 1.6].any()


def test_fake_quantise_two_axes_equals_tiles() -> None:
    w = torch.randn(32, 48, 3, 3, generator=torch.Generator().manual_seed(2))
    fake, _ = fake_quantize_nvfp4(w, (0, 1))
    tiles = quantize_nvfp4(w.permute(2, 3, 0, 1), block="2d").dequantize().permute(2, 3, 0, 1)
    assert torch.equal(fake, tiles)


def test_wrong_arguments_name_the_valid_values() -> None:
    with pytest.raises(InputError, match="1d, 2d"):
        quantize_nvfp4(torch.ones(16, 16), block="3d")
    with pytest.raises(InputError, match="floating"):
        quantize_nvfp4(torch.ones(16, dtype=torch.int32))
    with pytest.raises(InputError, match="axes"):
        quantize_nvfp4(torch.ones(16), block="2d")
