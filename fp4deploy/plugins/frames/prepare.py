"""Frames as a network reads them: resized to Pillow's bytes, padded where they are letterboxed, and normalised.

    images = prepare(frames, (352, 480), (352, 480), (124, 116, 104), scale, offset)    [N, H, W, 3] -> [N, 3, 352, 480]

**Arithmetic.** Pillow resizes along one axis and then along the other, antialiased: weights of a triangle as wide as a
target pixel, in whole numbers of `BITS` bits, sums rounded to 8 bits after each axis. So a network reads the bytes that
it was evaluated on. Product and sum of the normalisation are rounded to float32 one by one, as by torch.

The kernel (`cuda/prepare.cu`) takes frames of any size in one pass and without a copy between the axes: what a row
needs along the other axis is computed again for each row that needs it, two at most where frames are made smaller. For
a network that reads its image as FP4 terms it writes the operand in the image's place (`prepare_and_pack`): 9 bytes a
pixel instead of 12, and neither the cast to FP16 nor the encoding is a pass of its own.
"""

from __future__ import annotations

from functools import cache, lru_cache

import numpy as np
import torch
from PIL import Image

from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.plugins.quantize.input_encoding import empty_operand, packed_image
from fp4deploy.plugins.runtime.fallback import Fallback
from fp4deploy.plugins.runtime.launch import kernel

SOURCE = "prepare.cu"
BITS = 22  # of a weight below one, as Pillow has it
# Of a block. Measured fact: H200, 2026-11-30, 18b54c4c, events around 20 launches, +-1 %: 16 frames of 480 x 640 to
# 352 x 480 take 46 us with any block of 128 or 256 threads and 57 with 32; one of 3,000 x 4,000 takes 64 with 32 x 8
# and 66 to 75 with others.
COLUMNS, ROWS = 32, 8
Size = tuple[int, int]
Colour = tuple[int, ...]  # red, green, blue: 0..255

fallback = Fallback("Resized frames", "torch's resizing")
packed_fallback = Fallback("Frames packed as they are resized", "two kernels")


def prepare(
    frames: torch.Tensor, size: Size, part: Size, padding: Colour, scale: torch.Tensor, offset: torch.Tensor
) -> torch.Tensor:
    """Frames at the input size of a network, float32 [N, 3, *size].

    Args:
        frames: uint8 [N, H, W, 3].
        part: what frames are resized to, at the top left of `size`; the rest has the colour `padding`.
        scale, offset: of the normalisation, float32 [3].

    >>> frames, one = torch.tensor([0, 200], dtype=torch.uint8).view(1, 1, 2, 1).expand(1, 1, 2, 3), torch.ones(3)
    >>> prepare(frames.contiguous(), (2, 4), (1, 4), (9, 9, 9), one, one)[0, 0].tolist()
    [[1.0, 51.0, 151.0, 201.0], [10.0, 10.0, 10.0, 10.0]]
    """
    if supports(frames, size) and fallback.runs(frames.device):
        with fallback.guard(frames.device):
            return prepare_kernel(frames, size, part, padding, scale, offset)
    return prepare_reference(frames, size, part, padding, scale, offset)


def prepare_reference(
    frames: torch.Tensor, size: Size, part: Size, padding: Colour, scale: torch.Tensor, offset: torch.Tensor
) -> torch.Tensor:
    """`prepare` in torch."""
    pixels = resized(frames, part)
    if part != size:
        whole = torch.tensor(padding, dtype=torch.uint8, device=frames.device).repeat(len(frames), *size, 1)
        whole[:, : part[0], : part[1]] = pixels
        pixels = whole
    return (pixels.float() * scale + offset).movedim(-1, 1).contiguous()


def prepare_and_pack(
    frames: torch.Tensor,
    size: Size,
    part: Size,
    padding: Colour,
    scale: torch.Tensor,
    offset: torch.Tensor,
    amax: torch.Tensor,
) -> Nvfp4Tensor:
    """`packed_image(prepare(...), amax)`, byte for byte: the operand of a network that reads its image as FP4 terms.

    Args:
        frames, size, part, padding, scale, offset: as of `prepare`.
        amax: float32 [], the global amax.

    >>> frames, one = torch.zeros(1, 1, 2, 3, dtype=torch.uint8), torch.ones(3)
    >>> prepare_and_pack(frames, (1, 2), (1, 2), (9, 9, 9), one, one, torch.tensor(6.0)).dequantize()[0, 0, :, ::3]
    tensor([[ 2., -1.,  0.,  0.,  6.],
            [ 2., -1.,  0.,  0.,  6.]])
    """
    given = (frames, size, part, padding, scale, offset)
    if supports(frames, size) and packed_fallback.runs(frames.device):
        with packed_fallback.guard(frames.device):
            return prepare_and_pack_kernel(*given, amax)
    return packed_image(prepare(*given), amax)


def resized(frames: torch.Tensor, size: Size) -> torch.Tensor:
    """Frames uint8 [N, H, W, 3] at `size`, uint8 [N, *size, 3], byte for byte as Pillow resizes them bilinearly."""
    return _weighted(frames, size, _height_is_first(frames, size))


