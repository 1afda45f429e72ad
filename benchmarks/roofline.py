"""A lower bound of the time that each layer of the UNet takes: a PROJECTION from published peaks, not a measurement.

    python benchmarks/roofline.py --json benchmarks/results/roofline_projected.json

**Nothing here was measured on a Blackwell GPU.** For each layer, time = max(operations / peak, bytes / bandwidth), the
roofline: no kernel is faster, and every real one is slower. "Bound by" says which of the two is the larger. A GPU
that was measured (`--measured`) gets its time next to the projection, which shows how far kernels are from the roof.

Operations are 2 x multiply-accumulates of the convolution. Bytes count each tensor once, as if the cache held
everything that is read again: the input, the weights, the output. FP4 has 4 bits an element and 8 a block of 16,
together 4.5; all else FP16. Convolutions write FP16, because GroupNorm needs their sums; the transposed ones and the
passes of GroupNorm write what the next GEMM reads. GroupNorm + ReLU (+ pooling) reads its input twice, for the
statistics and for the result. Two sources of a concatenation are read where they are.

| on | GEMM of FP4 operands |
|---|---|
| SM100, SM120 | on FP4 tensor cores |
| SM90 | decoded in registers, multiplied at the FP16 peak: only bytes are saved |

Peaks are dense, with FP32 accumulation:

* B200: NVIDIA Blackwell Architecture Technical Brief, HGX B200, one GPU of it: FP4 9 PFLOP/s, FP16 2.25 PFLOP/s (with
  sparsity 18 and 4.5), 8 TB/s.
* RTX 5090: NVIDIA RTX Blackwell GPU Architecture whitepaper, appendix A: FP4 1676 TFLOP/s, FP16 209.5 (with sparsity
  3352 and 419; twice as much FP16 with FP16 accumulation, which no layer here uses), 1792 GB/s.
* H200 SXM: NVIDIA H200 Tensor Core GPU datasheet: FP16 1979 TFLOP/s with sparsity, half of it dense; 4.8 TB/s.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp4deploy.experiments.search.costs import FP4, FP16
from fp4deploy.models import build_unet
from fp4deploy.peaks import GPUS, Gpu
from fp4deploy.qat import layer_plan

LABEL = "projected"
STATEMENT = "Projected from published peaks. Nothing was measured on a Blackwell GPU."


@dataclass(frozen=True)
class Work:
    """What a layer does for a batch: operations, and bytes with FP16 and with FP4 operands.

    `fp4_operands` is False for layers that stay in FP16 and for those that multiply nothing. elements: of input, weight
    and output.
    """

    name: str
    kind: str
    operations: float
    bytes_fp16: float
    bytes_nvfp4: float
    fp4_operands: bool
    elements: tuple[int, ...]


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
    return Work(name, kind, 2.0 * macs, FP16 * (operands + y.numel()), packed, quantised, sizes)


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


def seconds(work: Work, gpu: Gpu, nvfp4: bool) -> tuple[float, str]:
    """The roofline, and which of its two parts it is."""
    native = nvfp4 and work.fp4_operands and gpu.fp4 is not None
    peak = gpu.fp4 if native and gpu.fp4 is not None else gpu.fp16
    compute = work.operations / (peak * 1e12)
    memory = (work.bytes_nvfp4 if nvfp4 else work.bytes_fp16) / (gpu.bandwidth * 1e12)
    return max(compute, memory), "compute" if compute > memory else "memory"


def project(works: list[Work], gpu: Gpu, measured: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """A row for each layer; `measured_*` only where somebody measured this GPU."""
    rows = []
    for work in works:
        fp16, bound16 = seconds(work, gpu, False)
        nvfp4, bound4 = seconds(work, gpu, True)
        row = {"label": LABEL, "gpu": gpu.name, "layer": work.name, "kind": work.kind}
        operands = ("FP4" if work.fp4_operands else "FP16") if work.operations else ""
        row |= {"operands": operands, "gflop": work.operations / 1e9}
        row |= {"mbytes_fp16": work.bytes_fp16 / 1e6, "mbytes_nvfp4": work.bytes_nvfp4 / 1e6}
        row |= {"fp16_us": fp16 * 1e6, "fp16_bound": bound16, "nvfp4_us": nvfp4 * 1e6, "nvfp4_bound": bound4}
        row |= {"speedup": fp16 / nvfp4}
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
    fp4 = f"{gpu.fp4:g} TFLOP/s FP4, " if gpu.fp4 else "no FP4, "
    print(f"\n{LABEL}  {gpu.name} ({gpu.arch}): {fp4}{gpu.fp16:g} FP16, {gpu.bandwidth:g} TB/s; {gpu.source}")
    head = ("layer", "kind", "operands", "GFLOP", "FP16 us", "NVFP4 us", "ratio", "NVFP4 bound by", "measured NVFP4 us")
    print(f"{LABEL}  {head[0]:18s} {head[1]:7s} {head[2]:8s} " + " ".join(f"{name:>9s}" for name in head[3:]))
    for row in rows:
        measured = f"{row['measured_nvfp4_us']:17.1f}" if "measured_nvfp4_us" in row else f"{'not measured':>17s}"
        print(
            f"{LABEL}  {row['layer']:18s} {row['kind']:7s} {row['operands']:8s} {row['gflop']:9.1f} "
            f"{row['fp16_us']:9.1f} {row['nvfp4_us']:9.1f} {row['speedup']:9.2f} {row['nvfp4_bound']:>14s} {measured}"
        )
    total = {name: sum(row[name] for row in rows) for name in ("fp16_us", "nvfp4_us")}
    total |= {"speedup": total["fp16_us"] / total["nvfp4_us"]}
    total |= {f"at_most_images_per_second_{name[:-3]}": batch / total[name] * 1e6 for name in ("fp16_us", "nvfp4_us")}
    print(
        f"{LABEL}  sum: FP16 {total['fp16_us'] / 1e3:.2f} ms, NVFP4 {total['nvfp4_us'] / 1e3:.2f} ms a batch of "
        f"{batch}, ratio {total['speedup']:.2f}; an upper bound of the speed, not a speed"
    )
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
                  "terabytes_per_second": gpu.bandwidth, "source": gpu.source} for gpu in GPUS]  # fmt: skip
        document = {"statement": STATEMENT, "command": "python benchmarks/roofline.py", **shape, "peaks": peaks}
        document |= {"totals": totals, "layers": rows}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
