"""The cost of training with quantised gradients: a sweep of networks and recipes, in parts that fit short GPU sessions.

    python -m benchmarks.claim --data dsb2018=DSB2018 --data camvid=CAMVID --json claim.json --minutes 8 --jobs 6
    python -m benchmarks.claim --sweep configs/sweep_protocol.yaml --data dsb2018=DSB2018 ...       another sweep
    python -m benchmarks.claim --json claim.json --plot docs/images/claim.png                       the picture alone
    python -m benchmarks.claim --json all.json --merge piece_1.json piece_2.json                    pieces as one file

The published claim (arXiv 2605.27616, brain-tumour segmentation): convolutional networks lose accuracy under recipes
that quantise gradients, the more the larger they are, and transformers do not. A variant NETWORK_RECIPE of the sweep is
compared with NETWORK_fp16: each is trained from random weights, and a gap is that of the best mIoU to the FP16 training
of the same network, data set and seed, with the interval of `experiments.sweep`; of AUPRC and Dice of that epoch
likewise. Growth is what the claim is about: the gap of a larger network minus that of the first of its kind (the part
of the name before the last "_"), seed by seed.

The JSON is added to. Every training that has ended becomes a row of it at once, one that diverged with the error in
place of scores; a call trains what has no row yet, seed by seed, and what --minutes interrupts is trained again by the
next call. On another machine give it the JSON of the calls before, or --merge what several have written. A data set of
which the longest training so far took more than the time left is not begun.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.peers import origin
from benchmarks.sweep_result import epochs, machine
from fp4deploy.experiments.sweep.results import collect, gap_text, interval, paired
from fp4deploy.experiments.sweep.run import run_sweep
from fp4deploy.experiments.sweep.spec import Sweep, load_sweep
from fp4deploy.train.logging.telemetry import mean_dice

SWEEP = Path(__file__).parents[1] / "configs/sweep_claim.yaml"
CONTROL = "fp16"
LINES = ("-", "--", ":")
COLOURS = ("#7f7f7f", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442", "#882255")
SCORES = ("best", "auprc", "dice", "test", "test_auprc", "test_dice")  # best, test: mIoU; others: of the same weights
NO_BACKGROUND = 'train.class_weights={"background": 0}'  # the loss of the published protocol is of the foreground
SETTINGS = {  # of one data set, by sweep
    ("sweep_claim.yaml", "camvid"): ("train.epochs=24", "data.width=352"),  # as many steps as on DSB2018
    ("sweep_protocol.yaml", "dsb2018"): (NO_BACKGROUND,),
}
Row = dict[str, Any]
Shown = tuple[str, str, float]  # of a curve: key, label of the axis, scale
SHOWN: tuple[Shown, ...] = (("loss", "loss of the training", 1.0), ("miou", "mIoU, %", 100.0))


class Cell(NamedTuple):
    """What a variant of the sweep trains."""

    network: str
    recipe: str


def cells(sweep: Sweep) -> dict[str, Cell]:
    """Network and recipe of every variant, by its name."""
    found = {}
    for variant in sweep.variants:
        network = (variant.against or variant.name).removesuffix(f"_{CONTROL}")
        found[variant.name] = Cell(network, variant.name.removeprefix(f"{network}_"))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what is missing, and print the gaps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", type=Path, default=SWEEP)
    parser.add_argument("--data", action="append", default=[], metavar="NAME=FOLDER", help="a data set; repeatable")
    parser.add_argument("--json", type=Path, required=True, help="results, added to")
    parser.add_argument("--merge", type=Path, nargs="+", default=[], metavar="JSON", help="take over the rows of these")
    parser.add_argument("--minutes", type=float, default=1e6)
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time, shared out among the GPUs")
    parser.add_argument("--networks", nargs="+", help="of the sweep; by default all")
    parser.add_argument("--recipes", nargs="+", help="likewise; what they are compared with has to be named, too")
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--retry", action="store_true", help="train again what has diverged")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the gaps of all rows")
    parser.add_argument("--curves", type=Path, metavar="FILE.png", help="draw loss and mIoU by epoch of all rows")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="settings of all trainings")
    options = parser.parse_args(arguments)
    whole = load_sweep(options.sweep)
    found = cells(whole)
    networks, recipes = (
        chosen(given, [cell[place] for cell in found.values()], parser)
        for place, given in enumerate((options.networks, options.recipes))
    )
    rows = merged([options.json, *options.merge])
    if options.retry:
        rows = [row for row in rows if "error" not in row]
    end = time.monotonic() + 60 * options.minutes
    labels = {found[each.name].network: each.note for each in whole.variants if each.against is None}

    def keep(new: Sequence[Row]) -> None:
        known, sweep = [*rows, *new], options.sweep.name
        about = {"sweep": sweep} | ({} if options.data else first_origin([options.json, *options.merge]))
        write(options.json, command_of(known, sweep, options.set, options.json), known, labels, **about)

    for name, folder in (each.split("=", 1) for each in options.data):
        asked = {key: cell for key, cell in found.items() if cell.network in networks and cell.recipe in recipes}
        for variants, seeds in missing(rows, name, asked, options.seeds or whole.seeds):
            left = (end - time.monotonic()) / 60
            if left < max(longest(rows, name, [asked[each] for each in variants]), 0.5):
                print(f"{name}: seeds {', '.join(map(str, seeds))} not begun, {left:.1f} minutes are left")
                continue
            own = SETTINGS.get((options.sweep.name, name), ())
            settings = (*own, f"data.root={json.dumps(folder)}", *options.set)
            sweep = load_sweep(options.sweep, settings, seeds, own_code(whole))
            rows += train(name, variants, asked, sweep, left, options.jobs, keep)
    if options.data or options.merge:
        keep([])
    for score in SCORES:
        for each in gaps(rows, score):
            label = labels.get(each["network"], each["network"])
            print(f"{each['data']} {label}, {each['recipe']}: {score} minus FP16's: {gap_text(each)}")
    for each in growth(rows):
        print(
            f"{each['data']} {each['recipe']}: gap of {each['network']} minus gap of {each['than']}: {gap_text(each)}"
        )
    if options.plot:
        draw(gaps(rows), labels, options.plot)
    if options.curves:
        draw_curves(rows, labels, options.curves)


def chosen(given: Sequence[str] | None, known: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """What was asked for, checked."""
    names = list(dict.fromkeys(known))
    if unknown := [each for each in given or () if each not in names]:
        parser.error(f"the sweep has no {', '.join(unknown)}. It has: {', '.join(names)}")
    return names if given is None else list(given)


def own_code(sweep: Sweep) -> tuple[str, ...]:
    """Networks of this checkout that a sweep names, which its processes may import."""
    specs = (sweep.config(variant, sweep.seeds[0]).model.spec for variant in sweep.variants)
    return tuple(dict.fromkeys(spec for spec in specs if spec.startswith("benchmarks/")))


def merged(paths: Iterable[Path]) -> list[Row]:
    """The rows of several files that are there, each training once; the first file wins."""
    rows: dict[tuple[Any, ...], Row] = {}
    for path in paths:
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else ():
            rows.setdefault(tuple(row[key] for key in ("data", "network", "recipe", "seed")), row)
    return list(rows.values())


def first_origin(paths: Iterable[Path]) -> dict[str, Any]:
    """Commit, date and machine of the first file that is there: where nothing is trained, they stay as they are."""
    documents = (json.loads(path.read_text(encoding="utf-8")) for path in paths if path.is_file())
    found = next(documents, {})
    return {key: found[key] for key in ("commit", "date", "machine") if key in found}


def missing(
    rows: Sequence[Row], data: str, asked: dict[str, Cell], seeds: Sequence[int]
) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    """(variants, seeds) without a row; neighbouring seeds that lack the same ones together."""
    done = {(row["network"], row["recipe"], row["seed"]) for row in rows if row["data"] == data}
    lacks = [(tuple(name for name, cell in asked.items() if (*cell, seed) not in done), seed) for seed in seeds]
    return [
        (variants, tuple(seed for _, seed in group))
        for variants, group in groupby(lacks, lambda pair: pair[0])
        if variants
    ]


def longest(rows: Sequence[Row], data: str, kinds: Sequence[Cell]) -> float:
    """Minutes of the longest training of these kinds so far; 0 where there is none."""
    same = [row["seconds"] for row in rows if row["data"] == data and (row["network"], row["recipe"]) in kinds]
    return max(same, default=0.0) / 60


def train(
    data: str,
    variants: Sequence[str],
    asked: dict[str, Cell],
    sweep: Sweep,
    minutes: float,
    jobs: int,
    keep: Callable[..., None],
) -> list[Row]:
    """The rows of the trainings that have ended; `keep` gets those so far with everything that the sweep says."""
    gpu = machine()["gpu"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "sweep"

        def finished() -> list[Row]:
            known = collect(sweep, out)["variants"]
            return [
                {"data": data, **asked[variant.name]._asdict(), "seed": int(seed), **row, "gpu": gpu}
                for variant in map(sweep.variant, variants)
                for seed, run in known[variant.name]["runs"].items()
                if (row := row_of(run, out / run["path"] / variant.model))
            ]

        def say(text: str) -> None:
            print(text, flush=True)
            keep(finished())

        run_sweep(sweep, out, tuple(variants), minutes, say, jobs=jobs)
        return finished()


def row_of(run: dict[str, Any], folder: Path) -> Row:
    """Scores of a training that has ended, and its curve at the epochs that were validated; empty of another."""
    if run["status"] not in ("done", "failed"):
        return {}
    metrics, test = folder / "metrics.jsonl", folder / "test.json"
    lines = epochs(metrics) if metrics.is_file() else []
    kept = [line for line in lines if line["miou"] is not None or line is lines[-1]]
    curve = [
        {"epoch": line["epoch"], **{key: rounded(line[key]) for key in ("loss", "miou", "auprc") if key in line}}
        for line in kept
    ]
    common = {"epochs": run.get("epochs", len(lines)), "seconds": round(run.get("seconds", 0.0), 1), "curve": curve}
    if run["status"] == "failed":
        return {"error": run["error"], **common}
    best = next(line for line in lines if line["epoch"] == run["best_epoch"])
    more = {"auprc": best.get("auprc"), "dice": mean_dice(best)}
    if test.is_file():
        tested = json.loads(test.read_text(encoding="utf-8"))
        more |= {"test": tested["miou"], "test_auprc": tested.get("auprc"), "test_dice": mean_dice(tested)}
    scores = {key: run[key] for key in ("best", "last", "skipped_steps")}
    return {**scores, **{key: value for key, value in more.items() if value is not None}, **common}


def rounded(value: float | None) -> float | None:
    """With as many digits as a picture shows."""
    return value if value is None else float(f"{value:.5g}")


def gaps(rows: Iterable[Row], score: str = "best") -> list[dict[str, Any]]:
    """For each data set, network and recipe the paired gap to FP16 in points, for the seeds that have both."""
    runs: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        of_recipes = runs.setdefault((row["data"], row["network"]), {})
        status = "failed" if "error" in row else "done"
        of_recipes.setdefault(row["recipe"], {})[str(row["seed"])] = {**row, "status": status}
    found = []
    for (data, network), of_recipes in runs.items():
        control = of_recipes.get(CONTROL, {})
        for recipe, all_runs in of_recipes.items():
            ran = {seed: run for seed, run in all_runs.items() if seed in control}
            if recipe != CONTROL and (gap := paired(ran, control, score)):
                found.append({"data": data, "network": network, "recipe": recipe, **gap})
    return found


def size_of(network: str) -> float:
    """What a network's name ends in: 4 million of "cnn_4m", 0.25 of "unet_025"."""
    text = network.rpartition("_")[2]
    number, factor = text.rstrip("km"), {"k": 1e3, "m": 1e6}.get(text[-1:], 1.0)
    if not number.isdigit():
        return 0.0
    return float(f"0.{number[1:]}" if number[0] == "0" else number) * factor


