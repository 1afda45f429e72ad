"""Convolutions of packed activations by wgmma, beside Triton's implicit GEMM and FP16 of cuDNN, layer by layer.

    python benchmarks/warpgroup_conv.py --json benchmarks/results/warpgroup_conv_h200.json
    python benchmarks/warpgroup_conv.py --variants FILE        every variant of every layer, to fit `warpgroup.cycles`

Layers of our UNet at scale 1.0 and of a residual network. The kernels of this package read the same packed activations
and the same decoded weight; cuDNN reads FP16 in channels_last, its algorithm chosen by measuring
(`torch.backends.cudnn.benchmark`). Each is replayed from a CUDA graph. 3x3 convolutions write float16, ours with the
moments for a GroupNorm; transposed ones write a packed output, of cuDNN float16.

`bytes floor` is the time of as many bytes at 3 TB/s, every input read once and every output written once; `operations
floor` that of as many multiply-adds at the dense FP16 rate of the GPU's data sheet, 989 TFLOP/s.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from peers import captured, machine, median_ms

from fp4deploy.formats import NVFP4_BLOCK, Nvfp4Tensor
from fp4deploy.plugins.gemm.convolution import decoded, warpgroup
from fp4deploy.plugins.gemm.convolution.decoded_weight import DecodedWeight, decode_weight
from fp4deploy.plugins.quantize.dispatch import quantize_nvfp4
from fp4deploy.plugins.runtime import launch
from fp4deploy.plugins.runtime.nvcc import compile_cubin

BANDWIDTH, RATE = 3e12, 989e12  # bytes and floating-point operations a second
SLOWEST = 1.6  # estimates above the smallest one, of variants that are measured
LEVELS = (64, 128, 256, 512, 1024)
IMAGES = ((16, 352, 480), (4, 512, 512), (1, 352, 480), (1, 1024, 2048))
OTHERS = (  # N, H, W, channels, outputs, kernel, dilation
    (16, 88, 120, 64, 256, 1, 1),
    (16, 44, 60, 512, 128, 1, 1),
    (16, 44, 60, 512, 2048, 1, 1),
    (16, 44, 60, 2048, 512, 1, 1),
    (16, 44, 60, 256, 256, 3, 2),
    (1, 44, 60, 256, 256, 3, 2),
    (16, 44, 60, 512, 512, 3, 4),
)
Layer = tuple[tuple[int, int, int], tuple[int, ...], int, int, int, bool]


def layers() -> Iterator[Layer]:
    """Pixels, channels of each source, outputs, kernel, dilation, transposed."""
    for n, h, w in IMAGES:
        for level, width in enumerate(LEVELS):
            size = (n, h >> level, w >> level)
            if level:
                yield size, (width // 2,), width, 3, 1, False
            yield size, (width,), width, 3, 1, False
            if level < len(LEVELS) - 1:
                yield size, (width, width), width, 3, 1, False
            if level:
                yield size, (width,), width // 2, 2, 1, True
    for n, h, w, channels, outputs, k, dilation in OTHERS:
        yield (n, h, w), (channels,), outputs, k, dilation, False


class Operands:
    """Of one layer, on the GPU."""

    def __init__(self, layer: Layer) -> None:
        (n, h, w), channels, outputs, k, self.dilation, self.transposed = layer
        self.k, self.padding = k, 0 if self.transposed else k // 2 * self.dilation
        torch.manual_seed(0)
        plain = [torch.randn(n, h, w, each, device="cuda", dtype=torch.half) for each in channels]
        self.sources: tuple[Nvfp4Tensor, ...] = tuple(quantize_nvfp4(x) for x in plain)
        weight = torch.randn(outputs, k, k, sum(channels), device="cuda", dtype=torch.half)
        self.planes: DecodedWeight = decode_weight(quantize_nvfp4(weight), channels, self.transposed)
        self.x = torch.cat(plain, 3).permute(0, 3, 1, 2)
        self.weight = weight.permute((3, 0, 1, 2) if self.transposed else (0, 3, 1, 2))
        self.weight = self.weight.contiguous(memory_format=torch.channels_last)
        self.amax = torch.tensor(40.0, device="cuda") if self.transposed else None

    def shape(self) -> warpgroup.Shape:
        place = (self.padding, self.padding)
        return warpgroup.shape_of(self.sources, self.planes, place, self.dilation, self.transposed, self.transposed)

    def triton(self) -> Any:
        n, h, w = self.sources[0].shape[:3]
        depths, taps = tuple(x.codes.shape[-1] for x in self.sources), 1 if self.transposed else self.k**2
        outputs = self.planes.shape[0]
        plan = decoded.chosen_plan(n * h * w, outputs, depths, taps, self.transposed, self.planes.planes.device)
        return self.ours(chosen=plan)

    def ours(self, **more: Any) -> Any:
        return decoded.conv2d(
            self.sources, self.planes, padding=self.padding, dilation=self.dilation, out_amax=self.amax,
            moments=not self.transposed, transposed=self.transposed, **more,
        )  # fmt: skip

    def cudnn(self) -> torch.Tensor:
        if self.transposed:
            return torch.nn.functional.conv_transpose2d(self.x, self.weight, stride=2)
        return torch.nn.functional.conv2d(self.x, self.weight, padding=self.padding, dilation=self.dilation)


def measure(layer: Layer) -> dict[str, Any]:
    """All kernels on one layer, microseconds."""
    (n, h, w), channels, outputs, k, dilation, transposed = layer
    operands = Operands(layer)
    packed, pixels = 0.5 + 1 / NVFP4_BLOCK, n * h * w
    weights = 2 * outputs * k * k * sum(channels)
    moved = pixels * (sum(channels) * packed + (4 * packed if transposed else 2) * outputs) + weights
    operations = 2 * pixels * sum(channels) * outputs * k * k
    name = f"{n} x {h} x {w}, {' + '.join(map(str, channels))} to {outputs}"
    kind = ", transposed" if transposed else f", {k}x{k}" + (f", dilation {dilation}" if dilation > 1 else "")
    row: dict[str, Any] = {"case": name + kind}
    for form, run in (("triton", operands.triton), ("wgmma", operands.ours), ("cudnn", operands.cudnn)):
        row[f"{form}_us"] = 1e3 * median_ms(captured(run))
    row |= {"bytes_floor_us": 1e6 * moved / BANDWIDTH, "operations_floor_us": 1e6 * operations / RATE}
    row["variant"] = asdict(warpgroup.variant(operands.shape(), launch.num_sms(operands.x.device)))  # type: ignore
    return row


def sweep(layer: Layer) -> dict[str, Any]:
    """Every variant of one layer, microseconds."""
    operands, rows = Operands(layer), []
    for each in variants(layer):
        with mock.patch.object(warpgroup, "variant", return_value=each):
            rows.append([asdict(each), 1e3 * median_ms(captured(operands.ours), 7, 1)])
    return {"layer": layer, "rows": rows}


def variants(layer: Layer) -> list[warpgroup.Variant]:
    """Those of a layer that could be the fastest."""
    pixels, channels, outputs, k, dilation, transposed = layer
    taps = (1, 1) if transposed else (k, k)
    shape = warpgroup.Shape(pixels, tuple(c // 64 for c in channels), outputs, taps, dilation, transposed, transposed)
    num_sms = launch.num_sms(torch.device("cuda", 0))
    found = {each: warpgroup.cycles(each, shape, num_sms) for each in warpgroup.variants(shape, num_sms)}
    return [each for each, cycles in found.items() if cycles < SLOWEST * min(found.values())]


def compile_all(found: list[tuple[Layer, warpgroup.Variant]]) -> None:
    """Several compilers at a time."""
    macros = {tuple(each.macros(torch.float16, not layer[-1], layer[-1]).items()) for layer, each in found}
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda each: compile_cubin("warpgroup_conv.cu", "sm_90a", dict(each)), macros))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--variants", type=Path)
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    taken = [
        layer for layer in layers() if warpgroup.supports(layer[1], layer[2], (layer[3],) * 2, 1, layer[4], layer[5])
    ]
    if options.variants:
        compile_all([(layer, each) for layer in taken for each in variants(layer)])
        options.variants.write_text(json.dumps([sweep(layer) for layer in taken]))
        return
    rows = []
    for layer in taken:
        row = measure(layer)
        rows.append(row)
        times = ", ".join(f"{name} {row[f'{name}_us']:.0f}" for name in ("triton", "wgmma", "cudnn"))
        print(f"{row['case']}: {times} us, floors {row['bytes_floor_us']:.0f}, {row['operations_floor_us']:.0f}")
    if options.json:
        found = {"command": "python benchmarks/warpgroup_conv.py", "machine": machine(), "rows": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
