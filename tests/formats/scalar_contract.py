"""The numerics contract once more: numpy float32, one tile at a time, written from the page and not from the package.

Slow and plain on purpose. E4M3 rounds by a table of midpoints, exponents come from frexp, stochastic rounding and the
Philox generator are done in whole numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

F32 = np.float32
FLT_MAX = np.finfo(np.float32).max
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], F32)
E4M3 = np.array(
    [m / 8 * 2.0**-6 for m in range(8)] + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:119]
)
E4M3_MIDPOINTS = (E4M3[1:] + E4M3[:-1]) / 2
MASK = 0xD7E8

Encoder = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Choice:
    metric: str
    e4m3_max: int
    fast: bool


CHOICES = [
    Choice(metric, largest, fast) for metric in ("mae", "mse") for largest in (256, 448) for fast in (False, True)
]


@dataclass(frozen=True)
class Quantized:
    """codes uint8 [R, K padded], scales uint8 [R, K padded / block], values float32 [R, K padded]."""

    codes: np.ndarray
    scales: np.ndarray
    values: np.ndarray


def e4m3(value: float) -> int:
    """The byte of the E4M3 value nearest to 0 <= `value` <= 448; a tie goes to the even byte."""
    low = int(np.searchsorted(E4M3_MIDPOINTS, float(value)))
    tie = low < 126 and float(value) == E4M3_MIDPOINTS[low]
    return low + 1 if tie and low % 2 else low


def e2m1(u: np.ndarray) -> np.ndarray:
    """Codes, by the list of intervals."""
    m = np.abs(u)
    code = sum((m > 0.25, m >= 0.75, m > 1.25, m >= 1.75, m > 2.5, m >= 3.5, m > 5), np.zeros(m.shape, np.uint8))
    return code + 8 * (u < 0).astype(np.uint8)


def e2m1_stochastic(u: float, r: int) -> int:
    """The code of one value: one float32 addition, then whole numbers of half units."""
    m = min(abs(F32(u)), F32(6))
    step = 0.5 if m < 2 else 1.0 if m < 4 else 2.0
    halves = int(2 * float(m + F32(r * step / 256)))
    code = halves if halves < 4 else 4 + (halves - 4) // 2 if halves < 8 else 6 + (halves - 8) // 4
    return code + 8 * int(u < 0)


def stochastic(random: np.ndarray) -> Encoder:
    def encode(u: np.ndarray) -> np.ndarray:
        codes = [e2m1_stochastic(value, int(r)) for value, r in zip(u.ravel(), random.ravel(), strict=True)]
        return np.array(codes, np.uint8).reshape(u.shape)

    return encode


def philox(counter: tuple[int, ...], key: tuple[int, ...]) -> list[int]:
    """Philox4x32-10."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 % 2**32, (p0 >> 32) ^ c3 ^ k1, p0 % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


