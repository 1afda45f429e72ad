"""FP16 convolutions of this package beside cuDNN's, on the layers of a UNet that stay in FP16: bytes and time.

    python benchmarks/plain_conv.py --json FILE

Bytes are compared with `plain.conv2d_reference` on the CPU. Times: medians of CUDA events, each replayed from a graph;
cuDNN by torch, channels_last.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from peers import captured, machine, median_ms

from fp4deploy.plugins.gemm.convolution import plain

LAYERS = {  # scale -> channels of the first layer's output, and of the head's input
    0.25: 16,
    1.0: 64,
}
CLASSES, HEIGHT, WIDTH = 12, 352, 480


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for scale, channels in LAYERS.items():
        for name, shape in (("first", (channels, 3, 3, 3)), ("head", (CLASSES, 1, 1, channels))):
            for batch in (1, 4):
                row = {"scale": scale, "layer": name, "batch": batch, **measure(shape, batch)}
                print(row, flush=True)
                rows.append(row)
    if arguments.json:
        found = {"command": "python benchmarks/plain_conv.py", "machine": machine(), "rows": rows}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


@torch.inference_mode()
def measure(shape: tuple[int, ...], batch: int) -> dict[str, Any]:
    """Elements that differ from the reference, and milliseconds; weights [O, KH, KW, C]."""
    torch.manual_seed(0)
    x, weight = torch.randn(batch, HEIGHT, WIDTH, shape[-1]).half(), torch.randn(shape).half()
    padding = (shape[1] // 2, shape[2] // 2)
    wanted = plain.conv2d_reference(x[:, :64], weight, padding=padding)[:, :60]
    on_gpu, filters = x.cuda(), weight.cuda()
    y = plain.conv2d(on_gpu, filters, padding=padding)
    different = int((y[:, :60].cpu().view(torch.int16) != wanted.contiguous().view(torch.int16)).sum())
    nchw, oihw = on_gpu.permute(0, 3, 1, 2), filters.permute(0, 3, 1, 2)
    calls = {
        "kernel": lambda: plain.conv2d(on_gpu, filters, padding=padding),
        "cudnn": lambda: torch.nn.functional.conv2d(nchw, oihw, padding=padding),
    }
    times = {f"{name}_ms": round(median_ms(captured(call)), 4) for name, call in calls.items()}
    return {"values": wanted.numel(), "different": different, **times}


if __name__ == "__main__":
    main()
