"""Tables of accuracy: data sets, methods, detection, instances."""

from __future__ import annotations

import statistics
from typing import Any

from docs.tables.results import MINUS, gap, markdown, result, spread

LAYERS = {"fp16": "0", "control": "0", "ptq": "21 of 23", "qat": "21 of 23", "ptq_all": "all", "qat_all": "all"}
LAYERS |= {"ptq_all_digits": "all, multi-term input", "qat_all_digits": "all, multi-term input"}


def camvid(sweep: str = "camvid_sweep_h200") -> str:
    """The sweep over CamVid: FP16, its control, calibration and QAT."""
    found = result(sweep)["variants"]
    rows = []
    for name, layers in LAYERS.items():
        row = found[name]
        scores = [spread(row["best"]), spread(row["last"]), gap(row["gap_best"]), gap(row["gap_last"])]
        rows.append([name, layers, *scores, spread(row["test"]), gap(row["gap_test"])])
    head = ["variant", "layers in FP4", "best", "last", "gap, best", "gap, last", "test", "gap, test"]
    return markdown(head, rows, 2)


def camvid_quarter() -> str:
    """The same at scale 0.25."""
    return camvid("camvid_quarter_sweep_h200")


ABLATION = {
    "qat": "NVFP4 from the FP16 weights: static activation scales, 1-D blocks, averaged weights",
    "scratch": "from random weights, as long as FP16",
    "dynamic": "the activation scale of each tensor",
    "delayed": "the activation scale of the step before",
    "learned": "activation scales learned, from the 99.9 % percentile",
    "weights_2d": "weights in 16 x 16 blocks",
    "four_over_six": "4/6 for weights and activations",
    "four_over_six_weights": "4/6 for weights",
    "qad": "distilled from the FP16 model, as its control",
    "qad_only": "distilled from the FP16 model, without labels",
    "damping": "dampening of weight oscillation",
    "damping_strong": "the same, ten times as strong",
    "raw": "weights not averaged, as its control",
    "qat_last": "the last layer in FP4 too",
    "qat_first": "the first layer in FP4 too",
    "qat_all": "both",
    "qad_all": "both, distilled, as its control",
    "qat_all_long": "both, 60 epochs at 4e-4, as its control",
    "scratch_all": "both, from random weights, as long as FP16",
    "qat_all_digits": "both, multi-term input encoding",
    "qat_all_digits_fp16": "both, multi-term input encoding, in the FP16 model and in its control too",
    "ptq": "calibrated, not trained",
    "percentile": "calibrated by the 99.9 % percentile, not trained",
    "ptq_all": "calibrated, not trained, first and last layer too",
    "ptq_all_digits": "the same, multi-term input encoding",
    "control_long": "FP16, 60 epochs at 4e-4",
    "control_digits": "FP16, multi-term input encoding, from FP16 with it",
    "control_qad": "FP16, distilled",
    "control_raw": "FP16, weights not averaged",
}


def ablation() -> str:
    """Every variant of the CamVid sweep against its own control."""
    found = result("camvid_sweep_h200")["variants"]
    rows = []
    for name, what in ABLATION.items():
        row = found[name]
        gaps = [gap(row[key]) for key in ("gap_best", "gap_last", "gap_test")]
        rows.append([name, what, str(len(row["runs"])), row["against"], *gaps])
    return markdown(["variant", "what it is", "seeds", "against", "gap, best", "gap, last", "gap, test"], rows, 2)


def dsb2018() -> str:
    """Instances on DSB2018: average precision over three seeds."""
    labels = {"fp16": "FP16", "fp16_control": "FP16 control", "nvfp4_ptq": "NVFP4, calibrated", "nvfp4": "NVFP4 QAT"}
    found = result("dsb2018_h200")["models"]
    rows = []
    for name, label in labels.items():
        row = found[name]
        epochs = str(next(iter(row["seeds"].values()))["epochs"])
        rows.append([label, epochs, *(spread(row[key]) for key in ("ap", "ap50", "ap75")), gap(row.get("gap_best"))])
    return markdown(["model", "epochs", "AP", "AP50", "AP75", "gap in AP"], rows)


