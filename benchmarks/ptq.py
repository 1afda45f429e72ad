"""Post-training quantisation of an FP16 UNet by every method, on one split, with paired intervals.

    python -m benchmarks.ptq --data CAMVID --config configs/camvid.yaml --json benchmarks/results/ptq_camvid_h200.json

Trains FP16 first (`--epochs`, the settings of `--config`), or takes `--checkpoint`. Placements: `default`, all layers
but the first and the last; `all`, every layer, the image in the multi-term FP4 encoding, which takes the FP16 weights
as they are; `rgb`, every layer on the plain image. Rows `input` quantise the input of the first layer and nothing else:
what they lose without any training. Rows `fp8` are `amax` with the convolutions of `build --conv fp8`, emulated in
E4M3. Calibration images are of the training split, evenly spaced, at evaluation size. A drop is FP16 minus the row,
points of mIoU, with the 95 % interval of the gate's bootstrap over images. The file is written after every row;
`--seconds` skips rows when the time is over. Files of several seeds become one, with intervals over seeds:

    python -m benchmarks.ptq --gather seed0.json seed1.json seed2.json --command "what made them" --json FILE
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fp4deploy.bench.environment import environment
from fp4deploy.bench.evidence import PixelCounts
from fp4deploy.bench.gate.bootstrap import paired_drop, value
from fp4deploy.data import IGNORE, EvalTransform, open_dataset
from fp4deploy.experiments.sweep.results import interval
from fp4deploy.export.lowering.forecast import forecast
from fp4deploy.models import ModelCard, build_unet, load_weights, read_card
from fp4deploy.ptq import quantize
from fp4deploy.qat import Recipe, calibrate, prepare, quantized_layers
from fp4deploy.qat.load import round_to_deployed
from fp4deploy.qat.recipes import NVFP4_STATIC

Samples = list[tuple[torch.Tensor, torch.Tensor]]  # images [3, H, W] and masks [H, W], or batches of both
ROWS: list[tuple[str, str, str, str]] = [  # placement, method, correction, activations
    *(("default", method, "none", "") for method in ("amax", "4/6", "sweep", "gptq")),
    *(("default", method, "norm", "") for method in ("amax", "gptq")),
    *(("all", method, "none", "") for method in ("amax", "gptq")),
    *(("all", method, "norm", "") for method in ("amax", "gptq")),
    ("rgb", "input", "none", ""),
    ("all", "input", "none", ""),
    ("default", "brecq", "none", ""),
    ("all", "brecq", "none", ""),
    ("default", "brecq", "norm", ""),
    ("all", "brecq", "norm", ""),
    ("rgb", "amax", "none", ""),
    ("rgb", "brecq", "norm", ""),
    *(("default", method, "none", "") for method in ("percentile", "mse", "adaround", "faar")),
    *(("all", method, "none", "") for method in ("percentile", "mse", "4/6", "sweep", "adaround", "faar")),
    *(("default", "gptq", correction, "") for correction in ("bias", "both")),
    ("all", "gptq", "both", "mse"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--rows", help="placement:method:correction[:activations],...")
    parser.add_argument("--gather", type=Path, nargs="+", help="files of seeds 0, 1, ... to put together")
    parser.add_argument("--command", help="with --gather: commands that trained the models and measured them")
    options = parser.parse_args()
    if options.gather:
        documents = [json.loads(path.read_text(encoding="utf-8")) for path in options.gather]
        write(options.json, {"command": options.command or documents[0]["command"], **gather(documents)})
        return
    if options.data is None:
        parser.error("--data is needed")
    began = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = options.checkpoint or train(options, Path(folder))
        training = time.monotonic() - began
        card, test, images = opened(options, checkpoint, device)
        plain = build_unet(len(card.class_names), card.scale)
        load_weights(plain, checkpoint)
        encoded = build_unet(len(card.class_names), card.scale, digits=True)
        load_weights(encoded, checkpoint, to_encoding=True)
    networks = {"default": plain, "rgb": plain, "all": encoded}
    networks = {name: network.to(device).eval() for name, network in networks.items()}
    document: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks.ptq", *_arguments(options)]),
        "split": options.split,
        "images": len(test),
        "calibration_images": sum(map(len, images)),
        "scale": card.scale,
        "epochs": options.epochs if options.checkpoint is None else None,
        "training_seconds": round(training, 1),
        "environment": environment(),
        "rows": [],
    }
    fp16 = measure(plain, test, card.class_names, device)
    document["fp16_miou"] = value(fp16)
    document["fp16_encoded_miou"] = value(measure(encoded, test, card.class_names, device))
    print(
        f"FP16 {100 * value(fp16):.2f}, encoded {100 * document['fp16_encoded_miou']:.2f}, training {training:.0f} s",
        flush=True,
    )
    chosen = [tuple([*row.split(":"), ""][:4]) for row in options.rows.split(",")] if options.rows else ROWS
    write(options.json, document)
    for placement, method, correction, activations in chosen:
        if time.monotonic() - began > options.seconds:
            document["rows"].append({"placement": placement, "method": method, "skipped": "no time left"})
            write(options.json, document)
            continue
        row: dict[str, Any] = {"placement": placement, "method": method, "correction": correction}
        row |= {"activations": activations} if activations else {}
        try:
            model = copy.deepcopy(networks[placement])
            start = time.monotonic()
            if method == "input":
                prepare(model, Recipe("input", activation=NVFP4_STATIC), include="encoder.0.conv1")
                calibrate(model, images)
            elif method == "fp8":
                quantize(model, images, "amax", correction=correction)
                emulate_fp8(model)
            else:
                found = quantize(
                    model,
                    images,
                    method,
                    include=None if placement == "default" else "*",
                    correction=correction,
                    activations=activations or None,
                    iterations=options.iterations,
                )
                row["units"] = {name: [float(f"{e:.3g}") for e in errors] for name, errors in found.units.items()}
            row["seconds"] = round(time.monotonic() - start, 1)
            drop = paired_drop(fp16, measure(model, test, card.class_names, device)).metric
            row |= {name: round(100 * getattr(drop, name), 3) for name in ("drop", "low", "high")}
        except Exception as error:
            traceback.print_exc()
            row["error"] = f"{type(error).__name__}: {error}"[:300]
        document["rows"].append(row)
        print({key: each for key, each in row.items() if key != "units"}, flush=True)
        write(options.json, document)


def gather(seeds: list[dict[str, Any]]) -> dict[str, Any]:
    """One document of those of several seeds: each row's drops by seed, their mean and its interval by Student's t.

    A row that some seed does not have is named in "incomplete", and has None for that seed.

    Raises:
        ValueError: the documents differ in what they measured.
    """
    common = ("split", "images", "calibration_images", "scale")
    if any(each[key] != seeds[0][key] for each in seeds for key in common):
        raise ValueError(f"The files differ in one of: {', '.join(common)}.")
    machine = seeds[0]["environment"]
    found: dict[str, Any] = {
        "machine": {"gpu": machine["gpus"][0]["name"], "torch": machine["packages"]["torch"]},
        **{key: seeds[0][key] for key in common},
        **{key: [each[key] for each in seeds] for key in ("fp16_miou", "fp16_encoded_miou") if key in seeds[0]},
        "rows": [],
        "incomplete": [],
    }
    by_name = [{_name(row): row for row in each["rows"] if "drop" in row} for each in seeds]
    for row in seeds[0]["rows"]:
        name = _name(row)
        measured = [rows.get(name) for rows in by_name]
        drops = [each["drop"] for each in measured if each is not None]
        if len(drops) < len(seeds):
            found["incomplete"].append(name)
        if not drops:
            continue
        low, high = interval(drops)
        found["rows"].append(
            {
                **{key: row[key] for key in ("placement", "method", "correction", "activations") if key in row},
                "by_seed": [each and each["drop"] for each in measured],
                "over_images": [each and [each["low"], each["high"]] for each in measured],
                "mean": statistics.fmean(drops),
                "low": low,
                "high": high,
                "seconds": [each and each.get("seconds") for each in measured],
            }
        )
    return found


def _name(row: dict[str, Any]) -> str:
    name = ":".join((row["placement"], row["method"], row.get("correction", "none")))
    return f"{name}:{row['activations']}" if "activations" in row else name


def write(path: Path, document: dict[str, Any]) -> None:
    """What was measured so far."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


