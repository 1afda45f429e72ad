"""Accuracy of every model of a sweep on the split that chose nothing, and of the engines that its models become.

    fp4deploy sweep configs/sweep_engine_camvid.yaml --data CAMVID --out runs/engine_camvid
    python -m benchmarks.engine_accuracy runs/engine_camvid --forms plugin auto gemm --json FILE --command ...

An engine computes the lowered graph, not what was trained (`export.lowering.emulation`). Each form of `build --conv`
that is named is exported, lowered and decomposed here. Its standard operators run in torch, on a GPU where there is
one: FP32 with TF32 off, rounded to FP16 and FP8 where the graph says so. A test compares this with ONNX Runtime.
`plugin` multiplies FP4 by FP4 in every quantised layer, W4A4; its difference from `trained`, the checkpoint in
autocast, is that of rounding between layers.

A drop is the compared model of the same seed minus the row, in points, with the gate's paired bootstrap over images;
over seeds there are two intervals: Student's t of the drops, and a bootstrap of their mean, in which all seeds share
the images drawn. `changed` is the share of pixels or voxels whose class is not that of `trained`.

Counts are kept beside each checkpoint, so that sweeps of single seeds, measured by several processes at a time, become
one file:

    python -m benchmarks.engine_accuracy runs/seed0 runs/seed1 runs/seed2 --gather --json FILE --command ...

A network that answers NaN or Inf has no score: the row says so. A training that failed is listed with its error.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn

from benchmarks.peers import origin
from benchmarks.sweep_result import SETTINGS_OF_THE_MACHINE, machine
from fp4deploy.bench.evaluate import BATCH, evaluate
from fp4deploy.bench.evidence import KINDS, PixelCounts, read_evidence, write_pixels
from fp4deploy.bench.gate.baseline import METRICS
from fp4deploy.bench.gate.bootstrap import Interval, mean_drop, paired_drop, value
from fp4deploy.bench.records import Evidence
from fp4deploy.bench.runtimes.pytorch import TorchRuntime
from fp4deploy.data import IGNORE, TEST, VAL, eval_loader, has_split, validation_set
from fp4deploy.data.inspection.digest import DigestedDataset
from fp4deploy.data.part import part_of
from fp4deploy.errors import InputError
from fp4deploy.experiments.sweep.results import interval
from fp4deploy.export import export_graph
from fp4deploy.export.lowering.emulation import emulated_engine
from fp4deploy.export.lowering.lower import CONV_MODES, lower
from fp4deploy.interop.onnx_network import OnnxNetwork
from fp4deploy.interop.onnx_operators import Call
from fp4deploy.models.card import ModelCard
from fp4deploy.qat import load_model, quantized_layers
from fp4deploy.qat.plan import eight_bits
from fp4deploy.rest import rest_of
from fp4deploy.system.files import atomic_write
from fp4deploy.system.onnx_runtime import ort
from fp4deploy.tasks import task_of
from fp4deploy.train import load_config

Batches = list[tuple[torch.Tensor, torch.Tensor]]
TRAINED = "trained"  # the checkpoint itself, in autocast
FILE = "accuracy.json"
ROUNDED = {
    onnx.TensorProto.FLOAT16: torch.float16,
    onnx.TensorProto.BFLOAT16: torch.bfloat16,
    onnx.TensorProto.FLOAT8E4M3FN: torch.float8_e4m3fn,
}
E4M3_MAX = 448.0
OF_A_RUN = ("status", "epochs", "best_epoch", "best", "last", "skipped_steps")  # best and last: of the validation split


class Rounding(OnnxNetwork):
    """An emulated engine in torch: casts to 16 and 8 bits round, which a file that is read for training ignores."""

    def _compute(self, call: Call, path: str, image: torch.Tensor) -> Any:
        x, kind = call.inputs[0], ROUNDED.get(call.get("to", 0)) if call.op == "Cast" else None
        if kind is not None and isinstance(x, torch.Tensor):
            x = x.clamp(-E4M3_MAX, E4M3_MAX) if kind is torch.float8_e4m3fn else x  # ONNX saturates, torch gives NaN
            return x.to(kind).to(image.dtype)
        return super()._compute(call, path, image)


def engine(canonical: onnx.ModelProto, conv: str, device: str) -> OnnxNetwork:
    """What an engine of one `--conv` form computes. canonical: as `export_graph` gives it, of one size."""
    folded = _folded(emulated_engine(canonical, conv))
    opset = next(each.version for each in folded.opset_import if each.domain in ("", "ai.onnx"))
    return Rounding(folded.graph, opset).eval().to(device)


def _folded(model: onnx.ModelProto) -> onnx.ModelProto:
    """With weights decoded: ONNX Runtime computes what depends on constants alone."""
    with tempfile.TemporaryDirectory() as folder:
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(Path(folder) / "folded.onnx")
        options.log_severity_level = 4
        ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return onnx.load(options.optimized_model_filepath)


def main() -> None:
    """Measure sweeps, and put what is measured together."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="of sweeps with the same variants")
    parser.add_argument("--forms", nargs="*", choices=CONV_MODES, default=[], help="of `build --conv`")
    parser.add_argument("--gather", action="store_true", help="measure nothing: only put together")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--command", default="", help="what made the sweeps and this file")
    parser.add_argument("--data", default="", help="with --json: what the data is, where it is not as published")
    parser.add_argument("--limit", type=int, help="images of the split, evenly spaced")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if not options.gather:
        for folder in options.folders:
            measure_sweep(folder, options.forms, options.limit)
    if options.json:
        found = {"command": options.command, "data": options.data, **gather(options.folders)}
        with atomic_write(options.json) as temporary:
            temporary.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(text(found))


