"""Tables of everything that was measured: what NVFP4 costs by data and network, and by recipe."""

from __future__ import annotations

import json
from typing import Any

from docs.tables.results import NOT_MEASURED, RESULTS, difference, gap, markdown, result, shown, spread
from docs.tables.steps import best_fp16, over_best, steps
from fp4deploy.qat.recipes import RECIPES

WHOLE_PICTURE = (  # data and network, result, control, calibrated only, QAT
    ("COCO samples, persons; EfficientNet-Lite0 UNet", "coco_samples_h200", "control", "", "qat"),
    ("COCO samples, seven classes; EfficientNet-Lite0 UNet", "coco_samples_h200", "control_classes", "", "qat_classes"),
    ("COCO samples, instances of persons; EfficientNet-Lite0 UNet", "coco_samples_instance_h200", "control", "", "qat"),
    ("DSB2018, boxes of nuclei; UNet 0.5", "dsb2018_detection_h200", "control", "ptq", "qat"),
    ("DSB2018, boxes; every layer, multi-term input", "dsb2018_detection_h200", "control", "ptq_all", "qat_all"),
    ("DSB2018, instances of nuclei; UNet 1.0", "dsb2018_h200", "fp16_control", "nvfp4_ptq", "nvfp4"),
    ("DSB2018; smp DeepLabV3+", "dsb2018_models_h200", "deeplabv3plus_control", "", "deeplabv3plus"),
    ("DSB2018; smp Unet(resnet34)", "dsb2018_models_h200", "unet_resnet34_control", "", "unet_resnet34"),
    ("DSB2018; MONAI BasicUNet", "dsb2018_models_h200", "basicunet_control", "", "basicunet"),
    ("CamVid; MONAI BasicUNet", "camvid_basicunet_h200", "basicunet_control", "", "basicunet"),
    ("CamVid; smp Unet(resnet34)", "camvid_unet_resnet34_h200", "unet_resnet34_control", "", "unet_resnet34"),
    ("CamVid; smp DeepLabV3+", "camvid_deeplabv3plus_h200", "deeplabv3plus_control", "", "deeplabv3plus"),
    ("CamVid; UNet 0.25", "camvid_quarter_sweep_h200", "control", "ptq", "qat"),
    ("CamVid; UNet 0.25, 256x352, 80 epochs", "engine_camvid_h200", "control", "ptq", "qat"),
    ("CamVid; smp MAnet(resnet34), the rest BF16", "camvid_manet_h200", "bf16_control", "nvfp4_ptq_bf16", "nvfp4_bf16"),
    ("DSB2018; UNet 0.25, 50 epochs", "engine_dsb2018_h200", "control", "ptq", "qat"),
    ("Hippocampus, volumes; UNet 0.25, 50 epochs", "hippocampus_h200", "control", "ptq", "qat"),
    ("COCO samples, persons, re-encoded; EfficientNet-Lite0 UNet", "engine_coco_samples_h200", "control", "ptq", "qat"),
    ("COCO samples, persons, re-encoded, again; EfficientNet-Lite0 UNet", "parity_coco_h200", "control", "ptq", "qat"),
    ("DSB2018, boxes of nuclei, re-encoded, again; UNet 0.5", "parity_nuclei_h200", "control", "ptq", "qat"),
    ("CamVid, re-encoded; MONAI BasicUNet", "parity_basicunet_h200", "control", "ptq", "qat"),
    ("CamVid; UNet 1.0", "camvid_sweep_h200", "control", "ptq", "qat"),
    ("CamVid; UNet 1.0, every layer", "camvid_sweep_h200", "control", "ptq_all", "qat_all"),
    (
        "CamVid; UNet 1.0, every layer, multi-term input",
        "camvid_sweep_h200",
        "control",
        "ptq_all_digits",
        "qat_all_digits",
    ),
)
SWEEP = "fp4deploy sweep configs/"


