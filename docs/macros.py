"""Writes measured tables and figures into README.md and the pages of docs, from benchmarks/results/*.json.

    python docs/macros.py

A page has them where a code host shows it too, between marks that are comments:

    <!-- table kernels: written by python docs/macros.py -->            a name of TABLES or TEXTS, and arguments
    <!-- end of table -->
    of <!--= machine("claim_h200") -->NVIDIA H200, torch 2.11<!--/-->   a Jinja expression of FIGURES

Below a table stands as of when its numbers are. Other figures in sentences are written by hand. `tests/docs` compares.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2

import fp4deploy
from fp4deploy.experiments.sweep.results import gap_text

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for tools
from tools.results import origin_of  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
MINUS = "\N{MINUS SIGN}"


def result(name: str) -> Any:
    """One JSON file of benchmarks/results, by its name without the suffix; `as_of` says that it was read."""
    _read[name] = _document(name)
    return _read[name]


@lru_cache
def _document(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


_read: dict[str, Any] = {}


def as_of() -> str:
    """Dates and commits of what was read since `_read` was cleared."""
    found = dict.fromkeys(str(origin_of(document)) for document in _read.values())
    return f"*As of {', '.join(found)}.*"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table; the first `left` columns are aligned to the left, the others to the right."""
    lines = [head, ["---" if index < left else "---:" for index in range(len(head))], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def spread(value: dict[str, float]) -> str:
    """Mean and standard deviation over seeds, in points; of one seed its score."""
    deviation = "" if value["sd"] is None else f" ± {100 * value['sd']:.2f}"
    return f"{100 * value['mean']:.2f}{deviation}"


def points(values: Sequence[float]) -> str:
    """Scores of several seeds in points: "57.3, 56.1 and 56.3"."""
    texts = [f"{100 * value:.1f}" for value in values]
    return f"{', '.join(texts[:-1])} and {texts[-1]}"


def gap(value: dict[str, Any] | None) -> str:
    """A difference paired by seed, in points, with its 95 % interval where there are several seeds."""
    return "" if value is None else gap_text(value).replace("-", MINUS)


def microseconds(row: dict[str, float], key: str = "ms") -> str:
    """A time in microseconds."""
    return f"{row[key] * 1e3:.1f}"


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
    "FP16, fused": "fp16 fused",
    "NVFP4, torch reference": "nvfp4 unfused, reference",
    "NVFP4, kernels but not fused": "nvfp4 unfused",
    "NVFP4, kernels but not fused, delayed amax": "nvfp4 unfused, delayed",
    "NVFP4, fused": "nvfp4 fused",
    "ModelOpt 0.47 NVFP4 QAT, eager, NCHW (blocks along image width)": "peer: ModelOpt NVFP4 QAT",
    "ModelOpt 0.47 NVFP4 QAT, eager, channels_last": "peer: ModelOpt NVFP4 QAT, channels_last",
}


def _steps(name: str = "training_step_h200") -> dict[tuple[float, str], dict[str, Any]]:
    return {(row["scale"], row["case"]): row for row in result(name)["rows"]}


def training_step() -> str:
    """A training step of the UNet by scale: time launched from Python and in a CUDA graph, and peak memory."""
    return _step_table(STEP_ROWS, _steps())


def unfused_step() -> str:
    """The same in the forms that are not fused, and of ModelOpt."""
    return _step_table(UNFUSED_ROWS, _steps("training_step_unfused_h200"))


def _step_table(labels: dict[str, str], found: dict[tuple[float, str], dict[str, Any]]) -> str:
    rows = []
    for label, case in labels.items():
        cells = [f"{found[scale, case][key]:.1f}" for scale in (1.0, 0.25) for key in ("ms", "graph_ms", "peak_gb")]
        rows.append([label, *cells])
    head = [cell for scale in (1.0, 0.25) for cell in (f"scale {scale}, ms", "in a CUDA graph, ms", "peak GB")]
    return markdown(["", *head], rows)


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
    found, rows = _steps(), []
    for (scale, case), row in found.items():
        if f"{case.removesuffix(', recomputed')}, recomputed" not in {name for _, name in found}:
            continue
        kept = found[scale, case.removesuffix(", recomputed")]
        ratios = ["" if row is kept else f"{row[key] / kept[key]:.2f}" for key in ("graph_ms", "peak_gb")]
        rows.append(
            [f"{case}, scale {scale:g}", f"{row['ms']:.1f}", f"{row['graph_ms']:.1f}", f"{row['peak_gb']:.2f}", *ratios]
        )
    return markdown(["", "launched, ms", "in a CUDA graph, ms", "peak GB", "time", "memory"], rows)


def largest_batches() -> str:
    """The largest batch of a training step that fits into the memory of a GPU, and its speed."""
    rows = [
        [f"{row['case']}, scale {row['scale']:g}", str(row["batch"]), f"{row['images_per_s']:.0f}"]
        for row in result("largest_batch_h200")["rows"]
    ]
    return markdown(["", "largest batch", "images a second"], rows)


def recipe_ratios() -> str:
    """Time of a step of each recipe over that of FP16, both in CUDA graphs."""
    found = {case: row["graph_ms"] for (scale, case), row in _steps().items() if scale == 1.0}
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
    found = _steps()
    return f"{found[scale, case][key] / found[scale, other][key]:.2f}"


