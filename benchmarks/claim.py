"""The cost of training with quantised gradients, by size and kind of network, in parts that fit short GPU sessions.

    python -m benchmarks.claim --data dsb2018=DSB2018 --data camvid=CAMVID --json claim.json --minutes 8 --jobs 6
    python -m benchmarks.claim --json claim.json                                    prints the table, trains nothing

The published claim (arXiv 2605.27616, brain-tumour segmentation): convolutional networks lose accuracy under recipes
that quantise gradients, the more the larger they are, and transformers do not. The variants are those of
configs/sweep_claim.yaml: each network is trained from random weights in FP16 and with four recipes, and a gap is that
of the best mIoU to the FP16 training of the same network, data set and seed, with the interval of `experiments.sweep`.

The JSON is added to. Every finished training is a row of it, and a call trains what has no row yet, the cheapest
networks first and all data sets of a network before the next one; what --minutes interrupts is trained again by the
next call. On another machine give it the JSON of the calls before; nothing else is needed. A group of which the longest
training so far took more than the time left is not begun.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.sweep_result import machine
from fp4deploy.experiments.sweep.results import collect, gap_text, paired
from fp4deploy.experiments.sweep.run import run_sweep
from fp4deploy.experiments.sweep.spec import load_sweep

SWEEP = Path(__file__).parents[1] / "configs/sweep_claim.yaml"
NETWORKS = ("unet_025", "segformer", "unet_05", "unet_1")  # the cheapest first
RECIPES = ("nvfp4_qat", "nvfp4_train", "tetrajet", "fp4_all_the_way")
CONTROL = "fp16"
SETTINGS = {"camvid": ("train.epochs=24", "data.width=352")}  # as many steps as on DSB2018
Row = dict[str, Any]


def main() -> None:
    """Train what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", action="append", default=[], metavar="NAME=FOLDER", help="a data set; repeatable")
    parser.add_argument("--json", type=Path, required=True, help="results, added to")
    parser.add_argument("--minutes", type=float, default=1e6)
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time on one GPU")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=NETWORKS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="settings of all trainings")
    options = parser.parse_args()
    rows: list[Row] = json.loads(options.json.read_text(encoding="utf-8"))["rows"] if options.json.is_file() else []
    end = time.monotonic() + 60 * options.minutes
    sets = [f"--set {each}" for each in options.set]
    data = dict(each.split("=", 1) for each in options.data)
    for network in options.networks:
        for name, folder in data.items():
            for variants, seeds in missing(rows, name, network, options.seeds):
                left = (end - time.monotonic()) / 60
                if left < max(longest(rows, name, network), 0.5):
                    print(f"{name} {network}: not begun, {left:.1f} minutes are left")
                    continue
                settings = (*SETTINGS.get(name, ()), f"data.root={json.dumps(folder)}", *options.set)
                rows += train(name, network, variants, seeds, settings, left, options.jobs)
                write(options.json, rows, sets)
    print(markdown(rows))


def missing(
    rows: Sequence[Row], data: str, network: str, seeds: Sequence[int]
) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    """(recipes, seeds) without a row, FP16 among the recipes; neighbouring seeds that lack the same ones together."""
    done = {(row["recipe"], row["seed"]) for row in rows if (row["data"], row["network"]) == (data, network)}
    lacks = [(tuple(each for each in (CONTROL, *RECIPES) if (each, seed) not in done), seed) for seed in seeds]
    return [
        (recipes, tuple(seed for _, seed in group))
        for recipes, group in groupby(lacks, lambda pair: pair[0])
        if recipes
    ]


def longest(rows: Sequence[Row], data: str, network: str) -> float:
    """Minutes of the longest training of this kind so far; 0 where there is none."""
    same = [row["seconds"] for row in rows if (row["data"], row["network"]) == (data, network)]
    return max(same, default=0.0) / 60


def train(
    data: str,
    network: str,
    recipes: Sequence[str],
    seeds: tuple[int, ...],
    sets: tuple[str, ...],
    minutes: float,
    jobs: int,
) -> list[Row]:
    """The rows of the trainings that were finished."""
    sweep = load_sweep(SWEEP, sets, seeds)
    chosen = {f"{network}_{recipe}": recipe for recipe in recipes}
    sweep = replace(sweep, variants=tuple(each for each in sweep.variants if each.name.startswith(f"{network}_")))
    with tempfile.TemporaryDirectory() as folder:
        run_sweep(
            sweep, Path(folder) / "sweep", tuple(chosen), minutes, lambda text: print(text, flush=True), jobs=jobs
        )
        found = collect(sweep, Path(folder) / "sweep")["variants"]
    gpu = machine()["gpu"]
    return [
        {
            "data": data,
            "network": network,
            "recipe": recipe,
            "seed": int(seed),
            **{key: run[key] for key in ("best", "last", "epochs", "skipped_steps")},
            "seconds": round(run["seconds"], 1),
            "gpu": gpu,
        }
        for name, recipe in chosen.items()
        for seed, run in found[name]["runs"].items()
        if run["status"] == "done"
    ]


def gaps(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """For each data set, network and recipe the paired gap to FP16 in points, for the seeds that have both."""
    runs: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        of_recipes = runs.setdefault((row["data"], row["network"]), {})
        of_recipes.setdefault(row["recipe"], {})[str(row["seed"])] = {**row, "status": "done"}
    found = []
    for (data, network), of_recipes in runs.items():
        control = of_recipes.get(CONTROL, {})
        for recipe in RECIPES:
            ran = {seed: run for seed, run in of_recipes.get(recipe, {}).items() if seed in control}
            if gap := paired(ran, control, "best"):
                found.append({"data": data, "network": network, "recipe": recipe, **gap})
    return found


def markdown(rows: Sequence[Row]) -> str:
    """FP16's mIoU in points, and the gaps of the recipes."""
    known = {(gap["data"], gap["network"], gap["recipe"]): gap for gap in gaps(rows)}
    lines = ["| data | network | FP16 | " + " | ".join(RECIPES) + " |", "|---|---|---:" + "|---:" * len(RECIPES) + "|"]
    for data in dict.fromkeys(row["data"] for row in rows):
        for network in sorted({row["network"] for row in rows if row["data"] == data}):
            scores = [
                100 * row["best"]
                for row in rows
                if (row["data"], row["network"], row["recipe"]) == (data, network, CONTROL)
            ]
            mean = f"{sum(scores) / len(scores):.2f}" if scores else "–"
            cells = [gap_text(known.get((data, network, recipe))) for recipe in RECIPES]
            lines.append(f"| {data} | {network} | {mean} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write(path: Path, rows: Sequence[Row], sets: Sequence[str]) -> None:
    """The JSON, with the gaps of all rows so far."""
    data = [f"--data {name}={name.upper()}" for name in dict.fromkeys(row["data"] for row in rows)]
    command = " ".join(["python -m benchmarks.claim", *data, *sets, f"--json {path.name}"])
    report = {"command": command, "machine": machine(), "sweep": SWEEP.name, "rows": rows, "gaps": gaps(rows)}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


if __name__ == "__main__":
    main()
