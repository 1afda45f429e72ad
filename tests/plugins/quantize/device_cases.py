"""Numbers and tensors on which almost right arithmetic shows, and the comparison that all header tests use."""

from __future__ import annotations

from collections.abc import Callable

import torch

Header = Callable[..., None]
FLT_MAX = torch.finfo(torch.float32).max
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
RANDOM = {"seed": 0xFEDCBA9876543210, "offset": 2**40 + 3}


def assert_bits(actual: torch.Tensor, expected: torch.Tensor, what: object = "") -> None:
    """Equal, the sign of a zero and the payload of a NaN excepted; names the first difference."""
    assert actual.shape == expected.shape, (what, actual.shape, expected.shape)
    same = (actual == expected) | ((actual != actual) & (expected != expected))
    if not same.all():
        at = tuple((~same).nonzero()[0].tolist())
        raise AssertionError(f"{what}: {int((~same).sum())} differ, first {at}: {actual[at]} instead of {expected[at]}")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def around(values: torch.Tensor, ulps: int = 2) -> torch.Tensor:
    """The floats next to `values`, flat."""
    bits = values.to(torch.float32).view(torch.int32)
    return torch.cat([bits + step for step in range(-ulps, ulps + 1)]).view(torch.float32)


def any_floats(count: int, seed: int = 0) -> torch.Tensor:
    """Random bit patterns without NaN: every binade, subnormals, infinities."""
    bits = torch.randint(-(2**31), 2**31 - 1, (count,), generator=generator(seed), dtype=torch.int64)
    floats = bits.to(torch.int32).view(torch.float32)
    return torch.where(floats.isnan(), torch.inf, floats)


def every(dtype: torch.dtype) -> torch.Tensor:
    """Every number of a 16-bit type, as float32."""
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).float()
    return values[~values.isnan()]


def inputs() -> dict[str, torch.Tensor]:
    """Name -> [R, 64], R a multiple of 16: what an almost right quantiser gets wrong."""
    normal = torch.randn(1024, 64, generator=generator(5))
    grid = torch.randint(-28, 29, (1024, 64), generator=generator(6)) / 4
    powers = torch.tensor([2.0**k for k in range(-126, 127)])
    edges = torch.cat([around(powers, 1), around(1.5 * powers, 1)])[: 23 * 64].view(-1, 1)
    spread = torch.rand(len(edges), 64, generator=generator(7)) * 2 - 1
    ties = around(6 * (E4M3[1:] + E4M3[:-1]) / 2, 1).view(-1, 1)[:368]
    return {
        "normal": normal,
        "heavy": normal * torch.exp(3 * torch.randn(1024, 64, generator=generator(8))),
        "element ties": grid * 2.0 ** torch.randint(-6, 6, (1024, 1), generator=generator(9)),
        "a grid whose 4/6 errors tie": grid,
        "powers of two": torch.cat([edges, spread * edges * 0.999], 1)[:1456, :64],
        "e4m3 ties": torch.cat([ties, spread[:368, :62] * ties * 0.999, torch.full((368, 1), 2688.0)], 1),
        "1e-30": normal * 1e-30,
        "1e30": normal * 1e30,
        "subnormal": normal * 1e-40,
        "largest": normal / normal.abs().max() * FLT_MAX,
        "rows": normal * 10.0 ** torch.linspace(-38, 35, 1024).unsqueeze(1),
        "any bits": any_floats(1 << 16).view(-1, 64),
        "bf16": (normal * 3).bfloat16().float(),
        "not finite": torch.where(
            torch.rand(1024, 64, generator=generator(4)) < 0.01, torch.tensor([torch.nan, torch.inf]).repeat(32), normal
        ),
        "zero": torch.zeros(16, 64),
        "negative zero and one": -torch.eye(64)[:48],
    }


INPUTS = inputs()