def measure_sweep(folder: Path, forms: list[str], limit: int | None = None) -> None:
    """Write the counts of every finished run that has none yet, beside its checkpoint."""
    for row in json.loads((folder / "sweep.json").read_text(encoding="utf-8"))["variants"].values():
        for run in row["runs"].values():
            path = folder / run["path"] / row["model"]
            if run["status"] == "done" and not (path / FILE).is_file():
                data = Path(str(load_config(folder / run["path"] / "config.yaml").data.root))
                found = {**origin(), "machine": machine(), **measure(path / "best.safetensors", data, forms, limit)}
                with atomic_write(path / FILE) as temporary:
                    temporary.write_text(json.dumps(found), encoding="utf-8")


def measure(checkpoint: Path, data: Path, forms: list[str], limit: int | None = None) -> dict[str, Any]:
    """Counts of a checkpoint and, where it is quantised, of its engines; by form, with the split they are of."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    split = TEST if has_split(data, TEST, False) else VAL
    try:
        model, card = load_model(checkpoint, device)
    except InputError as error:  # weights beyond the range of FP16
        return {"split": split, "rest": "", "forms": {TRAINED: {"error": str(error)[:300]}}}
    about = {"split": split, "rest": card.rest}
    if card.volume is not None:
        return {**about, "forms": {TRAINED: _volumes(checkpoint, data, split, limit)}}
    names, batches = _batches(card, data, split, limit, device)
    with rest_of(card).autocast(device):
        trained = classes_of(model, batches)
    found = {TRAINED: _scored(trained, batches, names, card)}
    if forms and card.precision == "nvfp4":
        if any(eight_bits(layer.recipe) for layer in quantized_layers(model).values()):
            forms = [form for form in forms if form == "auto"]  # what it was trained for
        canonical = export_graph(model.cpu(), card.input_shape, card)
        for form in forms:
            predicted = classes_of(engine(canonical, form, device), batches)
            found[form] = _scored(predicted, batches, names, card) | {"layers": _layers(canonical, form)}
            if predicted is not None and trained is not None:
                pairs = list(zip(predicted, trained, strict=True))
                found[form]["changed"] = float(torch.cat([(a != b).flatten() for a, b in pairs]).float().mean())
            print(f"{checkpoint}: {form} {found[form].get('value')}", flush=True)
    return {**about, "forms": found}


def _batches(card: ModelCard, data: Path, split: str, limit: int | None, device: str) -> tuple[list[str], Batches]:
    """Names of the images, and images with masks on the device, as `bench` sizes and normalises them."""
    dataset = DigestedDataset(part_of(validation_set(card, data, split), limit))
    transform = task_of(card).transform(card.size, card.mean, card.std)
    loaded = [(x.to(device), y.to(device)) for x, y in eval_loader(dataset, transform, BATCH, 0)]
    return [dataset.names[index] for index in range(len(dataset))], loaded


@torch.inference_mode()
def classes_of(network: nn.Module, batches: Batches) -> list[torch.Tensor] | None:
    """The class of every pixel, of each batch [N, H, W]; None where an output is NaN or Inf."""
    found = []
    for images, _ in batches:
        logits = network(images)
        if not torch.isfinite(logits).all():
            return None
        found.append(logits.argmax(1))
    return found


def _scored(
    predicted: list[torch.Tensor] | None, batches: Batches, names: list[str], card: ModelCard
) -> dict[str, Any]:
    if predicted is None:
        return {"error": "answers NaN or Inf"}
    number, cells = len(card.class_names), []
    for prediction, masks in (
        (a, b) for x, (_, y) in zip(predicted, batches, strict=True) for a, b in zip(x, y, strict=True)
    ):
        known = masks != IGNORE
        pairs = torch.bincount(masks[known] * number + prediction[known], minlength=number**2).view(number, number)
        cells.append(torch.stack([pairs.diag(), pairs.sum(1), pairs.sum(0)], -1).cpu().numpy())
    counts = PixelCounts(names, card.class_names, np.stack(cells).astype(np.int64))
    return {"value": value(counts), "evidence": write_pixels(counts).model_dump(mode="json")}


def _volumes(checkpoint: Path, data: Path, split: str, limit: int | None) -> dict[str, Any]:
    try:
        found = evaluate(TorchRuntime(checkpoint), data, BATCH, split=split, limit=limit)
    except InputError as error:  # NaN or Inf
        return {"error": str(error)[:300]}
    counts = read_evidence(found.evidence, split)
    assert isinstance(counts, PixelCounts)
    return {"value": value(counts), "evidence": found.evidence.model_dump(mode="json")}


def _layers(canonical: onnx.ModelProto, conv: str) -> dict[str, int]:
    """Quantised layers by the precision that the engine multiplies them in."""
    layers = [each for each in lower(canonical, conv, "tensorrt").layers if each.requested in ("FP4", "FP8")]
    return {name: sum(each.compute == name for each in layers) for name in sorted({each.compute for each in layers})}


def gather(folders: list[Path]) -> dict[str, Any]:
    """Of every variant and form: scores by seed, and drops from the variant that it is compared with."""
    sweeps = [(each, json.loads((each / "sweep.json").read_text(encoding="utf-8"))) for each in folders]
    variants: dict[str, dict[str, Any]] = {}
    kept: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}  # variant, form -> by seed
    about: dict[str, Any] = {}
    for folder, sweep in sweeps:
        for name, row in sweep["variants"].items():
            mine = variants.setdefault(name, {key: row[key] for key in ("model", "settings", "note", "against")})
            for seed, run in row["runs"].items():
                path = folder / run["path"] / row["model"] / FILE
                if run["status"] == "failed":
                    mine.setdefault("failed", {})[seed] = run["error"]
                if not path.is_file():
                    continue
                found = json.loads(path.read_text(encoding="utf-8"))
                about |= {key: found[key] for key in ("commit", "date", "machine", "split")}
                mine["rest"] = found["rest"]
                mine.setdefault("runs", {})[seed] = {key: run[key] for key in OF_A_RUN if key in run}
                for form, scored in found["forms"].items():
                    kept.setdefault((name, form), {})[seed] = scored
    rows: list[dict[str, Any]] = []
    for (name, form), by_seed in sorted(kept.items(), key=lambda item: (list(variants).index(item[0][0]), 0)):
        seeds = sorted(by_seed, key=int)
        scores = {seed: by_seed[seed].get("value") for seed in seeds}
        known = [100 * each for each in scores.values() if each is not None]
        line: dict[str, Any] = {"variant": name, "form": form, "score": scores}
        line |= {"mean": statistics.fmean(known) if known else None}
        line |= {"sd": statistics.stdev(known) if len(known) > 1 else None}
        for key in ("changed", "error"):
            line[key] = {seed: by_seed[seed][key] for seed in seeds if by_seed[seed].get(key) is not None} or None
        line |= {"layers": by_seed[seeds[0]].get("layers")}
        for key, other in (("drop", variants[name]["against"]), ("drop_of_form", name if form != TRAINED else None)):
            if other is not None and (other, TRAINED) in kept:
                line[key] = drops(kept[other, TRAINED], by_seed)
        rows.append({key: each for key, each in line.items() if each is not None})
        if form == TRAINED:
            variants[name] |= _of_a_sweep(rows[-1])
    counts = next((_counts(each) for forms in kept.values() for each in forms.values() if "evidence" in each), None)
    about |= {"images": len(counts.images), "metric": _metric(counts)} if counts else {}
    return {
        **about,
        "file": sweeps[0][1]["file"],
        "settings": [each for each in sweeps[0][1]["settings"] if not each.startswith(SETTINGS_OF_THE_MACHINE)],
        "variants": variants,
        "rows": rows,
    }


def _of_a_sweep(row: dict[str, Any]) -> dict[str, Any]:
    """Score and gap of the test split under the names that results of sweeps have; gaps are in points, signed."""
    found: dict[str, Any] = {}
    if row.get("sd") is not None:
        found["test"] = {"mean": row["mean"] / 100, "sd": row["sd"] / 100}
    if (drop := row.get("drop", {})).get("low") is not None:
        by_seed = {seed: -each["drop"] for seed, each in drop["by_seed"].items()}
        found["gap_test"] = {"mean": -drop["mean"], "low": -drop["high"], "high": -drop["low"], "by_seed": by_seed}
    return found


def drops(baseline: dict[str, dict[str, Any]], other: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Points lost, by seed with the interval over images, and their mean with both intervals over seeds."""
    pairs = {
        seed: (_counts(baseline[seed]), _counts(other[seed]))
        for seed in sorted(other, key=int)
        if seed in baseline and all("evidence" in each[seed] for each in (baseline, other))
    }
    by_seed = {seed: _points(paired_drop(*pair).metric) for seed, pair in pairs.items()}
    if not pairs:
        return {"by_seed": by_seed}
    points = [each["drop"] for each in by_seed.values()]
    low, high = interval(points)
    over_images = _points(mean_drop(list(pairs.values())))
    return {"by_seed": by_seed, "mean": statistics.fmean(points), "low": low, "high": high, "over_images": over_images}


