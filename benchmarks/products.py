"""Speed of GEMM and convolution with packed operands, compared with FP16 of the same shape.

    python benchmarks/products.py --json benchmarks/results/products_h200.json

Convolutions are those of the UNet of scale 1.0 at 352 x 480, batch 16, against cuDNN (channels_last, benchmark mode);
matmul and weight-only linear layers against cuBLAS. FP16 and packed alternate in one process, and the GPU is kept
busy while launches queue up. Every result is compared with the reference before it is timed. On GPUs
before Blackwell the kernels decode in registers: the ratio says what that costs, not what FP4 gains.

Weight-only GEMMs of a few rows (GEMV) are timed in a loop with frozen weights, where a kernel reads its weight while
the one before it still runs (programmatic dependent launch, `plugins.runtime.pdl`), and with each launch in stream
order.

`few_channels` are the first and the last layer, which are FP4 where every layer is, and the outer levels of scale 0.25.

`--sweep` tries every tile on every shape and prints the best.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from kernels import copy_ms, median_ms

from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.models.input_encoding import ENCODED_CHANNELS
from fp4deploy.models.unet import channel_widths
from fp4deploy.plugins.gemm import arguments as launching
from fp4deploy.plugins.gemm import dispatch
from fp4deploy.plugins.gemm.triton.tiles import (
    MIDDLE,
    NARROW,
    SMALL,
    SMALL_M,
    TALL_NARROW,
    TALL_THIN,
    TALL_THINNEST,
    WIDE,
    Tile,
)
from fp4deploy.plugins.quantize.dispatch import quantize_nvfp4
from fp4deploy.plugins.runtime import pdl

Shape = tuple[str, tuple[int, ...], int, int, int, int]  # name, channels of the sources, outputs, height, width, size
BATCH, HEIGHT, WIDTH = 16, 352, 480
SWEPT = (
    *(WIDE, MIDDLE, NARROW, SMALL),
    *(Tile(256, 128, 64, 8, 3), Tile(128, 128, 32, 4, 3), Tile(128, 64, 32, 8, 3), Tile(256, 128, 32, 8, 2)),
    *(TALL_NARROW, TALL_THIN, TALL_THINNEST),
)
SWEPT_SQUARE = (WIDE, Tile(256, 128, 64, 8, 3), Tile(256, 128, 64, 8, 2), Tile(128, 256, 64, 8, 3), MIDDLE)
SWEPT_SMALL_M = (
    SMALL_M,
    *(Tile(16, 64, 128, 4, 3), Tile(16, 64, 256, 4, 3), Tile(16, 64, 256, 8, 3), Tile(16, 64, 64, 4, 5)),
    *(Tile(16, 128, 128, 8, 4), Tile(16, 64, 128, 8, 4), Tile(16, 64, 64, 4, 6)),
)


def layers() -> list[Shape]:
    """The quantised convolutions of scale 1.0."""
    widths = channel_widths(1.0)
    found = []
    for level, (before, after) in enumerate(zip((3, *widths[:-1]), widths, strict=True)):
        h, w = HEIGHT >> level, WIDTH >> level
        if level:
            found.append((f"encoder.{level}.conv1", (before,), after, h, w, 3))
        found.append((f"encoder.{level}.conv2", (after,), after, h, w, 3))
    for level in reversed(range(len(widths) - 1)):
        width, h, w = widths[level], HEIGHT >> level, WIDTH >> level
        found.append((f"up.{len(widths) - 2 - level}", (widths[level + 1],), width, h // 2, w // 2, 2))
        found.append((f"decoder.{len(widths) - 2 - level}.conv1", (width, width), width, h, w, 3))
        found.append((f"decoder.{len(widths) - 2 - level}.conv2", (width,), width, h, w, 3))
    return found


def few_channels() -> list[Shape]:
    """What is quantised where every layer is, and the outer levels of scale 0.25: 16 and 32 channels."""
    half = (HEIGHT // 2, WIDTH // 2)
    return [
        ("first layer, digits", (ENCODED_CHANNELS,), 64, HEIGHT, WIDTH, 3),
        ("output layer", (64,), 12, HEIGHT, WIDTH, 1),
        ("encoder.0.conv2, 0.25", (16,), 16, HEIGHT, WIDTH, 3),
        ("encoder.1.conv1, 0.25", (16,), 32, *half, 3),
        ("encoder.1.conv2, 0.25", (32,), 32, *half, 3),
        ("decoder.2.conv1, 0.25", (32, 32), 32, *half, 3),
        ("up.3, 0.25", (32,), 16, *half, 2),
        ("decoder.3.conv1, 0.25", (16, 16), 16, HEIGHT, WIDTH, 3),
    ]


def packed(*shape: int) -> Nvfp4Tensor:
    return quantize_nvfp4(torch.randn(*shape, device="cuda", dtype=torch.float16))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@dataclass
class Layer:
    """A convolution, packed and in FP16; without bias, because torch adds it in a kernel of its own."""

    sources: tuple[Nvfp4Tensor, ...]
    weight: Nvfp4Tensor

    def __post_init__(self) -> None:
        maps = [source.dequantize(torch.float16) for source in self.sources]
        self.maps = torch.cat(maps, -1).permute(0, 3, 1, 2)
        axes = (3, 0, 1, 2) if self.transposed else (0, 3, 1, 2)
        filters = self.weight.dequantize(torch.float16).permute(axes)
        self.filters = filters.contiguous(memory_format=torch.channels_last)

    @property
    def size(self) -> int:
        return self.weight.shape[1]

    @property
    def transposed(self) -> bool:
        return self.size == 2

    def fp16(self) -> torch.Tensor:
        if self.transposed:
            return F.conv_transpose2d(self.maps, self.filters, None, 2)
        return F.conv2d(self.maps, self.filters, None, padding=self.size // 2)

    def packed(self, tile: Tile | None = None) -> torch.Tensor:
        if tile is not None:
            return self.tiled(tile)
        if self.transposed:
            return dispatch.conv_transpose2d(self.sources[0], self.weight)
        return dispatch.conv2d(self.sources, self.weight, padding=self.size // 2)

    def tiled(self, tile: Tile) -> torch.Tensor:
        n, h, w = self.sources[0].shape[:3]
        factor, taps, padding = (2, (1, 1), 0) if self.transposed else (1, (self.size, self.size), self.size // 2)
        out = torch.empty(n, factor * h, factor * w, self.weight.shape[0], dtype=torch.float16, device="cuda")
        call = launching.gemm_call(
            *(self.sources, self.weight, None, (n, h, w), (n, h, w), out, None, None, torch.float16, 90),
            taps=taps,
            padding=padding,
            transposed=self.transposed,
            tile=tile,
        )
        launching.run(call, out.device)
        return out


def convolutions(shapes: list[Shape], sweep: bool) -> list[dict[str, Any]]:
    """A row for each layer: times, throughput and ratio."""
    rows = []
    for name, channels, outputs, h, w, size in shapes:
        layer = Layer(tuple(packed(BATCH, h, w, c) for c in channels), packed(outputs, size, size, sum(channels)))
        error = relative_error(layer.packed(), layer.fp16().permute(0, 2, 3, 1))
        if error > 2e-3:
            raise SystemExit(f"{name}: the relative error is {error:.1e}.")
        fp16, ours = median_ms(lambda i, f=layer.fp16: f(), 9), median_ms(lambda i, f=layer.packed: f(), 9)
        operations = 2 * BATCH * h * w * sum(channels) * outputs * size * size
        row = {"layer": name, "channels": list(channels), "outputs": outputs, "height": h, "width": w, "size": size}
        row |= {"fp16_ms": fp16, "packed_ms": ours, "ratio": fp16 / ours, "relative_error": error}
        row |= {"fp16_tflops": operations / fp16 / 1e9, "packed_tflops": operations / ours / 1e9}
        line = f"{name:21s} {channels!s:14s}->{outputs:5d} {h:3d}x{w:3d}  FP16 {fp16 * 1e3:6.0f} us"
        line += f"  packed {ours * 1e3:6.0f} us  {row['packed_tflops']:4.0f} TFLOP/s  ratio {fp16 / ours:.2f}"
        print(line + (best(layer.packed, SWEPT, fp16) if sweep else ""), flush=True)
        rows.append(row)
    return rows


def best(run: Any, swept: tuple[Tile, ...], fp16: float) -> str:
    """The ratios of all tiles, best first."""
    found = []
    for tile in swept:
        try:
            found.append((fp16 / median_ms(lambda i, t=tile: run(t), 5), tile))
        except Exception as error:  # a tile that does not fit
            print(f"    {tile}: {type(error).__name__}")
    found.sort(key=lambda pair: -pair[0])
    shown = (f"{ratio:.2f} {t.bm}x{t.bn}x{t.bk} w{t.warps} s{t.stages}" for ratio, t in found[:4])
    return "\n      " + "; ".join(shown)


def ordered_ms(run: Callable[[int], object]) -> float:
    """Median milliseconds with every launch in stream order."""
    pdl.enabled = False
    try:
        return median_ms(run)
    finally:
        pdl.enabled = True


def matrices(sweep: bool) -> list[dict[str, Any]]:
    """Square W4A4 GEMM, and weight-only GEMV."""
    rows = []
    a, b = packed(4096, 4096), packed(4096, 4096)
    x, y = a.dequantize(torch.float16), b.dequantize(torch.float16)
    error = relative_error(dispatch.matmul(a, b), x @ y.T)
    fp16, ours = median_ms(lambda i: x @ y.T), median_ms(lambda i: dispatch.matmul(a, b))
    row = {"case": "W4A4 4096", "fp16_ms": fp16, "packed_ms": ours, "ratio": fp16 / ours, "relative_error": error}
    rows.append(row)
    print(f"W4A4 4096^3          FP16 {fp16 * 1e3:6.1f} us  packed {ours * 1e3:6.1f} us  ratio {fp16 / ours:.2f}")
    if sweep:
        extent, out = (1, 1, 4096), torch.empty(4096, 4096, dtype=torch.float16, device="cuda")
        for tile in SWEPT_SQUARE:
            call = launching.gemm_call((a,), b, None, extent, extent, out, None, None, torch.float16, 90, tile=tile)
            ms = median_ms(lambda i, call=call: launching.run(call, a.codes.device), 9)
            print(f"      {tile}: {fp16 / ms:.2f}")
    size = 8192
    weights = [packed(size, size) for _ in range(4)]
    for weight in weights:
        pdl.freeze(weight)
    plain = [weight.dequantize(torch.float16) for weight in weights]
    count = weights[0].codes.nbytes + weights[0].scales.nbytes
    floor = copy_ms(count)
    for m in (1, 8, 16):
        x = torch.randn(m, size, device="cuda", dtype=torch.float16)
        error = relative_error(dispatch.matmul(x, weights[0]), x @ plain[0].T)
        fp16 = median_ms(lambda i, x=x: F.linear(x, plain[i]))
        ours = median_ms(lambda i, x=x: dispatch.matmul(x, weights[i]))
        ordered = ordered_ms(lambda i, x=x: dispatch.matmul(x, weights[i]))
        row = {"case": f"W4A16 M={m}", "fp16_ms": fp16, "packed_ms": ours, "ordered_ms": ordered, "ratio": fp16 / ours}
        row |= {"copy_ms": floor, "share_of_copy": floor / ours, "relative_error": error}
        rows.append(row)
        line = f"W4A16 M={m:2d} 8192x8192  FP16 {fp16 * 1e3:6.1f} us  packed {ours * 1e3:6.1f} us"
        line += f" (each launch in order {ordered * 1e3:6.1f} us)"
        print(f"{line}  ratio {fp16 / ours:.2f}  {floor / ours:.0%} of copy bandwidth")
        if sweep:
            out = torch.empty(m, size, device="cuda", dtype=torch.float16)
            for tile in SWEPT_SMALL_M if m == 16 else ():
                calls = [launching.weight_only_call(x, weight, None, out, 90, tile=tile) for weight in weights]
                ms = median_ms(lambda i, calls=calls: launching.run(calls[i], weights[i].codes.device))
                print(f"      {tile}: {ms * 1e3:.1f} us {floor / ms:.0%}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    found = {"matrices": matrices(arguments.sweep), "convolutions": convolutions(layers(), arguments.sweep)}
    found["few_channels"] = convolutions(few_channels(), arguments.sweep)
    if arguments.json:
        machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
        machine["python"] = platform.python_version()
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        content = {"command": "python benchmarks/products.py", "machine": machine, **found}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
