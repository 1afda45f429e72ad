"""Cases of the GEMMs of a training step: dgrad by `gather_gemm`, wgrad by `rows_gemm`, and what packs its operand;
grouped GEMMs of experts.

Sums are exact, as in `gemms`, so that there is one right answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from fp4deploy import formats
from fp4deploy.formats import FourOverSix, Nvfp4Tensor
from fp4deploy.plugins.gemm.grouped import SEGMENT, grouped_call, spans, stacked
from fp4deploy.plugins.gemm.reference import matmul_reference
from fp4deploy.plugins.gemm.training import Packed, Window, gather_call, rows_call
from fp4deploy.plugins.quantize.unfolded import Unfolding, fake_quantize_unfolded, pack_unfolded
from fp4deploy_emulator.cases.case import Case, Outcome, Setting, multiples, normal, packed, packed_mx
from fp4deploy_emulator.cases.cuda import emulated
from fp4deploy_emulator.launch import emulate_triton

Pack = Callable[..., Packed]
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
class PackUnfolded:
    """Codes and scales of an unfolded feature map, one image at a time."""

    unfolding: Unfolding
    rule: str | None = None
    rounding: str = "nearest"
    four_over_six: FourOverSix | None = None
    hadamard: bool = False
    dtype: torch.dtype = torch.float16

    def __call__(self, setting: Setting, outcome: Outcome) -> None:
        """Launch, execute, compare."""
        x = normal(setting, 2, 3, 9, 8, seed=5).to(self.dtype)
        of = self.unfolding
        rows = F.unfold(x.float(), of.kernel, of.dilation, of.padding, of.stride)
        rows = formats.random_hadamard(rows) if self.hadamard else rows
        torch.manual_seed(setting.seed)
        expected: Any = (
            formats.quantize_mxfp4(rows, self.rule, self.rounding)
            if self.rule
            else formats.quantize_nvfp4(rows, four_over_six=self.four_over_six, rounding=self.rounding)
        )
        torch.manual_seed(setting.seed)
        with emulated(setting, outcome):
            options: dict[str, Any] = {"scale_rule": self.rule, "rounding": self.rounding}
            options |= {"four_over_six": self.four_over_six, "hadamard": self.hadamard, "most_bytes": 1}
            for images, found in pack_unfolded(x, of, **options):
                outcome.compare(found.codes, expected.codes[images])
                outcome.compare(found.scales.view(torch.uint8), expected.scales[images].view(torch.uint8))
                if isinstance(found, Nvfp4Tensor):
                    outcome.compare(found.amax, expected.amax)


@dataclass(frozen=True)
class QuantizeUnfolded:
    """The values of an unfolded feature map, of `dtype`."""

    unfolding: Unfolding
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float16

    def __call__(self, setting: Setting, outcome: Outcome) -> None:
        """Launch, execute, compare."""
        x, of = normal(setting, 2, 3, 9, 8, seed=5).half(), self.unfolding
        rows = F.unfold(x, of.kernel, of.dilation, of.padding, of.stride)
        torch.manual_seed(setting.seed)
        options: dict[str, Any] = dict(self.options)
        rows = formats.random_hadamard(rows) if options.pop("hadamard", False) else rows.float()
        if "scale_rule" in options:
            expected = formats.fake_quantize_mxfp4(rows, -1, **options)
        else:
            expected = formats.fake_quantize_nvfp4(rows, (-1,), **options)[0]
        torch.manual_seed(setting.seed)
        with emulated(setting, outcome):
            found = fake_quantize_unfolded(x, of, self.dtype, **self.options)
        outcome.compare(found.contiguous(), expected.to(self.dtype))


def _emulate(setting: Setting, outcome: Outcome, call: Any, out: torch.Tensor, written: bool = True) -> None:
    """written: every element of `out`, which holds nothing before."""
    outputs = [out] if written else []
    outcome.add(emulate_triton(call, setting.arch, outputs, setting.model, setting.edit, setting.grid, setting.gpu))


THREE = Unfolding((3, 3), (1, 1), (1, 1), (1, 1), (9, 8))
WHOLE = Unfolding((2, 3), (1, 1), (1, 1), (1, 1), (10, 8))  # rows of 80 pixels, whole groups
STRIDED = Unfolding((2, 3), (2, 1), (1, 2), (1, 2), (5, 8))

INPUT, WEIGHT, OPERANDS, GROUPED = "dgrad", "wgrad", "training operands", "grouped"
SHIFTED = Window((2, 3), (1, 2), (0, 2), (2, 1))
GEMMS = (
    Case("dgrad 3x3, stride 2", INPUT, InputGradient()),
    Case("dgrad 2x3, stride 1x2, dilation 2", INPUT, InputGradient(24, 40, (7, 8), SHIFTED)),
    Case("dgrad 3x3, MXFP4", INPUT, InputGradient(104, pack=packed_mx)),
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
PACKING = (
    Case("packing unfolded", OPERANDS, PackUnfolded(THREE)),
    Case("packing unfolded, stochastic, RHT", OPERANDS, PackUnfolded(STRIDED, None, "stochastic", None, True)),
    Case("packing unfolded, MXFP4, stochastic", OPERANDS, PackUnfolded(STRIDED, "ceil", "stochastic")),
    Case("packing unfolded, 4/6", OPERANDS, PackUnfolded(THREE, four_over_six=FourOverSix("mse"))),
    Case("quantising unfolded", OPERANDS, QuantizeUnfolded(WHOLE)),
    Case(
        "quantising unfolded, stochastic, RHT",
        OPERANDS,
        QuantizeUnfolded(STRIDED, {"rounding": "stochastic", "hadamard": True}),
    ),
    Case("quantising unfolded, MXFP4, FP32", OPERANDS, QuantizeUnfolded(THREE, {"scale_rule": "ceil"}, torch.float32)),
)
