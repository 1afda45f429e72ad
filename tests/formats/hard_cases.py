"""Tensors on which an almost right quantiser shows: [R, 32] float32 each, R a multiple of 16."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from fp4deploy.formats import FourOverSix, block_scales, quantize_nvfp4
from tests.formats.scalar_contract import E4M3_MIDPOINTS

TIES = [0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, 6.0]
# Amax 2688 makes the global scale 1: a block's scale is its amax / 6.
UNIT_AMAX = 2688.0


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def neighbours(values: torch.Tensor, ulps: int) -> torch.Tensor:
    """[2 * ulps + 1, ...]: the values and the floats around them."""
    bits = values.to(torch.float32).view(torch.int32)
    return torch.stack([bits + step for step in range(-ulps, ulps + 1)]).view(torch.float32)


def rows_of(values: torch.Tensor) -> torch.Tensor:
    """Any number of values as [R, 32], the rest zero."""
    flat = values.flatten()
    return torch.nn.functional.pad(flat, (0, -len(flat) % 512)).view(-1, 32)


def with_amax(amaxes: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """A block of 32 for each amax: it, and random values below it."""
    spread = torch.rand(len(amaxes), 32, generator=generator(seed)) * 2 - 1
    blocks = spread * amaxes.unsqueeze(1) * 0.9999
    blocks[:, 0] = amaxes
    blocks[:, 16] = -amaxes
    return torch.nn.functional.pad(blocks, (0, 0, 0, -len(blocks) % 16))


def e4m3_ties() -> torch.Tensor:
    """Amax values whose block scale under `UNIT_AMAX` is exactly halfway between two E4M3 values, and 1 ulp off."""
    around = neighbours(torch.tensor(6 * E4M3_MIDPOINTS), 4)
    exact = around * torch.tensor(1 / 6) == torch.tensor(E4M3_MIDPOINTS, dtype=torch.float32)
    found = torch.where(exact, around, 0.0).amax(0)
    assert (found > 0).sum() > 100
    return neighbours(found[found > 0], 1).flatten()


def near_ties(choice: FourOverSix, block: str = "1d", count: int = 64) -> torch.Tensor:
    """Pairs of neighbouring blocks of which one goes to 4 and one to 6, found by bisection: [2 * count, 16 or 256]."""
    size = 16 if block == "1d" else 256

    def to_four(blocks: torch.Tensor) -> torch.Tensor:
        tiles = blocks if block == "1d" else blocks.view(-1, 16)
        q = quantize_nvfp4(tiles, block, amax=8.0, four_over_six=choice)
        a = tiles.abs().amax(1) if block == "1d" else tiles.view(-1, 256).abs().amax(1)
        six = block_scales(a, torch.tensor(8.0), choice.e4m3_max)[0].view(-1)
        return q.scales.float()[:: size // 16].view(-1) > six

    pool = torch.randn(32 * count, size, generator=generator(size)) * 1.3
    four = to_four(pool)
    count = min(count, int(four.sum()), int((~four).sum()))
    a, b = pool[four][:count], pool[~four][:count]
    for _ in range(60):
        middle = (a + b) / 2
        four = to_four(middle).unsqueeze(1)
        a, b = torch.where(four, middle, a), torch.where(four, b, middle)
    assert torch.isclose(a, b, rtol=1e-4, atol=1e-6).all()
    return torch.cat([a, b])


@cache
def hard_cases() -> dict[str, torch.Tensor]:
    """Name -> [R, 32], amax from the tensor itself."""
    normal = torch.randn(64, 32, generator=generator())
    powers = torch.tensor([2.0**k for k in range(-120, 127, 3)])
    ladder = torch.tensor(TIES).repeat(32, 2) * 2.0 ** torch.arange(-16.0, 16).unsqueeze(1)
    ladder[:, 8:24] = torch.nextafter(ladder[:, 8:24], torch.tensor(torch.inf))
    ties = with_amax(e4m3_ties())
    ties[-1] = UNIT_AMAX
    heavy = normal / torch.rand(64, 32, generator=generator(1)).pow(3).clamp(min=1e-9)
    return {
        "normal": normal,
        "element ties": ladder,
        "e4m3 ties": ties,
        "powers of two": with_amax(neighbours(powers, 1).flatten(), 2),
        "1.5 powers of two": with_amax(neighbours(1.5 * powers, 1).flatten(), 3),
        "1e-30": normal * 1e-30,
        "1e30": normal * 1e30,
        "largest": normal / normal.abs().max() * torch.finfo(torch.float32).max,
        "subnormal": normal * 1e-40,
        "heavy tails": heavy,
        "rows of different scale": normal * 10.0 ** torch.linspace(-38, 35, 64).unsqueeze(1),
        "bf16": (normal * 3).bfloat16().float(),
        "fp16": (normal * 1e4).half().float(),
        "zeros and one": torch.eye(32)[:16] * 1e-3,
        "equal": torch.full((16, 32), -0.7),
        "zero": torch.zeros(16, 32),
        "not finite": torch.where(
            torch.rand(64, 32, generator=generator(4)) < 0.01, torch.tensor([torch.nan, torch.inf]).repeat(16), normal
        ),
    }


def as_numpy(x: torch.Tensor) -> np.ndarray:
    return np.ascontiguousarray(x.float().numpy())
