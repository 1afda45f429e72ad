"""Cases of the GEMMs of a training step: dgrad by `gather_gemm`, wgrad by `rows_gemm`, the quantiser of maps for both;
grouped GEMMs of experts.

Sums are exact, as in `gemms`, so that there is one right answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from fp4deploy import formats
from fp4deploy.formats.ms_eden import SHRINK
from fp4deploy.graph.sizes import output_size
from fp4deploy.plugins.gemm.grouped import SEGMENT, grouped_call, spans, stacked
from fp4deploy.plugins.gemm.reference import matmul_reference
from fp4deploy.plugins.gemm.training import POINTWISE, Packed, Window, gather_call, rows_call, whole_blocks
from fp4deploy.plugins.quantize import ms_eden
from fp4deploy.plugins.quantize.maps import Blocks, Columns, fake_quantize_map
from fp4deploy.qat.operators.gemms import ConvGemms
from fp4deploy_emulator.cases.case import Case, Outcome, Setting, multiples, normal, packed, packed_mx
from fp4deploy_emulator.cases.cuda import emulated
from fp4deploy_emulator.launch import emulate_triton

Pack = Callable[..., Packed]
POINTWISE_FILTER = ConvGemms((1, 1), (1, 1), (0, 0), (1, 1), 1)
SAME_FILTER = ConvGemms((3, 3), (1, 1), (1, 1), (1, 1), 1)
STRIDE_2 = Window((3, 3), (2, 2), (1, 1), (1, 1))


@dataclass(frozen=True)
class InputGradient:
    """dX [1, outputs, H, W] of a convolution with a stride; blocks of G and W along `channels`."""

    channels: int = 48
    outputs: int = 20
    size: tuple[int, int] = (9, 8)
    window: Window = STRIDE_2
    pack: Pack = packed

    def __call__(self, setting: Setting, outcome: Outcome) -> None:
        """Launch, execute, compare."""
        steps = (self.window.stride, self.window.padding, self.window.dilation)
        filters = self.pack(setting, self.outputs, *self.window.kernel, self.channels, seed=1, weight=True)
        image = torch.zeros(1, self.outputs, *self.size, dtype=torch.float64, requires_grad=True)
        y = F.conv2d(image, filters.dequantize(torch.float64).permute(3, 0, 1, 2), None, *steps)
        source = self.pack(setting, 1, *y.shape[2:], self.channels, seed=2)
        (dx,) = torch.autograd.grad(y, image, source.dequantize(torch.float64).permute(0, 3, 1, 2))
        out = torch.empty(1, *self.size, self.outputs, dtype=torch.float32)
        call = gather_call(source, filters, self.window, out, None, True, setting.capability)
        _emulate(setting, outcome, call, out)
        outcome.compare(out, dx.permute(0, 2, 3, 1).float().contiguous())


@dataclass(frozen=True)
class Mixed:
    """Y [1, OH, OW, outputs] of a convolution in W4A8: MXFP8 activations, MXFP4 weight."""

    channels: int = 72
    outputs: int = 20
    size: tuple[int, int] = (9, 8)
    window: Window = STRIDE_2
    dtype: torch.dtype = torch.float32

    def __call__(self, setting: Setting, outcome: Outcome) -> None:
        """Launch, execute, compare."""
        weight = packed_mx(setting, self.outputs, *self.window.kernel, self.channels, seed=1, weight=True)
        values = multiples(setting, 1, *self.size, self.channels, seed=2)
        values[..., ::9] = 448 * values[..., ::9].sign()  # every block has a scale of 1 or so, and codes of all sizes
        source = formats.quantize_mxfp8(values)
        bias = multiples(setting, self.outputs, seed=7)
        operands = (each.dequantize(torch.float64) for each in (source, weight))
        x, filters = (each.permute(0, 3, 1, 2) for each in operands)
        steps = (self.window.stride, self.window.padding, self.window.dilation)
        expected = F.conv2d(x, filters, bias.double(), *steps).permute(0, 2, 3, 1).to(self.dtype).contiguous()
        out = torch.empty(expected.shape, dtype=self.dtype)
        call = gather_call(source, weight, self.window, out, bias, False, setting.capability)
        _emulate(setting, outcome, call, out)
        outcome.compare(out, expected)


@dataclass(frozen=True)
class EightBits:
    """Y of a layer in FP8 as packed networks have it: E4M3 by E4M3, a scale of x and one of each output channel.

    inverse: a transposed convolution.
    """

    channels: int = 40
    outputs: int = 20
    size: tuple[int, int] = (9, 8)
    window: Window = STRIDE_2
    dtype: torch.dtype = torch.float32
    bias: bool = True
    inverse: bool = False

    def __call__(self, setting: Setting, outcome: Outcome) -> None:
        """Launch, execute, compare."""
        steps = (self.window.stride, self.window.padding, self.window.dilation)
        axes = (*self.window.kernel, self.channels)
        # Multiples of 1/4 up to 4 are codes, and so are the largest ones; their products are summed exactly.
        given, filters = (
            multiples(setting, *shape, seed=seed) for shape, seed in (((1, *self.size, self.channels), 2),
                                                                      ((self.outputs, *axes), 1))
        )  # fmt: skip
        given[..., ::9] = 448 * given[..., ::9].sign()
        scales = 1 + normal(setting, self.outputs + 1, seed=3).abs()
        x, w = (
            formats.EightBitTensor(codes.to(torch.float8_e4m3fn), scale)
            for codes, scale in ((given, scales[0]), (filters, scales[1:]))
        )
        bias = normal(setting, self.outputs, seed=7) if self.bias else None
        image, weight = given.double().permute(0, 3, 1, 2), filters.double()
        if self.inverse:
            total = F.conv_transpose2d(image, weight.permute(3, 0, 1, 2), None, *steps[:2], 0, 1, steps[2])
        else:
            total = F.conv2d(image, weight.permute(0, 3, 1, 2), None, *steps)
        y = total.permute(0, 2, 3, 1).float() * (x.scale * w.scale)  # as `packed.own_quantizer.multiply`
        expected = (y if bias is None else y + bias).to(self.dtype).contiguous()
        out = torch.empty(expected.shape, dtype=self.dtype)
        sources = (whole_blocks(x), whole_blocks(w))
        call = gather_call(*sources, self.window, out, bias, self.inverse, setting.capability)
        _emulate(setting, outcome, call, out)
        outcome.compare(out, expected)


@dataclass(frozen=True)
class WeightGradient:
    """dW [rows, columns] over `pixels` of `images`."""

    images: int = 2
    rows: int = 20
    columns: int = 33
    pixels: int = 99
    splits: int = 2
    pack: Pack = packed

    def __call__(self, setting: Setting, outcome: Outcome) -> None:
        """Launch, execute, compare."""
        a = self.pack(setting, self.images, self.rows, self.pixels, seed=1, weight=True)
        b = self.pack(setting, self.images, self.columns, self.pixels, seed=2)
        out = torch.empty(self.splits, self.rows, self.columns, dtype=torch.float32)
        _emulate(setting, outcome, rows_call(a, b, out, setting.capability), out)
        values = (x.dequantize(torch.float64) for x in (a, b))
        outcome.compare(out.sum(0), torch.einsum("nrp,ncp->rc", *values).float())


@dataclass(frozen=True)
class GroupedLinear:
    """Y of rows sorted by expert; an expert without rows and, behind the last end, rows without an expert."""

    ends: tuple[int, ...] = (131, 131, 150)
    rows: int = 150
    channels: int = 72
    outputs: int = 20
    bias: bool = True
    dtype: torch.dtype = torch.float16

    def __call__(self, setting: Setting, outcome: Outcome) -> None:
        """Launch, execute, compare."""
        x, ends = packed(setting, self.rows, self.channels, seed=2), torch.tensor(self.ends)
        weights = [
            packed(setting, self.outputs, self.channels, power=8 + i, seed=10 + i, weight=True)
            for i in range(len(self.ends))
        ]
        bias = multiples(setting, len(weights), self.outputs, seed=7) if self.bias else None
        out, expected = (torch.zeros(self.rows, self.outputs, dtype=self.dtype) for _ in range(2))
        for expert, (start, stop) in enumerate(spans(ends, self.rows)):
            own = None if bias is None else bias[expert]
            y = matmul_reference(x, weights[expert], own, dtype=self.dtype, accumulate=torch.float64)
            assert isinstance(y, torch.Tensor)
            expected[start:stop] = y[start:stop]
        call = grouped_call(x, stacked(weights), ends, bias, out, setting.capability)
        _emulate(setting, outcome, call, out, written=self.ends[-1] == self.rows)
        outcome.compare(out, expected)


@dataclass(frozen=True)
class GroupedWeightGradient:
    """dW [E, rows, columns]; `tokens` of each expert, padded."""

    tokens: tuple[int, ...] = (130, 0, 20)
    rows: int = 20
    columns: int = 33
    pack: Pack = packed

    def __call__(self, setting: Setting, outcome: Outcome) -> None:
        """Launch, execute, compare."""
        sizes = torch.tensor([-(-count // SEGMENT) * SEGMENT for count in self.tokens])
        segments = F.pad(sizes.cumsum(0), (1, 0)).int()
        tokens = int(segments[-1]) + SEGMENT  # some behind the last segment
        a = self.pack(setting, 1, self.rows, tokens, seed=1, weight=True)
        b = self.pack(setting, 1, self.columns, tokens, seed=2)
        out = torch.empty(len(self.tokens), self.rows, self.columns, dtype=torch.float32)
        _emulate(setting, outcome, rows_call(a, b, out, setting.capability, segments=segments), out)
        left, right = (x.dequantize(torch.float64)[0] for x in (a, b))
        cuts = [slice(*span) for span in spans(segments[1:], tokens)]
        outcome.compare(out, torch.stack([left[:, cut] @ right[:, cut].mT for cut in cuts]).float())


@dataclass(frozen=True)
class QuantizeMap:
    """A map [N, channels, H, W] quantised along its channels, its width, or both."""

    by_channels: Blocks | None = None
    by_width: Blocks | None = None
    filter: ConvGemms = POINTWISE_FILTER
    shape: tuple[int, int, int, int] = (2, 32, 3, 21)
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float16, torch.float16)

    def __call__(self, setting: Setting, outcome: Outcome) -> None:
        """Launch, execute, compare."""
        gemms, (dtype, result) = self.filter, self.dtypes
        x = normal(setting, *self.shape, seed=5).to(dtype, memory_format=torch.channels_last)
        steps = (gemms.kernel, gemms.stride, gemms.padding, gemms.dilation)
        columns, stride, padding, dilation = (sizes[-1] for sizes in steps)
        width = output_size(self.shape[3], columns, stride, padding, dilation)
        torch.manual_seed(setting.seed)
        expected = [
            _quantized(source, axis, blocks).to(result)
            for source, axis, blocks in ((x, 1, self.by_channels), (gemms.widen(x, width), 3, self.by_width))
            if blocks is not None
        ]
        torch.manual_seed(setting.seed)
        with emulated(setting, outcome):
            places = Columns(columns, stride, padding, dilation, width, gemms.groups)
            found = fake_quantize_map(x, self.by_channels, self.by_width, places, result)
        for one, other in zip([part for part in found if part is not None], expected, strict=True):
            outcome.compare(one.contiguous(), other.contiguous())


@dataclass(frozen=True)
class MsEden:
    """A tensor rotated and quantised along `axis`: its values, and its codes and scales."""

    axis: int
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float16
    channels_last: bool = False
    ahead: int = 0  # elements before it in its memory

    def __call__(self, setting: Setting, outcome: Outcome) -> None:
        """Launch, execute, compare."""
        x = normal(setting, *self.shape, seed=5).to(self.dtype)
        if self.dtype == torch.float32:  # a product that underflows has no sign
            x[:2] = 0.0
            x[:2, :4] = torch.tensor([[1e10, 1e10, 1e-44, 3e-44], [-1e10, 1e10, 3e-44, 1e-44]])
        if self.channels_last:
            x = x.to(memory_format=torch.channels_last)
        if self.ahead:
            x = torch.cat((x.new_zeros(self.ahead), x.flatten()))[self.ahead :].view(self.shape)
        rotation, seed = torch.tensor(setting.seed - 7), torch.tensor((1 << 40) + setting.seed)
        expected = formats.quantize_ms_eden(x, rotation, seed, self.axis)
        values = expected.dequantize(self.dtype).movedim(-1, self.axis)
        with emulated(setting, outcome):
            found, _, _ = ms_eden._quantized(x, rotation, seed, self.axis, packed=False)
            codes, scales, amax = ms_eden._quantized(x, rotation, seed, self.axis, packed=True)
        bits = torch.int32 if self.dtype == torch.float32 else torch.int16  # a zero has a sign
        outcome.compare(found.contiguous().view(bits), values.contiguous().view(bits))
        outcome.compare(codes, expected.codes)
        outcome.compare(scales.view(torch.uint8), expected.scales.view(torch.uint8))
        outcome.compare(amax * SHRINK, expected.amax)


@dataclass(frozen=True)
class MsEdenColumns:
    """What each column of a filter reads of a map, rotated and quantised along the width.

    blocks: thread blocks, where not one for each of their tiles.
    """

    filter: ConvGemms
    shape: tuple[int, int, int, int]
    dtype: torch.dtype = torch.float16
    blocks: int | None = None

    def __call__(self, setting: Setting, outcome: Outcome) -> None:
        """Launch, execute, compare."""
        gemms = self.filter
        x = normal(setting, *self.shape, seed=5).to(self.dtype, memory_format=torch.channels_last)
        columns, stride, padding, dilation = (sizes[-1] for sizes in gemms.steps)
        width = output_size(self.shape[3], columns, stride, padding, dilation)
        rotation, seed = torch.tensor(setting.seed - 7), torch.tensor((1 << 40) + setting.seed)
        expected = formats.quantize_ms_eden(gemms.widen(x, width), rotation, seed, 3)
        at = [columns, stride, padding, dilation, width, gemms.groups]
        with emulated(replace(setting, grid=(self.blocks, 1, 1)) if self.blocks else setting, outcome):
            found, _, amax = ms_eden._quantized(x, rotation, seed, 3, False, at)
        bits = torch.int32 if self.dtype == torch.float32 else torch.int16  # a zero has a sign
        outcome.compare(found.contiguous().view(bits), expected.dequantize(self.dtype).contiguous().view(bits))
        outcome.compare(amax * SHRINK, expected.amax)


def _quantized(x: torch.Tensor, axis: int, blocks: Blocks) -> torch.Tensor:
    source = formats.random_hadamard(x.float(), axis) if blocks.hadamard else x.float()
    if blocks.scale_rule:
        return formats.fake_quantize_mxfp4(source, axis, blocks.scale_rule, blocks.rounding)
    return formats.fake_quantize_nvfp4(source, (axis,), rounding=blocks.rounding)[0]


def _emulate(setting: Setting, outcome: Outcome, call: Any, out: torch.Tensor, written: bool = True) -> None:
    """written: every element of `out`, which holds nothing before."""
    outputs = [out] if written else []
    outcome.add(emulate_triton(call, setting.arch, outputs, setting.model, setting.edit, setting.grid, setting.gpu))


def _has_e4m3(capability: int) -> bool:
    return capability >= 90  # as `packed.network` chooses; Triton has the type from SM89 on


INPUT, WEIGHT, OPERANDS, GROUPED, MIXED = "dgrad", "wgrad", "training operands", "grouped", "W4A8"
FP8 = "FP8"
UP = Window((2, 2), (2, 2), (0, 0), (1, 1))
SHIFTED = Window((2, 3), (1, 2), (0, 2), (2, 1))
GEMMS = (
    Case("dgrad 3x3, stride 2", INPUT, InputGradient()),
    Case("dgrad 2x3, stride 1x2, dilation 2", INPUT, InputGradient(24, 40, (7, 8), SHIFTED)),
    Case("dgrad 3x3, MXFP4", INPUT, InputGradient(104, pack=packed_mx)),
    Case("W4A8 conv 3x3, stride 2", MIXED, Mixed(), _has_e4m3),
    Case("W4A8 pointwise, FP16", MIXED, Mixed(40, 70, (5, 6), POINTWISE, torch.float16), _has_e4m3),
    Case("FP8 conv 3x3, stride 2", FP8, EightBits(), _has_e4m3),
    Case("FP8 linear, FP16", FP8, EightBits(72, 70, (5, 6), POINTWISE, torch.float16, False), _has_e4m3),
    Case("FP8 transposed, BF16", FP8, EightBits(33, 17, (3, 4), UP, torch.bfloat16, True, True), _has_e4m3),
    Case("wgrad, two splits", WEIGHT, WeightGradient()),
    Case("wgrad, one pixel", WEIGHT, WeightGradient(1, 5, 7, 1, 1)),
    Case("wgrad, MXFP4", WEIGHT, WeightGradient(pixels=150, pack=packed_mx)),
    Case("grouped linear", GROUPED, GroupedLinear()),
    Case(
        "grouped linear, rows without an expert, whole steps",
        GROUPED,
        GroupedLinear((0, 7, 20), 29, 256, 72, False, torch.bfloat16),
    ),
    Case("grouped wgrad", GROUPED, GroupedWeightGradient()),
    Case("grouped wgrad, MXFP4", GROUPED, GroupedWeightGradient(pack=packed_mx)),
)
BOTH = (Blocks(), Blocks())
TURNED = Blocks(rounding="stochastic", hadamard=True)
MX, MX_RANDOM = Blocks("floor"), Blocks("ceil", "stochastic")
STRIDED = ConvGemms((2, 3), (2, 2), (1, 1), (1, 2), 2)  # two groups; no column reads the last position
PACKING = (
    Case("quantising a map both ways", OPERANDS, QuantizeMap(*BOTH)),
    Case(
        "quantising a map both ways, stochastic, RHT along the width",
        OPERANDS,
        QuantizeMap(Blocks(None, "stochastic"), TURNED),
    ),
    Case(
        "quantising a map both ways, stochastic, RHT, FP32",
        OPERANDS,
        QuantizeMap(TURNED, TURNED, dtypes=(torch.float32, torch.float16)),
    ),
    Case("quantising a map for three columns", OPERANDS, QuantizeMap(None, Blocks(), SAME_FILTER)),
    Case(
        "quantising a map for three columns, stride, groups, stochastic",
        OPERANDS,
        QuantizeMap(None, TURNED, STRIDED, (2, 32, 3, 38)),
    ),
    Case("quantising a map both ways, MXFP4, stochastic", OPERANDS, QuantizeMap(MX_RANDOM, MX_RANDOM)),
    Case(
        "quantising a map for three columns, MXFP4, FP32",
        OPERANDS,
        QuantizeMap(None, MX, SAME_FILTER, (1, 64, 2, 33), (torch.float32, torch.float32)),
    ),
    Case(
        "quantising a map along its channels, BF16",
        OPERANDS,
        QuantizeMap(Blocks(), None, dtypes=(torch.bfloat16, torch.bfloat16)),
    ),
    Case("MS-EDEN along the channels", OPERANDS, MsEden(1, (2, 144, 3, 5), channels_last=True)),
    Case("MS-EDEN along the width", OPERANDS, MsEden(3, (2, 35, 3, 40), channels_last=True)),
    Case("MS-EDEN along rows, FP32", OPERANDS, MsEden(1, (35, 130), torch.float32)),
    Case("MS-EDEN along rows of whole blocks, FP32", OPERANDS, MsEden(1, (35, 144), torch.float32)),
    Case("MS-EDEN along many rows", OPERANDS, MsEden(1, (450, 128), torch.bfloat16)),
    Case("MS-EDEN along rows that begin between words", OPERANDS, MsEden(1, (35, 144), ahead=3)),
    Case("MS-EDEN along tokens, BF16", OPERANDS, MsEden(0, (150, 35), torch.bfloat16)),
    Case("MS-EDEN along 48 channels", OPERANDS, MsEden(1, (2, 48, 3, 5), channels_last=True)),
    Case("MS-EDEN along 30 tokens, BF16", OPERANDS, MsEden(0, (30, 35), torch.bfloat16)),
    Case("MS-EDEN, columns of a filter", OPERANDS, MsEdenColumns(SAME_FILTER, (2, 35, 3, 40), blocks=5)),
    Case(
        "MS-EDEN, columns of a filter, stride 2, groups",
        OPERANDS,
        MsEdenColumns(ConvGemms((1, 4), (1, 2), (0, 3), (1, 2), 2), (2, 68, 2, 150), torch.bfloat16),
    ),
    Case("MS-EDEN along a width of 9", OPERANDS, MsEden(3, (2, 35, 3, 9), channels_last=True)),
)
