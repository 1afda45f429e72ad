"""Tables of training: steps, memory, scaling."""

from __future__ import annotations

import statistics

from docs.tables.results import markdown, result
from docs.tables.steps import STEP_IMAGES, Steps, best_fp16, images, over_best, span, steps
from fp4deploy.qat import RECIPES

STEP_ROWS = {
    "FP16, torch eager, channels_last": "fp16 unfused",
    "FP16, torch eager, NCHW": "fp16 unfused, NCHW",
    "FP16, torch.compile, channels_last": "fp16 compiled",
    "FP16, fused, torch's loss": "fp16 fused, torch's loss",
    "FP16, fused": "fp16 fused",
    "NVFP4, fused, torch's loss": "nvfp4 fused, torch's loss",
    "**NVFP4, fused**": "nvfp4 fused",
    "NVFP4, fused, delayed amax": "nvfp4 fused, delayed",
}

UNFUSED_ROWS = {
    "FP16, torch.compile, channels_last": "fp16 compiled",
    "FP16, fused": "fp16 fused",
    "FP16, fused, compiled loss": "fp16 fused, compiled loss",
    "NVFP4, torch reference": "nvfp4 unfused, reference",
    "NVFP4, kernels but not fused": "nvfp4 unfused",
    "NVFP4, kernels but not fused, delayed amax": "nvfp4 unfused, delayed",
    "NVFP4, fused": "nvfp4 fused",
    "ModelOpt 0.47 NVFP4 QAT, eager, NCHW (blocks along image width)": "peer: ModelOpt NVFP4 QAT",
    "ModelOpt 0.47 NVFP4 QAT, eager, channels_last": "peer: ModelOpt NVFP4 QAT, channels_last",
}


def training_step() -> str:
    """A training step of the UNet by scale: launched from Python, in a CUDA graph, over the best FP16, peak memory."""
    return _step_table(STEP_ROWS, steps())


def unfused_step() -> str:
    """The same in the forms that are not fused, and of ModelOpt."""
    return _step_table(UNFUSED_ROWS, steps("training_step_unfused_h200"))


def _step_table(labels: dict[str, str], found: Steps) -> str:
    best = {scale: best_fp16(found, scale)["graph_ms"] for scale in (1.0, 0.25)}
    rows = []
    for label, case in labels.items():
        cells = [label]
        for scale in best:
            row = found[scale, case]
            cells += [f"{row['ms']:.1f}", f"{row['graph_ms']:.1f}", f"{row['graph_ms'] / best[scale]:.2f}"]
            cells.append(f"{row['peak_gb']:.1f}")
        rows.append(cells)
    head = ["in a CUDA graph, ms", "over the best FP16", "peak GB"]
    return markdown(["", *(cell for scale in best for cell in (f"scale {scale}, ms", *head))], rows)


KEPT_AS_CODES = {"default": "a quarter (default)", "fused": "none", "recomputed": "all"}


def network_steps() -> str:
    """Steps of networks that torch.compile fuses, in a CUDA graph, by the share of inputs kept as FP4 codes."""
    found = {(row["network"], row["way"]): row for row in result("training_models_h100")["rows"]}
    rows = []
    for (network, way), ours in found.items():
        if way == "compiled":
            continue
        plain = found[network, "compiled"]
        cells = [f"{row['graph_ms']:.1f} ({row['peak_gb']:.2f})" for row in (plain, ours)]
        ratios = [f"{ours[key] / plain[key]:.2f}" for key in ("graph_ms", "peak_gb")]
        rows.append([f"`{network}`", KEPT_AS_CODES[way], *cells, *ratios])
    head = ["network", "inputs as codes", "FP16, torch.compile, ms (GB)", "NVFP4, ms (GB)", "time", "memory"]
    return markdown(head, rows, 2)


def first_steps() -> str:
    """How long first steps of compiled networks take, NVFP4 and FP16."""
    found = result("training_models_h100")["rows"]
    ours, plain = (
        [row["first_step_s"] for row in found if (row["way"] == "compiled") is fp16] for fp16 in (False, True)
    )
    return f"{min(ours):.0f} to {max(ours):.0f} s in NVFP4 and {min(plain):.0f} to {max(plain):.0f} s in FP16"


