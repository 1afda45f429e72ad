"""The time of each layer of the UNet on three GPUs by the time model: a PROJECTION for Blackwell, not a measurement.

    python benchmarks/roofline.py --json benchmarks/results/roofline_projected.json

**Nothing here was measured on a Blackwell GPU.** Convolutions of FP4 operands are this package's kernels on that GPU
(`fp4deploy.timing.launches`), those of FP16 a library's (`timing.library`), and GroupNorm with ReLU and pooling moves
bytes. The error bars are those of layers that were held out when the model was fitted on an H200; that they hold on
another architecture is not known. `roofline_training.py` has bounds from the bare peaks of `fp4deploy.peaks`.

Bytes count each tensor once: the input, the weights, the output. FP4 has 4 bits an element and 8 a block of 16,
together 4.5; all else FP16. Convolutions write FP16, because GroupNorm needs their sums; the transposed ones and the
passes of GroupNorm write what the next GEMM reads. GroupNorm + ReLU (+ pooling) reads its input twice, for the
statistics and for the result. Two sources of a concatenation are read where they are.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp4deploy.models import build_unet
from fp4deploy.peaks import GPUS, Gpu
from fp4deploy.precisions import ELEMENT_BYTES
from fp4deploy.qat import layer_plan
from fp4deploy.timing.launches import Shape, moving, works
from fp4deploy.timing.library import library_work
from fp4deploy.timing.model import NOTHING, Time, time_of

FP16, FP4 = 2.0, ELEMENT_BYTES["nvfp4"]  # bytes an element; FP4 with its block scales
LABEL = "projected"
STATEMENT = "Projected by the time model. Nothing was measured on a Blackwell GPU."


@dataclass(frozen=True)
class Work:
    """What a layer does for a batch: operations, and bytes with FP16 and with FP4 operands.

    `fp4_operands` is False for layers that stay in FP16 and for those that multiply nothing. elements: of input, weight
    and output. shape: of a convolution.
    """

    name: str
    kind: str
    operations: float
    bytes_fp16: float
    bytes_nvfp4: float
    fp4_operands: bool
    elements: tuple[int, ...]
    shape: Shape | None = None


def layers(scale: float, classes: int, batch: int, height: int, width: int) -> list[Work]:
    """Every convolution and every GroupNorm of the UNet, in the order of the forward pass."""
    with torch.device("meta"):
        model = build_unet(classes, scale)
    quantised = {plan.name for plan in layer_plan(model) if plan.precision == "FP4"}
    found: list[Work] = []
    names = {module: name for name, module in model.named_modules()}

    def note(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        x, name = inputs[0], names[module]
        if isinstance(module, nn.GroupNorm):
            found.append(norm(name, output, quantised))
        elif isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            found.append(convolution(name, module, x, output, name in quantised))

    hooks = [module.register_forward_hook(note) for module in names]
    model(torch.empty(batch, 3, height, width, device="meta"))
    for hook in hooks:
        hook.remove()
    return found


def convolution(
    name: str, layer: nn.Conv2d | nn.ConvTranspose2d, x: torch.Tensor, y: torch.Tensor, quantised: bool
) -> Work:
    """A convolution: an output element sums over channels and taps; transposed, an input element goes to them."""
    transposed = isinstance(layer, nn.ConvTranspose2d)
    taps = layer.kernel_size[0] * layer.kernel_size[1]
    macs = x.numel() * layer.out_channels * taps if transposed else y.numel() * layer.in_channels * taps
    operands = x.numel() + layer.weight.numel()
    # Only a transposed convolution is followed by no GroupNorm, and what reads it is an FP4 convolution.
    written = FP4 if transposed and quantised else FP16
    packed = (FP4 if quantised else FP16) * operands + written * y.numel()
    kind = f"{'up ' if transposed else ''}{layer.kernel_size[0]}x{layer.kernel_size[1]}"
    sizes = (x.numel(), layer.weight.numel(), y.numel())
    sources = (x.shape[1] // 2,) * 2 if name.startswith("decoder") and name.endswith("conv1") else (x.shape[1],)
    pairs = (tuple(map(int, pair)) for pair in (layer.kernel_size, layer.stride, layer.padding))
    shape = Shape(x.shape[0], tuple(x.shape[2:]), sources, layer.out_channels, *pairs, 1, transposed, transposed)
    return Work(name, kind, 2.0 * macs, FP16 * (operands + y.numel()), packed, quantised, sizes, shape)


def norm(name: str, y: torch.Tensor, quantised: set[str]) -> Work:
    """GroupNorm, ReLU, and the pooling of an encoder level that is not the last: two reads, and what is written."""
    room, level, part = name.split(".")
    pooled = 0.25 if room == "encoder" and part == "norm2" and int(level) < 4 else 0.0
    reader = {"norm1": f"{room}.{level}.conv2"}.get(part)
    if reader is None:  # the skip is read by a decoder, the rest by the transposed convolution or by the head
        reader = (
            f"decoder.{3 - int(level)}.conv1" if pooled else "up.0" if room == "encoder" else f"up.{int(level) + 1}"
        )
    reader = "head" if reader == "up.4" else reader
    written = (1 + pooled) * y.numel()
    reads = 2 * FP16 * y.numel()
    packed = reads + (FP4 if reader in quantised else FP16) * written
    return Work(name, "norm", 0.0, reads + FP16 * written, packed, False, (y.numel(), 0, y.numel()))


def time(work: Work, gpu: Gpu, nvfp4: bool) -> Time:
    """Of one layer, by the kernels that compute it."""
    moved = work.bytes_nvfp4 if nvfp4 else work.bytes_fp16
    if work.shape is None:
        kernels = [moving(moved, work.elements[-1] * nvfp4, gpu, norm=True)]
    elif nvfp4 and work.fp4_operands:
        kernels = works(work.shape, gpu)
    else:
        shape = work.shape
        product = (shape.rows, shape.places * shape.outputs, sum(shape.channels) * shape.summed)
        kernels = [library_work("FP16", *product, work.bytes_fp16, gpu, shape.transposed)]
    return sum((time_of(kernel, gpu) for kernel in kernels), NOTHING)


def project(works: list[Work], gpu: Gpu, measured: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """A row for each layer; `measured_*` only where somebody measured this GPU."""
    rows = []
    for work in works:
        operands = ("FP4" if work.fp4_operands else "FP16") if work.operations else ""
        row: dict[str, Any] = {"label": LABEL, "gpu": gpu.name, "layer": work.name, "kind": work.kind}
        row |= {"operands": operands, "gflop": work.operations / 1e9}
        row |= {"mbytes_fp16": work.bytes_fp16 / 1e6, "mbytes_nvfp4": work.bytes_nvfp4 / 1e6}
        for name, found in (("fp16", time(work, gpu, False)), ("nvfp4", time(work, gpu, True))):
            row |= {
                f"{name}_us": 1e3 * found.ms,
                f"{name}_low_us": 1e3 * found.low,
                f"{name}_high_us": 1e3 * found.high,
            }
        row |= {"speedup": row["fp16_us"] / row["nvfp4_us"]}
        row |= {f"measured_{name}": value for name, value in measured.get(work.name, {}).items()}
        rows.append(row)
    return rows


def read_measured(path: Path | None) -> tuple[str, dict[str, dict[str, float]]]:
    """GPU and layer -> times, of a file {"gpu": ..., "layers": [{"layer": ..., "fp16_us": ..., "nvfp4_us": ...}]}."""
    if path is None:
        return "", {}
    content = json.loads(path.read_text())
    times = {
        row["layer"]: {name: row[name] for name in ("fp16_us", "nvfp4_us") if name in row} for row in content["layers"]
    }
    return content["gpu"], times


def show(rows: list[dict[str, Any]], gpu: Gpu, batch: int) -> dict[str, Any]:
    """Print a GPU's table; every line says that it is projected. The sum is returned."""
    rate = gpu.rate("FP4" if gpu.fp4 else "FP16") / 1e12
    print(f"\n{LABEL}  {gpu.name} ({gpu.arch}): {rate:.0f} TFLOP/s, {gpu.bytes_per_second / 1e12:.2f} TB/s reached")
    head = ("layer", "kind", "operands", "GFLOP", "FP16 us", "NVFP4 us", "low", "high", "ratio", "measured NVFP4 us")
    print(f"{LABEL}  {head[0]:18s} {head[1]:7s} {head[2]:8s} " + " ".join(f"{name:>9s}" for name in head[3:]))
    for row in rows:
        measured = f"{row['measured_nvfp4_us']:17.1f}" if "measured_nvfp4_us" in row else f"{'not measured':>17s}"
        names = ("gflop", "fp16_us", "nvfp4_us", "nvfp4_low_us", "nvfp4_high_us", "speedup")
        numbers = " ".join(f"{row[name]:9.2f}" for name in names)
        print(f"{LABEL}  {row['layer']:18s} {row['kind']:7s} {row['operands']:8s} {numbers} {measured}")
    sums = [f"{side}_{part}us" for side in ("fp16", "nvfp4") for part in ("", "low_", "high_")]
    total = {name: sum(row[name] for row in rows) for name in sums}
    total |= {"speedup": total["fp16_us"] / total["nvfp4_us"]}
    whole, times, low, high = (total[name] / 1e3 for name in (sums[0], *sums[3:]))
    bar = f"{times:.2f} ms a batch of {batch}, {low:.2f} to {high:.2f}"
    print(f"{LABEL}  sum: FP16 {whole:.2f} ms, NVFP4 {bar}; ratio {total['speedup']:.2f}")
    return {"label": LABEL, "gpu": gpu.name, **total}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--classes", type=int, default=11)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, nargs=2, default=(352, 480), metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--measured", type=Path, help="JSON of measured layers of one of the GPUs, to compare with it")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    works = layers(arguments.scale, arguments.classes, arguments.batch, *arguments.size)
    gpu_measured, measured = read_measured(arguments.measured)
    print(f"{LABEL}: {STATEMENT}")
    rows, totals = [], []
    for gpu in GPUS:
        these = project(works, gpu, measured if gpu.name in gpu_measured else {})
        totals.append(show(these, gpu, arguments.batch))
        rows += these
    if arguments.json:
        shape = {"model": "unet", "scale": arguments.scale, "classes": arguments.classes, "batch": arguments.batch}
        shape |= {"height": arguments.size[0], "width": arguments.size[1]}
        peaks = [{"name": gpu.name, "arch": gpu.arch.triton_name, "fp4_tflops": gpu.fp4, "fp16_tflops": gpu.fp16,
                  "terabytes_per_second": gpu.bandwidth, "source": gpu.source, "reached": dict(gpu.reached),
                  "reached_source": gpu.reached_source} for gpu in GPUS]  # fmt: skip
        document = {"statement": STATEMENT, "command": "python benchmarks/roofline.py", **shape, "peaks": peaks}
        document |= {"totals": totals, "layers": rows}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
