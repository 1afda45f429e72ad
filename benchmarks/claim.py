"""The cost of training with quantised gradients, by size and kind of network, in parts that fit short GPU sessions.

    python -m benchmarks.claim --data dsb2018=DSB2018 --data camvid=CAMVID --json claim.json --minutes 8 --jobs 6
    python -m benchmarks.claim --json claim.json --plot docs/images/claim.png       the gaps and the picture alone

The published claim (arXiv 2605.27616, brain-tumour segmentation): convolutional networks lose accuracy under recipes
that quantise gradients, the more the larger they are, and transformers do not. The variants are those of
configs/sweep_claim.yaml: each network is trained from random weights in FP16 and with four recipes, and a gap is that
of the best mIoU to the FP16 training of the same network, data set and seed, with the interval of `experiments.sweep`.
Growth is what the claim is about: the gap of a larger UNet minus that of the one of scale 0.25, seed by seed.

The JSON is added to. Every finished training becomes a row of it at once, and a call trains what has no row yet, the
cheapest networks first and all data sets of a network before the next one; what --minutes interrupts is trained again
by the next call. On another machine give it the JSON of the calls before; nothing else is needed. A group of which the
longest training so far took more than the time left is not begun.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.sweep_result import machine
from fp4deploy.experiments.sweep.results import collect, gap_text, paired
from fp4deploy.experiments.sweep.run import run_sweep
from fp4deploy.experiments.sweep.spec import Sweep, load_sweep

SWEEP = Path(__file__).parents[1] / "configs/sweep_claim.yaml"
NETWORKS = ("unet_025", "segformer", "unet_05", "unet_1")  # the cheapest first
RECIPES = ("nvfp4_qat", "nvfp4_train", "tetrajet", "fp4_all_the_way")
CONTROL = "fp16"
SMALLEST, LARGER = "unet_025", ("unet_05", "unet_1")
LABELS = {"unet_025": "UNet 0.25", "unet_05": "UNet 0.5", "unet_1": "UNet 1.0", "segformer": "SegFormer B0"}
COLOURS = dict(zip(RECIPES, ("#7f7f7f", "#0072B2", "#D55E00", "#009E73"), strict=True))  # of Okabe and Ito
SETTINGS = {"camvid": ("train.epochs=24", "data.width=352")}  # as many steps as on DSB2018
Row = dict[str, Any]


def main() -> None:
    """Train what is missing, and print the gaps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", action="append", default=[], metavar="NAME=FOLDER", help="a data set; repeatable")
    parser.add_argument("--json", type=Path, required=True, help="results, added to")
    parser.add_argument("--minutes", type=float, default=1e6)
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time on one GPU")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=NETWORKS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the gaps of all rows")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="settings of all trainings")
    options = parser.parse_args()
    rows: list[Row] = json.loads(options.json.read_text(encoding="utf-8"))["rows"] if options.json.is_file() else []
    end = time.monotonic() + 60 * options.minutes
    sets = [f"--set {each}" for each in options.set]
    data = dict(each.split("=", 1) for each in options.data)

    def keep(found: Sequence[Row]) -> None:
        write(options.json, [*rows, *found], sets)

    for network in options.networks:
        for name, folder in data.items():
            for variants, seeds in missing(rows, name, network, options.seeds):
                left = (end - time.monotonic()) / 60
                if left < max(longest(rows, name, network), 0.5):
                    print(f"{name} {network}: not begun, {left:.1f} minutes are left")
                    continue
                settings = (*SETTINGS.get(name, ()), f"data.root={json.dumps(folder)}", *options.set)
                sweep = load_sweep(SWEEP, settings, seeds)
                rows += train(name, network, variants, sweep, left, options.jobs, keep)
                keep([])
    for each in gaps(rows):
        print(f"{each['data']} {LABELS[each['network']]}, {each['recipe']}: gap to FP16 {gap_text(each)}")
    for each in growth(rows):
        print(f"{each['data']} {each['recipe']}: gap of {each['network']} minus gap of {SMALLEST}: {gap_text(each)}")
    if options.plot:
        draw(gaps(rows), options.plot)


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
    data: str, network: str, recipes: Sequence[str], sweep: Sweep, minutes: float, jobs: int, keep: Callable[..., None]
) -> list[Row]:
    """The rows of the trainings that were finished; `keep` gets those so far with everything that the sweep says."""
    chosen = {f"{network}_{recipe}": recipe for recipe in recipes}
    sweep = replace(sweep, variants=tuple(each for each in sweep.variants if each.name.startswith(f"{network}_")))
    gpu = machine()["gpu"]

    def finished(out: Path) -> list[Row]:
        found = collect(sweep, out)["variants"]
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

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "sweep"

        def say(text: str) -> None:
            print(text, flush=True)
            keep(finished(out))

        run_sweep(sweep, out, tuple(chosen), minutes, say, jobs=jobs)
        return finished(out)


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