def four_over_six_training() -> str:
    """A training step with 4/6 beside the same without, in turn."""
    rows = []
    for row in result("four_over_six_cost_h200")["rows"]:
        low, high = row["ratio_quartiles"]
        times = (f"{row[key]:.2f}" for key in ("plain_ms", "four_over_six_ms"))
        rows.append([row["pair"], f"{row['scale']:g}", *times, f"{row['ratio']:.3f} [{low:.3f}, {high:.3f}]"])
    return markdown(["4/6 in", "scale", "plain, ms", "4/6, ms", "ratio, quartiles of the pairs"], rows)


KERNEL_ROWS = {
    "fake quantise": ("fake quantise, amax given",),
    "fake quantise with in-range mask": ("fake quantise + mask",),
    "the same, and the amax for the next step (delayed)": ("fake quantise + mask + amax of the same pass",),
    "Hadamard transform + fake quantise": ("Hadamard + fake quantise",),
    "fake quantise, amax computed in the call (two passes; 67 % is the limit)": ("fake quantise, amax found",),
    "packed codes and scales": ("packed, amax given",),
    "packed, scales in the 128x4 layout": ("packed swizzled",),
    "packed 4/6, MAE, fast / strict": ("4/6 mae fast packed", "4/6 mae strict packed"),
    "packed 4/6, MSE, fast / strict": ("4/6 mse fast packed", "4/6 mse strict packed"),
    "packed MXFP4": ("MXFP4 packed",),
    "packed, stochastic rounding": ("stochastic packed",),
    "packed, 16 x 16 blocks": ("2-D packed",),
}


def _kernels() -> dict[str, dict[str, float]]:
    return {row["case"]: row for row in result("kernels_h200")["torch.bfloat16"]}


def kernels() -> str:
    """Quantisation kernels on a bfloat16 matrix, against a copy that moves as many bytes."""
    found = _kernels()
    rows = []
    for label, cases in KERNEL_ROWS.items():
        times = " / ".join(microseconds(found[case]) for case in cases)
        shares = " / ".join(f"{100 * found[case]['share_of_copy']:.1f} %" for case in cases)
        rows.append([label, times, shares])
    return markdown(["", "µs", "share of copy bandwidth"], rows)


MODES = [(metric, mode) for metric in ("mae", "mse") for mode in ("fast", "strict")]


def four_over_six_cost() -> dict[str, str]:
    """Time of packing with 4/6 over that of packing without, by "metric mode"."""
    found = _kernels()
    plain = found["packed, amax given"]["ms"]
    return {f"{metric} {mode}": f"{found[f'4/6 {metric} {mode} packed']['ms'] / plain:.2f}" for metric, mode in MODES}


def four_over_six_ties() -> str:
    """The same for amax values at which products fall on rounding ties."""
    found = _kernels()
    plain = found["packed, amax given"]["ms"]
    rows = []
    for amax in ("5.8125", "5.0625", "5.25"):
        times = [found[f"4/6 {metric} {mode} packed, amax {amax}"]["ms"] for metric, mode in MODES]
        rows.append([amax, *(f"{time / plain:.2f}" for time in times)])
    return markdown(["amax", *(f"{metric.upper()}, {mode}" for metric, mode in MODES)], rows)


def _convolutions(rows: list[dict[str, Any]]) -> str:
    cells = []
    for row in rows:
        channels = f"{' + '.join(map(str, row['channels']))} -> {row['outputs']}"
        times = [f"{row[name] * 1e3:.0f}" for name in ("fp16_ms", "packed_ms")]
        cells.append([row["layer"], channels, f"{row['height']} x {row['width']}", *times, f"{row['ratio']:.2f}"])
    return markdown(["layer", "channels", "feature map", "cuDNN FP16, µs", "packed, µs", "speed ratio"], cells, 3)


def convolutions() -> str:
    """Every quantised convolution of the UNet at scale 1.0, batch 16."""
    return _convolutions(result("products_h200")["convolutions"])


def few_channels() -> str:
    """Layers with few channels: the first and the last layer, and those of scale 0.25."""
    return _convolutions(result("products_h200")["few_channels"])


def gemms() -> str:
    """GEMM and GEMV of packed operands against cuBLAS."""
    labels = {"M=1": "W4A16, 1 x 8192 x 8192", "M=8": "W4A16, 8 x 8192 x 8192", "M=16": "W4A16, 16 x 8192 x 8192"}
    rows = []
    for row in result("products_h200")["matrices"]:
        label = labels.get(row["case"].split()[-1], "W4A4, 4096 x 4096 x 4096")
        small = (
            [f"{100 * row['share_of_copy']:.0f} %", microseconds(row, "ordered_ms")] if "copy_ms" in row else ["", ""]
        )
        rows.append(
            [label, microseconds(row, "fp16_ms"), microseconds(row, "packed_ms"), f"{row['ratio']:.2f}", *small]
        )
    head = [
        "GEMM, M x N x K",
        "cuBLAS FP16, µs",
        "packed, µs",
        "speed ratio",
        "share of copy bandwidth",
        "in stream order, µs",
    ]
    return markdown(head, rows)


