"""Tables of trainings from random weights (`benchmarks.claim`, `.language_model`), measured or still to be."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.claim import CONTROL, cells, gaps
from benchmarks.language_model import RECIPES_HERE
from docs.tables.results import MINUS, NOT_MEASURED, RESULTS, ROOT, difference, gap, markdown, result
from fp4deploy.experiments.sweep.spec import load_sweep

DATA = ("dsb2018", "camvid")
TITLES = {
    "fp16": "FP16", "bf16": "BF16", "all_passes": "all passes", "forward": "forward only", "chain_rule": "chain rule",
    "2d_rht": "2-D, RHT", "2d_rht_sr": "2-D, RHT, SR", "sr": "SR only", "forward_rht": "forward, RHT",
}  # fmt: skip


PUBLISHED_FOLDS = {  # test AUPRC of the five folds at 4M, FP16 and 2-D + RHT + SR: ldu-nvidia/nvfp4-cvpr-2026, 18887a40
    "cnn": ((0.6973, 0.8293, 0.7211, 0.6855, 0.8013), (0.5800, 0.7998, 0.7554, 0.6871, 0.8039)),
    "swin": ((0.7038, 0.8509, 0.7241, 0.8880, 0.7956), (0.7671, 0.8347, 0.7055, 0.8855, 0.8047)),
}


def published_folds(network: str) -> str:
    """AUPRC of the recipe minus that of FP16, mean over the published folds with its 95 % interval."""
    found = difference([recipe - control for control, recipe in zip(*PUBLISHED_FOLDS[network], strict=True)])
    mean, low, high = (f"{found[key]:+.3f}".replace("-", MINUS) for key in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


def protocol(score: str) -> str:
    """FP16's score in per cent and the gaps of the published recipes to it; of the test split where there is one."""
    sweep = load_sweep(ROOT / "configs/sweep_protocol.yaml")
    known = cells(sweep)
    labels = {known[each.name].network: each.note for each in sweep.variants if each.against is None}
    recipes = list(dict.fromkeys(cell.recipe for cell in known.values() if cell.recipe != CONTROL))
    rows = _rows("protocol_h200")
    table = []
    for data in DATA:
        of_data = [row for row in rows if row["data"] == data]
        tested = "test" if score == "best" else f"test_{score}"
        key = tested if any(tested in row for row in of_data) else score
        found = {(each["network"], each["recipe"]): each for each in gaps(of_data, key)}
        for network, label in labels.items():
            scores = [
                row[key] for row in of_data if (row["network"], row["recipe"]) == (network, CONTROL) and key in row
            ]
            shown = f"{100 * statistics.fmean(scores):.2f}" if scores else NOT_MEASURED
            measured = [gap(found.get((network, recipe))) or NOT_MEASURED for recipe in recipes]
            table.append([data, label, shown, *measured])
    return markdown(["data", "network", "FP16", *(TITLES[recipe] for recipe in recipes)], table, 2)


def convergence_camvid() -> str:
    """mIoU of the best validation of every recipe, and the gap to FP16."""
    sweep = load_sweep(ROOT / "configs/sweep_convergence.yaml")
    recipes = [cell.recipe for cell in cells(sweep).values()]
    return _by_recipe("convergence_camvid_h200", recipes, "best", "mIoU, %", 100.0)


def language_model() -> str:
    """Bits per byte of every recipe, and the gap to FP16 in hundredths of a bit; less is better."""
    return _by_recipe("language_model_h200", RECIPES_HERE, "bits", "bits per byte", 1.0)


def _by_recipe(name: str, recipes: Any, score: str, title: str, scale: float) -> str:
    rows = _rows(name)
    found = {each["recipe"]: each for each in gaps(rows, score)}
    table = []
    for recipe in recipes:
        same = [row for row in rows if row["recipe"] == recipe]
        scores = [scale * row[score] for row in same if score in row]
        deviation = f" ± {statistics.stdev(scores):.3g}" if len(scores) > 1 else ""
        shown = f"{statistics.fmean(scores):.4g}{deviation}" if scores else NOT_MEASURED
        diverged = str(sum("error" in row for row in same)) if same else NOT_MEASURED
        apart = "" if recipe == CONTROL else gap(found.get(recipe)) or NOT_MEASURED
        table.append([TITLES.get(recipe, f"`{recipe}`"), str(len(same)), shown, apart, diverged])
    return markdown(["training", "seeds", title, "minus FP16", "diverged"], table)


def _rows(name: str) -> list[dict[str, Any]]:
    """Of a result, if it has been measured."""
    rows: list[dict[str, Any]] = result(name)["rows"] if (RESULTS / f"{name}.json").is_file() else []
    return rows