def growth(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """For each data set, recipe and larger network its gap minus that of the smallest of its kind, paired by seed."""
    known = {(gap["data"], gap["recipe"], gap["network"]): gap for gap in gaps(rows)}
    found = []
    for (data, recipe, network), gap in known.items():
        kind = network.rpartition("_")[0]
        same = [key for key in known if key[:2] == (data, recipe) and key[2].rpartition("_")[0] == kind]
        first = min(same, key=lambda key: size_of(key[2]))
        if not kind or first[2] == network:
            continue
        runs = [
            {seed: {"status": "done", "gap": points / 100} for seed, points in each["by_seed"].items()}
            for each in (gap, known[first])
        ]
        shared = {seed: run for seed, run in runs[0].items() if seed in runs[1]}
        if difference := paired(shared, runs[1], "gap"):
            found.append({"data": data, "network": network, "than": first[2], "recipe": recipe, **difference})
    return found


def _figure(columns: int, rows: int = 1) -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    size = (5.2 * max(1, columns), 3.6 * max(1, rows))
    return plt, *plt.subplots(max(1, rows), max(1, columns), figsize=size, squeeze=False, layout="constrained")


def _styles(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Colour and line of each name; after the last colour the first again, with another line."""
    kinds = ((colour, line) for line in LINES for colour in COLOURS)
    return dict(zip(dict.fromkeys(names), kinds, strict=False))


def _finish(plt: Any, figure: Any, panels: Any, styles: dict[str, tuple[str, str]], path: Path) -> None:
    for panel in panels.flat:
        panel.grid(axis="y", color="#e0e0e0")
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    handles = [
        plt.Line2D([], [], color=colour, marker="o", ms=4, ls=line, label=name)
        for name, (colour, line) in styles.items()
    ]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=min(2 * panels.shape[1], len(handles)), frameon=False
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw(found: Sequence[dict[str, Any]], labels: dict[str, str], path: Path) -> None:
    """Gaps by network, a panel for each data set: mean, interval and seeds of each recipe."""
    names = list(dict.fromkeys(gap["data"] for gap in found))
    styles = _styles(gap["recipe"] for gap in found)
    plt, figure, panels = _figure(len(names))
    for panel, name in zip(panels[0], names, strict=False):
        panel.sharey(panels[0][0])
        for shift, (recipe, (colour, _)) in enumerate(styles.items()):
            for gap in found:
                if (gap["data"], gap["recipe"]) != (name, recipe):
                    continue
                at = list(labels).index(gap["network"]) + 0.64 / len(styles) * (shift - (len(styles) - 1) / 2)
                seeds = list(gap["by_seed"].values())
                if gap["low"] is not None:
                    panel.plot([at, at], [gap["low"], gap["high"]], "-", lw=1.5, color=colour)
                panel.plot([at] * len(seeds), seeds, "o", ms=3, alpha=0.5, color=colour)
                panel.plot(at, gap["mean"], "_", ms=9, mew=2.5, color=colour)
        panel.axhline(0, color="#7f7f7f", lw=1)
        panel.set_xticks(range(len(labels)), list(labels.values()))
        panel.set_title(name, fontsize=10, loc="left")
    panels[0][0].set_ylabel("mIoU minus FP16's, points")
    _finish(plt, figure, panels, styles, path)


def draw_curves(
    rows: Sequence[Row], labels: dict[str, str], path: Path, shown: Sequence[Shown] = SHOWN, axis: str = "epoch"
) -> None:
    """Loss (above) and score by epoch, a column for each data set and network: mean over the seeds, 95 % interval."""
    columns = list(dict.fromkeys((row["data"], row["network"]) for row in rows))
    styles = _styles(row["recipe"] for row in rows)
    plt, figure, panels = _figure(len(columns), len(shown))
    for column, (data, network) in enumerate(columns):
        panels[0][column].set_title(f"{data}, {labels.get(network, network)}", fontsize=10, loc="left")
        for (key, label, scale), panel in zip(shown, panels[:, column], strict=True):
            panel.set_ylabel(label)
            for recipe, (colour, line) in styles.items():
                same = [row for row in rows if (row["data"], row["network"], row["recipe"]) == (data, network, recipe)]
                curve = curve_of([row.get("curve", ()) for row in same], key)
                at = [each["epoch"] for each in curve]
                mean, low, high = ([scale * each[end] for each in curve] for end in ("mean", "low", "high"))
                panel.plot(at, mean, line, lw=1.2, color=colour)
                panel.fill_between(at, low, high, color=colour, alpha=0.08, lw=0)
        panels[-1][column].set_xlabel(axis)
    _finish(plt, figure, panels, styles, path)


def curve_of(curves: Sequence[Sequence[Row]], key: str) -> list[dict[str, float]]:
    """Mean and 95 % interval of one value at each epoch that has it, over the trainings that came so far."""
    by_epoch: dict[int, list[float]] = {}
    for line in (line for curve in curves for line in curve):
        if line.get(key) is not None:
            by_epoch.setdefault(line["epoch"], []).append(line[key])
    found = []
    for epoch, values in sorted(by_epoch.items()):
        low, high = interval(values)
        mean = sum(values) / len(values)
        found.append({"epoch": epoch, "mean": mean, "low": mean if low is None else low, "high": high or mean})
    return found


def command_of(rows: Sequence[Row], sweep: str, sets: Sequence[str], path: Path) -> str:
    """What makes all rows at once."""
    data = [f"--data {name}={name.upper()}" for name in dict.fromkeys(row["data"] for row in rows)]
    file = [] if sweep == SWEEP.name else [f"--sweep configs/{sweep}"]
    options = [*file, *data, *(f"--set {each}" for each in sets), f"--json {path.name}"]
    return " ".join(["python -m benchmarks.claim", *options])


def write(path: Path, command: str, rows: Sequence[Row], labels: dict[str, str], **about: Any) -> None:
    """The JSON, with the gaps of all rows so far in every score that they have."""
    report = {"command": command, **origin(), "machine": machine(), **about, "rows": rows, "networks": labels}
    report["recipes"] = list(dict.fromkeys(row["recipe"] for row in rows if row["recipe"] != CONTROL))
    report |= {"gaps": gaps(rows), "growth": growth(rows)}
    report |= {f"gaps_{score}": found for score in SCORES[1:] if (found := gaps(rows, score))}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


if __name__ == "__main__":
    main()