def supports(frames: torch.Tensor, size: Size) -> bool:
    """Whether the kernel takes these: its grid has 65535 blocks along two axes, and it counts an image in 31 bits."""
    count, height, width, _ = frames.shape
    return 0 < count < 1 << 16 and all(0 < 3 * h * w < 1 << 31 for h, w in ((height, width), size))


def prepare_kernel(
    frames: torch.Tensor, size: Size, part: Size, padding: Colour, scale: torch.Tensor, offset: torch.Tensor
) -> torch.Tensor:
    """`prepare` by the kernel.

    Raises:
        UnavailableError: the kernel does not compile or launch here.
    """
    images = torch.empty((len(frames), 3, *size), dtype=torch.float32, device=frames.device)
    _launch(frames, size, part, padding, scale, offset, (images,))
    return images


def prepare_and_pack_kernel(
    frames: torch.Tensor,
    size: Size,
    part: Size,
    padding: Colour,
    scale: torch.Tensor,
    offset: torch.Tensor,
    amax: torch.Tensor,
) -> Nvfp4Tensor:
    """`prepare_and_pack` by the kernel.

    Raises:
        UnavailableError: the kernel does not compile or launch here.
    """
    operand = empty_operand((len(frames), *size), frames.device, amax)
    _launch(frames, size, part, padding, scale, offset, (operand.codes, operand.scales), amax)
    return operand


def _launch(
    frames: torch.Tensor,
    size: Size,
    part: Size,
    padding: Colour,
    scale: torch.Tensor,
    offset: torch.Tensor,
    written: tuple[torch.Tensor, ...],
    amax: torch.Tensor | None = None,
) -> None:
    """Write images, or with an amax codes and scales."""
    (count, height, width, _), (rows, columns) = frames.shape, part
    down, across = _taps(height, rows, frames.device), _taps(width, columns, frames.device)
    packing = () if amax is None else (amax,)
    if frames.is_cuda:  # those are kept, and other streams may read them as well; what is written is new
        stream = torch.cuda.current_stream(frames.device)
        for each in (down, across, scale, offset, *packing):
            each.record_stream(stream)
    results = (*packing, *written)
    run = kernel(SOURCE, "prepare_frames", "P" * (5 + len(results)) + "i" * 10, {"PACKED": len(packing)}, frames.device)
    grid = (-(-size[1] // COLUMNS), -(-size[0] // ROWS), count)
    colour = sum(value << 8 * at for at, value in enumerate(padding))
    counts = (len(down) - 1, len(across) - 1, colour, int(_height_is_first(frames, part)))
    tensors = (frames.contiguous(), *results, down, across, scale, offset)
    run.launch(grid, (COLUMNS, ROWS), *tensors, height, width, *size, *part, *counts)


def _weighted(frames: torch.Tensor, size: Size, height_first: bool) -> torch.Tensor:
    x = frames.int()
    for axis in (1, 2) if height_first else (2, 1):
        source, target = x.shape[axis], size[axis - 1]
        if source == target:
            continue
        first, *weights = _taps(source, target, x.device)
        total = torch.full((), 1 << BITS - 1, dtype=torch.int32, device=x.device)
        for at, weight in enumerate(weights):
            places = (first + at).clamp(max=source - 1)
            total = total + x.index_select(axis, places) * weight.view(
                [-1 if other == axis else 1 for other in range(4)]
            )
        x = total >> BITS
    return x.to(torch.uint8)


def _height_is_first(frames: torch.Tensor, size: Size) -> bool:
    """Of Pillow 13, where the height loses pixels, and more than twice as many as the width; else the width is."""
    lost = frames.shape[1] - size[0]
    return lost > 0 and lost > 2 * (frames.shape[2] - size[1]) and _height_may_be_first()


@cache
def _height_may_be_first() -> bool:
    """Whether the Pillow that is installed does so, by a trial: earlier ones always begin with the width."""
    pixels = (np.arange(40 * 7 * 3) * 97 % 251).astype(np.uint8).reshape(40, 7, 3)
    found = _weighted(torch.from_numpy(pixels)[None], (9, 5), True)[0].numpy()
    theirs = Image.fromarray(pixels).resize((5, 9), Image.Resampling.BILINEAR)
    return np.array_equal(found, np.asarray(theirs))


@lru_cache(maxsize=64)
def _taps(source: int, target: int, device: torch.device) -> torch.Tensor:
    """Of each target pixel of an axis: its first source pixel, and the weights of that and the next, int32 [., target].

    Behind the last source pixel weights are 0.
    """
    scale = source / target
    width = max(scale, 1.0)
    centre = (torch.arange(target, dtype=torch.float64) + 0.5) * scale
    first = (centre - width + 0.5).clamp(min=0).floor()
    last = (centre + width + 0.5).floor().clamp(max=source)
    at = first[:, None] + torch.arange(int((last - first).max()), dtype=torch.float64)
    weights = (1 - ((at - centre[:, None] + 0.5) / width).abs()).clamp(min=0) * (at < last[:, None])
    weights = weights / weights.sum(1, keepdim=True) * (1 << BITS) + 0.5
    return torch.cat([first[:, None], weights], 1).int().T.contiguous().to(device)