def growth(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """For each data set, recipe and larger UNet: its gap minus that of the smallest, paired by seed, in points."""
    known = {(gap["data"], gap["network"], gap["recipe"]): gap for gap in gaps(rows)}
    found = []
    for (data, network, recipe), gap in known.items():
        smallest = known.get((data, SMALLEST, recipe))
        if network in LARGER and smallest:
            runs = [
                {seed: {"status": "done", "gap": points / 100} for seed, points in each["by_seed"].items()}
                for each in (gap, smallest)
            ]
            shared = {seed: run for seed, run in runs[0].items() if seed in runs[1]}
            if difference := paired(shared, runs[1], "gap"):
                found.append({"data": data, "network": network, "recipe": recipe, **difference})
    return found


def draw(found: Sequence[dict[str, Any]], path: Path) -> None:
    """Gaps by network, a panel for each data set: mean, interval and seeds of each recipe."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys(gap["data"] for gap in found))
    figure, panels = plt.subplots(
        1, max(1, len(names)), figsize=(5.2 * max(1, len(names)), 3.6), sharey=True, squeeze=False, layout="constrained"
    )
    for panel, name in zip(panels[0], names, strict=False):
        for shift, recipe in enumerate(RECIPES):
            for gap in found:
                if (gap["data"], gap["recipe"]) != (name, recipe):
                    continue
                at = list(LABELS).index(gap["network"]) + 0.16 * (shift - 1.5)
                seeds = list(gap["by_seed"].values())
                if gap["low"] is not None:
                    panel.plot([at, at], [gap["low"], gap["high"]], "-", lw=1.5, color=COLOURS[recipe])
                panel.plot([at] * len(seeds), seeds, "o", ms=3, alpha=0.5, color=COLOURS[recipe])
                panel.plot(at, gap["mean"], "_", ms=9, mew=2.5, color=COLOURS[recipe])
        panel.axhline(0, color="#7f7f7f", lw=1)
        panel.set_xticks(range(len(LABELS)), list(LABELS.values()))
        panel.set_title(name, fontsize=10, loc="left")
        panel.grid(axis="y", color="#e0e0e0")
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("mIoU minus FP16's, points")
    handles = [plt.Line2D([], [], color=colour, marker="o", ls="", label=recipe) for recipe, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def write(path: Path, rows: Sequence[Row], sets: Sequence[str]) -> None:
    """The JSON, with the gaps of all rows so far."""
    data = [f"--data {name}={name.upper()}" for name in dict.fromkeys(row["data"] for row in rows)]
    command = " ".join(["python -m benchmarks.claim", *data, *sets, f"--json {path.name}"])
    report = {"command": command, "machine": machine(), "sweep": SWEEP.name, "rows": rows}
    report |= {"networks": LABELS, "recipes": list(RECIPES), "gaps": gaps(rows), "growth": growth(rows)}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


if __name__ == "__main__":
    main()