def detection() -> str:
    """Boxes on DSB2018: average precision over three seeds."""
    labels = {
        "fp16": ("FP16", "0"),
        "control": ("FP16 control", "0"),
        "ptq": ("NVFP4, calibrated", "default"),
        "qat": ("NVFP4 QAT", "default"),
        "ptq_all": ("NVFP4, calibrated", "all, multi-term input"),
        "qat_all": ("NVFP4 QAT", "all, multi-term input"),
    }
    found = result("dsb2018_detection_h200")["variants"]
    rows = []
    for name, (label, layers) in labels.items():
        row = found[name]
        scores = [spread(row[key]) for key in ("best", "ap50", "ap75")]
        rows.append([label, layers, _epochs(row), _seeds(row), *scores, gap(row["gap_best"])])
    return markdown(["model", "layers in FP4", "epochs", "seeds", "AP", "AP50", "AP75", "gap in AP"], rows, 2)


def detection_closer() -> str:
    """Boxes on DSB2018: what was tried to bring NVFP4 QAT nearer to the control."""
    labels = {
        "qat": "default layers",
        "qat_early8": "encoder's first two levels in FP8",
        "qat_early8_four_over_six": "encoder's first two levels in FP8, 4/6 elsewhere",
        "qat_encoder8": "whole encoder in FP8",
        "qad_early8": "encoder's first two levels in FP8, distilled from the control",
        "qat_four_over_six": "4/6 for weights and activations",
        "qat_first16": "encoder's first level in FP16",
        "learned": "learned activation scales, from the 99.9 % percentile",
        "qat_long": "default layers, 48 epochs, beside a control of 48",
    }
    found = result("dsb2018_detection_h200")["variants"]
    rows = []
    for name, label in labels.items():
        row = found[name]
        settings = "<br>".join(f"`{each}`" for each in row["settings"])
        rows.append([label, settings, _seeds(row), spread(row["best"]), gap(row["gap_best"])])
    return markdown(["NVFP4 QAT", "settings", "seeds", "AP", "gap in AP"], rows, 2)


def detection_within() -> str:
    """Boxes on DSB2018: settings of NVFP4 QAT that come within 0.3 AP of the control, and what is beside them."""
    first = "encoder's first two levels in FP8"
    labels = {
        "qat": "default layers",
        "qat_late": "default layers, quantised from the 8th epoch on",
        "qat_late_early8": f"**{first}, quantised from the 8th epoch on**",
        "qat_early8_box8": f"{first}, box tower too",
        "qat_early8_box8_four_over_six": f"**{first}, box tower too, 4/6 elsewhere**",
        "qat_late_early8_box8": f"{first}, box tower too, quantised from the 8th epoch on",
        "qat_shallow8": "FP8 on the way to the boxes up to stride 4",
        "qat_fp8": "every quantised layer in FP8",
    }
    found = result("dsb2018_detection_h100")["variants"]
    rows = [
        [label, _seeds(found[name]), spread(found[name]["best"]), gap(found[name]["gap_best"])]
        for name, label in labels.items()
    ]
    return markdown(["QAT", "seeds", "AP", "gap in AP"], rows, 1)


def fp4_products() -> str:
    """A UNet of scale 1.0 trained through FP4 GEMMs and their emulation, from random weights and fine-tuned."""
    labels = {
        "fp16": "FP16, 18 epochs from random weights",
        "scratch_emulated": "`nvfp4_train`, emulated, 18 epochs from random weights",
        "scratch_fp4": "`nvfp4_train`, FP4 GEMMs, 18 epochs from random weights",
        "control": "FP16, 6 epochs more",
        "tuned_emulated": "`nvfp4_train`, emulated, 6 epochs from FP16",
        "tuned_fp4": "`nvfp4_train`, FP4 GEMMs, 6 epochs from FP16",
    }
    against = {"fp16": "FP16", "control": "FP16, 6 epochs more"}
    found, rows = result("fp4_products_sweep_h200")["variants"], []
    for name, label in labels.items():
        row = found[name]
        compared = name.startswith(("scratch", "tuned"))
        difference = [against[row["against"]], gap(row["gap_best"])] if compared else ["", ""]
        rows.append([label, _seeds(row), spread(row["best"]), *difference])
    return markdown(["training", "seeds", "mIoU", "against", "gap"], rows, 1)


