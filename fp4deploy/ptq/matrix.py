"""A layer's weight as the matrix that its GEMM contracts, and its input as rows of the same length.

    Conv2d             [O, C, KH, KW]   ->  [O, KH*KW*C']        a row of the input is the C' channels of every tap
    ConvTranspose2d    [C, O, KH, KW]   ->  [O*KH*KW, C']        every tap contracts the channels of one input pixel
    Linear             [O, C]           ->  [O, C']

Of one or three spatial axes they are the same with as many taps.

C' is C padded with zeros to whole blocks of 16, so that a block is 16 neighbours of one row. With X the rows of inputs,
the error of a row w of the weight in the layer's output is (w - q) H (w - q)^T with H = X^T X / rows, the Hessian that
GPTQ and local block errors use. X holds a random choice of output positions, drawn from a generator of its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp4deploy.formats import NVFP4_BLOCK
from fp4deploy.graph.sizes import output_size
from fp4deploy.qat.layers import TRANSPOSED, QuantizedLayer
from fp4deploy.qat.prepare import quantized_layers

POSITIONS = 2048  # of one image


@dataclass(frozen=True)
class WeightMatrix:
    """How the weight of one layer becomes a matrix, and back."""

    shape: tuple[int, ...]
    transposed: bool

    @classmethod
    def of(cls, layer: nn.Module) -> WeightMatrix:
        """That of a convolution, a transposed convolution or a linear layer."""
        weight: Any = layer.weight
        return cls(tuple(weight.shape), isinstance(layer, TRANSPOSED))

    @property
    def channels(self) -> int:
        """C, of one group."""
        return self.shape[0] if self.transposed else self.shape[1]

    def rows(self, weight: Tensor) -> Tensor:
        """Weight -> matrix [R, K], float32."""
        outer = weight.movedim(0, -1) if self.transposed else weight.movedim(1, -1)
        padded = F.pad(outer.float(), (0, -self.channels % NVFP4_BLOCK))
        return padded.reshape(-1, padded.shape[-1]) if self.transposed else padded.reshape(self.shape[0], -1)

    def weight(self, rows: Tensor) -> Tensor:
        """Matrix -> weight, `rows` undone."""
        taps = self.shape[2:]
        outputs = self.shape[1] if self.transposed else self.shape[0]
        unfolded = rows.reshape(outputs, *taps, -1)[..., : self.channels]
        return unfolded.movedim(-1, 0) if self.transposed else unfolded.movedim(-1, 1)


def fp4_layers(model: nn.Module) -> dict[str, QuantizedLayer]:
    """The layers of a prepared model whose weights have codes and block scales to choose.

    Not those in FP8 or W4A8, nor those whose weights are computed from other parameters (`qat.computed`), which are
    rounded.
    """
    layers = quantized_layers(model).items()
    return {name: layer for name, layer in layers if layer.holds_weight and layer.recipe.precision == "FP4"}


def blocks(rows: Tensor) -> Tensor:
    """[R, K] -> [R, K/16, 16]."""
    return rows.unflatten(-1, (-1, NVFP4_BLOCK))


def has_hessian(layer: nn.Module) -> bool:
    """The inputs of this layer can be written as rows: one group, zeros as padding."""
    if isinstance(layer, nn.Linear):
        return True
    plain = isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED)) and layer.groups == 1
    return plain and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


def input_rows(layer: nn.Module, x: Tensor, generator: torch.Generator, most: int = POSITIONS) -> Tensor:
    """Rows [P, K] of the inputs that a layer contracts, float32, at most `most` output positions of each image."""
    pad = -x.shape[-1 if isinstance(layer, nn.Linear) else 1] % NVFP4_BLOCK
    if isinstance(layer, nn.Linear):
        flat = F.pad(x.flatten(0, -2).float(), (0, pad))
        return flat[_chosen(len(flat), most * max(1, len(x)), generator, x.device)]
    pixels = F.pad(x.float().movedim(1, -1), (0, pad))  # [N, H, W, C']
    if isinstance(layer, TRANSPOSED):
        flat = pixels.flatten(1, -2)
        return flat[:, _chosen(flat.shape[1], most, generator, x.device)].flatten(0, 1)
    assert isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    kernel, stride, dilation = layer.kernel_size, layer.stride, layer.dilation
    edges = [edge for size in reversed(_numbers(layer.padding, len(kernel))) for edge in (size, size)]
    padded = F.pad(pixels, (0, 0, *edges))
    steps = zip(padded.shape[1:-1], kernel, stride, dilation, strict=True)
    extents = [output_size(side, taps, step, 0, wide) for side, taps, step, wide in steps]
    place = torch.unravel_index(_chosen(math.prod(extents), most, generator, x.device), extents)
    starts = [at * step for at, step in zip(place, stride, strict=True)]
    taps = []  # [N, P, C'] each
    for tap in itertools.product(*map(range, kernel)):
        places = [start + at * wide for start, at, wide in zip(starts, tap, dilation, strict=True)]
        index: Any = (slice(None), *places)
        taps.append(padded[index])
    return torch.cat(taps, -1).flatten(0, 1)


def _chosen(count: int, most: int, generator: torch.Generator, device: torch.device) -> Tensor:
    if count <= most:
        return torch.arange(count, device=device)
    return torch.randint(count, (most,), generator=generator).to(device)


def _numbers(padding: Any, axes: int) -> Sequence[int]:
    return (padding,) * axes if isinstance(padding, int) else padding
