"""Latency of packed networks against FP16 of torch in every form, batch by batch.

    python benchmarks/packed_latency.py --json benchmarks/results/packed_latency_h200.json

UNets of random weights, calibrated on random images: latency and memory do not depend on the values (agreement of
trained models: `packed_unet.py`). A case is SCALE:BATCHxHEIGHTxWIDTH. For each, in one process:

* `fp16, FORM`: torch's FP16 model, in all forms of `peers`, with and without a CUDA graph;
* `packed fp16`: the same FP16 weights in a packed file (`unet-fp16.fp4`): our executor and norm kernels, convolutions
  of cuDNN. What it gains over torch is the runtime's, not FP4's;
* `packed nvfp4`: the packed file with 21 of 23 layers in NVFP4.

`best` is the fastest FP16 form of torch, `ratio` the packed network's time over it, CUDA graphs on both sides: below 1
the packed network is faster. On GPUs before Blackwell FP4 is decoded to FP16 in registers.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from peers import FORMS, forward, machine, measured
from torch import nn

from fp4deploy.export.to_packed import pack_model
from fp4deploy.models import ModelCard, build_unet
from fp4deploy.packed import packed_file
from fp4deploy.packed.network import PackedNetwork
from fp4deploy.qat import calibrate, prepare, round_to_deployed

RECIPE, CLASSES = "nvfp4_qat", tuple(f"class {i}" for i in range(12))
CASES = (
    *("1.0:16x352x480", "1.0:1x1024x2048", "1.0:4x512x512"),
    *("1.0:1x352x480", "0.25:16x352x480", "0.25:1x352x480"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), metavar="SCALE:NxHxW")
    parser.add_argument("--forms", nargs="*", default=list(FORMS), choices=FORMS, help="of torch")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    found: dict[str, Any] = {
        "command": "python benchmarks/packed_latency.py",
        "machine": machine(),
        "recipe": RECIPE,
        "cases": [],
    }
    for case in arguments.cases:
        found["cases"].append(measure(case, arguments.forms))
        if arguments.json:  # after each case: a run that is cut off keeps what it has
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")


@lru_cache
def model(scale: float, precision: str) -> nn.Module:
    """A UNet of random weights as it is deployed, on the CPU."""
    torch.manual_seed(0)
    made = build_unet(len(CLASSES), scale)
    if precision == "nvfp4":
        prepare(made, RECIPE)
        calibrate(made.cuda(), [torch.randn(1, 3, 352, 480, device="cuda")])
    round_to_deployed(made.cpu())
    return made.eval()


@lru_cache
def network(scale: float, precision: str) -> PackedNetwork:
    """Its packed network on the GPU."""
    rgb = ((0.5, 0.5, 0.5), (0.2, 0.2, 0.2))
    card = ModelCard(precision, scale, CLASSES, 352, 480, *rgb, False, RECIPE if precision == "nvfp4" else "none")
    parts = pack_model(model(scale, precision), torch.zeros(1, 3, 352, 480), dynamic_size=False)
    return PackedNetwork(packed_file(Path("unet.fp4"), card, *parts), "cuda")


@torch.inference_mode()
def measure(case: str, forms: list[str]) -> dict[str, Any]:
    """One case, printed as it is measured."""
    scale, _, size = case.partition(":")
    batch, height, width = (int(part) for part in size.split("x"))
    x = torch.randn(batch, 3, height, width, device="cuda", dtype=torch.float16)
    row: dict[str, Any] = {"scale": float(scale), "batch": batch, "height": height, "width": width, "runs": {}}
    runs = {f"fp16, {form}": lambda form=form: forward(model(float(scale), "fp16"), form, x) for form in forms}
    for precision in ("fp16", "nvfp4"):
        runs[f"packed {precision}"] = lambda p=precision: partial(network(float(scale), p), x)
    for name, make in runs.items():
        began = time.perf_counter()
        row["runs"][name] = one = measured(make())
        took = time.perf_counter() - began
        told = one.get("error") or "launched {launched_ms:8.3f} ms  graph {graph_ms:8.3f} ms".format(**one)
        print(f"{case:18s} {name:28s} {told}   ({took:.1f} s)", flush=True)
    torch_runs = {
        name: one["graph_ms"] for name, one in row["runs"].items() if name[:5] == "fp16," and "graph_ms" in one
    }
    if torch_runs:
        row["best"] = min(torch_runs, key=torch_runs.__getitem__)
        for precision in ("fp16", "nvfp4"):
            if "graph_ms" in row["runs"][f"packed {precision}"]:
                ratio = row["runs"][f"packed {precision}"]["graph_ms"] / torch_runs[row["best"]]
                row[f"ratio_{precision}"] = ratio
                print(f"{case:18s} packed {precision} / best ({row['best']}): {ratio:.2f}", flush=True)
    return row


if __name__ == "__main__":
    main()