def recomputed_steps() -> str:
    """Steps that keep the inputs of convolutions and steps that do not."""
    found, rows = steps(), []
    for (scale, case), row in found.items():
        if f"{case.removesuffix(', recomputed')}, recomputed" not in {name for _, name in found}:
            continue
        kept = found[scale, case.removesuffix(", recomputed")]
        ratios = ["" if row is kept else f"{row[key] / kept[key]:.2f}" for key in ("graph_ms", "peak_gb")]
        ratios.append(f"{row['graph_ms'] / best_fp16(found, scale)['graph_ms']:.2f}")
        rows.append(
            [f"{case}, scale {scale:g}", f"{row['ms']:.1f}", f"{row['graph_ms']:.1f}", f"{row['peak_gb']:.2f}", *ratios]
        )
    return markdown(
        ["", "launched, ms", "in a CUDA graph, ms", "peak GB", "time", "memory", "over the best FP16"], rows
    )


def largest_batches() -> str:
    """The largest batch of a training step that fits into the memory of a GPU, and its speed."""
    rows = [
        [f"{row['case']}, scale {row['scale']:g}", str(row["batch"]), f"{row['images_per_s']:.0f}"]
        for row in result("largest_batch_h200")["rows"]
    ]
    return markdown(["", "largest batch", "images a second"], rows)


def recipe_ratios() -> str:
    """Time of a step of each recipe over that of FP16, both in CUDA graphs."""
    found = {case: row["graph_ms"] for (scale, case), row in steps().items() if scale == 1.0}
    names = {
        "": "`nvfp4_qat`",
        ", dynamic": "`nvfp4_qat+dynamic`",
        ", learned": "`nvfp4_qat+learned`",
        ", 2-D": "`nvfp4_qat_2d`",
        ", 4/6": "`nvfp4_4o6_qat`",
    }
    ratios = [f"{found[f'nvfp4 fused{key}'] / found['fp16 fused']:.2f} ({name})" for key, name in names.items()]
    return ", ".join(ratios[:-1]) + " and " + ratios[-1]


def captured_recipe() -> str:
    """Images a second of a training that quantises gradients, in the epochs after the first: replayed and launched."""
    found = {row["cuda_graph"]: row["epochs"][1:] for row in result("captured_recipe_h200")["rows"]}
    replayed, launched = ([epoch["images_per_s"] for epoch in found[graph]] for graph in (True, False))
    times = sum(replayed) / sum(launched)
    return f"{min(replayed):.0f} to {max(replayed):.0f}, {min(launched):.0f} to {max(launched):.0f}, {times:.1f} times"


def step_ratio(case: str, other: str, scale: float = 1.0, key: str = "graph_ms") -> str:
    """Time of one row of that table over another's, in CUDA graphs."""
    found = steps()
    return f"{found[scale, case][key] / found[scale, other][key]:.2f}"


def four_over_six_training() -> str:
    """A training step with 4/6 beside the same without, in turn."""
    rows = []
    for row in result("four_over_six_cost_h200")["rows"]:
        low, high = row["ratio_quartiles"]
        times = (f"{row[key]:.2f}" for key in ("plain_ms", "four_over_six_ms"))
        rows.append([row["pair"], f"{row['scale']:g}", *times, f"{row['ratio']:.3f} [{low:.3f}, {high:.3f}]"])
    return markdown(["4/6 in", "scale", "NVFP4 without 4/6, ms", "4/6, ms", "ratio, quartiles of the pairs"], rows)