def whole_picture() -> str:
    """Every data set and network that a sweep fine-tuned three seeds of, the largest loss of QAT first.

    Scores of the test split where there is one, else of the validation images that chose the best epoch; bold: the
    interval does not include zero. Layers, multiply-accumulates and bytes of the weights are counted
    (`benchmarks/fp4_share.py`).
    """
    rows, shares = [], result("fp4_share_cpu")["rows"]
    for label, name, control, ptq, qat in WHOLE_PICTURE:
        report = result(name)
        found = report.get("variants") or report["models"]
        split = "test" if found[qat].get("gap_test") else "best"
        metric = report.get("metric") if report.get("metric") in ("mIoU", "Dice") else "AP"
        shown_split = "test" if split == "test" and report.get("split") != "val" else "validation"
        score = found[control].get(split) or found[control]["ap"]
        tuned, calibrated = (found[each][f"gap_{split}"] if each else None for each in (qat, ptq))
        cells = [label, f"{metric}, {shown_split}", spread(score)]
        cells += [shown(calibrated), shown(tuned), shown(_over(tuned, calibrated)) if calibrated else NOT_MEASURED]
        share = shares[label]
        inside, every = share["layers"]
        cells += [f"{inside} of {every}; {100 * share['macs']:.1f} %", f"{share['bytes']:.2f}; 1.00"]
        sweep = report["command"].removeprefix(SWEEP).split(" && ")[0]
        rows.append((tuned["mean"], [*cells, f"`{sweep}`"]))
    head = ["data; network", "score", "FP16 control", "calibrated", "QAT", "QAT − calibrated"]
    head += ["in FP4: layers; MACs", "weights over FP16's: file; decoded", f"`{SWEEP}...`"]
    return markdown(head, (cells for _, cells in sorted(rows, key=lambda row: float(row[0]))))


PARITY = (
    ("COCO samples, persons; EfficientNet-Lite0 UNet", "parity_coco_h200"),
    ("DSB2018, boxes of nuclei; UNet 0.5", "parity_nuclei_h200"),
    ("CamVid; MONAI BasicUNet", "parity_basicunet_h200"),
    ("DSB2018; smp DeepLabV3+", "parity_deeplab_h200"),
)


def parity() -> str:
    """What was tried against the loss of plain QAT: gaps to the control of the same seed and sweep."""
    rows = []
    for label, name in PARITY:
        if not (RESULTS / f"{name}.json").is_file():
            rows.append([label, *[NOT_MEASURED] * 5])
            continue
        found = result(name)["variants"]
        for row in found.values():
            if not (value := row["gap_test"] or row["gap_best"]):
                continue
            split = "test" if row["gap_test"] else "validation"
            settings = ", ".join(f"`{each}`" for each in row["settings"]) or "plain"
            what = "calibrated" if row["model"] == "nvfp4_ptq" else "FP16" if row["model"] != "nvfp4" else "QAT"
            score = spread(row["test"] or row["best"])
            rows.append([f"{label}; {split}", what, settings, str(len(value["by_seed"])), score, shown(value)])
    return markdown(["data; network; split", "", "settings", "seeds", "score", "minus the control"], rows)


def one_rule() -> str:
    """`nvfp4_best`, trained and calibrated only, on the networks of `PARITY`: gaps to the control of the same seed."""
    rows = []
    for label, name in PARITY:
        name = name.replace("parity", "parity_rule")
        if not (RESULTS / f"{name}.json").is_file():
            rows.append([label, *[NOT_MEASURED] * 5])
            continue
        found = result(name)["variants"]
        split = "test" if found["rule"]["gap_test"] else "best"
        ways = [found[each] for each in ("rule", "ptq_rule")]
        runs = [run for row in ways for run in row["runs"].values()]
        shares = [run["fp4_macs"] for run in runs if "fp4_macs" in run]
        of = "" if len(shares) == len(runs) else f" ({len(shares)} of {len(runs)} runs)"
        seeds = "; ".join(str(len(row[f"gap_{split}"]["by_seed"])) for row in ways)
        cells = [f"{label}; {'test' if split == 'test' else 'validation'}", spread(found["control"][split]), seeds]
        rows.append(
            [
                *cells,
                *(shown(row[f"gap_{split}"]) for row in ways),
                f"{100 * min(shares):.1f} %{of}" if shares else NOT_MEASURED,
            ]
        )
    head = ["data; network; split", "FP16 control", "seeds: QAT; calibrated", "QAT", "calibrated"]
    return markdown([*head, "MACs in FP4, least"], rows)


