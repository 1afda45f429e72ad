"""The quantising kernels as torch operators, `torch.ops.fp4deploy.*`; `dispatch` decides when they are called.

`variant` is [FORMAT, E, SQUARED, FAST, HADAMARD, ROWS], values of the macros of `cuda/quantize.cu`; with `random`,
int64 [2] of seed and offset, rounding is stochastic. `inside` asks for the in-range (clip) mask of the straight-through
estimator, or is that mask. All tensors are on one GPU; nothing synchronises.
"""

from __future__ import annotations

import torch

from fp4deploy.formats import MXFP4_BLOCK, NVFP4_BLOCK, random_hadamard
from fp4deploy.plugins.quantize.layout import CHANNELS_LAST, View, dense, is_channels_last, view_along
from fp4deploy.plugins.runtime.launch import kernel, num_sms
from fp4deploy.plugins.runtime.torch_library import CUDA_TYPES, SMALL, THREADS, like_first, operator, scalar

SIGNATURE = "PPPPPPqqq"
FILL = 132 * 16  # blocks that fill a large GPU
# Fitted on an H200 (2026-11-21, `python benchmarks/kernels.py`); the times of the other choices are not recorded.
BLOCKS = {"pack_rows": 8, "pack_rows_4o6": 6}  # thread blocks a multiprocessor: two waves
TILE = (128, 4)
HELD = 96 << 10  # most bytes of a row that stay in shared memory while its amax is found: a block has them on every GPU
VECTORS = 2  # 16-byte loads of a thread: the fastest of 1, 2, 4, 8, likewise


def _block(variant: list[int]) -> int:
    return MXFP4_BLOCK if variant[0] >= 2 else NVFP4_BLOCK


def _macros(x: torch.Tensor, variant: list[int], random: torch.Tensor | None) -> dict[str, str | int]:
    names = ("FORMAT", "E", "SQUARED", "FAST", "HADAMARD", "ROWS")
    return {
        "DTYPE": CUDA_TYPES[x.dtype],
        "STOCHASTIC": int(random is not None),
        **dict(zip(names, variant, strict=True)),
    }


