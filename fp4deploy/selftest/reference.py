"""The torch reference on this machine's CPU: the bytes that it gave where they were recorded.

Everything else is compared with this reference, so it comes first. Inputs are built from the Philox bytes of
`formats.philox` by exact operations (integers times powers of two), so that no library's random numbers matter. A
digest covers codes, scales and amax of one format; `RECORDED` was written on x86-64 and holds on any other CPU, because
the contract leaves no rounding open (docs/numerics.md).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fp4deploy import formats
from fp4deploy.errors import GateError
from fp4deploy.formats import E2M1_VALUES, FourOverSix, Mxfp4Tensor, Nvfp4Tensor
from fp4deploy.selftest.context import Context
from fp4deploy.selftest.proof import Proof
from fp4deploy.system.files import digest_of

ROWS, COLUMNS = 64, 208
VARIANTS: dict[str, dict[str, object]] = {
    "NVFP4": {},
    "NVFP4, 16 x 16 blocks": {"block": "2d"},
    "NVFP4, row-scaled": {"row_scaled": True},
    "NVFP4, stochastic": {"rounding": "stochastic", "seed": 7, "offset": 3},
    "4/6 by MAE": {"four_over_six": FourOverSix()},
    "4/6 by MSE": {"four_over_six": FourOverSix("mse")},
    "4/6 by MAE, fast": {"four_over_six": FourOverSix(fast=True)},
    "MXFP4, floor": {"scale_rule": "floor"},
    "MXFP4, ceil": {"scale_rule": "ceil"},
}
RECORDED = {
    "NVFP4": "7fe763ce20b3c879689854d6ca1b57e1875d7ed058d62c468188e55087687c60",
    "NVFP4, 16 x 16 blocks": "06da927bd9932687d2faf2ce38c9376158e6fe42a88e3bbbb16b427c3796476e",
    "NVFP4, row-scaled": "fd1ef03a2925a5cdd8c4c3048053c57af823be450c4e06804b21fe25e8eb401b",
    "NVFP4, stochastic": "af132aa70c01083e126995c1c74e283f931cebb595ae132c5d49eb5fccd7365d",
    "4/6 by MAE": "ef7174d51e81c5ce2b0750663358ff4f44a0f3cbc055e697a1502a92a97df8f6",
    "4/6 by MSE": "6e8cbeabbbfefa3b4e68bf670b35f45ffc69599ca246bed97ffe8e72ead71267",
    "4/6 by MAE, fast": "5001431ed0e74204646748ad37788e8d222d60847d02c8ca5ce90707e1719b30",
    "MXFP4, floor": "6d56b763286451a985017e43b966f16a6d30b14a3a0951ef1529120cebbb6bb6",
    "MXFP4, ceil": "21f3d02a60fae7fde7cdef60622e0a804c75f7055542f81281ba357547edc33f",
}


def numbers(rows: int = ROWS, columns: int = COLUMNS, seed: int = 1) -> torch.Tensor:
    """Float32 [rows, columns] of both signs over 14 binades, the same on every machine; the first is a zero."""
    values, exponents = (formats.random_bytes(torch.Size((rows, columns)), 1, seed, stream) for stream in (0, 1))
    powers = torch.tensor([2.0**power for power in range(-11, 3)])
    x = (values.float() - 128) * powers[(exponents % len(powers)).long()]
    x[0, 0] = 0
    return x


def digest(x: torch.Tensor, variant: dict[str, Any]) -> str:
    """SHA-256 of what the reference makes of a tensor."""
    packed: Nvfp4Tensor | Mxfp4Tensor
    if "scale_rule" in variant:
        packed = formats.quantize_mxfp4(x, **variant)
        parts = [packed.codes, packed.scales]
    else:
        packed = formats.quantize_nvfp4(x, **variant)
        parts = [packed.codes, packed.scales, packed.amax.reshape(-1)]
    return digest_of(part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts)


def recorded_bytes(_: Context) -> Proof:
    """Every format gives the recorded digest.

    Raises:
        GateError: one gives another.
    """
    x = numbers()
    found = {name: digest(x, variant) for name, variant in VARIANTS.items()}
    wrong = [name for name, value in found.items() if value != RECORDED.get(name)]
    if wrong:
        raise GateError(f"{', '.join(wrong)}: other bytes than those recorded, for the same {x.numel()} numbers")
    return Proof(f"{len(found)} formats of {x.numel()} numbers each give the recorded bytes", {"formats": len(found)})


def nearest_values(_: Context) -> Proof:
    """E2M1 codes of all finite FP16 values, against a search for the nearest value in float64.

    Raises:
        GateError: a code is not that of the nearest value, of two equally near ones not the even.
    """
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    u = every[every.isfinite()]
    codes = formats.encode_e2m1(u)
    distances = np.abs(np.abs(u.double().numpy())[:, None] - np.array(E2M1_VALUES)[None])
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7])  # even codes first: argmin takes the first of equal distances
    expected = order[distances[:, order].argmin(1)] + 8 * (u < 0).numpy()
    differing = np.flatnonzero(codes.numpy() != expected)
    if len(differing):
        first = differing[0]
        raise GateError(
            f"{len(differing)} of {len(u)} FP16 values get a code that is not the nearest; {u[first].item()} gets "
            f"{codes[first].item()} instead of {expected[first]}"
        )
    return Proof(f"all {len(u)} finite FP16 values get the nearest code, ties the even one", {"values": len(u)})
