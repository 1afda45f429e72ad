"""One training step of nnU-Net's plain network over volumes: NVFP4 beside every form of torch in FP16 and BF16.

    python benchmarks/volume_training.py --json benchmarks/results/volume_training_h200.json
    python benchmarks/volume_training.py --device cpu --size 16 --widths 16 16

The network of `packed_volumes.py` (five stages of 32 to 320 channels), batch 2 of one channel of 128 x 128 x 128
voxels, three classes, autocast over FP32 weights, the loss and the optimiser of `fp4deploy train`, gradients clipped;
random input that stays on the GPU. Each case is a process; some compile at the same time, then one after another has
the GPU.

| case | what runs |
|---|---|
| `eager`, `compiled` | torch, channels_last_3d; `NCDHW`: as torch lays tensors out |
| `nvfp4_qat, kernels` | `fd.prepare`, a kernel for each quantiser |
| `nvfp4_qat, fused` | `fd.fuse`, with the passes of `qat.fusion`; `recomputed`: codes for 16-bit inputs |
| `nvfp4_train, fp4` | gradients too, GEMMs of packed operands (`train.products=fp4`); not in `ratio` |

Medians of whole steps by CUDA events: `ms` launched from Python, `graph_ms` as one CUDA graph; `peak_gb` is PyTorch's,
of the launched steps. `ratio`: the shortest step of nvfp4_qat over the shortest in FP16 or BF16. A case that does not
run says why. On a CPU each case takes one step, untimed, and nothing is a measurement.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import peers
import torch
from packed_volumes import CLASSES, LAYOUT, WIDTHS, PlainUNet
from torch import nn
from training_step import make_step, timed

from fp4deploy.qat import prepare, set_products
from fp4deploy.qat.fusion.fuse import fuse

NVFP4, PRODUCTS = "nvfp4_qat", "nvfp4_train"
CASES = (
    *(f"{dtype}, {way}" for way in ("compiled", "eager") for dtype in ("fp16", "bf16")),
    *(f"{NVFP4}, {way}, fp16" for way in ("fused", "recomputed", "kernels")),
    f"{NVFP4}, fused, bf16",
    f"{PRODUCTS}, fp4, fp16",
    "fp16, compiled, NCDHW",
)


def step_of(case: str, arguments: argparse.Namespace) -> Callable[[], None]:
    """The whole step of a case."""
    torch.manual_seed(0)
    model: nn.Module = PlainUNet(tuple(arguments.widths))
    parts = case.split(", ")
    layout, autocast, way = LAYOUT, parts[0], parts[1]
    if parts[0] in (NVFP4, PRODUCTS):
        prepare(model, parts[0])
        autocast = parts[2]
        if way == "fp4":
            set_products(model, "fp4")
    elif parts[-1] == "NCDHW":
        layout = torch.contiguous_format
    model = model.to(arguments.device, memory_format=layout).train()  # type: ignore[call-overload]
    if way == "compiled":
        model.compile(dynamic=False)
    elif way in ("fused", "recomputed"):
        fuse(model, recompute=way == "recomputed")
    size = (arguments.size,) * 3
    return make_step(model, layout, arguments.batch, autocast=autocast, size=size, channels=1, classes=CLASSES)


def measure(case: str, arguments: argparse.Namespace, folder: Path, place: int) -> dict[str, Any]:
    """One case, in a process of its own."""
    on_gpu = arguments.device == "cuda"
    row: dict[str, Any] = {"case": case}
    try:
        with peers.tuning_alone(folder) if on_gpu else nullcontext():
            began = time.perf_counter()
            step = step_of(case, arguments)
            step()
            if on_gpu:
                torch.cuda.synchronize()
            row["first_step_s"] = round(time.perf_counter() - began, 1)
        with peers.turn(folder, place):
            if on_gpu:
                torch.backends.cudnn.benchmark = True  # not before: the choice takes measurements
                row |= timed(step, arguments.repeats)
    except Exception as error:  # one case must not end the others
        row["error"] = f"{type(error).__name__}: {error}"[:600]
        (folder / f"{place}.ready").touch()
    return row


def ratio(rows: list[dict[str, Any]]) -> float | None:
    """The shortest step of QAT over the shortest of torch."""
    best: dict[bool, float] = {}
    for row in rows:
        ours = row["case"].startswith(NVFP4)
        for time_ms in (row[key] for key in ("ms", "graph_ms") if key in row and not row["case"].startswith(PRODUCTS)):
            best[ours] = min(best.get(ours, time_ms), time_ms)
    return best[True] / best[False] if len(best) == 2 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES, metavar="CASE")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--compile-seconds", type=float, default=240, help="then time what is compiled")
    parser.add_argument("--seconds", type=float, default=240, help="of timing, for as many cases as compile together")
    parser.add_argument("--together", type=int, default=5, help="cases that compile, and hold memory, at a time")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        folder, place = Path(arguments.one[0]), int(arguments.one[1])
        row = measure(arguments.cases[0], arguments, folder, place)
        (folder / f"{place}.json").write_text(json.dumps(row))
        return
    shared = [f"--{name}={getattr(arguments, name)}" for name in ("size", "batch", "repeats", "device")]
    shared += ["--widths", *map(str, arguments.widths)]
    found: dict[str, Any] = {"command": peers.command("--compile-seconds", "--seconds", "--together"), "rows": []}
    for first in range(0, len(arguments.cases), arguments.together):
        folder, cases = Path(tempfile.mkdtemp()), arguments.cases[first : first + arguments.together]
        commands = [
            [sys.executable, __file__, *shared, "--cases", case, "--one", str(folder), str(place)]
            for place, case in enumerate(cases)
        ]
        for place in peers.at_once(commands, folder, arguments.compile_seconds, arguments.seconds):
            print(f"{cases[place]}: not compiled in time", flush=True)
        for path in sorted(folder.glob("*.json"), key=lambda path: int(path.stem)):
            found["rows"].append(json.loads(path.read_text()))
            print(path.read_text(), flush=True)
        if arguments.device == "cuda":
            found |= {"machine": peers.machine(), "size": arguments.size, "batch": arguments.batch}
            found["ratio"] = ratio(found["rows"])
            print("NVFP4 over the best of torch:", found["ratio"], flush=True)
        if arguments.json:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
