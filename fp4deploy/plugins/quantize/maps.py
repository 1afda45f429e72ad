"""Both operands that the gradients of a layer need of a feature map, fake-quantised from one read (`quantize_map.cu`).

    operand       blocks                       read by
    by_channels   along the channels           dgrad: a convolution of the gradient
    by_width      along the width of a row     wgrad: shifted once for each column of the filter

Values and random numbers are those of `dispatch`'s functions on the maps that `qat.operators.gemms` writes out, for the
same seeds. A linear layer's [tokens, features] is a map of one row, [1, features, 1, tokens].
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from functools import lru_cache

import torch

from fp4deploy.formats import MXFP4_BLOCK, NVFP4_BLOCK
from fp4deploy.formats.mxfp4 import SCALE_RULES
from fp4deploy.plugins.quantize.dispatch import finite_amax, random_state, runs_on_gpu
from fp4deploy.plugins.runtime.launch import kernel
from fp4deploy.plugins.runtime.torch_library import ANY_DEVICE, CUDA_TYPES, operator

SIGNATURE = "PPPPPPPPqiiiiiiiii"
THREADS = 128


@dataclass(frozen=True)
class Blocks:
    """How one operand is quantised: MXFP4 by its scale rule, or NVFP4 with a dynamic global scale."""

    scale_rule: str | None = None
    rounding: str = "nearest"
    hadamard: bool = False


@dataclass(frozen=True)
class Columns:
    """The columns of a filter on a row; `width`: positions of the other operand."""

    count: int
    stride: int
    padding: int
    dilation: int
    width: int
    groups: int = 1

    @property
    def numbers(self) -> list[int]:
        """As operators take them."""
        return list(astuple(self))


@lru_cache
def reads_all(columns: Columns, size: int) -> bool:
    """Whether some column reads each position of a row of `size`."""
    last = (columns.width - 1) * columns.stride - columns.padding
    if columns.stride == 1 and columns.dilation <= columns.width:  # a column reads on where the one before it ends
        return columns.padding >= 0 and last + (columns.count - 1) * columns.dilation >= size - 1
    starts = range(-columns.padding, last + 1, columns.stride)
    return {start + at * columns.dilation for start in starts for at in range(columns.count)} >= set(range(size))


def supports(x: torch.Tensor, dtype: torch.dtype, channels: Blocks | None, width: Blocks | None, groups: int) -> bool:
    """Whether the kernel quantises this map [N, C, H, W], to values of `dtype`."""
    given = [blocks for blocks in (channels, width) if blocks is not None]
    rules = {blocks.scale_rule for blocks in given}
    if x.ndim != 4 or not runs_on_gpu(x) or not x.numel() or len(rules) > 1 or not rules <= {None, *SCALE_RULES}:
        return False
    block = NVFP4_BLOCK if rules == {None} else MXFP4_BLOCK
    return x.shape[1] // groups % block == 0 and dtype in CUDA_TYPES and x.dtype in (dtype, torch.float32)


def fake_quantize_map(
    x: torch.Tensor, channels: Blocks | None, width: Blocks | None, columns: Columns, dtype: torch.dtype
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Quantise and dequantise `x` in both ways that are asked for.

    Args:
        x: [N, C, H, W], on a GPU; see `supports`. A copy is made where it is not channels_last.
        channels: blocks along C; None leaves the first result out. It needs the columns of a pointwise filter.
        width: blocks along W, for each of `columns`; None leaves the second out.
        dtype: of the values; that of `x`, or any where that is float32.

    Returns:
        [N, C, H, W] and [N, groups * count * C / groups, H, W' (with `hadamard` padded to a multiple of 16)], both
        channels_last.
    """
    x = x.detach().contiguous(memory_format=torch.channels_last)
    random = [None if blocks is None else random_state(x, blocks.rounding, None, 0) for blocks in (channels, width)]
    mx = next(blocks.scale_rule for blocks in (channels, width) if blocks is not None)
    how = [int(mx is not None), int(mx == "ceil")]
    for blocks in (channels, width):
        how += [0, 0, 0] if blocks is None else [1, int(blocks.hadamard), int(blocks.rounding == "stochastic")]
    at = columns.numbers
    amaxes = (None, None) if mx else _amaxes(x, channels, width, columns, how, at)
    found: tuple[torch.Tensor, torch.Tensor] = torch.ops.fp4deploy.quantize_map(x, *amaxes, *random, how, at, dtype)
    return (found[0] if channels else None), (found[1] if width else None)