def scaling() -> str:
    """Training on several GPUs."""
    rows = []
    for name in ("scaling_h200", "scaling_quarter_h100"):
        found = result(name)
        for row in found["rows"]:
            distance = ", ".join(f"{100 * part:.2f} %" for part in row.get("relative_distance", ()))
            share = f"{100 * row['all_reduce_ms'] / row['step_ms']:.1f} %" if "step_ms" in row else ""
            speed = [f"{row['images_per_s']:.0f}", f"{row['epoch_s']:.0f}", f"{100 * row['efficiency']:.0f} %", share]
            step = "graph" if row.get("captured", row["gpus"] == 1) else "launched"  # of one GPU alone in older results
            rows.append([f"{found['scale']}", row["model"], f"{row['gpus']} x {row['batch']}", step, *speed, distance])
    head = ["scale", "model", "GPUs x images", "step", "images/s", "epoch, s", "efficiency", "all-reduce"]
    return markdown([*head, "difference of the loss"], rows, 4)


def fp4_training() -> str:
    """Steps of recipes that quantise gradients over the FP16 step of the same run, which is the best of all forms."""
    report, rows = result("fp4_training_h200"), []
    for row in sorted(report["rows"], key=lambda row: (-row["scale"], row["run"])):
        name = f"`{row['recipe']}`" + (", packed FP4 operands" if row["products"] == "fp4" else "")
        if not row["recipe"]:
            name = "FP16, fused" if not row["run"] else f"FP16, run {row['run'] + 1}"
        if "losses" not in row:
            rows.append([name, f"{row['scale']}", row["error"], *[""] * 5])
            continue
        graph = f"{row['graph_ms']:.1f}" if "graph_ms" in row else "none"
        losses = (row["losses"][0], statistics.mean(row["losses"][-10:]))
        cells = [f"{row['ms']:.1f}", graph, f"{over_best(row):.2f}", f"{row['peak_gb']:.2f}"]
        rows.append([name, f"{row['scale']}", *cells, *(f"{loss:.4f}" for loss in losses)])
    count = len(report["rows"][0]["losses"])
    head = ["", "scale", "ms a step", "in a CUDA graph, ms", "over the best FP16", "peak GB", "first loss"]
    return markdown([*head, f"mean of steps {count - 9} to {count}"], rows)


def fp4_over_best(which: str, form: str = ".1f", scale: float | None = None) -> str:
    """Emulated steps over their run's FP16 step, from and to: of recipes that quantise "both" ways, or "forward"."""
    rows = [row for row in result("fp4_training_h200")["rows"] if row["products"] == "emulated" and "ms" in row]
    rows = [row for row in rows if scale in (None, row["scale"]) and row["recipe"] != "quartet_2"]  # named beside it
    forward = {name for name, recipe in RECIPES.items() if not recipe.dgrad_gradient}
    return span((over_best(row) for row in rows if (row["recipe"] in forward) == (which == "forward")), form)


def recipe_over_best(recipe: str, products: str, scale: float) -> str:
    """A recipe's step over the FP16 step of the same run."""
    rows = result("fp4_training_h200")["rows"]
    (row,) = (row for row in rows if (row["recipe"], row["products"], row["scale"]) == (recipe, products, scale))
    return f"{over_best(row):.1f}"


def over_bound(scale: float) -> str:
    """A measured FP16 step on an H200 over its projected bound, which is of 8 images."""
    (bound,) = (
        row for row in result("roofline_training_projected")["rows"] if (row["gpu"], row["scale"]) == ("H200", scale)
    )
    report = result("fp4_training_h200")
    (row,) = (row for row in report["rows"] if row["scale"] == scale and not row["recipe"] and not row["run"])
    return f"{8 * row['graph_ms'] / images(report) / bound['fp16_ms']:.1f}"


def fused_losses(which: str) -> str:
    """Mean difference of 50 losses to those of the torch reference: of "fused", or of "reference, seed 1"."""
    return f"{result('convergence_h200')[which]['mean_difference']:.3f}"


def estimates() -> str:
    """Estimated COCO-2017 trainings on eight GPUs, from steps measured on one."""
    rows = []
    for name in ("coco2017", "coco2017_instance"):
        found = result(f"estimate_{name}_h200")
        for measured, whole in zip(found["measured"], found["estimated"], strict=True):
            speed = [f"{measured[key]:.0f}" for key in ("training", "loader")]
            rows.append([name, measured["model"], *speed, str(whole["epochs"]), f"{whole['hours']:.2f}"])
    head = ["configuration", "model", "images/s, one GPU", "loader, images/s", "epochs", "hours on 8 GPUs (estimated)"]
    return markdown(head, rows, 2)


