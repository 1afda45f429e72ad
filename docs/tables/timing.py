"""Tables of the time model, and of single layers on a Hopper GPU beside cuDNN and cuBLAS."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from typing import Any

from docs.tables.results import markdown, result
from fp4deploy.peaks import find_gpu
from fp4deploy.plugins.gemm.training import WIDE
from fp4deploy.plugins.gemm.triton.tiles import NATIVE_WIDE
from fp4deploy.timing.launches import SCHEDULERS, Shape, code_of, implicit
from fp4deploy.timing.model import time_of

KERNELS = {
    "implicit": "implicit GEMM of packed weights",
    "decoded": "implicit GEMM of decoded weights",
    "warpgroup": "wgmma, SM90",
    "direct": "direct, few channels",
    "library": "cuDNN and cuBLAS, FP16 and FP8",
    "moves": "packing",
    "norms": "GroupNorm, ReLU and packing",
}
PEAK_FP8 = {
    "sm120": 2,
    "sm100": 1,
}  # of `Gpu.fp8`: scales double the rate of an RTX 50, where others measured 918 TFLOP/s
FP16, FP8 = ("cudnn_fp16", "cublas_fp16"), ("cudnn_fp8", "scaled_mm_fp8")


def time_model() -> str:
    """Predicted over measured, by kernel."""
    rows = []
    for name, family in result("time_model_h200")["families"].items():
        cells = [str(family[half]["times"]) for half in ("fit", "held_out")]
        cells += [f"{family[half][key]:.2f}" for half in ("fit", "held_out") for key in ("p5", "p50", "p95")]
        rows.append([KERNELS[name], *cells])
    halves = [f"{half}: {key}" for half in ("fitted", "held out") for key in ("5 %", "median", "95 %")]
    return markdown(["kernels", "times fitted", "held out", *halves], rows)


def held_out_layers() -> str:
    """How many layer shapes were held out of how many."""
    rows = {row["layer"]: row["held_out"] for row in result("time_model_h200")["rows"] if row["column"] == "ours"}
    return f"{sum(rows.values())} of {len(rows)}"


def whole_networks() -> str:
    """Whole networks, predicted and as they were measured."""
    rows = []
    for row in result("time_model_h200")["networks"]:
        inside = "yes" if row["low_ms"] <= row["measured_ms"] <= row["high_ms"] else "no"
        bar = f"{row['ms']:.2f} ({row['low_ms']:.2f} to {row['high_ms']:.2f})"
        name = f"our UNet {row['network']}" if ":" not in row["network"] else f"`{row['network']}`"
        ratio = f"{row['ms'] / row['measured_ms']:.2f}"
        rows.append([f"{name}, {row['size'].replace('x', ' x ', 1)}", bar, f"{row['measured_ms']:.2f}", ratio, inside])
    return markdown(["network, images", "predicted, ms", "measured, ms", "predicted / measured", "in the bar"], rows)


def layer_shapes() -> int:
    """Shapes that were timed."""
    return sum("cold_us" in row.get("ours", {}) for row in result("layer_times_h200")["rows"])


def product_rate(arch: str) -> str:
    """TFLOP/s of a product of 8192 x 8192 x 8192 by the kernel of packed weights, with its error bar."""
    gpu, operations = find_gpu(arch), 2 * 8192**3
    found = time_of(implicit(Shape(8192, (), (8192,), 8192), gpu), gpu, warm=False)
    best, low, high = (f"{operations / ms / 1e9:.0f}" for ms in (found.ms, found.high, found.low))
    return f"{best} ({low} to {high})"


def static_cycles() -> str:
    """What the machine code of each Blackwell kernel's main loop allows at most, of the dense peak of its format."""
    kernels = {"implicit": "FP4", "FP8": "FP8", "W4A8": "FP8"}
    rows = []
    for arch, (family, rate) in itertools.product(("sm120", "sm100"), kernels.items()):
        gpu, tile = find_gpu(arch), NATIVE_WIDE if family == "implicit" else WIDE
        code, warps = code_of(arch, family, tile, 1), tile.warps
        peak = gpu.fp4 if rate == "FP4" else PEAK_FP8[arch] * gpu.fp8
        assert peak is not None
        tensor = tile.bm * tile.bn * 2 * tile.bk / (1e12 * peak / (2e9 * gpu.num_sms * gpu.clock))
        issue, blocks = code.loop.issued * warps / SCHEDULERS, code.resident(warps, gpu)
        share = blocks * tensor / max(blocks * tensor, blocks * issue, code.loop.stall)
        name = "FP4" if family == "implicit" else family
        size = f"{tile.bm} x {tile.bn} x {2 * tile.bk}"
        cells = (size, code.registers, code.shared, f"{tensor:.0f}", f"{issue:.0f}", code.loop.stall, blocks)
        rows.append([gpu.name, name, *map(str, cells), f"{100 * share:.0f} %"])
    head = ["GPU", "kernel", "outputs x elements a step", "registers", "shared memory, bytes", "tensor cores, cycles"]
    return markdown([*head, "issue, cycles", "one warp, cycles", "blocks", "of the peak at most"], rows)


def hopper_layers(*networks: str) -> str:
    """Microseconds of layers whose names begin so, e.g. "4x512": of a UNet of 4 images of 512 x 512."""
    rows = []
    for row in result("layer_times_h200")["rows"]:
        if row["case"].replace(" x ", "x").startswith(networks):
            times = [_cold(row, ("ours",)), _cold(row, ("implicit",)), _cold(row, FP16), _cold(row, FP8)]
            rows.append([row["case"], *("" if each is None else f"{each:.1f}" for each in times)])
    return markdown(["layer", "NVFP4, ours", "NVFP4, packed weights", "FP16", "FP8"], rows)


def ours_over(precision: str, which: str) -> str:
    """Our time over cuDNN's or cuBLAS's in "FP16" or "FP8": "median", or "faster": on how many of how many layers."""
    ratios = list(_ratios(FP16 if precision == "FP16" else FP8))
    if which == "median":
        return f"{statistics.median(ratios):.2f}"
    return f"{sum(ratio < 1 for ratio in ratios)} of {len(ratios)}"


def _ratios(columns: tuple[str, ...]) -> Iterator[float]:
    for row in result("layer_times_h200")["rows"]:
        ours, other = _cold(row, ("ours",)), _cold(row, columns)
        if ours is not None and other is not None:
            yield ours / other


def _cold(row: dict[str, Any], columns: tuple[str, ...]) -> float | None:
    """The faster one's microseconds with operands from memory; None where none was timed."""
    return min((row[each]["cold_us"] for each in columns if "cold_us" in row.get(each, {})), default=None)