def _amaxes(
    x: torch.Tensor, channels: Blocks | None, width: Blocks | None, columns: Columns, how: list[int], at: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The global amax of both operands: of what is quantised, a transform included."""
    transformed = any(blocks is not None and blocks.hadamard for blocks in (channels, width))
    if not transformed and (width is None or reads_all(columns, x.shape[3])):
        amax = finite_amax(x)
        return amax, amax
    cells: torch.Tensor = torch.ops.fp4deploy.map_amaxes(x, how, at)
    return cells[0], cells[1]


def _shapes(x: torch.Tensor, how: list[int], at: list[int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    count, channels, height, _ = x.shape
    wide = -(-at[4] // NVFP4_BLOCK) * NVFP4_BLOCK if how[6] else at[4]
    by_channels = torch.empty_like(x, dtype=dtype) if how[2] else x.new_empty(0, dtype=dtype)
    if not how[5]:
        return by_channels, x.new_empty(0, dtype=dtype)
    shape = (count, at[0] * channels, height, wide)
    return by_channels, torch.empty(shape, dtype=dtype, device=x.device, memory_format=torch.channels_last)


def _launch(
    x: torch.Tensor,
    pointers: tuple[torch.Tensor | None, ...],
    how: list[int],
    at: list[int],
    dtype: torch.dtype,
    measure: bool,
) -> None:
    names = ("MX", "UP", "BY_CHANNELS", "C_HADAMARD", "C_STOCHASTIC", "BY_WIDTH", "W_HADAMARD", "W_STOCHASTIC")
    macros: dict[str, str | int] = dict(zip(names, how, strict=True))
    macros |= {"DTYPE": CUDA_TYPES[x.dtype], "OUT": CUDA_TYPES[dtype], "MEASURE": int(measure)}
    if measure:
        macros |= {"C_STOCHASTIC": 0, "W_STOCHASTIC": 0}
    count, channels, height, width = x.shape
    columns, stride, padding, dilation, wide, groups = at
    block = MXFP4_BLOCK if how[0] else NVFP4_BLOCK
    lanes = 2 if how[0] else 4
    threads = count * height * -(-wide // block) * (channels // lanes)
    sizes = (count * height, height, width, channels, columns, stride, padding, dilation, wide, channels // groups)
    if x.data_ptr() % (lanes * x.element_size()):  # a view that begins within a vector of its storage
        x = x.clone()
    launch = kernel("quantize_map.cu", "quantize_map", SIGNATURE, macros, x.device).launch
    launch(-(-threads // THREADS), THREADS, x, *pointers, *sizes)


@operator(
    "map_amaxes(Tensor x, int[] how, int[] at) -> Tensor",
    lambda x, how, at: x.new_empty(2, dtype=torch.float32),
    ANY_DEVICE,
)
def _map_amaxes(x: torch.Tensor, how: list[int], at: list[int]) -> torch.Tensor:
    cells = torch.zeros(2, dtype=torch.float32, device=x.device)
    _launch(x, (None, None, None, None, None, None, cells), how, at, x.dtype, measure=True)
    return cells


@operator(
    "quantize_map(Tensor x, Tensor? c_amax, Tensor? w_amax, Tensor? c_random, Tensor? w_random, int[] how, int[] at, "
    "ScalarType dtype) -> (Tensor, Tensor)",
    lambda x, c_amax, w_amax, c_random, w_random, how, at, dtype: _shapes(x, how, at, dtype),
    ANY_DEVICE,
)
def _quantize_map(
    x: torch.Tensor,
    c_amax: torch.Tensor | None,
    w_amax: torch.Tensor | None,
    c_random: torch.Tensor | None,
    w_random: torch.Tensor | None,
    how: list[int],
    at: list[int],
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    outputs = _shapes(x, how, at, dtype)
    _launch(x, (c_amax, w_amax, c_random, w_random, *outputs, None), how, at, dtype, measure=False)
    return outputs
