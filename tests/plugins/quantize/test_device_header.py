"""The kernels' arithmetic without a GPU: `fp4.cuh` compiled by the C++ compiler, bitwise against the torch reference.

`host_kernels.cpp` loops over the functions where kernels have threads. Here: elements, scales, random bits, the
Hadamard transform; whole blocks are in `test_device_blocks.py`. What kernels do around this arithmetic, indices and
shuffles, needs a GPU: `test_quantize_gpu.py`.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fp4deploy import formats
from fp4deploy.formats import Nvfp4Tensor
from tests.plugins.quantize.device_cases import E4M3, FLT_MAX, Header, any_floats, around, assert_bits, every, generator

E2M1_EDGES = torch.tensor([0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8])


def test_nearest_codes_of_two_million_floats(header: Header) -> None:
    edges = around(E2M1_EDGES, 4)
    uniform = torch.rand(1 << 20, generator=generator(1)) * 16 - 8
    u = torch.cat([edges, -edges, any_floats(1 << 20), uniform, every(torch.bfloat16), every(torch.float16)])
    q, codes = torch.empty_like(u), torch.empty(len(u), dtype=torch.uint8)
    header("round_nearest", u, len(u), q, codes)
    assert_bits(q, formats.round_e2m1(u))
    assert_bits(codes, formats.encode_e2m1(u))
    small = u[(u >= 0) & (u < 7)].contiguous()
    codes = torch.empty(len(small), dtype=torch.uint8)
    header("codes_of_sums", small, len(small), codes)
    assert_bits(codes, formats.encode_e2m1(small), "without a clamp")


def test_stochastic_codes_for_every_byte(header: Header) -> None:
    positive = torch.cat([torch.arange(0, 8, 1 / 64), around(E2M1_EDGES), any_floats(512).abs(), torch.zeros(1)])
    values = torch.cat([positive, -positive])
    u = values.repeat_interleave(256)
    random = torch.arange(256, dtype=torch.uint8).repeat(len(values))
    q, codes = torch.empty_like(u), torch.empty(len(u), dtype=torch.uint8)
    header("round_stochastic", u, random, len(u), q, codes)
    assert_bits(q, formats.round_e2m1(u, random))
    assert_bits(codes, formats.encode_e2m1(u, random))
    header("stochastic_steps", u, random, len(u), codes)
    assert_bits(codes, formats.encode_e2m1(u, random) & 7, "as packed rows have them")


def test_every_code_and_scale_byte_decodes(header: Header) -> None:
    codes, values = torch.arange(16, dtype=torch.uint8), torch.empty(16)
    header("decode_codes", codes, 16, values)
    assert torch.equal(values.view(torch.int32)[:8], formats.decode_e2m1(codes).view(torch.int32)[:8])
    assert_bits(values, formats.decode_e2m1(codes))
    scales, decoded = torch.arange(128, dtype=torch.uint8), torch.empty(128)
    header("decode_scales", scales, 128, decoded)
    assert_bits(decoded, scales.view(torch.float8_e4m3fn).float())


def test_e4m3_rounds_ties_subnormals_and_all_binades(header: Header) -> None:
    middles = (E4M3[1:] + E4M3[:-1]) / 2
    values = torch.cat([around(middles, 3), around(E4M3[1:], 3), every(torch.bfloat16), every(torch.float16)])
    values = torch.cat([values, torch.rand(1 << 20, generator=generator()) * 448, any_floats(1 << 20).abs()])
    d = values[(values >= 0) & (values <= 448)].abs()  # no -0.0
    assert len(d) > 1 << 20
    rounded, codes = torch.empty_like(d), torch.empty(len(d), dtype=torch.uint8)
    header("round_scales", d, len(d), rounded, codes)
    expected = d.to(torch.float8_e4m3fn)
    assert_bits(rounded, expected.float())
    assert_bits(codes, expected.view(torch.uint8))


@pytest.mark.parametrize("rule", ["floor", "ceil"])
def test_e8m0_next_to_powers_of_two(header: Header, rule: str) -> None:
    powers = torch.tensor([2.0**k for k in range(-149, 128)])
    edges = torch.cat([around(powers[2:], 2), around(1.5 * powers[2:-1], 2), any_floats(1 << 18).abs()])
    a = torch.cat([edges, torch.tensor([0.0, 2.0**-149, FLT_MAX, torch.inf, torch.nan])])
    scales, values = torch.empty(len(a), dtype=torch.uint8), torch.empty_like(a)
    header("power_scales", a, len(a), int(rule == "ceil"), scales, values)
    assert_bits(scales, formats.e8m0_scales(a, rule))
    assert_bits(values, formats.decode_e8m0(scales))


@pytest.mark.parametrize("largest", [256, 448])
def test_every_scale_byte_times_every_code(header: Header, largest: int) -> None:
    scales, codes = torch.arange(128, dtype=torch.uint8), torch.arange(16, dtype=torch.uint8)
    packed = formats.pack_codes(codes).expand(1, 128, 8).flatten(1)
    for amax in (1.0, 0.7, 2688.0, 1e-30, 1e30, 1e-45, FLT_MAX, 3.25, 0.0):
        step, encode = torch.empty(128), torch.empty(128)
        header("steps", scales, 128, amax, largest, step, encode)
        q = Nvfp4Tensor(packed, scales.view(1, -1).view(torch.float8_e4m3fn), torch.tensor(amax), (1, 2048), largest)
        if amax:
            values = (step.unsqueeze(1) * formats.decode_e2m1(codes)).view(1, -1)
            assert_bits(values, q.dequantize(), amax)
        else:
            assert_bits(step[:-1], torch.zeros(127), "amax 0")
            assert_bits(encode[:-1], torch.zeros(127), "amax 0")


@pytest.mark.parametrize("largest", [256, 448])
def test_division_by_a_product_and_its_correction(header: Header, largest: int) -> None:
    v = any_floats(1 << 22)
    grid = torch.cat([v[(v.abs() > 1e-25) & (v.abs() < 1e37)], torch.zeros(1)]).contiguous()
    quotient, expected = torch.empty_like(grid), torch.empty_like(grid)
    header("divide_by_range", grid, len(grid), largest, quotient, expected)
    assert_bits(quotient, expected)


PUBLISHED = [
    (0, 0, 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (2**64 - 1, 2**64 - 1, 2**64 - 1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (0x85A308D3243F6A88, 0x299F31D0A4093822, 0x0370734413198A2E, "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("number", "seed", "offset", "words"), PUBLISHED)
def test_philox_gives_the_published_words(header: Header, number: int, seed: int, offset: int, words: str) -> None:
    numbers, found = torch.tensor(np.array([number], np.uint64).view(np.int64)), torch.empty(4, dtype=torch.int32)
    header("philox", numbers, 1, seed, offset, found)
    assert " ".join(f"{word & 0xFFFFFFFF:08x}" for word in found.tolist()) == words


def test_philox_numbers_groups_as_the_reference(header: Header) -> None:
    for seed, offset in ((0, 0), (2**63 + 5, 7), (0x0123456789ABCDEF, 2**64 - 1)):
        found = torch.empty(1 << 14, 4, dtype=torch.int32)
        header("philox", torch.arange(1 << 14), 1 << 14, seed, offset, found)
        expected = formats.random_bytes(torch.Size((1 << 10, 256)), -1, seed, offset)
        assert torch.equal(found.view(torch.uint8).view(1 << 10, 256), expected)


def test_hadamard(header: Header) -> None:
    x = torch.cat([torch.arange(16.0), torch.randn(1 << 20, generator=generator()), any_floats(1 << 16, 3)])
    x[20 * 16] = torch.nan
    y = x.clone()
    header("hadamard", y, len(y) // 16)
    assert_bits(y, formats.random_hadamard(x))
    assert y[:4].tolist() == [-14.5, -7.5, 6.5, -0.5]