def random_bytes(rows: int, columns: int, seed: int, offset: int = 0, block: int = 16) -> np.ndarray:
    """uint8 [rows, columns padded to `block`]: a Philox call for every 16 columns, bytes little-endian."""
    groups = -(-columns // block) * block // 16
    drawn = b""
    for g in range(rows * groups):
        words = philox(
            (g % 2**32, g >> 32, offset % 2**32, offset >> 32 & 0xFFFFFFFF), (seed % 2**32, seed >> 32 & 0xFFFFFFFF)
        )
        drawn += b"".join(word.to_bytes(4, "little") for word in words)
    return np.frombuffer(drawn, np.uint8).reshape(rows, groups * 16)


@np.errstate(over="ignore", divide="ignore", under="ignore", invalid="ignore")
def nvfp4_tile(
    tile: np.ndarray, amax: np.float32, choice: Choice | None = None, encoder: Encoder = e2m1
) -> tuple[np.ndarray, int]:
    """Codes like `tile` [rows, 16] and the scale byte of one tile (rows 1 or 16)."""
    zeros = np.zeros(tile.shape, np.uint8)
    if not np.isfinite(tile).all():
        return zeros, 0x7F
    if amax == 0:
        return zeros, 0
    scale = min(F32(6 * (choice.e4m3_max if choice else 448)) / amax, FLT_MAX) or F32(1)
    block_amax = np.abs(tile).max()

    def encode(byte: int) -> np.ndarray:
        if byte == 0:
            return zeros
        e = min(F32(1) / (F32(E4M3[byte]) * (F32(1) / scale)), FLT_MAX)
        return encoder(np.clip(tile * e, F32(-6), F32(6)))

    if choice is None:
        byte = e4m3(min(block_amax * (scale * F32(1 / 6)), F32(448)))
        return encode(byte), byte
    b = (block_amax / F32(6)) * scale
    six, four = (e4m3(min(b * factor, F32(448))) for factor in (F32(1), F32(1.5)))
    errors = [_error(tile, encode(byte), byte, amax, scale, choice) for byte in (six, four)]
    byte = four if errors[1] < errors[0] else six
    return encode(byte), byte


def _error(
    tile: np.ndarray, codes: np.ndarray, byte: int, amax: np.float32, scale: np.float32, choice: Choice
) -> np.float32:
    scaled = E2M1[codes] * F32(E4M3[byte])
    if choice.fast:
        difference = scaled.astype(np.float16).astype(F32) - tile * scale
    else:
        difference = (scaled * amax) / F32(6 * choice.e4m3_max) - tile
    terms = np.abs(difference) if choice.metric == "mae" else difference * difference
    rows = np.zeros(len(tile), F32)
    for column in range(16):
        rows = rows + terms[:, column]
    while len(rows) > 1:
        rows = rows[: len(rows) // 2] + rows[len(rows) // 2 :]
    return rows[0]


@np.errstate(over="ignore", under="ignore", invalid="ignore")
def nvfp4(
    x: np.ndarray,
    tile_rows: int = 1,
    amax: float | None = None,
    row_scaled: bool = False,
    choice: Choice | None = None,
    random: np.ndarray | None = None,
) -> Quantized:
    """NVFP4 of float32 [R, K], tiles of `tile_rows` x 16."""
    rows, columns = x.shape
    x = np.pad(x.astype(F32), ((0, -rows % tile_rows), (0, -columns % 16)))
    random = None if random is None else np.pad(random, ((0, -rows % tile_rows), (0, 0)))
    codes, scales = np.zeros(x.shape, np.uint8), np.zeros((len(x), x.shape[1] // 16), np.uint8)
    values = np.zeros(x.shape, F32)
    for r in range(0, len(x), tile_rows):
        a = F32(amax) if amax is not None else finite_amax(x[r] if row_scaled else x)
        for k in range(0, x.shape[1], 16):
            at = slice(r, r + tile_rows), slice(k, k + 16)
            encoder = e2m1 if random is None else stochastic(random[at])
            codes[at], byte = nvfp4_tile(x[at], a, choice, encoder)
            scales[r : r + tile_rows, k // 16] = byte
            unit = (F32(E4M3[byte] if byte < 0x7F else np.nan) * a) * F32(
                1 / (6 * (choice.e4m3_max if choice else 448))
            )
            values[at] = unit * E2M1[codes[at]]
    return Quantized(codes[:rows], scales[:rows], values[:rows])


@np.errstate(over="ignore", invalid="ignore")
def mxfp4(x: np.ndarray, rule: str, random: np.ndarray | None = None) -> Quantized:
    """MXFP4 of float32 [R, K], the exponent from frexp: amax = m * 2^e with .5 <= m < 1."""
    rows, columns = x.shape
    x = np.pad(x.astype(F32), ((0, 0), (0, -columns % 32)))
    codes, scales = np.zeros(x.shape, np.uint8), np.zeros((rows, x.shape[1] // 32), np.uint8)
    values = np.zeros(x.shape, F32)
    for r in range(rows):
        for k in range(0, x.shape[1], 32):
            at = slice(k, k + 32)
            if not np.isfinite(x[r, at]).all():
                scales[r, k // 32], values[r, at] = 0xFF, np.nan
                continue
            m, e = np.frexp(np.abs(x[r, at]).max())
            if m == 0:
                continue
            exponent = max(int(e) - 3 if rule == "floor" or m <= 0.75 else int(e) - 2, -127)
            scales[r, k // 32] = exponent + 127
            u = np.clip(np.ldexp(x[r, at], -exponent), F32(-6), F32(6))
            codes[r, at] = e2m1(u) if random is None else stochastic(random[r, at])(u)
            values[r, at] = np.ldexp(E2M1[codes[r, at]], exponent)
    return Quantized(codes, scales, values)


def finite_amax(x: np.ndarray) -> np.float32:
    finite = np.abs(x[np.isfinite(x)])
    return F32(finite.max() if finite.size else 0)


def hadamard(groups: np.ndarray) -> np.ndarray:
    """Float32 [..., 16]: signs, butterflies of stride 1, 2, 4, 8 in that order, the division by 4 last."""
    y = [groups[..., i] * F32(-1 if MASK >> i & 1 else 1) for i in range(16)]
    for stride in (1, 2, 4, 8):
        for i in range(16):
            if not i & stride:
                y[i], y[i + stride] = y[i] + y[i + stride], y[i] - y[i + stride]
    return np.stack(y, -1) * F32(0.25)
