"""A finished sweep as a file of benchmarks/results: its scores, the command that made them, and the machine.

    python -m benchmarks.sweep_result runs/SWEEP --json benchmarks/results/NAME.json --command "fp4deploy sweep ..."

Run it on the machine of the sweep. From the runs it adds what `sweep.json` leaves out: AP50 and AP75 of the best epoch,
mean and standard deviation over seeds; with --curves loss and score of every epoch; with --fp4-share the share of the
multiply-accumulates that each checkpoint has in FP4. Times are left out: trainings of a
sweep with --jobs share the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp4deploy.bench.environment import environment
from fp4deploy.graph.costs import MULTIPLYING, work_of_layers
from fp4deploy.qat import load_model, quantized_layers
from fp4deploy.train.schedule import QUANTIZED_MODELS

MORE = ("ap50", "ap75")
SCORES = ("miou", "ap")
OF_THE_MACHINE = ("seconds", "images_per_s")
SETTINGS_OF_THE_MACHINE = ("data.root=", "data.workers=")


def main() -> None:
    """Write the result of one sweep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--command", required=True)
    parser.add_argument("--curves", action="store_true", help="loss and score by epoch")
    parser.add_argument("--fp4-share", action="store_true", help="multiply-accumulates in FP4, by seed")
    options = parser.parse_args()
    gathered = gather(options.folder, options.curves, options.fp4_share)
    found = {"command": options.command, "machine": machine(), **gathered}
    options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def machine() -> dict[str, Any]:
    """GPU and version of torch, as results name them."""
    found = environment()
    gpus = found["gpus"]
    return {"gpu": gpus[0]["name"] if gpus else None, "torch": found["packages"]["torch"]}


def gather(folder: Path, curves: bool = False, share: bool = False) -> dict[str, Any]:
    """`sweep.json` with AP50 and AP75 where the runs have them; curves, share: of every finished run, and quantised."""
    found: dict[str, Any] = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))
    ran = {name: row for name, row in found["variants"].items() if any(_is_done(run) for run in row["runs"].values())}
    found["variants"] = ran  # with --only, a sweep runs some of its variants
    found["settings"] = [each for each in found["settings"] if not each.startswith(SETTINGS_OF_THE_MACHINE)]
    for row in found["variants"].values():
        finished = [run for run in row["runs"].values() if _is_done(run)]
        for run in row["runs"].values():
            for key in OF_THE_MACHINE:
                run.pop(key, None)
        for run in finished:
            lines = epochs(folder / run["path"] / row["model"] / "metrics.jsonl")
            best = next(line for line in lines if line["epoch"] == run["best_epoch"])
            run |= {key: best[key] for key in MORE if key in best}
            if share and row["model"] in QUANTIZED_MODELS:
                network, card = load_model(folder / run["path"] / row["model"] / "best.safetensors")
                run["fp4_macs"] = macs_in_fp4(network, card.input_shape)
            if curves:
                run["curve"] = [{key: line[key] for key in ("epoch", "loss", *SCORES) if key in line} for line in lines]
        for key in MORE:
            values = [run[key] for run in finished if key in run]
            if values:
                spread = statistics.stdev(values) if len(values) > 1 else None
                row[key] = {"mean": statistics.fmean(values), "sd": spread}
    return found


@torch.no_grad()
def macs_in_fp4(network: nn.Module, shape: Sequence[int]) -> float:
    """Share of the multiply-accumulates of a prepared network that are in FP4, of one input of this shape."""
    quantized = quantized_layers(network)
    layers: dict[str, nn.Module] = {
        name: each for name, each in network.named_modules() if isinstance(each, MULTIPLYING)
    }
    before = {name: layer.quantizing for name, layer in quantized.items()}
    for layer in quantized.values():
        layer.quantizing = False
    work = work_of_layers(network, layers, torch.zeros(1, *shape))
    for name, layer in quantized.items():
        layer.quantizing = before[name]
    fp4 = sum(work[name].macs for name, layer in quantized.items() if layer.recipe.precision == "FP4")
    return round(fp4 / sum(each.macs for each in work.values()), 4)


def _is_done(run: dict[str, Any]) -> bool:
    return bool(run["status"] == "done")


def epochs(metrics: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl."""
    return [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