def _time_and_memory(row: dict[str, float]) -> list[str]:
    return [f"{row['ms']:.2f}", f"{row['peak_bytes'] / 2**20:.0f}"]


def packed_network() -> str:
    """The packed UNet against torch."""
    one, many = result("packed_unet_h200")["batches"]
    names = {
        "FP16, torch eager, channels_last": "fp16 eager",
        "FP16, torch.compile, no CUDA graph": "fp16 compiled",
        "NVFP4 as it is trained, fake-quantised": "nvfp4 emulated",
        "**packed**, CUDA graph": "packed",
    }
    rows = [[label, *_time_and_memory(one[name]), *_time_and_memory(many[name])] for label, name in names.items()]
    return markdown(["", "batch 1, ms", "MiB", "batch 16, ms", "MiB"], rows)


LATENCY_FORMS = {
    "FP16 eager NCHW": "fp16, eager, NCHW",
    "FP16 eager channels_last": "fp16, eager, channels_last",
    "torch.compile": "fp16, compiled",
    "max-autotune": "fp16, max-autotune",
    "packed FP16": "packed fp16",
    "**packed NVFP4**": "packed nvfp4",
}


def packed_latency() -> str:
    """Packed networks beside FP16 of torch in every form, each as one CUDA graph."""
    return _latencies("packed_latency_h200", LATENCY_FORMS)


def packed_fp16_over_nvfp4() -> str:
    """Time of our packed UNets with FP16 weights over NVFP4's, from and to."""
    runs = [case["runs"] for case in result("packed_latency_h200")["cases"]]
    found = sorted(run["packed fp16"]["graph_ms"] / run["packed nvfp4"]["graph_ms"] for run in runs)
    return f"{found[0]:.2f} to {found[-1]:.2f}"


def packed_own_networks() -> str:
    """The same of networks of other libraries."""
    return _latencies("packed_own_networks_h200", LATENCY_FORMS | {"NVFP4, node by node": "packed nvfp4, node by node"})


def _latencies(name: str, forms: dict[str, str]) -> str:
    rows = []
    for case in result(name)["cases"]:
        runs = [case["runs"].get(form, {}) for form in forms.values()]
        times = [f"{run['graph_ms']:.2f}" if "graph_ms" in run else "–" for run in runs]
        ratio = f"{case['ratio_nvfp4']:.2f}" if "ratio_nvfp4" in case else "–"
        model, _, images = case["case"].rpartition(":")
        title = f"scale {model}" if model[0].isdecimal() else model
        rows.append([f"{title}, {images.replace('x', ' x ')}", *times, ratio])
    return markdown(["one CUDA graph, ms", *forms, "NVFP4 / best of torch"], rows)


def direct_convolutions() -> str:
    """Convolutions of few channels: implicit GEMM and direct."""
    rows = []
    for row in result("direct_conv_h200")["rows"]:
        times = [f"{row[key]:.0f}" for key in ("implicit_us", "direct_us", "floor_us")]
        rows.append([row["case"], *times, f"{row['implicit_us'] / row['direct_us']:.2f}"])
    return markdown(["images, channels", "implicit GEMM, us", "direct, us", "floor, us", "faster by"], rows, 1)


def warpgroup_convolutions() -> str:
    """Convolutions of whole chunks of 64 channels: implicit GEMM, wgmma, cuDNN in FP16."""
    rows = []
    for row in result("warpgroup_conv_h200")["rows"]:
        times = [f"{row[f'{form}_us']:.0f}" for form in ("triton", "wgmma", "cudnn", "bytes_floor", "operations_floor")]
        rows.append([row["case"], *times, f"{row['cudnn_us'] / row['wgmma_us']:.2f}"])
    head = ["images, channels", "implicit GEMM, us", "wgmma, us", "cuDNN FP16, us", "bytes, us", "operations, us"]
    return markdown([*head, "speed against cuDNN"], rows, 1)


def wgmma_share(kind: str, median: bool = False) -> str:
    """Speed of the convolutions by wgmma that have `kind` in their name, over cuDNN's: from and to, or the median."""
    rows = (row for row in result("warpgroup_conv_h200")["rows"] if kind in row["case"])
    found = sorted(row["cudnn_us"] / row["wgmma_us"] for row in rows)
    return f"{statistics.median(found):.2f}" if median else f"{found[0]:.2f} to {found[-1]:.2f}"


def small_k_convolutions() -> str:
    """FP16 convolutions of small K: torch and the kernel."""
    rows = []
    for row in result("small_k_conv_h200")["rows"]:
        times = [f"{row[key]:.0f}" for key in ("torch_us", "kernel_us", "floor_us")]
        rows.append([row["case"], *times, f"{row['torch_us'] / row['kernel_us']:.2f}"])
    return markdown(["images, channels", "torch, us", "kernel, us", "floor, us", "faster by"], rows, 1)


CPU_FORMS = ("torch eager, channels_last", "torch.compile", "onnx fp16", "portable onnx", "packed fp16", "packed nvfp4")