@torch.no_grad()
def emulate_fp8(model: torch.nn.Module) -> None:
    """Layers that `--conv fp8` makes FP8 convolutions: FP4 weights rounded to E4M3 by channel, inputs by tensor."""
    for layer in quantized_layers(model).values():
        module: Any = layer
        if forecast(layer, "fp8").compute != "FP8":
            continue
        axis = 1 if isinstance(layer, torch.nn.ConvTranspose2d) else 0
        weight = module.quantized_weight().movedim(axis, 0)
        scale = (weight.flatten(1).abs().amax(1) / 448).half().float().view(-1, *[1] * (weight.ndim - 1))
        module.weight.copy_(((weight / scale).to(torch.float8_e4m3fn).float() * scale).movedim(0, axis))
        step = float((module.input_amax / 448).half())
        module.recipe = replace(module.recipe, weight=None, activation=None)
        module.register_forward_pre_hook(lambda _, inputs, step=step: (_e4m3(inputs[0], step),))


def _e4m3(x: torch.Tensor, step: float) -> torch.Tensor:
    return ((x.float() / step).clamp(-448, 448).to(torch.float8_e4m3fn).float() * step).to(x.dtype)


def _arguments(options: argparse.Namespace) -> list[str]:
    given = {name: each for name, each in vars(options).items() if each not in (None, [], 1e9)}
    return [f"--{name.replace('_', '-')}={each}" for name, each in given.items()]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What names the model, the data and the result."""
    parser.add_argument("--data", type=Path)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--checkpoint", type=Path, help="FP16 checkpoint instead of training one")
    parser.add_argument("--epochs", type=int, default=200, help="of FP16, without --checkpoint")
    parser.add_argument("--set", action="append", default=[], help="setting of the training")
    parser.add_argument("--split", default="test")
    parser.add_argument("--images", type=int, default=64, help="calibration images")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--most", type=int, default=100_000, help="images of the split at most")
    parser.add_argument("--json", type=Path, required=True)


def opened(options: argparse.Namespace, checkpoint: Path, device: str) -> tuple[ModelCard, Samples, list[torch.Tensor]]:
    """The card of a checkpoint, the samples to measure on, and batches of calibration images on the device."""
    card = read_card(checkpoint)
    chosen = load(card, options.data, "train", options.images)
    images = [batch.to(device) for batch, _ in batches(chosen, options.batch)]
    return card, load(card, options.data, options.split, options.most), images


def train(options: argparse.Namespace, folder: Path) -> Path:
    """An FP16 checkpoint."""
    from fp4deploy.runs import create_run
    from fp4deploy.train import load_config, train_models

    settings = [f"data.root={options.data}", f"train.epochs={options.epochs}", "telemetry.every=0", *options.set]
    run = create_run(folder / "run")
    train_models(load_config(options.config, settings), run, ["fp16"])
    return run.checkpoint("fp16")


def load(card: ModelCard, data: Path, split: str, most: int) -> Samples:
    """Up to `most` samples, evenly spaced, as the card sizes and normalises them."""
    dataset = open_dataset(data, split, card.class_names[1:] if card.background else card.class_names)
    transform = EvalTransform(card.height, card.width, card.mean, card.std)
    count = min(most, len(dataset))
    return [transform(dataset.load(place * len(dataset) // count)) for place in range(count)]


def batches(samples: Samples, size: int) -> Samples:
    """Samples stacked."""
    parts = [samples[start : start + size] for start in range(0, len(samples), size)]
    return [(torch.stack([x for x, _ in part]), torch.stack([y for _, y in part])) for part in parts]


@torch.no_grad()
def measure(model: torch.nn.Module, samples: Samples, classes: tuple[str, ...], device: str) -> PixelCounts:
    """Counts of every image, the weights as deployed, FP16 autocast on a GPU."""
    deployed = copy.deepcopy(model).eval()
    round_to_deployed(deployed)
    count = len(classes)
    found = []
    for images, masks in batches(samples, 8):
        with torch.autocast(device, dtype=torch.float16, enabled=device == "cuda"):
            predicted = deployed(images.to(device)).argmax(1)
        for prediction, mask in zip(predicted, masks.to(device), strict=True):
            known = mask != IGNORE
            pairs = torch.bincount(mask[known] * count + prediction[known], minlength=count * count).view(count, count)
            found.append(torch.stack([pairs.diag(), pairs.sum(1), pairs.sum(0)], -1).cpu().numpy())
    return PixelCounts([str(number) for number in range(len(found))], classes, np.stack(found).astype(np.int64))


if __name__ == "__main__":
    main()
