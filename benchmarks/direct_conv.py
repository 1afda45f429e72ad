"""Direct convolutions of few channels beside the implicit GEMM that took these layers before, on packed operands.

    python benchmarks/direct_conv.py --json benchmarks/results/direct_conv_h100.json

Layers of our UNet at scale 0.25. Both kernels read the same packed activations and the same decoded weight, each
replayed from a CUDA graph, and write float16 and moments for a GroupNorm.
The floor is the time of as many bytes at 3 TB/s: every input read once, every output written once.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peers import captured, machine, median_ms

from fp4deploy.formats import NVFP4_BLOCK
from fp4deploy.plugins.gemm.convolution import decoded, direct
from fp4deploy.plugins.gemm.convolution.decoded_weight import decode_weight
from fp4deploy.plugins.quantize.dispatch import quantize_nvfp4

BANDWIDTH = 3e12  # bytes a second
CASES = (  # N, H, W, channels of each source, outputs
    (16, 352, 480, (16,), 16),
    (16, 352, 480, (16, 16), 16),
    (16, 176, 240, (16,), 32),
    (16, 176, 240, (32,), 32),
    (16, 176, 240, (32, 32), 32),
    (16, 88, 120, (32,), 64),
    (1, 352, 480, (16,), 16),
    (1, 176, 240, (32, 32), 32),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for case in CASES:
        row = measure(*case)
        rows.append(row)
        times = ", ".join(f"{name} {row[f'{name}_us']:.0f} us" for name in ("implicit", "direct", "floor"))
        print(f"{row['case']}: {times}")
    if options.json:
        found = {"command": "python benchmarks/direct_conv.py", "machine": machine(), "rows": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def measure(n: int, h: int, w: int, channels: tuple[int, ...], outputs: int) -> dict[str, Any]:
    """Both kernels on one layer, microseconds."""
    torch.manual_seed(0)
    sources = tuple(quantize_nvfp4(torch.randn(n, h, w, each, device="cuda").half()) for each in channels)
    weight = quantize_nvfp4(torch.randn(outputs, 3, 3, sum(channels), device="cuda").half())
    planes = decode_weight(weight, channels)
    depths = tuple(x.codes.shape[-1] for x in sources)
    plan = decoded.chosen_plan(n * h * w, outputs, depths, 9, False, weight.codes.device)
    implicit = partial(decoded.conv2d, sources, planes, padding=1, chosen=plan, moments=True)
    directly = partial(direct.conv2d, sources, planes, padding=(1, 1), moments=True)
    moved = n * h * w * (sum(channels) * (0.5 + 1 / NVFP4_BLOCK) + 2 * outputs)
    return {
        "case": f"{n} x {h} x {w}, {' + '.join(map(str, channels))} to {outputs}",
        "implicit_us": 1e3 * median_ms(captured(implicit)),
        "direct_us": 1e3 * median_ms(captured(directly)),
        "floor_us": 1e6 * moved / BANDWIDTH,
    }


if __name__ == "__main__":
    main()
