"""One step of the denoisers of `denoiser.py`, random weights: packed FP16 and NVFP4 beside all forms of torch's FP16.

    python benchmarks/denoiser_latency.py --networks unet --json benchmarks/results/denoiser_latency_h200.json
    python benchmarks/denoiser_latency.py --networks unet2d --json benchmarks/results/denoiser_latency_unet2d_h200.json

A row for each network and batch: milliseconds by CUDA graph, packed as steps and compiled; `best`, the fastest form of
torch, and the packed networks' times over it, as `packed_latency.py` has them. The runs of a row are in four processes,
which compile at the same time and are then timed one after another (`peers.at_once`); those of max-autotune, which
hold the GPU for minutes to try their kernels, when the others are done.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peers
import torch
from denoiser import Denoiser, calibrated, inputs_of, packed
from packed_latency import compare, no_gradients
from peers import FORMS, Run, command, forward, machine, measured
from torch import nn

from fp4deploy.errors import Fp4DeployError
from fp4deploy.packed.network import PackedNetwork
from fp4deploy.packed.program import compile_program

# The runs of each process; torch tries hundreds of kernels for the last.
GROUPS = {
    "nvfp4": ("packed nvfp4", "packed nvfp4, compiled"),
    "fp16": ("packed fp16", "packed fp16, compiled"),
    "torch": tuple(f"fp16, {form}" for form in FORMS[:-1]),
    "autotune": (f"fp16, {FORMS[-1]}",),
}


def run_of(name: str, base: nn.Module, pack: Callable[[], PackedNetwork], x: torch.Tensor) -> Run:
    """The run of a name of GROUPS on x [N, 4, H, W]; `pack` gives the packed network, where it is one."""
    if name.startswith("fp16, "):
        return no_gradients(forward(base, name.removeprefix("fp16, "), x))
    if name.endswith(", compiled"):
        return no_gradients(partial(compile_program(pack().file, [x]), x))
    return no_gradients(partial(pack(), x))


def in_turn(network: str, batch: int, group: str, folder: Path, number: int, options: argparse.Namespace) -> None:
    """The runs of a group: compiled while others are, timed alone; a file of `folder` when all are done."""
    torch.manual_seed(0)
    base = Denoiser(network, options.scale).cuda().eval()
    seen = inputs_of(torch.randn(8, 3, options.size, options.size).cuda(), torch.ones(8, 1, 1, 1).cuda())
    made: list[PackedNetwork] = []

    def pack() -> PackedNetwork:
        if not made:
            model = calibrated(base, "nvfp4_qat", [seen]) if group == "nvfp4" else base
            made.append(packed(model, seen[:2], verify=False))
        return made[0]

    x = torch.randn(batch, 4, options.size, options.size, device="cuda", dtype=torch.float16)
    runs, found = compiled(group, lambda name: run_of(name, base, pack, x), folder)
    with peers.turn(folder, number):
        for name, run in runs.items():
            found[name] = {**measured(run), **found[name]}
    (folder / f"{number}.json").write_text(json.dumps(found))


def compiled(group: str, made: Callable[[str], Run], folder: Path) -> tuple[dict[str, Run], dict[str, dict[str, Any]]]:
    """Runs of a group after their first call, and the seconds until then or the error of each."""
    runs: dict[str, Run] = {}
    found: dict[str, dict[str, Any]] = {}
    with peers.tuning_alone(folder):
        for name in GROUPS[group]:
            began = time.perf_counter()
            try:
                run = made(name)
                run()
                runs[name] = run
                found[name] = {"first_call_s": time.perf_counter() - began}
            except Fp4DeployError as error:
                found[name] = {"error": str(error)}
    return runs, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["unet", "unet2d"], choices=("unet", "unet2d"))
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--scale", type=float, default=0.25, help="width of the networks")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--seconds", type=float, default=900, help="of compiling; the rest is left out")
    parser.add_argument("--part", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.part:
        group, folder, number = options.part[0], Path(options.part[1]), int(options.part[2])
        in_turn(options.networks[0], options.batches[0], group, folder, number, options)
        return
    content: dict[str, Any] = {"command": command("--seconds"), "machine": machine(), "rows": []}
    own = [sys.executable, __file__, "--size", str(options.size), "--scale", str(options.scale)]
    end, rows = time.monotonic() + options.seconds, dict[tuple[str, int], dict[str, Any]]()
    for groups in (list(GROUPS)[:-1], list(GROUPS)[-1:]):
        cases = [
            (network, batch, group) for network in options.networks for batch in options.batches for group in groups
        ]
        with tempfile.TemporaryDirectory() as name:
            commands = [
                [*own, "--networks", network, "--batches", str(batch), "--part", group, name, str(number)]
                for number, (network, batch, group) in enumerate(cases)
            ]
            late = peers.at_once(commands, Path(name), end - time.monotonic(), 30.0 * len(cases))
            add_runs(rows, cases, Path(name), late)
    for row in rows.values():
        compare(row)
    content["rows"] = list(rows.values())
    for row in content["rows"]:
        print(json.dumps(row))
    if options.json:
        options.json.write_text(json.dumps(content, indent=1) + "\n")


def add_runs(
    rows: dict[tuple[str, int], dict[str, Any]], cases: list[tuple[str, int, str]], folder: Path, late: list[int]
) -> None:
    """Add what the processes left in files to the row of each network and batch."""
    for number, (network, batch, group) in enumerate(cases):
        row = rows.setdefault((network, batch), {"network": network, "batch": batch, "runs": {}})
        path = folder / f"{number}.json"
        missing = {"error": "not compiled in time" if number in late else "ended without a result"}
        row["runs"] |= json.loads(path.read_text()) if path.is_file() else dict.fromkeys(GROUPS[group], missing)


if __name__ == "__main__":
    main()
