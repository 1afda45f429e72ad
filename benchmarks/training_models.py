"""One training step of any network: FP16 and NVFP4, eager, compiled and fused, a process for each case.

    python benchmarks/training_models.py --json benchmarks/results/training_models_h100.json

Batch 16, 352 x 480, 12 classes, channels_last, FP16 autocast over FP32 weights, the loss and the optimiser of
`fp4deploy train`, gradients clipped; random input that stays on the GPU. "compiled" is torch.compile alone, "fused" is
`fp4deploy.fuse` without, "recomputed" with `recompute`, "default" as the library chooses. All processes compile at the
same time; those that are not done in time are ended. Then one after another takes its median of whole steps by CUDA
events, while the others wait: `ms` launched from Python, `graph_ms` replayed as one CUDA graph, the default of
`fp4deploy train` (`graph_error`: why a step cannot be captured). Peak memory is PyTorch's, of the launched steps;
`first_step_s` is with compiling beside the others; `kernels_ms` and `kernels` are the sum and the number of the kernels
of one step. With `--autocast fp16 bf16` each case is measured under BF16 autocast, too, with `over_fp16` as in
`training_step.py`.

Transformers (`transformer_steps.py`) read batches of their own: `--cases transformers` is all of them, in FP16 eager
and compiled, and by the general path with every recipe whose layers are all FP4.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peers
import torch
import transformer_steps
from peers import command, machine
from torch import nn
from training_step import AUTOCAST, CLASSES, HEIGHT, WIDTH, graph_ms, make_step, median_ms, over_fp16

from fp4deploy.qat import calibrate_percentile, prepare, quantized_layers
from fp4deploy.qat.fusion.fuse import fuse

RECOMPUTE = {"fused": False, "recomputed": True, "default": None}
RECIPES = ("fp16", "nvfp4_qat", "nvfp4_qat+dynamic", "nvfp4_qat+learned", "nvfp4_qat_2d", "nvfp4_4o6_qat")
CASES = (
    *(
        f"{network},{recipe},{way}"
        for network in ("smp:Unet/resnet34", "monai:BasicUNet", "torchvision:deeplabv3_resnet50")
        for recipe, way in (
            *(("nvfp4_qat", "fused"), ("nvfp4_qat", "recomputed"), ("nvfp4_qat", "default")),
            *(("fp16", "compiled"), ("fp16", "eager")),
        )
    ),
    *(f"unet:1.0,{recipe},fused" for recipe in RECIPES),
)


def build(network: str, recipe: str) -> nn.Module:
    tokens = network in transformer_steps.NETWORKS
    model = transformer_steps.build(network) if tokens else peers.network(network, CLASSES)
    if recipe != "fp16":
        prepare(model, recipe)
    return model.cuda().to(memory_format=torch.channels_last).train()  # type: ignore[no-any-return, call-overload]


def profile(step: Callable[[], None], path: Path) -> dict[str, float]:
    """Kernel times of one step into a text file; returns their sum in ms, and their number."""
    kernels = peers.kernels_of(step)
    times: dict[str, list[float]] = {}
    for name, us in kernels:
        times.setdefault(name, []).append(us)
    largest = sorted(times.items(), key=lambda item: -sum(item[1]))[:80]
    lines = [f"{sum(each) / 1e3:9.3f} ms {len(each):5d}  {name[:200]}" for name, each in largest]
    path.write_text("\n".join(lines) + "\n")
    return {"kernels_ms": sum(us for _, us in kernels) / 1e3, "kernels": len(kernels)}


def measure(case: str, folder: Path, place: int) -> None:
    """One case, in a process of its own; the result is a file in `folder`."""
    network, recipe, way, autocast = case.split(",")
    row: dict[str, Any] = {"network": network, "recipe": recipe, "way": way, "autocast": autocast}
    try:
        with peers.tuning_alone(folder):
            step = _first_step(row)
        with peers.turn(folder, place):
            torch.backends.cudnn.benchmark = True  # not before: the choice takes measurements
            for _ in range(5):
                step()
            torch.cuda.reset_peak_memory_stats()
            row["ms"] = median_ms(step, 15, 0)
            row["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
            row |= graph_ms(step, 15)
            row |= profile(step, folder / f"{case}.txt".replace("/", "_").replace(":", "_"))
    except Exception as error:  # one case must not end the others
        row["error"] = f"{type(error).__name__}: {error}"[:600]
        (folder / f"{place}.ready").touch()
    (folder / f"{place}.json").write_text(json.dumps(row))


def _first_step(row: dict[str, Any]) -> Callable[[], None]:
    model = build(row["network"], row["recipe"])
    if row["way"] == "compiled":
        model.compile(dynamic=False)
    elif row["way"] in RECOMPUTE:
        fuse(model, recompute=RECOMPUTE[row["way"]])
    row["fp4_layers"] = len(quantized_layers(model))
    if row["network"] in transformer_steps.NETWORKS:
        step = transformer_steps.make_step(row["network"], model, row["autocast"])
    else:
        step = make_step(model, torch.channels_last, autocast=row["autocast"])
    if row["recipe"].endswith("+learned"):
        calibrate_percentile(model, [torch.randn(2, 3, HEIGHT, WIDTH, device="cuda")], 99.9)
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    row["first_step_s"] = round(time.perf_counter() - start, 1)
    spent = {name: sum(each) for name, each in torch._dynamo.utils.compilation_time_metrics.items()}
    row["phases_s"] = {name: round(each, 1) for name, each in spent.items() if each > 0.5}
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profiles", type=Path, help="folder for a table of kernel times of each case")
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="NETWORK,RECIPE,WAY")
    parser.add_argument("--autocast", nargs="+", choices=AUTOCAST, default=["fp16"], help="default: fp16")
    parser.add_argument("--compile-seconds", type=float, default=900, help="then time what is compiled")
    parser.add_argument("--seconds", type=float, default=900, help="of timing, for all cases together")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        folder, place = arguments.one
        measure(arguments.cases[0], Path(folder), int(place))
        return
    folder = arguments.profiles or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    own = [sys.executable, __file__, "--cases"]
    if arguments.cases == ["transformers"]:
        arguments.cases = transformer_steps.CASES
    cases = [f"{case},{autocast}" for case in arguments.cases for autocast in arguments.autocast]
    commands = [[*own, case, "--one", str(folder), str(place)] for place, case in enumerate(cases)]
    for place in peers.at_once(commands, folder, arguments.compile_seconds, arguments.seconds):
        print(f"{cases[place]}: not compiled in time", flush=True)
    rows = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"), key=lambda path: int(path.stem))]
    over_fp16(rows, "network", "recipe", "way")
    for row in rows:
        print(json.dumps(row), flush=True)
    report = {"command": command("--profiles", "--compile-seconds", "--seconds"), "machine": machine(), "rows": rows}
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
