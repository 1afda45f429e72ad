"""One step of the denoisers of `denoiser.py`, random weights: packed FP16 and NVFP4 beside all forms of torch's FP16.

    python benchmarks/denoiser_latency.py --json benchmarks/results/denoiser_latency_h200.json

A row for each network and batch: milliseconds by CUDA graph, packed as steps and compiled; `best`, the fastest form of
torch, and the packed networks' times over it, as `packed_latency.py` has them. Written form after form.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from denoiser import Denoiser, calibrated, inputs_of, packed
from packed_latency import compare, no_gradients
from peers import FORMS, Run, command, forward, machine, measured
from torch import nn

from fp4deploy.errors import Fp4DeployError
from fp4deploy.packed.network import PackedNetwork
from fp4deploy.packed.program import compile_program


def latency(
    base: nn.Module, networks: dict[str, PackedNetwork], x: torch.Tensor, keep: Callable[[], None], row: dict[str, Any]
) -> None:
    """Milliseconds of one call on x into `row`: packed networks, as steps and compiled, and forms of torch in FP16."""
    made: dict[str, Callable[[], Run]] = {}
    for name, network in networks.items():
        made[f"packed {name}"] = partial(partial, network, x)
        made[f"packed {name}, compiled"] = partial(_compiled, network, x)
    made |= {f"fp16, {form}": partial(forward, base, form, x) for form in FORMS}
    for name, make in made.items():
        try:
            row["runs"][name] = measured(no_gradients(make()))
        except Fp4DeployError as error:
            row["runs"][name] = {"error": str(error)}
        compare(row)
        keep()


def _compiled(network: PackedNetwork, x: torch.Tensor) -> Run:
    return partial(compile_program(network.file, [x]), x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["unet", "unet2d"], choices=("unet", "unet2d"))
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--scale", type=float, default=0.25, help="width of the networks")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    content: dict[str, Any] = {"command": command(), "machine": machine(), "rows": []}

    def keep() -> None:
        if options.json:
            options.json.write_text(json.dumps(content, indent=1) + "\n")

    for network in options.networks:
        torch.manual_seed(0)
        base = Denoiser(network, options.scale).cuda().eval()
        crops = torch.randn(8, 3, options.size, options.size, device="cuda")
        seen = inputs_of(crops, torch.ones(8, 1, 1, 1, device="cuda"))
        networks = {
            "nvfp4": packed(calibrated(base, "nvfp4_qat", [seen]), seen[:2], verify=False),
            "fp16": packed(base, seen[:2], verify=False),
        }
        for batch in options.batches:
            x = torch.randn(batch, 4, options.size, options.size, device="cuda", dtype=torch.float16)
            content["rows"].append(row := {"network": network, "batch": batch, "runs": {}})
            latency(base, networks, x, keep, row)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