def _counts(scored: dict[str, Any]) -> PixelCounts:
    counts = read_evidence(Evidence(**scored["evidence"]), "counts")
    assert isinstance(counts, PixelCounts)
    return counts


def _metric(counts: PixelCounts) -> str:
    return METRICS[next(name for name, kind in KINDS.items() if isinstance(counts, kind))]


def _points(drop: Interval) -> dict[str, float]:
    return {name: round(100 * getattr(drop, name), 4) for name in ("drop", "low", "high")}


def text(found: dict[str, Any]) -> str:
    """A short table, largest drop first."""
    lines = [f"{found['file']}, {found.get('metric')} on {found.get('images')} images of {found.get('split')}"]
    order = partial(_drop_of, key="drop")
    for row in sorted(found["rows"], key=order, reverse=True):
        scores = " ".join("NaN" if each is None else f"{100 * each:.2f}" for each in row["score"].values())
        lines.append(
            f"  {row['variant']:<16}{row['form']:<9}{scores:<20}{_said(row, 'drop')}{_said(row, 'drop_of_form')}"
        )
    for name, row in found["variants"].items():
        lines += [f"  {name} seed {seed} failed: {why[:150]}" for seed, why in row.get("failed", {}).items()]
    return "\n".join(lines)


def _drop_of(row: dict[str, Any], key: str) -> float:
    return float(row.get(key, {}).get("mean", float("-inf")))


def _said(row: dict[str, Any], key: str) -> str:
    drop = row.get(key, {})
    if "mean" not in drop:
        return ""
    t = "" if drop["low"] is None else f" t[{drop['low']:+.2f},{drop['high']:+.2f}]"
    images = drop["over_images"]
    return f"  {key} {drop['mean']:+.2f}{t} images[{images['low']:+.2f},{images['high']:+.2f}]"


if __name__ == "__main__":
    main()