def cpu_latency() -> str:
    """Artefacts on a CPU over torch eager in FP32."""
    found: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in result("cpu_latency_cpu")["rows"]:
        found.setdefault((row["case"], row["batch"], row["threads"]), {})[row["form"]] = row
    rows = []
    for (case, batch, threads), forms in found.items():
        label, size = _network_and_size(case)
        ratios = [f"{forms[form]['ratio']:.2f}" if _settled(forms.get(form)) else "–" for form in CPU_FORMS]
        eager = f"{forms['torch eager']['ms']:.1f}"
        rows.append([label, f"{batch} x {size}", str(threads), eager, *ratios])
    titles = (form.replace("portable", "decomposed") for form in CPU_FORMS)
    return markdown(["network", "images", "threads", "torch eager FP32, ms", *titles], rows, 2)


def _network_and_size(case: str) -> tuple[str, str]:
    """ "0.25:96x96" as ("UNet, scale 0.25", "96 x 96")."""
    name, _, size = case.rpartition(":")
    label = f"UNet, scale {name}" if ":" not in name else name.partition(":")[2].replace("/", ", ")
    return label, size.replace("x", " x ")


def cpu_slowest() -> str:
    """The artefact with the largest ratio to torch eager, and its ratio to torch eager in channels_last."""
    rows = [row for row in result("cpu_latency_cpu")["rows"] if row["form"] in CPU_FORMS[2:] and _settled(row)]
    slowest = max(rows, key=lambda row: float(row["ratio"]))
    place = {key: slowest[key] for key in ("case", "batch", "threads")}
    (peer,) = (
        row for row in result("cpu_latency_cpu")["rows"] if row["form"] == CPU_FORMS[0] and place.items() <= row.items()
    )
    label, size = _network_and_size(slowest["case"])
    form = slowest["form"].replace("portable", "decomposed")
    return (
        f"the largest ratio of an artefact is the {slowest['ratio']:.2f} of {form} ({label}, "
        f"{slowest['batch']} x {size}, {slowest['threads']} thread{'s' * (slowest['threads'] > 1)}), which is "
        f"{slowest['ms'] / peer['ms']:.2f} times torch eager in channels_last"
    )


def _settled(row: dict[str, Any] | None) -> bool:
    """Whether the quartiles of a ratio lie within half of it."""
    return row is not None and float(row["high"]) < 1.5 * float(row["low"])


def packed_input_encoding() -> str:
    """The packed UNet with the first and last layer in FP4, without and with the multi-term input encoding."""
    one, many = result("packed_digits_h200")["batches"]
    names = {"21 of 23": "21 of 23", "all": "all", "all, multi-term input": "all, digits"}
    rows = [[label, *_time_and_memory(one[name]), *_time_and_memory(many[name])] for label, name in names.items()]
    return markdown(["layers in FP4", "batch 1, ms", "MiB", "batch 16, ms", "MiB"], rows)


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
    """Steps of a training through FP4 GEMMs, of their emulation, and in FP16."""
    rows = []
    for row in result("fp4_training_h200")["rows"]:
        name = f"`{row['recipe']}`, `{row['products']}`" if row["recipe"] else "FP16, torch eager, channels_last"
        losses = [row["losses"][0], statistics.mean(row["losses"][-10:])]
        measured = [f"{row['ms']:.1f}", f"{row['peak_gb']:.2f}", *(f"{loss:.4f}" for loss in losses)]
        rows.append([name, str(row["scale"]), *measured])
    return markdown(
        [
            "",
            "scale",
            "ms a step",
            "peak GB",
            "first loss",
            f"mean of steps {len(row['losses']) - 9} to {len(row['losses'])}",
        ],
        rows,
        1,
    )


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


def projected() -> str:
    """Projected from published peaks; nothing was measured on a Blackwell GPU."""
    rows = []
    for row in result("roofline_projected")["totals"]:
        times = [f"{row[name] / 1e3:.2f}" for name in ("fp16_us", "nvfp4_us")]
        rows.append([row["gpu"], *times, f"{row['speedup']:.2f}"])
    return markdown(["projected", "FP16, ms", "NVFP4, ms", "ratio"], rows)


def projected_training() -> str:
    """Products and norms of a training step, projected from published peaks."""
    rows = []
    for row in result("roofline_training_projected")["rows"]:
        times = [f"{row[name]:.2f}" for name in ("fp16_ms", "fp4_ms")]
        rows.append([f"{row['scale']}", row["gpu"], *times, f"{row['ratio']:.2f}"])
    return markdown(["scale", "projected", "FP16, ms", "FP4 products, ms", "ratio"], rows, 2)


def settings() -> str:
    """Every key of `--set` and of a configuration file; `fp4deploy settings` prints the same."""
    from fp4deploy.train.config import Config, describe_settings

    def text(value: Any) -> str:
        return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)

    rows = [
        [f"`{setting.key}`", text(setting.default), setting.valid.replace("<", "&lt;"), setting.meaning]
        for setting in describe_settings(Config())
    ]
    return markdown(["setting", "default", "valid", "meaning"], rows, left=4)


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


