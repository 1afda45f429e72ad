"""Philox4x32-10: random bits by counter, so that every implementation draws the same ones.

A counter-based generator maps (key, counter) to 128 bits with no state. Here the key is the seed and a counter stands
for 16 elements along the contraction axis:

    key      (seed low, seed high)
    counter  (g low, g high, offset low, offset high),   g = row * groups + k / 16
    byte i   of the 16 little-endian bytes belongs to element i of the group

`row` numbers the other axes in row-major order with the contraction axis moved last, `groups` counts the groups of 16
of one row. The bits depend on where an element is in the tensor, never on its memory layout.

Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import torch

from fp4deploy.errors import InputError

ROUNDINGS = ("nearest", "stochastic")
ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Ten rounds of Philox4x32.

    Args:
        counter, key: words of 32 bits held in int64 tensors, shapes that broadcast.

    Returns:
        four words of 32 bits in int64 tensors.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # int64 wraps, but the 64 bits of the product are right, and the mask removes the sign.
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((right >> 32) & _LOW) ^ c1 ^ k0,
            right & _LOW,
            ((left >> 32) & _LOW) ^ c3 ^ k1,
            left & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def random_bytes(
    shape: torch.Size,
    axis: int,
    seed: int | torch.Tensor,
    offset: int | torch.Tensor = 0,
    block: int = 16,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """The random byte of every element of a tensor of `shape`, its contraction axis padded to `block`.

    Args:
        seed, offset: 64 bits each, as int or int64 tensors [] (a tensor on the device avoids a synchronisation).

    Returns:
        uint8, `shape` with `axis` rounded up to a multiple of `block` (itself a multiple of 16).
    """
    axis %= len(shape)
    rows = [size for position, size in enumerate(shape) if position != axis]
    groups = -(-shape[axis] // block) * (block // 16)
    count = groups
    for size in rows:
        count *= size
    g = torch.arange(count, dtype=torch.int64, device=device)
    seeds, offsets = (_on_device(value, device) for value in (seed, offset))
    words = philox4x32((g & _LOW, (g >> 32) & _LOW, *_halves(offsets)), _halves(seeds))
    shifts = torch.arange(0, 32, 8, device=device)
    data = ((torch.stack(words, -1).unsqueeze(-1) >> shifts) & 0xFF).to(torch.uint8)
    return data.view(*rows, groups * 16).movedim(-1, axis)


def rounding_bytes(
    x: torch.Tensor,
    axis: int,
    rounding: str,
    seed: int | torch.Tensor | None,
    offset: int | torch.Tensor,
    block: int,
) -> torch.Tensor | None:
    """What a rounding mode needs for `x`: None for "nearest"; `random_bytes` for "stochastic".

    Args:
        seed: None draws one from torch's generator of the device of `x`.

    Raises:
        InputError: another rounding mode.
    """
    if rounding not in ROUNDINGS:
        raise InputError(f"Unknown rounding '{rounding}'. Valid roundings: {', '.join(ROUNDINGS)}.")
    if rounding == "nearest":
        return None
    if seed is None:
        seed = draw_seed(x.device)
    return random_bytes(x.shape, axis, seed, offset, block, x.device)


def _on_device(value: int | torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Int64 []. An int is filled in there, since a copy from the CPU would wait for a GPU."""
    if isinstance(value, torch.Tensor):
        return torch.as_tensor(value, dtype=torch.int64, device=device)
    return torch.full((), signed(value), dtype=torch.int64, device=device)


def draw_seed(device: torch.device) -> torch.Tensor:
    """A seed, int64 [], from torch's generator of a device."""
    return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=device)


def _halves(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return value & _LOW, (value >> 32) & _LOW


def signed(value: int) -> int:
    """An unsigned 64-bit number as the int64 with the same bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value