def late_rule() -> str:
    """Gaps of `nvfp4_best` quantised from the first step, a half and three quarters of the training on, and seeds.

    Last: those from a half minus those from the first step, of the seeds that both have.
    """
    rows = []
    for label, name in PARITY:
        found = result(name.replace("parity", "parity_rule"))["variants"]
        for key, split in (("gap_test", "test"), ("gap_best", "validation")):
            ways = [found.get(each, {}).get(key) for each in ("rule_first", "rule", "rule_late")]
            if any(ways):
                cells = [f"{shown(way)} ({len(way['by_seed'])})" if way else NOT_MEASURED for way in ways]
                first, half = (way["by_seed"] for way in ways[:2])
                changed = difference([half[seed] - gap for seed, gap in first.items()])
                rows.append([f"{label}; {split}", *cells, f"{shown(changed)} ({len(first)})"])
    head = ["data; network; split (seeds)", "from the first step", "from a half", "from three quarters"]
    return markdown([*head, "a half minus the first"], rows)


def rule_gaps() -> str:
    """Gaps of `nvfp4_best` after QAT, of every network of `PARITY`, the largest loss first."""
    found = []
    for label, name in PARITY:
        row = result(name.replace("parity", "parity_rule"))["variants"]["rule"]
        value = row["gap_test"] or row["gap_best"]
        found.append((value["mean"], f"{gap(value)} ({label.replace('; ', ', ')})"))
    return ", ".join(text for _, text in sorted(found))


W4A8 = {  # networks and data of the whole picture, trained again beside W4A8
    "w4a8_camvid_h200": "CamVid; smp Unet(resnet34)",
    "w4a8_dsb2018_h200": "DSB2018; smp Unet(resnet34)",
    "w4a8_coco_h200": "COCO samples, persons; EfficientNet-Lite0 UNet",
}


def w4a8() -> str:
    """W4A8 between NVFP4 and FP8, trained and calibrated: gaps to the control of the same seed."""
    formats = {"fp4": "NVFP4", "w4a8": "W4A8", "fp8": "FP8"}
    rows = []
    for name, label in W4A8.items():
        found = result(name)["variants"]
        split = "test" if found["w4a8"]["gap_test"] else "best"
        gaps = [shown(found[f"{how}{form}"][f"gap_{split}"]) for how in ("", "ptq_") for form in formats]
        control = spread(found["control"][split])
        rows.append([f"{label}; {'test' if split == 'test' else 'validation'}", control, *gaps])
    heads = [f"{form}, {how}" for how in ("QAT", "calibrated") for form in formats.values()]
    return markdown(["data; network; split", "FP16 control, mIoU", *heads], rows)


def largest_loss() -> str:
    """The default layers' largest loss after QAT that its interval shows: gap, data and network."""
    found = []
    for label, name, _, _, qat in WHOLE_PICTURE:
        report = result(name)
        row = (report.get("variants") or report["models"])[qat]
        value = row.get("gap_test") or row["gap_best"]
        if "every layer" not in label and value["high"] < 0:
            found.append((value["mean"], f"{gap(value)} ({label})"))
    return min(found)[1]