def fuzzed() -> str:
    """Outcomes of `make fuzz`, and the machine of each row."""
    rows = result("fuzz_cpu")["rows"]
    counts = ("cases", "refused", "accepted", "defects")
    cells = [[str(row[key]) for key in ("loader", *counts)] + [f"{row['cores']} cores, {row['cpu']}"] for row in rows]
    total = [str(sum(row[key] for row in rows)) for key in counts]
    return markdown(["reader", *counts, "machine"], [*cells, ["all", *total, ""]])


def mutants() -> str:
    """Scores of the mutation tests."""
    rows = []
    for row in result("mutants_cpu")["rows"]:
        files = ", ".join(f"`{file.removeprefix('fp4deploy/')}`" for file in row["files"])
        counts = [str(row[key]) for key in ("mutants", "drawn", "killed")]
        rows.append([row["room"], files, *counts, f"{row['killed'] / row['drawn']:.0%}"])
    return markdown(["room", "files", "mutants", "drawn", "killed", "score"], rows, left=2)


FORMS = {"plugin": "TensorRT: SM100 to SM110", "fp16": "FP16 engine"}  # the others: TensorRT-RTX for SM120


def engine_forms(*networks: str) -> str:
    """What each form of an engine multiplies, and how large its plan is, for each network."""
    found = [row for row in result("engine_forms_sm120")["rows"] if row["network"] in networks]
    rows = []
    for form in dict.fromkeys(row["form"] for row in found if row["form"] != "fp8"):  # as auto, wherever auto has FP8
        own = {row["network"]: row for row in found if row["form"] == form}
        half = {row["network"]: row["plan_bytes"] for row in found if row["form"] == "fp16"}
        cells = [FORMS["fp16"] if form == "fp16" else f"`--conv {form}`"]
        cells.append(FORMS["plugin"] if form == "plugin" else "TensorRT-RTX: SM120")
        for name in networks:
            share = own[name]["shares"]
            cells.append(" / ".join(f"{100 * share.get(each, 0):.1f}" for each in ("FP4", "FP8", "FP16")))
            size = own[name].get("plan_bytes")
            cells.append(f"{size / 1e6:.1f} ({size / half[name]:.2f})" if size else "not built")
        rows.append(cells)
    titles = [text for name in networks for text in (f"`{name}`, %", "plan MB (of FP16's)")]
    return markdown(["form", "library", *titles], rows, 2)


