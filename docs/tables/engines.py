"""Tables of the accuracy of engines and of the precision of the rest."""

from __future__ import annotations

import re
from typing import Any

from docs.tables.results import MINUS, difference, gap, markdown, result, shown, spread

TRAINED = "trained"


def engine_accuracy(name: str) -> str:
    """Of every checkpoint and form of `--conv`, the score and its distance to the FP16 control; largest loss first."""
    found, rows = result(name), []
    auto = "--conv auto"
    notes = {variant: row["note"].replace(auto, f"`{auto}`") for variant, row in found["variants"].items()}
    for row in found["rows"]:
        if "drop" not in row:
            continue
        form = "canonical" if row["form"] == TRAINED else f"`--conv {row['form']}`"
        layers = ", ".join(f"{number} {kind}" for kind, number in row.get("layers", {}).items())
        cells = [
            notes[row["variant"]],
            form,
            layers,
            _score(row),
            _gap(row["drop"]),
            _over_images(row["drop"]),
        ]
        changed = row.get("changed", {}).values()
        cells += [_gap(row["drop_of_form"]), f"{100 * max(changed):.2f} %"] if changed else ["", ""]
        rows.append((row["drop"]["mean"], cells))
    head = ["trained as", "computed as", "layers multiply in", found["metric"], "minus the FP16 control, over seeds"]
    head += ["the same, over images", "minus its canonical form", "pixels changed, at most"]
    return markdown(head, (cells for _, cells in sorted(rows, key=lambda row: -float(row[0]))), 3)


def engine_control(name: str) -> str:
    """The score of the FP16 control of such a table."""
    return spread(result(name)["variants"]["control"]["test"])


def rests(*names: str) -> str:
    """A network in several precisions of the rest, by seed."""
    files, rows = [result(name) for name in names], []
    metric, found = files[0]["metric"], [(row, file["variants"]) for file in files for row in file["rows"]]
    seeds = sorted({seed for row, _ in found for seed in row["score"]})
    for row, variants in sorted(found, key=lambda each: each[0].get("mean", 0)):
        about = variants[row["variant"]]
        runs, failed = about["runs"], about.get("failed", {})
        validation = [
            f"{100 * runs[seed]['best']:.1f}" if seed in runs else f"NaN, ended in epoch {_epoch(failed[seed])}"
            for seed in seeds
        ]
        scores = [_scored(row, seed) for seed in seeds] if "mean" in row else ["none"]
        rows.append([about["note"], "; ".join(validation), "; ".join(scores), _gap(row.get("drop", {}))])
    return markdown(["model", "validation, best, by seed", f"{metric}, test, by seed", "minus its control"], rows)


def test_gap(variant: str, against: str, name: str) -> str:
    """What one variant scored more than another on the split that chose nothing, in points, by seed."""
    scores = {row["variant"]: row["score"] for row in result(name)["rows"]}
    return gap(difference([100 * (score - scores[against][seed]) for seed, score in scores[variant].items()]))


def on_validation(variant: str, against: str, *names: str) -> str:
    """What one variant scored more than another on the validation images, by seed."""
    runs = {name: about["runs"] for each in names for name, about in result(each)["variants"].items()}
    one, other = runs[variant], runs[against]
    return gap(difference([100 * (one[seed]["best"] - other[seed]["best"]) for seed in one]))


def _scored(row: dict[str, Any], seed: str) -> str:
    return f"{100 * row['score'][seed]:.2f}" if row["score"].get(seed) is not None else "none"


def _epoch(error: str) -> str:
    found = re.search(r"in epoch (\d+)", error)
    return found[1] if found else "?"


def _score(row: dict[str, Any]) -> str:
    return f"{row['mean']:.2f} ± {row['sd']:.2f}"


def _gap(drop: dict[str, Any]) -> str:
    """A drop with the other sign and Student's interval over seeds."""
    if drop.get("low") is None:
        return ""
    return shown({"mean": -drop["mean"], "low": -drop["high"], "high": -drop["low"]})


def _over_images(drop: dict[str, Any]) -> str:
    images = drop["over_images"]
    return f"[{-images['high']:+.2f}, {-images['low']:+.2f}]".replace("-", MINUS)


def trained_for_auto(name: str) -> str:
    """What QAT in the precision of `--conv auto` adds to NVFP4 QAT, both built with it; paired by seed."""
    scores = {row["variant"]: row["score"] for row in result(name)["rows"] if row["form"] == "auto"}
    return gap(difference([100 * (scores["qat_auto"][seed] - score) for seed, score in scores["qat"].items()]))
