"""The cost of a packed UNet with FP4 first and last layers, without and with the multi-term FP4 input encoding.

    python benchmarks/packed_digits.py --json benchmarks/results/packed_digits_h200.json

UNets of random weights, calibrated on random images: latency and memory do not depend on the values. One network after
the other in one process, each as a CUDA graph; medians of CUDA events over random images that stay on the GPU. Memory
is the peak of one forward pass above the weights, not captured. The encoding counts: every pass computes it from
the image.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peers import machine, measured

from fp4deploy.export.to_packed import pack_model
from fp4deploy.models import ModelCard, build_unet
from fp4deploy.packed import packed_file
from fp4deploy.packed.network import PackedNetwork
from fp4deploy.qat import calibrate, prepare, round_to_deployed

RECIPE, CLASSES = "nvfp4_qat", tuple(f"class {i}" for i in range(12))
KINDS = {"21 of 23": (False, None), "all": (False, ["*"]), "all, digits": (True, ["*"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--size", type=int, nargs=2, default=[352, 480], metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    height, width = arguments.size
    networks = {kind: network(arguments.scale, height, width, *how) for kind, how in KINDS.items()}
    rows = [compare(networks, batch, height, width) for batch in arguments.batches]
    if arguments.json:
        model = {"scale": arguments.scale, "height": height, "width": width, "recipe": RECIPE}
        found = {"command": "python benchmarks/packed_digits.py", "machine": machine(), "model": model, "batches": rows}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


def network(scale: float, height: int, width: int, digits: bool, include: list[str] | None) -> PackedNetwork:
    torch.manual_seed(0)
    model = build_unet(len(CLASSES), scale, digits)
    prepare(model, RECIPE, include=include)
    calibrate(model.cuda(), [torch.randn(1, 3, height, width, device="cuda")])
    round_to_deployed(model.cpu())
    rgb = ((0.5, 0.5, 0.5), (0.2, 0.2, 0.2))
    card = ModelCard("nvfp4", scale, CLASSES, height, width, *rgb, False, RECIPE, digits=digits)
    graph, tensors = pack_model(model.eval(), torch.zeros(1, 3, height, width), dynamic_size=False)
    return PackedNetwork(packed_file(Path("unet.fp4"), card, graph, tensors), "cuda")


@torch.inference_mode()
def compare(networks: dict[str, PackedNetwork], batch: int, height: int, width: int) -> dict[str, Any]:
    x = torch.randn(batch, 3, height, width, device="cuda", dtype=torch.float16)
    row: dict[str, Any] = {"batch": batch}
    for kind, one in networks.items():
        found = measured(partial(one, x))
        row[kind] = {"ms": found["graph_ms"], "launched_ms": found["launched_ms"], "peak_bytes": found["peak_bytes"]}
        memory = found["peak_bytes"] / 2**20
        print(f"batch {batch:3d}  {kind:12s} {row[kind]['ms']:8.3f} ms  {memory:8.1f} MiB above the weights")
    return row


if __name__ == "__main__":
    main()
