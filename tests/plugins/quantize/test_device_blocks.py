"""Whole blocks by the kernels' header, compiled for the host: codes, scales, values and mask as the torch reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fp4deploy import formats
from fp4deploy.formats import FourOverSix
from tests.formats.golden import golden_cases, golden_input
from tests.plugins.quantize.device_cases import FLT_MAX, INPUTS, RANDOM, Header, assert_bits, generator
from tests.samples import sample

CHOICES = [FourOverSix(m, e, f) for m in ("mae", "mse") for f in (False, True) for e in (256, 448)]


def quantize(
    header: Header,
    x: torch.Tensor,
    amax: torch.Tensor,
    rows: int = 1,
    choice: FourOverSix | None = None,
    random: bool = False,
) -> tuple[torch.Tensor, ...]:
    """The header's codes [R, K/2], scales [R, K/16], values and inside [R, K] of float32 [R, K]; amax [] or [R, 1]."""
    count, size = x.shape
    tiles = count // rows * (size // 16)

    def cut(y: torch.Tensor, width: int) -> torch.Tensor:
        return y.reshape(count // rows, rows, -1, width).transpose(1, 2).contiguous()

    def join(y: torch.Tensor) -> torch.Tensor:
        return y.view(count // rows, -1, rows, y.shape[-1]).transpose(1, 2).reshape(count, -1)

    amaxes = cut(amax.expand(count, size // 16), 1)[:, :, 0].flatten().contiguous()
    numbers = cut(torch.arange(count * size // 16).view(count, -1), 1)
    key = torch.from_numpy(np.array([RANDOM["seed"], RANDOM["offset"]], np.uint64).view(np.int64)) if random else None
    codes, values = torch.empty(tiles * rows, 8, dtype=torch.uint8), torch.empty(tiles * rows, 16)
    scales, inside = torch.empty(tiles, dtype=torch.uint8), torch.empty(tiles * rows, dtype=torch.int16)
    how = 1 + 2 * (choice.metric == "mse") + choice.fast if choice else 0
    largest = choice.e4m3_max if choice else 448
    outputs = (codes, scales, values, inside)
    header("nvfp4", cut(x, 16), tiles, rows, amaxes, largest, how, key, numbers, *outputs)
    bits = inside.unsqueeze(1) >> torch.arange(16, dtype=torch.int16) & 1
    return join(codes), join(scales.repeat_interleave(rows).unsqueeze(1)), join(values), join(bits).bool()


def check(
    header: Header,
    x: torch.Tensor,
    what: object,
    block: str = "1d",
    choice: FourOverSix | None = None,
    static: float | None = None,
    **options: Any,
) -> None:
    axes, rows = ((-1,), 1) if block == "1d" else ((-2, -1), 16)
    q = formats.quantize_nvfp4(x, block, static, four_over_six=choice, **options)
    values, inside = formats.fake_quantize_nvfp4(x, axes, static, four_over_six=choice, **options)
    amax = q.amax.unsqueeze(1) if q.amax.ndim else q.amax
    found = quantize(header, x, amax, rows, choice, "rounding" in options)
    expected = (q.codes, q.scales.view(torch.uint8), values, inside)
    for name, actual, reference in zip(("codes", "scales", "values", "inside"), found, expected, strict=True):
        assert_bits(actual, reference, (what, static, name))


@pytest.mark.parametrize(("block", "choice"), sample(["1d", "2d"], [None, *CHOICES], every=4), ids=str)
def test_nvfp4(header: Header, block: str, choice: FourOverSix | None) -> None:
    for name, x in INPUTS.items():
        for static in (None, 0.7):
            check(header, x, name, block, choice, static)


@pytest.mark.parametrize("choice", [None, *CHOICES[::3]], ids=str)
def test_row_scaled(header: Header, choice: FourOverSix | None) -> None:
    for name, x in INPUTS.items():
        check(header, x, name, choice=choice, row_scaled=True)


@pytest.mark.parametrize("block", ["1d", "2d"])
def test_stochastic(header: Header, block: str) -> None:
    for name, x in INPUTS.items():
        check(header, x, name, block, rounding="stochastic", **RANDOM)


def test_after_hadamard(header: Header) -> None:
    for name, x in INPUTS.items():
        y = x.clone()
        header("hadamard", y, y.numel() // 16)
        assert_bits(y, formats.random_hadamard(x), name)
        check(header, y, name, rounding="stochastic", **RANDOM)


@pytest.mark.parametrize("amax", [float("inf"), float("nan")])
def test_a_static_amax_that_only_a_learned_scale_has(header: Header, amax: float) -> None:
    """`quantize_nvfp4` refuses it; in a training step it shows as NaN, or as zeros."""
    static = torch.tensor(amax)
    for name, x in INPUTS.items():
        for choice in (None, CHOICES[0], CHOICES[-1]):
            expected = formats.fake_quantize_nvfp4(x, (-1,), static, four_over_six=choice)
            for actual, reference in zip(quantize(header, x, static, choice=choice)[2:], expected, strict=True):
                assert_bits(actual, reference, (name, amax))


@pytest.mark.parametrize("amax", [0.0, 1e-45, 1e-38, FLT_MAX])
def test_static_amax_at_the_ends(header: Header, amax: float) -> None:
    for name, x in INPUTS.items():
        for choice in (None, CHOICES[0], CHOICES[-1]):
            check(header, x, name, choice=choice, static=amax)


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_neighbours_that_choose_differently(header: Header, choice: FourOverSix) -> None:
    """Bisect between blocks that choose 4 and 6 until they are all but equal."""

    def scales(x: torch.Tensor, how: FourOverSix | None) -> torch.Tensor:
        return quantize(header, x, torch.tensor(8.0), choice=how)[1].squeeze(1).int()

    pool = torch.randn(1 << 14, 16, generator=generator(10)) * 1.3
    four = scales(pool, choice) >= scales(pool, None) + 2 - 6 * (choice.e4m3_max == 256)
    count = min(int(four.sum()), int((~four).sum()), 2048)
    assert count > 500
    a, b = pool[four][:count], pool[~four][:count]
    for _ in range(40):
        middle = (a + b) / 2
        q = formats.quantize_nvfp4(middle, amax=8.0, four_over_six=choice).scales.view(torch.uint8).int()
        four = q >= scales(middle, None).unsqueeze(1) + 2 - 6 * (choice.e4m3_max == 256)
        a, b = torch.where(four, middle, a), torch.where(four, b, middle)
    check(header, torch.cat([a, b]), "bisected", choice=choice, static=8.0)


@pytest.mark.parametrize("rule", ["floor", "ceil"])
@pytest.mark.parametrize("random", [False, True])
def test_mxfp4(header: Header, rule: str, random: bool) -> None:
    options: dict[str, Any] = {"rounding": "stochastic", **RANDOM} if random else {}
    key = torch.from_numpy(np.array([RANDOM["seed"], RANDOM["offset"]], np.uint64).view(np.int64)) if random else None
    for name, x in INPUTS.items():
        q, values = formats.quantize_mxfp4(x, rule, **options), formats.fake_quantize_mxfp4(x, -1, rule, **options)
        codes, scales = torch.empty_like(q.codes), torch.empty_like(q.scales)
        found, inside = torch.empty_like(x), torch.empty(x.numel() // 16, dtype=torch.int16)
        numbers = torch.arange(x.numel() // 16)
        outputs = (codes, scales, found, inside)
        header("mxfp4", x.contiguous(), x.numel() // 32, int(rule == "ceil"), key, numbers, *outputs)
        assert_bits(codes, q.codes, (name, "codes"))
        assert_bits(scales, q.scales, (name, "scales"))
        assert_bits(found, values, (name, "values"))


def test_golden_bytes(header: Header) -> None:
    """Against the vectors themselves: the reference has no part in it."""
    names = {f"4o6_{c.metric.upper()}_{c.e4m3_max}_{'fast' if c.fast else 'strict'}": c for c in CHOICES}
    for name, case in golden_cases().items():
        x = golden_input(case)
        rows = 1 if case["tile"] == [1, 16] else 16
        padded = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % rows))
        amax = x.abs().amax(1, keepdim=True) if case["row_scaled"] else torch.tensor(case["amax"])
        for configuration, expected in case["expected"].items():
            codes, scales, _, _ = quantize(header, padded, amax, rows, names.get(configuration))
            assert codes[: len(x)].numpy().tobytes().hex() == "".join(expected["data_hex"]), (name, configuration)
            assert scales[: len(x)].numpy().tobytes().hex() == "".join(expected["scale_hex"]), (name, configuration)
