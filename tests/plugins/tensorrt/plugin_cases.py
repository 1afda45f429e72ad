"""Nodes of the plugins with awkward shapes: their operands in TensorRT's order, what must come out, and the verdict.

`check` is given something that runs a plugin (on a GPU, or in Triton's interpreter) and says how far its outputs are
from the reference. Outputs are poisoned and lie between guards.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fp4deploy.formats import FourOverSix, Nvfp4Tensor, quantize_nvfp4
from fp4deploy.plugins.gemm.reference import conv2d_reference, conv_transpose2d_reference
from fp4deploy.plugins.tensorrt import PLUGINS, QUANTIZE, Plugin, convolution_plugin

LIMIT = 1e-3
GUARD = 512
POISON = 77
EXACT: dict[str, Any] = {"dtype": torch.float64, "accumulate": torch.float64}
# plugin, inputs in order, attributes, tactic (from 1) -> outputs in order
Run = Callable[[Plugin, list[torch.Tensor], dict[str, list[int]], int], list[torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """A convolution; `channels` of one or two feature maps, `size`: batch, height and width."""

    size: tuple[int, int, int]
    channels: tuple[int, ...]
    outputs: int
    kernel: int = 3
    stride: int = 1
    padding: int = 1
    dilation: int = 1
    relu: bool = False
    transposed: bool = False

    def attributes(self) -> dict[str, list[int]]:
        """As the ONNX node has them."""
        taps = 2 if self.transposed else self.kernel
        return {
            "kernel": [taps, taps],
            "channels": list(self.channels),
            "out_channels": [self.outputs],
            "stride": [self.stride],
            "padding": [self.padding],
            "dilation": [self.dilation],
            "relu": [int(self.relu)],
        }


CASES = {
    "one pixel, 1x1": Case((1, 1, 1), (64,), 10, kernel=1, padding=0),
    "one pixel, 3x3": Case((1, 1, 1), (20,), 33),
    "17 channels, stride 2": Case((2, 9, 6), (17,), 16, stride=2, relu=True),
    "48 channels, 5x5, dilation 2": Case((3, 12, 11), (48,), 70, kernel=5, padding=4, dilation=2),
    "64 channels": Case((2, 19, 13), (64,), 64, relu=True),
    "128 channels, 130 outputs": Case((2, 21, 22), (128,), 130),
    "7x7, stride 2": Case((1, 15, 14), (80,), 40, kernel=7, padding=3, stride=2),
    "1x1, stride 2": Case((2, 20, 20), (16,), 100, kernel=1, padding=0, stride=2),
    "16 channels": Case((2, 7, 9), (16,), 16),
    "two sources, 16 channels": Case((2, 11, 9), (16, 16), 20, relu=True),
    "no padding": Case((1, 7, 8), (32,), 24, padding=0),
    "two sources": Case((2, 11, 9), (64, 64), 64, relu=True),
    "two sources, uneven": Case((2, 5, 7), (32, 20), 17),
    "up": Case((2, 7, 9), (64,), 32, transposed=True),
    "up, odd channels": Case((1, 3, 5), (40,), 21, transposed=True, relu=True),
}
IMAGES = {  # N, C, H, W
    "one pixel": (1, 16, 1, 1),
    "17 channels": (2, 17, 5, 7),
    "64 channels": (3, 64, 13, 11),
    "200 channels": (2, 200, 9, 8),
    "one channel": (1, 1, 6, 3),
}


def check(case: Case, run: Run, device: str = "cpu", tactic: int = 1) -> dict[str, float]:
    """Relative error of the FP16 output, and bytes of the packed one that are not those of quantising it."""
    torch.manual_seed(0)
    images = tuple(_quantized((*case.size, count), 3.0**i) for i, count in enumerate(case.channels))
    taps = 2 if case.transposed else case.kernel
    weight = _quantized((case.outputs, taps, taps, sum(case.channels)), 1.0, FourOverSix())
    bias = torch.randn(case.outputs)
    if case.transposed:
        expected = conv_transpose2d_reference(images[0], weight, bias, case.relu, **EXACT)
    else:
        numbers = (case.stride, case.padding, case.dilation, case.relu)
        expected = conv2d_reference(images, weight, bias, *numbers, **EXACT)
    assert isinstance(expected, torch.Tensor)
    inputs = [part for image in (*images, weight) for part in _parts(image)]
    inputs = [each.to(device) for each in (*inputs, bias)]
    plain = convolution_plugin(len(images), False, case.transposed)
    (found,) = run(plain, inputs, case.attributes(), tactic)
    amax = expected.abs().max().float().reshape(1) * 0.75  # some saturate
    packed = run(packed_variant(plain), [*inputs, amax.to(device)], case.attributes(), tactic)
    norm = expected.norm().clamp_min(1e-30)
    return {"error": float((found.cpu().double() - expected).norm() / norm), **_compare(found.cpu(), amax, packed)}


def packed_variant(plugin: Plugin) -> Plugin:
    """The plugin of the same product with packed output."""
    return convolution_plugin(plugin.sources, True, plugin.transposed)


def check_quantize(shape: tuple[int, int, int, int], run: Run, device: str = "cpu") -> dict[str, float]:
    """Bytes that are not the reference's, for an image of FP16 [N, C, H, W]; broken values and zeros included."""
    torch.manual_seed(1)
    x = (4 * torch.randn(shape)).half()
    x[0, :, 0, 0] = 0.0
    x[-1, -1, -1, -1] = math.inf
    total = 0.0
    for value in (3.0, 20.0):
        amax = torch.tensor([value])
        found = run(QUANTIZE, [x.to(device), amax.to(device)], {"channels": [shape[1]]}, 1)
        total += _compare(x.permute(0, 2, 3, 1).contiguous(), amax, found)["differing"]
    return {"differing": total}