def _families(rows: Iterable[dict[str, Any]], *keys: str) -> dict[tuple[str, ...], list[dict[str, Any]]]:
    """Cases of the emulator by the values of some keys."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(str(row[key]) for key in keys), []).append(row)
    return groups


def _span(values: Iterable[float], form: str = ",") -> str:
    found = sorted(values)
    low, high = format(found[0], form), format(found[-1], form)
    return low if low == high else f"{low} to {high}"


def emulated(name: str, *architectures: str) -> str:
    """Kernels in the PTX emulator, against the reference; a line for each family."""
    rows, cases = [], [case for case in result(name)["cases"] if case["for"] in architectures]
    for (arch, family), group in sorted(_families(cases, "for", "family").items()):
        cells = [str(len({row["kernel"] for row in group})), str(sum(row["launches"] for row in group))]
        cells += [_span(row["instructions"] for row in group), f"{sum(row['compared'] for row in group):,}"]
        cells += [*_verdict(group), _span((row["seconds"] for row in group), ".1f")]
        rows.append([arch.replace("sm_", "SM"), family, *cells])
    head = ["for", "family", "cases", "launches", "instructions a case", "values compared", "bit-equal", "hazards"]
    return markdown([*head, "CPU s a case"], rows, 2)


def _verdict(rows: list[dict[str, Any]]) -> list[str]:
    """Whether all are bit-equal, and how many hazards there were."""
    different, hazards = sum(row["different"] for row in rows), sum(bool(row["hazard"]) for row in rows)
    return [f"{different} differ" if different else "no" if hazards else "yes", str(hazards or "none")]


def emulated_architectures(name: str) -> str:
    """A line for each architecture."""
    rows = []
    cases = [case for case in result(name)["cases"] if case["for"] not in ("sm_100", "sm_120")]  # these: `emulated`
    for (arch,), group in _families(cases, "for").items():
        unknown = [row for row in group if "not implemented" in row["hazard"]]
        ran = [row for row in group if not row["unavailable"] and row not in unknown]
        missing = sorted({row["family"] for row in group if row["unavailable"]})
        cells = [f"{len({row['family'] for row in ran})}", str(len(ran)), f"{sum(row['compared'] for row in ran):,}"]
        cells += [*_verdict(ran), ", ".join(row["family"] for row in unknown), ", ".join(missing)]
        rows.append([arch.replace("sm_", "SM"), *cells])
    head = ["for", "families", "cases", "values compared", "bit-equal", "hazards", "not implemented"]
    return markdown([*head, "not compiled here"], rows)


def emulated_on_gpu(name: str) -> str:
    """The emulator's bytes against a GPU's."""
    found = result(name)["cases"]
    exact = _families((row for row in found if "model" not in row), "family")
    models = _families((row for row in found if "model" in row), "family", "model")
    rows = []
    for (family,), group in exact.items():
        cells = [str(len(group)), str(sum(row["launches"] for row in group))]
        cells += [f"{sum(row['device_bytes'] for row in group):,}", str(sum(row["device_different"] for row in group))]
        for model in ("hardware", "exact"):
            others = models.get((family, model))
            cells.append(f"{sum(row['device_different'] for row in others):,}" if others else "")
        rows.append([family, *cells])
    head = ["family", "cases", "launches", "bytes compared", "different", "cancelling: different"]
    return markdown([*head, "the same, sums taken as exact"], rows)


def self_test() -> str:
    """What the self-test showed on a GPU."""
    checks = result("selftest_h200")["checks"]
    rows = [[check["group"], check["claim"], check["status"], check["detail"]] for check in checks]
    return markdown(["", "claim", "status", "evidence or reason"], rows, 4)


def native_library() -> str:
    """The C library beside the Python runtime: elements that differ, and milliseconds."""
    rows = []
    for row in result("native_library_h200")["rows"]:
        every = row["kind"] == "digits"
        layers = "every layer in FP4" if every else "first and last layer in FP16"
        times = [f"{row[name]['graph_ms']:.2f}" for name in ("library", "python, own", "python, torch")]
        times[1] = "-" if every else times[1]
        differing = f"{sum(row['different'].values())} of {row['values']:,}"
        launched = [f"{row[name]['launched_ms']:.2f}" for name in ("library", "python, torch")]
        rows.append([f"{layers}, scale {row['scale']}", str(row["batch"]), differing, *times, *launched])
    head = ["UNet, 352 x 480", "batch", "logits that differ", "library", 'Python, `plain="kernel"`', "Python"]
    return markdown([*head, "library, launched", "Python, launched"], rows)


def large_images() -> str:
    """`predict --tile` by the size of the image: CPU time and peak memory of the command."""
    rows = [
        [
            f"{row['side']} x {row['side']}",
            str(row["tiles"]),
            f"{row['cpu_seconds']:.0f}",
            f"{row['peak_mib'] / 1024:.2f}",
            f"{row['all_logits_mib'] / 1024:.2f}",
        ]
        for row in result("large_images_cpu")["rows"]
    ]
    return markdown(["image", "tiles", "CPU, s", "peak memory, GiB", "logits of all pixels, GiB"], rows, 1)


def first_hour() -> str:
    """The commands of docs/first-hour.md by name: seconds by the clock and of the processor."""
    rows = []
    for row in result("first_hour_cpu")["rows"]:
        words = row["command"].split()
        name = " ".join(words[: 3 if words[1] == "data" else 2])
        rows.append([f"`{name}`", f"{row['seconds']:.0f}", f"{row['cpu_seconds']:.0f}"])
    return markdown(["command", "seconds", "of a processor"], rows, 1)


def plain_convolutions() -> str:
    """FP16 convolutions by this package and by cuDNN: elements that differ from the reference, microseconds."""
    rows = []
    for row in result("plain_conv_h200")["rows"]:
        times = [f"{1000 * row[name]:.0f}" for name in ("kernel_ms", "cudnn_ms")]
        label = f"{row['layer']} layer, scale {row['scale']}"
        rows.append([label, str(row["batch"]), f"{row['different']} of {row['values']:,}", *times])
    return markdown(["UNet, 352 x 480", "batch", "differ from the reference", "kernel, us", "cuDNN, us"], rows)


def fuzzed_networks() -> str:
    """Outcomes of random networks."""
    found = result("fuzz_networks_cpu")
    counts = [(name, count) for name, count in found["outcomes"].items() if not name.startswith("refused")]
    rows = [[name, f"{count:,}"] for name, count in counts]
    rows += [[reason, f"{count:,}"] for reason, count in found["reasons"].items()]
    return markdown(["outcome", "networks"], [*rows, ["all", f"{found['networks']:,}"]])


def transformers_table() -> str:
    """What became of networks of transformers and diffusers, from `prepare` to a packed network and an engine."""
    head = ["network", "layers in FP4", "of the parameters", "export", "ONNX Runtime", "packed", "FP4 GEMMs, fallbacks"]
    rows = []
    for row in result("transformers_cpu")["rows"]:
        planned, exported, packed = row.get("prepare", {}), row.get("export", {}), row.get("packed", {})
        runtime, engine = row.get("runtime", {}), row.get("engine", {"error": "not measured"})
        built = f"{engine['fp4_gemms']}, {engine['fallbacks']}" if "fallbacks" in engine else refusal(engine)
        layers = f"{planned['fp4_layers']} of {planned['layers']}" if "layers" in planned else refusal(planned)
        rows.append([
            f"`{row['class']}`" + (" \\*" if "files" in row else ""),
            layers,
            f"{100 * planned.get('fp4_share', 0):.0f} %",
            "agrees" if exported.get("passed") else refusal(exported),
            *(f"{each['distance']:.0e}" if "distance" in each else refusal(each) for each in (runtime, packed)),
            built,
        ])  # fmt: skip
    return markdown(head, rows)


def architectures() -> str:
    """What became of many architectures, from `prepare` to a packed network."""
    found = result("architectures_cpu")
    rows = []
    for row in found["rows"]:
        given = f" {row['arguments']}" if row.get("arguments") else ""
        untuned = " \\*" if row["model"] in found["untuned"] else ""
        planned, trained = row.get("prepare", {}), row.get("train", {})
        engine, packed = row.get("engine", {}), row.get("packed", {})
        canonical = row.get("canonical", {})
        gate = "yes" if canonical.get("passed") else refusal(canonical)
        share = (
            f"{100 * engine['fp4_mac_share']:.1f} %, {engine['fallbacks']}"
            if "fallbacks" in engine
            else refusal(engine)
        )
        stages = (canonical, row.get("portable", {}), engine, packed)
        sizes = [2 * planned.get("parameters", 0), *(stage.get("bytes") for stage in stages)]
        rows.append([
            f"`{row['model']}`{given.replace('|', ' ')}{untuned}",
            f"{planned['fp4_layers']} of {planned['layers']}" if "layers" in planned else refusal(planned),
            "{:.2f}, {:.2f}".format(*trained["losses"]) if "losses" in trained else refusal(trained),
            f"{gate}, {percent(canonical)}",
            distance_of_logits(row.get("portable", {})),
            share,
            percent(packed),
            ", ".join("-" if size is None else f"{size / 1e6:.1f}" for size in sizes),
        ])  # fmt: skip
    head = [
        "model", "layers in FP4", "QAT loss, first and last step", "canonical ONNX: gate, argmax",
        "decomposed ONNX: distance of logits, classes", "SM120 engine: FP4 MACs, fallbacks", "packed",
        "MB: FP16, canonical, decomposed, plan, packed",
    ]  # fmt: skip
    return markdown(head, rows)


def percent(stage: dict[str, Any]) -> str:
    """Pixels with torch's class, or that the stage was refused."""
    return f"{100 * stage['argmax']:.2f} %" if "argmax" in stage else refusal(stage)