def _launch(
    x: torch.Tensor,
    view: View,
    amax: torch.Tensor | None,
    random: torch.Tensor | None,
    variant: list[int],
    outputs: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    packed: int,
    own: torch.Tensor | None = None,
) -> None:
    """`own`, float32 [], zero before: becomes the finite amax of `x`, in the same pass where the kernel can do it."""
    mx = _block(variant) == MXFP4_BLOCK
    width = 0 if view.inner == 1 else _width(x, view.inner)
    groups = view.groups(_block(variant))
    linear = _is_linear(x, view, variant, outputs[0])
    blocks = groups // 2 if mx and width else groups
    threads = view.outer * blocks * -(-view.inner // (width or 1))
    macros = _macros(x, variant, random)
    macros |= {"PACKED": packed, "IN_RANGE": int(outputs[2] is not None), "INNER": width, "LINEAR": int(linear)}
    macros |= {"BIG": int(max(threads, view.rows) > SMALL)}
    if linear and packed == 0 and random is None and variant[0] != 1 and not variant[4] and not variant[5]:
        vectors = x.numel() * x.element_size() // 16
        macros |= {"VECTORS": VECTORS, "MEASURE": int(own is not None)}
        rows = kernel("quantize.cu", "fake_quantize_rows", "PPPPPq", macros, x.device)
        rows.launch(-(-vectors // (VECTORS * THREADS)), THREADS, x, amax, outputs[0], outputs[2], own, vectors)
        return
    if (
        width == 2
        and packed == 0
        and _is_plain(variant, random)
        and x.dtype != torch.float32
        and view.size % NVFP4_BLOCK == 0
    ):
        macros["PAIR"] = "__half2" if x.dtype == torch.float16 else "__nv_bfloat162"
        macros["MEASURE"] = int(own is not None)
        columns = kernel("quantize.cu", "fake_quantize_columns", "PPPPPqqq", macros, x.device)
        sizes = (view.outer, view.size, view.inner)
        columns.launch(-(-threads // THREADS), THREADS, x, amax, outputs[0], outputs[2], own, *sizes)
        return
    if own is not None:
        _find_amax(x, own, None)
    # 4/6 to nearest and in the plain layout; fewer groups than 32 bits number where they are numbered
    either = (variant[0] == 0 and threads <= SMALL) or (random is None and packed == 1)
    if (
        packed in (1, 2)
        and linear
        and either
        and variant[0] <= 1
        and not variant[4]
        and not variant[5]
        and x.dtype != torch.float32
    ):
        _pack_rows(x, view, amax, random, variant, outputs, packed == 2)
        return
    launch = kernel("quantize.cu", "quantize_tensor", SIGNATURE, macros, x.device).launch
    launch(-(-threads // THREADS), THREADS, x, amax, random, *outputs, view.outer, view.size, view.inner)


def _pack_rows(
    x: torch.Tensor,
    view: View,
    amax: torch.Tensor | None,
    random: torch.Tensor | None,
    variant: list[int],
    outputs: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    swizzled: bool,
) -> None:
    """Whole blocks of 16-bit numbers, by persistent thread blocks."""
    name = "pack_rows_4o6" if variant[0] else "pack_rows"
    width = view.groups(NVFP4_BLOCK)
    macros: dict[str, str | int | None] = {"DTYPE": CUDA_TYPES[x.dtype], "E": variant[1]}
    more: tuple[torch.Tensor | int | None, ...] = ()
    if variant[0]:
        macros |= {"SQUARED": variant[2], "FAST": variant[3]}
    else:
        macros |= {"STOCHASTIC": int(random is not None), "SWIZZLED": int(swizzled)}
        more = random, width
    groups = view.outer * width
    blocks = min(-(-groups // THREADS), BLOCKS[name] * num_sms(x.device))
    launch = kernel(f"{name}.cu", name, "PPPPq" + ("Pi" if more else ""), macros, x.device).launch
    launch(blocks, THREADS, x, amax, outputs[0], outputs[1], groups, *more)


def _launch_row_scaled(
    x: torch.Tensor,
    view: View,
    axis: int,
    random: torch.Tensor | None,
    variant: list[int],
    outputs: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    packed: int,
) -> torch.Tensor:
    """As `_launch`, with the amax of each row, which is returned; `x` is read once where a row has whole blocks and
    fits into the shared memory of one thread block.
    """
    pitch = -(-view.size * x.element_size() // 64) * 64
    if pitch > HELD or not _is_linear(x, view, variant, outputs[0]):
        amax = _row_amax(random_hadamard(x, axis) if variant[4] else x, axis)
        _launch(x, view, amax, random, variant, outputs, packed)
        return amax
    amax = _row_amaxes(x, axis)
    # A thread has 128 bytes of a row or, in a warp, at least a group.
    threads = min(512, pitch // 128 // 32 * 32) or min(32, 1 << (view.groups(NVFP4_BLOCK) - 1).bit_length())
    rows = max(1, 128 // threads) if threads <= 32 else 1
    grid, shared = -(-view.outer // rows), rows * pitch
    if packed and random is None and variant[0] == variant[4] == 0 and x.dtype != torch.float32:
        choices: dict[str, str | int | None] = {
            "DTYPE": CUDA_TYPES[x.dtype],
            "E": variant[1],
            "STOCHASTIC": 0,
            "SWIZZLED": 0,
            "HELD": 1,
        }
        pack = kernel("pack_rows.cu", "pack_row_scaled", "PPPPqi", choices, x.device).launch
        pack(grid, (threads, rows), x, amax, *outputs[:2], view.outer, view.groups(NVFP4_BLOCK), shared=shared)
        return amax
    macros = _macros(x, variant, random) | {"PACKED": packed, "IN_RANGE": int(outputs[2] is not None)}
    macros |= {"INNER": 0, "LINEAR": 1, "BIG": 0, "HELD": 1}
    launch = kernel("quantize.cu", "quantize_row_scaled", "PPPPPPqq", macros, x.device).launch
    launch(grid, (threads, rows), x, amax, random, *outputs, view.outer, view.size, shared=shared)
    return amax


def _is_linear(x: torch.Tensor, view: View, variant: list[int], out: torch.Tensor) -> bool:
    """Whether whole blocks follow each other in memory, at addresses that 16-byte loads take."""
    return view.inner == 1 and view.size % _block(variant) == 0 and (x.data_ptr() | out.data_ptr()) % 16 == 0


def _is_plain(variant: list[int], random: torch.Tensor | None) -> bool:
    return random is None and variant == [0, 448, 0, 0, 0, 0]


def _width(x: torch.Tensor, inner: int) -> int:
    """Adjacent inner positions of a thread: two where alignment allows."""
    return 2 if inner % 2 == 0 and x.data_ptr() % (2 * x.element_size()) == 0 else 1


def _fake_quantize_along(x, axis, amax, random, variant, inside):  # type: ignore[no-untyped-def]
    x, view = dense(x, axis, in_order=random is not None or bool(variant[5]))
    return _quantized(x, axis, view, variant, inside)


@operator(
    "quantize_along(Tensor x, int axis, Tensor? amax, Tensor? random, int[] variant, bool inside) -> (Tensor, Tensor)",
    _fake_quantize_along,
)
def _quantize_along(
    x: torch.Tensor,
    axis: int,
    amax: torch.Tensor | None,
    random: torch.Tensor | None,
    variant: list[int],
    inside: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    x, view = dense(x, axis, in_order=random is not None or bool(variant[5]))
    values, bits = _quantized(x, axis, view, variant, inside)
    outputs = values, None, bits if inside else None
    if amax is None and variant[5]:
        _launch_row_scaled(x, view, axis, random, variant, outputs, 0)
    else:
        _launch(x, view, amax, random, variant, outputs, 0)
    return values, bits


def _quantized(
    x: torch.Tensor, axis: int, view: View, variant: list[int], inside: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    count = view.rows * view.groups(_block(variant)) if inside else 0
    bits = torch.empty(count, dtype=torch.int16, device=x.device)
    if not variant[4]:
        return torch.empty_like(x), bits
    shape = list(x.shape)
    shape[axis] = NVFP4_BLOCK * view.groups(NVFP4_BLOCK)
    layout = torch.contiguous_format if x.is_contiguous() else CHANNELS_LAST[x.ndim]
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=layout), bits


def _fake_quantize_and_amax(x, axis, amax, random, variant):  # type: ignore[no-untyped-def]
    x, view = dense(x, axis, in_order=random is not None)
    return *_quantized(x, axis, view, variant, True), torch.empty((), dtype=torch.float32, device=x.device)


@operator(
    "quantize_and_amax(Tensor x, int axis, Tensor amax, Tensor? random, int[] variant) -> (Tensor, Tensor, Tensor)",
    _fake_quantize_and_amax,
)
def _quantize_and_amax(
    x: torch.Tensor, axis: int, amax: torch.Tensor, random: torch.Tensor | None, variant: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, view = dense(x, axis, in_order=random is not None)
    values, bits = _quantized(x, axis, view, variant, True)
    own = torch.zeros((), dtype=torch.float32, device=x.device)
    _launch(x, view, amax, random, variant, (values, None, bits), 0, own)
    return values, bits, own


@operator(
    "pack_along(Tensor x, int axis, Tensor? amax, Tensor? random, int[] variant, bool swizzled) -> (Tensor, Tensor)",
    lambda x, axis, amax, random, variant, swizzled: _packed(x, axis, variant, swizzled),
)
def _pack_along(
    x: torch.Tensor,
    axis: int,
    amax: torch.Tensor | None,
    random: torch.Tensor | None,
    variant: list[int],
    swizzled: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    x, view = dense(x, axis, in_order=True)
    codes, scales = _packed(x, axis, variant, swizzled)
    _launch(x, view, amax, random, variant, (codes, scales, None), 2 if swizzled else 1)
    return codes, scales


@operator(
    "pack_row_scaled(Tensor x, int axis, Tensor? random, int[] variant) -> (Tensor, Tensor, Tensor)",
    lambda x, axis, random, variant: (*_packed(x, axis, variant, False), _row_amaxes(x, axis)),
)
def _pack_row_scaled(
    x: torch.Tensor, axis: int, random: torch.Tensor | None, variant: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, view = dense(x, axis, in_order=True)
    codes, scales = _packed(x, axis, variant, swizzled=False)
    return codes, scales, _launch_row_scaled(x, view, axis, random, variant, (codes, scales, None), 1)


def _packed(x: torch.Tensor, axis: int, variant: list[int], swizzled: bool) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [size for at, size in enumerate(x.shape) if at != axis]
    blocks = -(-x.shape[axis] // _block(variant))
    codes = torch.empty((*rows, blocks * _block(variant) // 2), dtype=torch.uint8, device=x.device)
    if not swizzled:
        return codes, torch.empty((*rows, blocks), dtype=torch.uint8, device=x.device)
    count = codes.numel() // max(1, codes.shape[-1])
    padded = -(-count // TILE[0]) * TILE[0] * -(-blocks // TILE[1]) * TILE[1]
    return codes, torch.zeros(padded, dtype=torch.uint8, device=x.device)


def _tile_launch(
    x: torch.Tensor,
    row_axis: int,
    axis: int,
    amax: torch.Tensor,
    random: torch.Tensor | None,
    variant: list[int],
    outputs: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    packed: int,
) -> None:
    strides = [x.stride(at) if size > 1 else 0 for at, size in enumerate(x.shape)]
    planes = [(size, strides[at]) for at, size in enumerate(x.shape) if at not in (row_axis, axis)]
    (a, stride_a), (b, stride_b) = [*[(1, 0)] * (2 - len(planes)), *planes]
    rows, size = x.shape[row_axis], x.shape[axis]
    above, groups = a * b * -(-rows // 16), -(-size // 16)
    along = strides[axis] == 1 and groups * 16 >= THREADS  # of shorter rows most lanes of a block would have none
    blocks = above * -(-groups * 16 // THREADS) if along else -(-above * groups * 16 // THREADS)
    macros = _macros(x, variant, random) | {"PACKED": packed, "IN_RANGE": int(outputs[2] is not None)}
    macros |= {"ALONG": int(along)}
    launch = kernel("quantize_tile.cu", "quantize_tiles", "PPPPPPqqqqqqqq", macros, x.device).launch
    sizes = (a, b, rows, size, stride_a, stride_b, strides[row_axis], strides[axis])
    launch(blocks, THREADS, x, amax, random, *outputs, *sizes)


def _fake_quantize_tiles(x, row_axis, axis, amax, random, variant, inside):  # type: ignore[no-untyped-def]
    x = x if view_along(x, axis) else x.contiguous()
    return torch.empty_like(x), _mask(x, inside)


@operator(
    "quantize_tiles(Tensor x, int row_axis, int axis, Tensor amax, Tensor? random, int[] variant, bool inside) "
    "-> (Tensor, Tensor)",
    _fake_quantize_tiles,
)
def _quantize_tiles(
    x: torch.Tensor,
    row_axis: int,
    axis: int,
    amax: torch.Tensor,
    random: torch.Tensor | None,
    variant: list[int],
    inside: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    x = x if view_along(x, axis) else x.contiguous()
    values, mask = torch.empty_like(x), _mask(x, inside)
    _tile_launch(x, row_axis, axis, amax, random, variant, (values, None, mask if inside else None), 0)
    return values, mask


def _mask(x: torch.Tensor, inside: bool) -> torch.Tensor:
    return torch.empty_like(x, dtype=torch.bool) if inside else torch.empty(0, dtype=torch.bool, device=x.device)


@operator(
    "pack_tiles(Tensor x, Tensor amax, Tensor? random, int[] variant) -> (Tensor, Tensor)",
    lambda x, amax, random, variant: _packed(x, x.ndim - 1, variant, swizzled=False),
)
def _pack_tiles(
    x: torch.Tensor, amax: torch.Tensor, random: torch.Tensor | None, variant: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.contiguous()
    flat = x.flatten(0, -3) if x.ndim > 3 else x
    codes, scales = _packed(x, x.ndim - 1, variant, swizzled=False)
    *_, rows, size = x.shape
    vectors, tiles = size // 8, x.numel() // max(1, rows * size) * -(-rows // 16)
    whole = size % 16 == 0 and x.data_ptr() % 16 == 0 and tiles * vectors <= SMALL
    if variant[0] or x.dtype == torch.float32 or not whole:
        _tile_launch(flat, flat.ndim - 2, flat.ndim - 1, amax, random, variant, (codes, scales, None), 1)
        return codes, scales
    macros: dict[str, str | int | None] = {"DTYPE": CUDA_TYPES[x.dtype], "E": variant[1]}
    macros |= {"STOCHASTIC": int(random is not None)}
    launch = kernel("pack_tiles.cu", "pack_tiles", "PPPPPiii", macros, x.device).launch
    launch(-(-tiles * vectors // 128), 128, x, amax, random, codes, scales, rows, vectors, tiles)
    return codes, scales


@operator(
    "finite_amax(Tensor x, Tensor? previous=None) -> Tensor",
    scalar,
)
def _finite_amax(x: torch.Tensor, previous: torch.Tensor | None = None) -> torch.Tensor:
    x = x if _is_dense(x) else x.contiguous()
    amax = torch.zeros((), dtype=torch.float32, device=x.device)
    _find_amax(x, amax, previous)
    return amax


def _find_amax(x: torch.Tensor, amax: torch.Tensor, previous: torch.Tensor | None) -> None:
    blocks = max(1, min(FILL, x.numel() * x.element_size() // (16 * THREADS * 2)))
    launch = kernel("amax.cu", "finite_amax", "PPPq", {"DTYPE": CUDA_TYPES[x.dtype]}, x.device).launch
    launch(blocks, THREADS, x, amax, previous, x.numel())


def _is_dense(x: torch.Tensor) -> bool:
    return x.is_contiguous() or is_channels_last(x)


@operator("hadamard_amax(Tensor x, int axis) -> Tensor", scalar)
def _hadamard_amax(x: torch.Tensor, axis: int) -> torch.Tensor:
    x, view = dense(x, axis, in_order=False)
    amax = torch.zeros((), dtype=torch.float32, device=x.device)
    _launch(x, view, None, None, [0, 448, 0, 0, 1, 0], (amax, None, None), 3)
    return amax


def _row_amaxes(x: torch.Tensor, axis: int) -> torch.Tensor:
    """Float32 for an amax of each row of `x`, not written."""
    shape = [1 if at == axis else size for at, size in enumerate(x.shape)]
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def _row_amax(x: torch.Tensor, axis: int) -> torch.Tensor:
    x, view = dense(x, axis, in_order=True)
    amax = _row_amaxes(x, axis)
    threads = view.outer * 32 if view.inner == 1 else view.rows
    launch = kernel("amax.cu", "row_amax", "PPqqq", {"DTYPE": CUDA_TYPES[x.dtype]}, x.device).launch
    launch(-(-threads // THREADS), THREADS, x, amax, view.outer, view.size, view.inner)
    return amax


@operator(
    "mask_gradient(Tensor gradient, Tensor inside, int axis) -> Tensor",
    like_first,
)
def _mask_gradient(gradient: torch.Tensor, inside: torch.Tensor, axis: int) -> torch.Tensor:
    view = view_along(gradient, axis)
    assert view is not None
    out = torch.empty_like(gradient)
    blocks = max(1, min(FILL, gradient.numel() // (THREADS * 4)))
    macros: dict[str, str | int] = {"FORMAT": 0, "SQUARED": 0, "FAST": 0, "HADAMARD": 0, "ROWS": 0, "STOCHASTIC": 0}
    macros |= {
        "DTYPE": CUDA_TYPES[gradient.dtype],
        "PACKED": 0,
        "IN_RANGE": 0,
        "INNER": 0,
        "LINEAR": 0,
        "E": 448,
        "BIG": 0,
    }
    launch = kernel("quantize.cu", "mask_gradient", "PPPqqqq", macros, gradient.device).launch
    sizes = (view.outer, view.size, view.inner, view.groups(NVFP4_BLOCK))
    launch(blocks, THREADS, gradient, inside, out, *sizes)
    return out