def _over(value: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The difference of two gaps to one control, paired by seed."""
    return difference([value["by_seed"][seed] - other["by_seed"][seed] for seed in value["by_seed"]])


def qat_over_calibrated(name: str, split: str, layers: str = "") -> str:
    """What QAT adds to calibration alone on a split ("test", "best") of a sweep; layers: "", "_all", "_all_digits"."""
    found = result(name)["variants"]
    return gap(_over(*(found[f"{variant}{layers}"][f"gap_{split}"] for variant in ("qat", "ptq"))))


STEP_RECIPES = {"": "nvfp4_qat", ", delayed": "nvfp4_qat_delayed", ", dynamic": "nvfp4_qat+dynamic"}
STEP_RECIPES |= {", learned": "nvfp4_qat+learned", ", 2-D": "nvfp4_qat_2d", ", 4/6": "nvfp4_4o6_qat"}
SAME_RECIPE = {"nvfp4_qat+delayed": "nvfp4_qat_delayed"}


def recipe_evidence() -> str:
    """What was measured of each recipe: time of a step, gaps of trainings; a recipe without a figure says so."""
    found = steps()
    best = best_fp16(found, 1.0)["graph_ms"]
    times = {name: f"{found[1.0, f'nvfp4 fused{key}']['graph_ms'] / best:.2f}" for key, name in STEP_RECIPES.items()}
    for row in result("fp4_training_h200")["rows"]:
        if (row["scale"], row["products"]) == (1.0, "emulated") and "ms" in row:
            times[row["recipe"]] = f"{over_best(row):.2f}"
    gaps = [times, _tuned("camvid_sweep_h200"), _tuned("dsb2018_detection_h100") | _tuned("dsb2018_detection_h200")]
    for data in ("camvid", "dsb2018"):
        claimed = (each for each in result("claim_h200")["gaps"] if (each["data"], each["network"]) == (data, "unet_1"))
        gaps.append({each["recipe"]: gap(each) for each in claimed})
    gaps += [_tuned(f"engine_{data}_h200", "gap_test") for data in ("camvid", "dsb2018", "coco_samples")]
    gaps.append(_tuned("w4a8_dsb2018_h200", "gap_test"))
    gaps += [{name: gap(value) for name, value in _digit_gaps(name).items()} for name in DIGITS]
    names = dict.fromkeys((*RECIPES, *(name for column in gaps for name in column)))
    rows = [[f"`{name}`", *(column.get(name, NOT_MEASURED) for column in gaps)] for name in names]
    head = ["recipe", "step over the best FP16", "CamVid, fine-tuned", "boxes of nuclei, fine-tuned, AP"]
    head += [f"{data}, from random weights" for data in ("CamVid", "DSB2018")]
    head += [f"{data}, UNet 0.25, fine-tuned, test" for data in ("CamVid", "DSB2018")]
    head += ["COCO samples, Lite0 UNet, fine-tuned, validation", "DSB2018, Unet(resnet34), fine-tuned, test"]
    return markdown([*head, *DIGITS.values()], rows)


def _tuned(name: str, score: str = "gap_best") -> dict[str, str]:
    """Gaps to the control of the variants of a sweep that choose a recipe and no layers, and of its `qat`."""
    found = {}
    for variant, row in result(name)["variants"].items():
        settings = dict(each.split("=", 1) for each in row["settings"])
        recipe = json.loads(settings.get("recipe", '"nvfp4_qat"' if variant == "qat" else "null"))
        if recipe and row["model"] == "nvfp4" and settings.keys() <= {"recipe", "quant.percentile"}:
            found[SAME_RECIPE.get(recipe, recipe)] = _with_seeds(row[score])
    return found


def _with_seeds(value: dict[str, Any]) -> str:
    """The gap; of fewer than three seeds, how many."""
    seeds = len(value["by_seed"])
    return gap(value) + {1: " (1 seed)", 2: " (2 seeds)"}.get(seeds, "")


DIGITS = {"digits_vit_cpu": "digits, transformer", "digits_conv_cpu": "digits, convolutions"}


def _digit_gaps(name: str) -> dict[str, dict[str, Any]]:
    """Accuracy minus FP32's by recipe, paired by seed, in points."""
    runs = result(name)["runs"]
    base = [run["accuracy"] for run in runs["fp32"]]
    return {
        recipe: difference([run["accuracy"] - own for run, own in zip(found, base, strict=True)])
        for recipe, found in runs.items()
        if recipe != "fp32"
    }


def digits_below(name: str) -> str:
    """The recipes whose gap to FP32 has an interval below zero."""
    below = [f"`{recipe}` {gap(value)}" for recipe, value in _digit_gaps(name).items() if value["high"] < 0]
    return ", ".join(below) or "none"


def digits_trained(name: str) -> str:
    """Every recipe, or all but those that a result lacks."""
    missing = [f"`{recipe}`" for recipe in RECIPES if recipe not in result(name)["runs"]]
    return "every recipe" + (f" but {', '.join(missing)}" if missing else "")