def _epochs(row: dict[str, Any]) -> str:
    """Epochs of a finished variant."""
    (found,) = {run["epochs"] for run in row["runs"].values() if run["status"] == "done"}
    return str(found)


def _seeds(row: dict[str, Any]) -> str:
    """How many seeds of a variant finished."""
    return str(sum(run["status"] == "done" for run in row["runs"].values()))


def _base(found: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """The FP16 model that a variant with settings of its own starts from."""
    own = [name for name, each in found.items() if each["model"] == "fp16" and each["settings"] == row["settings"]]
    base: dict[str, Any] = found[own[0] if own else "fp16"]
    return base


def coco_samples() -> str:
    """COCO samples, mIoU: person, and seven classes."""
    found = result("coco_samples_h200")["variants"]
    rows = []
    for row in (each for each in found.values() if each["model"] == "nvfp4"):
        models = _base(found, row), found[row["against"]], row
        seeds = ", ".join(map(_seeds, models))
        rows.append([row["note"], seeds, *(spread(each["best"]) for each in models), gap(row["gap_best"])])
    return markdown(["classes", "seeds", "FP16", "FP16 control", "NVFP4 QAT", "gap"], rows)


def instances_of_samples(key: str, variant: str = "fp16") -> str:
    """AP of the models of COCO samples, the best epoch of each seed, in points; "gap": to the variant's control."""
    row = result("coco_samples_instance_h200")["variants"][variant]
    if key == "gap":
        return gap(row["gap_best"])
    runs = row["runs"].values()
    scores = [100 * run["best" if key == "ap" else key] for run in runs]
    return f"{statistics.mean(scores):.1f} ± {statistics.stdev(scores):.1f}"


PLACEMENTS = {"default": "21 of 23 layers", "all": "every layer, multi-term input", "rgb": "every layer, plain image"}

CORRECTIONS = {"none": "", "norm": "norms", "bias": "biases", "both": "norms and biases"}


def claim() -> str:
    """mIoU of FP16 and gaps of the recipes to it, in points, of the networks that all seeds were trained of."""
    report = result("claim_h200")
    gaps = {(each["data"], each["network"], each["recipe"]): each for each in report["gaps"] if each["low"] is not None}
    rows = []
    for data in dict.fromkeys(row["data"] for row in report["rows"]):
        for network, label in report["networks"].items():
            found = [gaps.get((data, network, recipe)) for recipe in report["recipes"]]
            of = {"data": data, "network": network, "recipe": "fp16"}
            scores = [row["best"] for row in report["rows"] if all(row[key] == value for key, value in of.items())]
            if any(found):
                rows.append([data, label, f"{100 * sum(scores) / len(scores):.2f}", *map(gap, found)])
    return markdown(["data", "network", "FP16", *(f"`{recipe}`" for recipe in report["recipes"])], rows, 2)


def claim_growth(data: str, network: str, recipe: str) -> str:
    """Gap of a larger UNet minus that of the smallest, in points."""
    keys = {"data": data, "network": network, "recipe": recipe}
    (found,) = (each for each in result("claim_h200")["growth"] if keys.items() <= each.items())
    return gap(found)


def ptq_camvid(name: str = "ptq_camvid_h200") -> str:
    """Drops of methods of post-training quantisation, points of mIoU, over the seeds of a result."""
    names = {"input": "only the input of the first layer", "fp8": "`amax`, convolutions in FP8 (`build --conv fp8`)"}
    keys = ("placement", "method", "activations", "correction")
    found = {tuple(row.get(key, "") for key in keys): row for row in result(name)["rows"]}
    rows = []
    for method, activations, correction in dict.fromkeys(key[1:] for key in found):
        label = names.get(method, f"`{method}`") + (f", activations `{activations}`" if activations else "")
        cells = [_drop(found.get((placement, method, activations, correction))) for placement in PLACEMENTS]
        rows.append([label, CORRECTIONS[correction], *cells])
    return markdown(["method", "corrected", *PLACEMENTS.values()], rows, 2)


PEERS = {
    "`nvfp4_qat`": ("nvfp4_qat", "none"),
    "`sweep`, norms corrected": ("sweep", "norm"),
    "ModelOpt, simulated blocks": ("modelopt", "none"),
    "ModelOpt's weights and amaxes, imported": ("imported", "none"),
    "FP16, trained as long (control)": ("fp16", "none"),
}


def modelopt_peer() -> str:
    """ModelOpt's PTQ, QAT and QAD beside ours."""
    rows = result("modelopt_peer_h200")["rows"]
    found = {(row["placement"].replace("control", "qat"), row["method"], row["correction"]): row for row in rows}
    table = [
        [label, *(_drop(found.get((kind, *key))) for kind in ("ptq", "qat", "qad"))] for label, key in PEERS.items()
    ]
    return markdown(["", "PTQ", "QAT", "QAD"], table)


def image_input() -> str:
    """What quantising the image itself costs on CamVid's test split, every layer in FP4."""
    found = result("camvid_sweep_h200")["variants"]
    shown = {
        "calibrated, plain image": "ptq_all",
        "calibrated, multi-term input": "ptq_all_digits",
        "QAT, plain image": "qat_all",
        "QAT, multi-term input": "qat_all_digits",
    }
    rows = [[label, gap(found[name]["gap_test"])] for label, name in shown.items()]
    return markdown(["every layer in FP4", "gap on the test split"], rows)


def image_loss(which: str) -> str:
    """Of the gap without the multi-term input, points: "all"; what QAT wins "back"; what it leaves "lost"."""
    found = result("camvid_sweep_h200")["variants"]
    calibrated, trained, encoded = (
        -found[each]["gap_test"]["mean"] for each in ("ptq_all", "qat_all", "qat_all_digits")
    )
    chosen = {"all": calibrated, "back": calibrated - trained, "lost": trained - encoded}[which]
    return f"{chosen:.2f}"


def first_input_share() -> str:
    """Per cent of the drop of every layer on the plain image that the first layer's input causes alone."""
    rows = {(row["placement"], row["method"]): row["mean"] for row in result("ptq_camvid_h200")["rows"]}
    return f"{100 * rows['rgb', 'input'] / rows['rgb', 'amax']:.0f} %"


def _drop(row: dict[str, Any] | None) -> str:
    """A drop as a difference to FP16, with its interval; those of the seeds that have it, where not all do."""
    if row is None:
        return ""
    if None in row["by_seed"]:
        return ", ".join(f"{-drop:+.2f}" for drop in row["by_seed"] if drop is not None).replace("-", MINUS)
    return gap({"mean": -row["mean"], "low": -row["high"], "high": -row["low"]})


def sensitivity() -> str:
    """The sensitivity study on CamVid: what one kind of tensor alone in NVFP4 does to the logits."""
    damage = result("kurtosis_camvid_h200")["damage"]
    groups = {
        "first layer": [row for row in damage if row["layer"] == "encoder.0.conv1"],
        "output layer": [row for row in damage if row["layer"] == "head"],
        "parameters of a normalisation": [row for row in damage if row["what"] == "parameters"],
        "input of a normalisation": [row for row in damage if row["what"] == "input"],
    }
    groups["a layer that runs in FP4"] = [row for row in damage if all(row not in group for group in groups.values())]
    rows = []
    for label, group in groups.items():
        means = [statistics.fmean(row[key] for row in group) for key in ("logit_error", "changed")]
        shares = [statistics.fmean(row[key] for row in group) for key in ("parameters", "macs")]
        rows.append(
            [label, str(len(group)), *(f"{100 * m:.2f} %" for m in means), *(f"{100 * s:.2g} %" for s in shares)]
        )
    head = ["alone in NVFP4", "layers", "error of the logits, mean", "pixels changed, mean", "parameters", "MACs"]
    return markdown(head, rows)


def layer_errors(name: str, count: str) -> str:
    """A study of layers: the layers of the largest errors at the output, and what all layers lose together."""
    found = result(name)
    worst = sorted(found["layers"], key=lambda row: -row["at_end"]["both"])[: int(count)]
    rows = [
        [
            f"`{row['layer']}`",
            str(row["in_channels"]),
            *(f"{100 * value:.1f}" for value in (row["macs"], *row["at_end"].values(), *row["inside"].values())),
            *(f"{100 * value:.0f}" for value in (row["shift"], row["scales"]["input"], row["half"])),
        ]
        for row in worst
    ]
    together = [f"{100 * value:.1f}" for value in found["together"].values()]
    rows.append(["all layers together", "", "100.0", *together, *[""] * (len(rows[0]) - 6)])
    head = ["layer", "channels", "MACs %", "output: input %", "weight %", "both %"]
    head += ["own: input %", "weight %", "both %", "shift %", "E4M3 %", "half in % of channels"]
    return markdown(head, rows)


def tiles() -> str:
    """What the largest tile of each kind of kernel compiles to, for every architecture."""
    order = ("3 x 3", "two sources", "matrix", "transposed", "W4A16")
    largest: dict[tuple[str, str], dict[str, Any]] = {}
    for row in result("tiles_compiled")["kernels"]:
        key = (row["arch"], row["kind"])
        if key not in largest or _size(row) > _size(largest[key]):
            largest[key] = row
    rows = []
    for arch in sorted({arch for arch, _ in largest}, key=lambda arch: int(arch.removeprefix("sm_"))):
        for kind in (kind for kind in order if (arch, kind) in largest):
            row = largest[arch, kind]
            tile, code = " x ".join(map(str, row["tile"])), f"`{', '.join(row['instructions'])}`"
            rows.append([arch, kind, tile, code, *(str(row[name]) for name in ("registers", "spills", "shared"))])
    head = ["target", "kernel", "tile", "instruction", "registers", "spilled bytes", "shared memory, bytes"]
    return markdown(head, rows, 4)


def _size(row: dict[str, Any]) -> tuple[int, int]:
    rows, columns, depth = row["tile"]
    return rows * columns, depth


def digit_recipes(name: str) -> str:
    """Recipes on scikit-learn's 8x8 digits over seeds, paired with FP32."""
    runs = result(name)["runs"]
    base = [run["accuracy"] for run in runs["fp32"]]
    rows = []
    for recipe, found in runs.items():
        accuracy = [run["accuracy"] for run in found]
        pairs = [a - b for a, b in zip(accuracy, base, strict=True)]
        paired = ["", ""] if recipe == "fp32" else [f"{statistics.fmean(pairs):+.2f}", f"{statistics.stdev(pairs):.2f}"]
        cells = [f"{statistics.fmean(accuracy):.2f}", f"{statistics.stdev(accuracy):.2f}", *paired]
        rows.append([recipe, *cells, f"{statistics.fmean(run['loss'] for run in found):.4f}"])
    return markdown(["recipe", "accuracy", "sd", "minus FP32", "sd", "loss"], rows)


OTHER_MODELS = ("unet_resnet34", "deeplabv3plus", "basicunet")  # of `configs/sweep_*_models.yaml`


def camvid_models() -> str:
    """CamVid for networks of other libraries."""
    return _other_models({name: f"camvid_{name}_h200" for name in OTHER_MODELS})


def dsb2018_models() -> str:
    """Nuclei for the same networks."""
    return _other_models(dict.fromkeys(OTHER_MODELS, "dsb2018_models_h200"))


def _other_models(files: dict[str, str]) -> str:
    """mIoU of three seeds, and gaps paired by seed. files: the result of each network."""
    rows = []
    for name, file in files.items():
        found = result(file)["variants"]
        row = found[name]
        base = next(each for each in found.values() if (each["model"], each["settings"]) == ("fp16", row["settings"]))
        for label, each in (("FP16", base), ("FP16 control", found[f"{name}_control"]), ("NVFP4 QAT", row)):
            cells = [text for key in ("best", "test") for text in (spread(each[key]), gap(each.get(f"gap_{key}")))]
            rows.append([row["note"], label, _seeds(each), *cells])
    return markdown(["network", "model", "seeds", "validation", "gap", "test", "gap"], rows, 2)