def check_chain(run: Run, device: str = "cpu") -> dict[str, float]:
    """Image, quantiser, packed convolution, convolution, as a lowered graph chains them: only codes lie between.

    The share of codes between the two that are not the reference's, and the relative error of the result.
    """
    torch.manual_seed(3)
    x = torch.randn(2, 32, 5, 6).half()
    weights = [_quantized((48, 3, 3, 32), 1.0), _quantized((20, 3, 3, 48), 1.0)]
    amax, middle = torch.tensor([4.0]), torch.tensor([60.0])
    first = quantize_nvfp4(x.permute(0, 2, 3, 1).contiguous(), amax=amax[0])
    between = conv2d_reference((first,), weights[0], None, padding=1, relu=True, out_amax=middle[0])
    assert isinstance(between, Nvfp4Tensor)
    expected = conv2d_reference((between,), weights[1], None, padding=1, **EXACT)
    assert isinstance(expected, torch.Tensor)

    def weight(w: Nvfp4Tensor) -> list[torch.Tensor]:
        return [part.to(device) for part in (*_parts(w), torch.zeros(w.shape[0]))]

    attributes = [Case((2, 5, 6), (32,), 48, relu=True).attributes(), Case((2, 5, 6), (48,), 20).attributes()]
    packed = run(QUANTIZE, [x.to(device), amax.to(device)], {"channels": [32]}, 1)
    inputs = [*packed, (amax / 2688).to(device), *weight(weights[0]), middle.to(device)]
    packed = run(convolution_plugin(1, True, False), inputs, attributes[0], 1)
    inputs = [*packed, (middle / 2688).to(device), *weight(weights[1])]
    (found,) = run(convolution_plugin(1, False, False), inputs, attributes[1], 1)
    wrong = (packed[0].view(torch.uint8).cpu() != between.codes).double().mean()
    return {"error": float((found.cpu().double() - expected).norm() / expected.norm()), "differing": float(wrong)}


def _compare(plain: torch.Tensor, amax: torch.Tensor, packed: list[torch.Tensor]) -> dict[str, float]:
    expected = quantize_nvfp4(plain, amax=amax[0])
    codes, scales = (each.cpu().view(torch.uint8) for each in packed)
    assert codes.shape == expected.codes.shape
    assert scales.shape == expected.scales.shape
    wrong = (codes != expected.codes).sum() + (scales != expected.scales.view(torch.uint8)).sum()
    return {"differing": float(wrong)}


def _quantized(shape: tuple[int, ...], scale: float, choice: FourOverSix | None = None) -> Nvfp4Tensor:
    return quantize_nvfp4(scale * torch.randn(shape), four_over_six=choice)


def _parts(x: Nvfp4Tensor) -> list[torch.Tensor]:
    """Codes and block scales as INT8, and the global scale."""
    scale = x.amax / (6 * x.e4m3_max)
    return [x.codes.view(torch.int8), x.scales.view(torch.int8), scale.reshape(1)]


class Outputs:
    """Poisoned outputs between guards, of the shapes and types that a plugin announced."""

    def __init__(self, plugin: Plugin, shapes: tuple[tuple[int, ...], ...], device: str) -> None:
        kinds = plugin.types()[len(plugin.inputs) :]
        types = [torch.float16 if kind == "FP16" else torch.int8 for kind in kinds]
        self.whole, self.inner = [], []
        for shape, kind in zip(shapes, types, strict=True):
            count = math.prod(shape)
            poison = math.nan if kind == torch.float16 else POISON
            whole = torch.full((count + 2 * GUARD,), poison, dtype=kind, device=device)
            self.whole.append(whole)
            self.inner.append(whole[GUARD : GUARD + count].view(shape))

    def checked(self) -> list[torch.Tensor]:
        """The outputs, if nothing was written around them."""
        for whole in self.whole:
            guards = torch.cat([whole[:GUARD], whole[-GUARD:]])
            intact = guards.isnan() if guards.dtype == torch.float16 else guards == POISON
            assert intact.all(), "a kernel wrote beside its output"
        return self.inner


assert {
    convolution_plugin(len(case.channels), packed, case.transposed)
    for case in CASES.values()
    for packed in (False, True)
} == {plugin for plugin in PLUGINS.values() if plugin is not QUANTIZE}
