"""FP16 convolutions of small K beside torch (cuDNN), on first and last layers of networks, replayed from CUDA graphs.

    python benchmarks/small_k_conv.py --json benchmarks/results/small_k_conv_h100.json
    python benchmarks/small_k_conv.py --variants        other numbers of blocks on a multiprocessor and rows of a tile

torch: channels_last, `torch.backends.cudnn.benchmark`, then what the layer has besides: bias and ReLU, or the moments
for a GroupNorm (`statistics.chunk_moments`). image: from FP32 in NCHW, which torch converts and reorders first and the
kernel reads where it lies. The floor is the time of as many bytes at 3 TB/s: x read once, y written once. `different`:
outputs that are further from float64 than 2^-10 of the largest one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peers import captured, machine, median_ms

from fp4deploy.plugins.gemm.convolution import small_k
from fp4deploy.plugins.quantize.statistics import chunk_moments

BANDWIDTH = 3e12  # bytes a second
CASES = (  # N, H, W, C; O; taps, stride; moments instead of bias and ReLU; an image in NCHW, FP32
    ((16, 352, 480, 3), 64, 3, 1, True, False),
    ((1, 352, 480, 3), 64, 3, 1, True, False),
    ((4, 512, 512, 3), 64, 3, 1, True, False),
    ((1, 1024, 2048, 3), 64, 3, 1, True, False),
    ((16, 352, 480, 3), 16, 3, 1, True, False),
    ((16, 352, 480, 3), 64, 3, 1, True, True),
    ((1, 352, 480, 3), 64, 3, 1, True, True),
    ((16, 352, 480, 3), 16, 3, 1, True, True),
    ((16, 352, 480, 3), 64, 3, 1, False, False),
    ((16, 352, 480, 3), 32, 3, 2, False, False),
    ((16, 512, 512, 3), 64, 7, 2, False, False),
    ((16, 352, 480, 16), 16, 3, 1, False, False),
    ((16, 352, 480, 64), 12, 1, 1, False, False),
    ((1, 352, 480, 64), 12, 1, 1, False, False),
    ((4, 512, 512, 64), 12, 1, 1, False, False),
    ((1, 1024, 2048, 64), 12, 1, 1, False, False),
    ((16, 352, 480, 16), 12, 1, 1, False, False),
    ((16, 352, 480, 64), 21, 1, 1, False, False),
    ((16, 352, 480, 64), 1, 1, 1, False, False),
    ((16, 176, 240, 128), 64, 1, 1, False, False),
    ((16, 176, 240, 64), 128, 1, 1, False, False),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--variants", action="store_true")
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    rows = []
    for case in CASES:
        row = measure(*case, options.variants)
        rows.append(row)
        others = "".join(f", {name} {time:.1f}" for name, time in row.get("variants", {}).items())
        times = ", ".join(f"{name} {row[f'{name}_us']:.1f} us" for name in ("torch", "kernel", "floor"))
        faster = f"faster by {row['torch_us'] / row['kernel_us']:.2f}, different {row['different']}"
        print(f"{row['case']}: {times}, {faster}{others}", flush=True)
    if options.json:
        found = {"command": "python benchmarks/small_k_conv.py", "machine": machine(), "rows": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


@torch.inference_mode()
def measure(
    image: tuple[int, int, int, int], outputs: int, taps: int, stride: int, moments: bool, planes: bool, variants: bool
) -> dict[str, Any]:
    """Microseconds of both on one layer."""
    torch.manual_seed(0)
    n, h, w, channels = image
    padding, strides = (taps // 2, taps // 2), (stride, stride)
    x = torch.randn(n, channels, h, w, device="cuda")
    if not planes:
        x = x.half().contiguous(memory_format=torch.channels_last)
    weight = (torch.randn(outputs, taps, taps, channels, device="cuda") * (taps * taps * channels) ** -0.5).half()
    bias = None if moments else torch.randn(outputs, device="cuda")
    nhwc, oihw = x.permute(0, 2, 3, 1), weight.permute(0, 3, 1, 2)
    half = None if bias is None else bias.half()

    def by_torch() -> Any:
        y = F.conv2d(x.half().contiguous(memory_format=torch.channels_last), oihw, half, stride, padding)
        return (y, chunk_moments(y.permute(0, 2, 3, 1))) if moments else y.relu()

    def kernel(chosen: small_k.Variant | None = None) -> Callable[[], Any]:
        return lambda: small_k.conv2d(nhwc, weight, bias, strides, padding, not moments, moments, chosen)

    y = kernel()()[0]
    wanted = small_k.conv2d_reference(nhwc[:1], weight, bias, strides, padding, not moments).float()
    different = int(((y[:1].float() - wanted).abs() > wanted.abs().max() / 1024).sum())
    moved = x.numel() * x.element_size() + 2 * y.numel()
    layer = f"{n} x {h} x {w}, {channels} to {outputs}, {taps}x{taps}{f', stride {stride}' if stride > 1 else ''}"
    found: dict[str, Any] = {
        "case": f"{layer}{', moments' if moments else ', bias, ReLU'}{', image' if planes else ''}",
        "torch_us": 1e3 * median_ms(captured(by_torch)),
        "kernel_us": 1e3 * median_ms(captured(kernel())),
        "floor_us": 1e6 * moved / BANDWIDTH,
        "different": different,
    }
    if variants:
        own = small_k.variant(channels, outputs, (taps, taps), stride, padding)
        times = {}
        for resident in (1, 2, 3, 4):
            for rows in sorted({1, own.rows, 2 * own.rows}):
                chosen = replace(own, resident=resident, rows=rows)
                if chosen.shared_bytes + chosen.static_bytes > small_k.SHARED:
                    continue
                name = f"{resident} blocks of {rows} rows"
                times[name] = 1e3 * median_ms(captured(kernel(chosen)))
        found["variants"] = times
    return found


if __name__ == "__main__":
    main()