def distance_of_logits(stage: dict[str, Any]) -> str:
    """Relative distance of the logits from torch's and the classes that occur, or that the stage was refused."""
    return f"{stage['distance']:.0e}, {stage['classes']}" if "classes" in stage else refusal(stage)


def refusal(stage: dict[str, Any]) -> str:
    """The first sentence of a stage's error."""
    return " ".join(stage.get("error", "not run").split()).partition(". ")[0].replace("|", " ")[:120]


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


README_ROWS = {
    "FP16 control": ("control", "0"),
    "NVFP4, calibrated only": ("ptq", "21 of 23"),
    "**NVFP4, QAT**": ("qat", "21 of 23"),
    "NVFP4, calibrated only, every layer": ("ptq_all", "all"),
    "NVFP4, QAT, every layer": ("qat_all", "all"),
    "**NVFP4, QAT, every layer, multi-term input**": ("qat_all_digits", "all"),
}


def camvid_readme() -> str:
    """CamVid in the README."""
    found = result("camvid_sweep_h200")["variants"]
    rows = []
    for label, (name, layers) in README_ROWS.items():
        row = found[name]
        cells = [text for key in ("best", "test") for text in (spread(row[key]), gap(row.get(f"gap_{key}")))]
        rows.append([label, layers, *cells])
    return markdown(["", "layers in FP4", "validation", "gap", "test", "gap"], rows, 2)


TABLES: dict[str, Callable[..., str]] = {
    function.__name__: function
    for function in (
        training_step, unfused_step, recomputed_steps, largest_batches, network_steps, four_over_six_training,
        kernels, four_over_six_ties, convolutions, few_channels, gemms,
        packed_network, packed_latency, packed_own_networks, cpu_latency,
        packed_input_encoding, camvid, camvid_quarter, ablation, dsb2018, detection, detection_closer,
        detection_within, fp4_products, projected_training, direct_convolutions, warpgroup_convolutions,
        small_k_convolutions,
        coco_samples, ptq_camvid, claim,
        modelopt_peer, image_input, scaling, fp4_training, estimates, telemetry_cost,
        sensitivity, tiles, projected, digit_recipes, settings, fuzzed, mutants, engine_forms, emulated,
        emulated_architectures, emulated_on_gpu, self_test, native_library, large_images, first_hour,
        plain_convolutions, fuzzed_networks, architectures, transformers_table, camvid_models, dsb2018_models,
        camvid_readme,
    )
}  # fmt: skip


def input_encoding_cost(batch: int) -> float:
    """Milliseconds that the multi-term input encoding adds: batch 1 (0), batch 16 (1)."""
    row = result("packed_digits_h200")["batches"][batch]
    return float(row["all, digits"]["ms"] - row["all"]["ms"])


def step_images_per_s() -> str:
    """Images a second of the fused FP16 step of scale 1.0 in a CUDA graph."""
    return f"{1000 * 16 / _steps()[1.0, 'fp16 fused']['graph_ms']:.0f}"


def loading_rates() -> str:
    """ "243, 856 images/s with 0, 4" of the data loader."""
    rows = result("data_loading_h200")["rows"]
    rates, workers = (", ".join(f"{row[key]:.0f}" for row in rows) for key in ("images_per_s", "workers"))
    return f"{rates} images/s with {workers}"


def commands(*names: str) -> str:
    """What measured some results, to be copied."""
    return "\n".join(["```", *(_document(name)["command"] for name in names), "```"])


