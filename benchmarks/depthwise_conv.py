"""Depthwise convolutions beside torch (cuDNN), on layers of networks, replayed from CUDA graphs.

    python benchmarks/depthwise_conv.py --json benchmarks/results/depthwise_conv_h200.json
    python benchmarks/depthwise_conv.py --pieces        other numbers of pixels of a thread

torch: channels_last, `torch.backends.cudnn.benchmark`, bias and ReLU after it. The floor is the larger of two times: of
as many bytes at 4 TB/s, x read once, y written once, and of the multiplications in FP32 on all lanes of the GPU.
`different`: outputs that are further from float64 than 2^-10 of the largest one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peers import captured, command, machine, median_ms

from fp4deploy.plugins.gemm.convolution import depthwise
from fp4deploy.plugins.runtime.launch import num_sms

BANDWIDTH, LANES, CLOCK = 4e12, 128, 1.7e9  # bytes a second; of a multiprocessor; a second
CASES = (  # N, H, W, C; taps, stride, dilation
    ((8, 128, 128, 96), 7, 1, 1),
    ((8, 64, 64, 192), 7, 1, 1),
    ((8, 32, 32, 384), 7, 1, 1),
    ((8, 16, 16, 768), 7, 1, 1),
    ((1, 128, 128, 96), 7, 1, 1),
    ((1, 64, 64, 192), 7, 1, 1),
    ((1, 32, 32, 384), 7, 1, 1),
    ((1, 16, 16, 768), 7, 1, 1),
    ((1, 128, 128, 144), 5, 2, 1),
    ((1, 64, 64, 240), 5, 1, 1),
    ((1, 32, 32, 672), 5, 1, 1),
    ((16, 32, 32, 672), 5, 1, 1),
    ((1, 256, 256, 32), 3, 1, 1),
    ((1, 256, 256, 96), 3, 2, 1),
    ((1, 128, 128, 256), 3, 1, 1),
    ((8, 128, 128, 256), 3, 1, 1),
    ((1, 32, 32, 320), 3, 1, 6),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pieces", action="store_true")
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    rows = []
    for case in CASES:
        row = measure(*case, options.pieces)
        rows.append(row)
        others = "".join(f", {name} {time:.1f}" for name, time in row.get("pieces", {}).items())
        times = ", ".join(f"{name} {row[f'{name}_us']:.1f} us" for name in ("torch", "kernel", "floor"))
        faster = f"faster by {row['torch_us'] / row['kernel_us']:.2f}, different {row['different']}"
        print(f"{row['case']}: {times}, {faster}{others}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"command": command(), "machine": machine(), "rows": rows}, indent=1) + "\n")


@torch.inference_mode()
def measure(image: tuple[int, int, int, int], taps: int, stride: int, dilation: int, pieces: bool) -> dict[str, Any]:
    """Microseconds of both on one layer."""
    torch.manual_seed(0)
    n, h, w, channels = image
    around = dilation * (taps // 2)
    places = ((stride, stride), (around, around), (dilation, dilation))
    x = torch.randn(image, device="cuda").half()
    weight = (torch.randn(channels, 1, taps, taps, device="cuda") / taps).half()
    bias = torch.randn(channels, device="cuda")
    half = bias.half()

    def kernel(piece: tuple[int, int] | None = None) -> Callable[[], Any]:
        return lambda: depthwise.conv2d(x, weight, bias, *places, True, piece)

    y = kernel()()
    wanted = depthwise.conv2d_reference(x[:1], weight, bias, *places, True).float()
    different = int(((y[:1].float() - wanted).abs() > wanted.abs().max() / 1024).sum())
    work = y.numel() * taps * taps / (num_sms(x.device) * LANES * CLOCK)
    found: dict[str, Any] = {
        "case": f"{n} x {h} x {w}, {channels} channels, {taps}x{taps}"
        f"{f', stride {stride}' if stride > 1 else ''}{f', dilation {dilation}' if dilation > 1 else ''}",
        "torch_us": 1e3
        * median_ms(captured(lambda: F.conv2d(x.movedim(-1, 1), weight, half, *places, channels).relu_())),
        "kernel_us": 1e3 * median_ms(captured(kernel())),
        "floor_us": 1e6 * max(2 * (x.numel() + y.numel()) / BANDWIDTH, work),
        "different": different,
    }
    if pieces:
        valid = [each for each in depthwise.PIECES if each[0] == 1 or dilation == 1]
        found["pieces"] = {f"{rows} x {cols}": 1e3 * median_ms(captured(kernel((rows, cols)))) for rows, cols in valid}
    return found


if __name__ == "__main__":
    main()