def telemetry_cost(where: str = "h200") -> str:
    """A step with and without a sample of every layer, and the share of training time at one sample in 200 steps."""
    rows = []
    for row in result(f"telemetry_cost_{where}")["rows"]:
        times = [f"{row[name]:.1f}" for name in ("step_ms", "looked_at_ms")]
        rows.append([row["model"], f"{row['scale']:g}", *times, f"{100 * row['share']['1'] / 200:.2f} %"])
    return markdown(["model", "scale", "step, ms", "sampled step, ms", "share at N = 200"], rows)


def step_images_per_s() -> str:
    """Images a second of the fused FP16 step of scale 1.0 in a CUDA graph."""
    return f"{1000 * STEP_IMAGES / steps()[1.0, 'fp16 fused']['graph_ms']:.0f}"


def loading_rates() -> str:
    """ "243, 856 images/s with 0, 4" of the data loader."""
    rows = result("data_loading_h200")["rows"]
    rates, workers = (", ".join(f"{row[key]:.0f}" for row in rows) for key in ("images_per_s", "workers"))
    return f"{rates} images/s with {workers}"


def steps_by_cudnn() -> str:
    """Steps of our UNet by cuDNN's convolutions: the fused FP16 one of scale 0.25, and BF16 over FP16 of NVFP4."""
    ms = {
        (row["scale"], row["case"], row["autocast"]): row["graph_ms"]
        for row in result("precision_step_before_h200")["rows"]
    }
    small = " and ".join(f"{ms[0.25, 'fp16 fused', each]:.2f}" for each in ("fp16", "bf16"))
    ratios = " and ".join(
        f"{ms[each, 'nvfp4 fused', 'bf16'] / ms[each, 'nvfp4 fused', 'fp16']:.3f}" for each in (1.0, 0.25)
    )
    return f"{small} ms for the fused FP16 step of scale 0.25 (FP16, BF16), and {ratios} times for the NVFP4 steps"


def precision_times() -> str:
    """BF16 over FP16, of training steps and of packed networks in their faster form; what costs the most first."""
    rows = []
    pairs: dict[tuple[str, ...], dict[str, float]] = {}
    for row in result("precision_step_h200")["rows"]:
        case = row["case"].replace("general", "torch.compile")
        label = f"training step of our UNet, scale {row['scale']}, {case}"
        pairs.setdefault((label,), {})[row["autocast"]] = row["graph_ms"]
    for row in result("precision_models_h200")["rows"]:
        what = "NVFP4 QAT" if row["recipe"] != "fp16" else "torch.compile"
        pairs.setdefault((f"training step of {row['network']}, {what}",), {})[row["autocast"]] = row["graph_ms"]
    packed = ("precision_packed_h200", "precision_unet_h200")  # of our UNet the later one
    for case in {each["case"]: each for file in packed for each in result(file)["cases"]}.values():
        name, _, images = case["case"].rpartition(":")
        title = f"our UNet, scale {name}" if name[0].isdecimal() else name
        runs = {"fp16": [], "bf16": []}
        for form, run in case["runs"].items():
            runs["bf16" if form.endswith("bf16") else "fp16"].append(run["graph_ms"])
        pairs[f"packed NVFP4: {title}, {images.replace('x', ' x ')}",] = {rest: min(ms) for rest, ms in runs.items()}
    for (label,), times in pairs.items():
        if len(times) < 2:  # the benchmark ended between them
            continue
        ratio = times["bf16"] / times["fp16"]
        shown = f"**{ratio:.3f}**" if ratio > 1.03 else f"{ratio:.3f}"
        rows.append((ratio, [label, f"{times['fp16']:.2f}", f"{times['bf16']:.2f}", shown]))
    return markdown(
        ["one CUDA graph", "FP16, ms", "BF16, ms", "BF16 / FP16"],
        (cells for _, cells in sorted(rows, key=lambda row: -row[0])),
    )