SECTIONS = {
    "formats": "Formats",
    "qat": "Quantisation-aware training",
    "ptq": "Post-training quantisation",
    "export": "Export",
    "bench": "Runtimes",
    "models": "Generation with a cache",
    "predict": "Prediction",
    "plugins": "GEMM and convolution of packed tensors",
    "errors": "Errors",
}


RETURNED = (  # classes that public functions return
    *("formats.nvfp4.Nvfp4Tensor", "formats.mxfp4.Mxfp4Tensor", "ptq.quantize.Result"),
    *("export.to_onnx.ExportResult", "export.verify.outputs.Agreement", "export.to_packed.PackedResult"),
    *("export.engine.build.BuildResult", "export.ledger.ledger.Ledger", "export.ledger.ledger.LedgerRow"),
    *("bench.runtimes.open.OpenRuntime", "predict.predictor.Predictor", "predict.prediction.Prediction"),
    "models.generation.CachedDecoder",
)


def public_names() -> str:
    """The API reference: every name of `fp4deploy.__all__` and the classes that functions return, by section."""
    stub = ast.parse(Path(fp4deploy.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    paths = [*(homes[name] for name in sorted(fp4deploy.__all__, key=str.lower)), *RETURNED]
    parts = []
    for section, title in SECTIONS.items():
        own = [path for path in paths if path.startswith(f"{section}.")]
        rows = [[f"[`{path.rpartition('.')[2]}`](#fp4deploy.{path})", _about(path)] for path in own]
        parts += [f"## {title}", markdown(["name", "what it is"], rows, 2), *(f"::: fp4deploy.{path}" for path in own)]
    return "\n\n".join(parts)


def _about(path: str) -> str:
    """The first sentence of a docstring."""
    module, _, name = path.rpartition(".")
    value = getattr(importlib.import_module(f"fp4deploy.{module}"), name)
    if isinstance(value, dict):
        return f"One of {', '.join(f'`{key}`' for key in value)}, by name."
    text = str(inspect.getdoc(value))
    return re.split(r"(?<=[.])\s|\n\n", text)[0].replace("\n", " ").replace("|", "\\|")


TEXTS: dict[str, Callable[..., str]] = {"commands": commands, "public_names": public_names}


def table(name: str, *arguments: str) -> str:
    """What a mark names: a table and as of when its numbers are, or a text.

    Raises:
        KeyError: there is no such table.
    """
    _read.clear()
    text = (TABLES | TEXTS)[name](*arguments)
    return f"{text}\n\n{as_of()}" if _read else text


def machine(name: str) -> str:
    """GPU and versions of a result: "NVIDIA H200, torch 2.11.0+cu130"."""
    found = result(name)["machine"]
    return f"{found['gpu']}, torch {found['torch']}"


def triton_share(case: int) -> str:
    """Per cent of copy bandwidth of the Triton peer (1) and of the kernel here (0)."""
    return f"{100 * result('kernels_triton_h200')['torch.bfloat16'][case]['share_of_copy']:.0f}"


def command(name: str, *more: str) -> str:
    """What measured a result, as code; more: arguments that are not recorded with it."""
    return f"`{' '.join((result(name)['command'], *more))}`"


FIGURES: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        result, command, points, machine, step_ratio, four_over_six_cost, input_encoding_cost, loading_rates,
        step_images_per_s, captured_recipe, recipe_ratios, first_steps, cpu_slowest, instances_of_samples, claim_growth,
        image_loss, first_input_share, wgmma_share, packed_fp16_over_nvfp4, triton_share,
    )
}  # fmt: skip
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
BLOCK = re.compile(
    r"(<!-- table (.+): written by python docs/macros\.py -->\n)(?:(?!<!-- table ).*\n)*?(<!-- end of table -->)"
)
FIGURE = re.compile(r"(<!--= (.+?) -->)[^\n]*?(<!--/-->)")


def written(text: str) -> str:
    """A page with its tables and figures made again, each between its marks.

    Raises:
        KeyError: there is no such table.
        jinja2.UndefinedError: a result has no such value.
        ValueError: a mark has no other, or a line begins with one, which a code host would show as raw HTML.
    """
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)

    def figure(found: re.Match[str]) -> str:
        return f"{found[1]}{environment.from_string(f'{{{{ {found[2]} }}}}').render(FIGURES)}{found[3]}"

    def block(found: re.Match[str]) -> str:
        return f"{found[1]}{table(*found[2].split())}\n{found[3]}"

    for mark, whole in (("<!-- table ", BLOCK), ("<!-- end of table", BLOCK), ("<!--= ", FIGURE), ("<!--/-->", FIGURE)):
        if text.count(mark) != len(whole.findall(text)):
            raise ValueError(f"'{mark}' is not always one of two marks")
    if alone := re.search(r"^[\s*+>-]*<!--=.*", text, re.MULTILINE):
        raise ValueError(f"a line begins with a mark: {alone[0]}")
    return FIGURE.sub(figure, BLOCK.sub(block, text))


if __name__ == "__main__":
    for each in PAGES:
        each.write_text(written(each.read_text(encoding="utf-8")), encoding="utf-8")
