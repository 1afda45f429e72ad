"""From decoded frames to masks: copies, resizing, network, classes and copies back, overlapped, over the network alone.

    python -m benchmarks.pipeline --json benchmarks/results/pipeline_h200.json

UNets of random weights, whose classes are no results; frames uint8 of `--frame`, networks of `--size`. A row for each
scale and form, as `fp4deploy bench --pipeline` measures it (`predict.pipeline`): milliseconds of a batch by part, each
to its end; `overlapped`, the whole with the next batch copied meanwhile; `over_network`, overlapped over the network's
part. Forms: `packed` (NVFP4); `packed, digits`, every layer in NVFP4 and the image read as FP4 terms, which the kernel
that prepares frames packs, and `packed, digits, images`, the same file given images; and the FP16 checkpoint in torch,
`eager`, `compiled` or `max-autotune`. `same_masks`: the share of pixels with the class that the host makes of the same
frames: Pillow, the form's logits, torch.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.peers import command, machine
from fp4deploy.bench.runtimes.open import open_runtime
from fp4deploy.data import IMAGE_MEAN, IMAGE_STD, EvalTransform
from fp4deploy.data.sample import Sample
from fp4deploy.export.to_packed import pack
from fp4deploy.models import ModelCard, build_unet, save_checkpoint
from fp4deploy.plugins.frames.class_map import class_map_reference
from fp4deploy.predict.pipeline import Pipeline
from fp4deploy.qat import calibrate, prepare

CLASSES = 20
FORMS = ["packed", "packed, digits", "packed, digits, images", "eager", "compiled"]


def checkpoint(folder: Path, scale: float, precision: str, size: tuple[int, int], digits: bool = False) -> Path:
    """A checkpoint of random weights; the same ones for each precision.

    digits: its image is encoded as FP4 terms, and every layer is quantised.
    """
    torch.manual_seed(0)
    model, recipe = build_unet(CLASSES, scale, digits), "nvfp4_qat" if precision == "nvfp4" else None
    if recipe:
        prepare(model, recipe, include=["*"] if digits else None)
        calibrate(model, [torch.randn(1, 3, *size)])
    names = tuple(f"class {number}" for number in range(CLASSES))
    card = ModelCard(precision, scale, names, *size, IMAGE_MEAN, IMAGE_STD, True, recipe, digits=digits)
    path = folder / f"{precision}-{scale}-{digits}.safetensors"
    save_checkpoint(path, model, card)
    return path


def measured(path: Path, form: str, frames: torch.Tensor) -> dict[str, Any]:
    """One form's times, and how many pixels have the class of the host."""
    runtime = open_runtime(path, **({} if form.startswith("packed") else {"form": form}))
    with patch.object(type(runtime), "image_amax", None) if form.endswith("images") else nullcontext():
        pipeline, size = Pipeline(runtime), (frames.shape[1], frames.shape[2])
    (answer,) = pipeline([frames])
    transform = EvalTransform(*runtime.card.size, runtime.card.mean, runtime.card.std)
    inputs = [transform(Sample(each, np.zeros(size, np.uint8), ""))[0] for each in frames.numpy()]
    logits = torch.from_numpy(runtime.infer(torch.stack(inputs).numpy()))
    expected = class_map_reference(logits, size, torch.uint8).numpy()
    same = float(np.mean([found == wanted for found, wanted in zip(answer.outputs, expected, strict=True)]))
    return {"form": form, "runtime": runtime.name, **pipeline.times(frames).to_json(), "same_masks": same}


def main() -> None:
    """Measure form after form, and write what there is after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--frame", type=int, nargs=2, default=[480, 640])
    parser.add_argument("--size", type=int, nargs=2, default=[352, 480])
    parser.add_argument("--scales", type=float, nargs="+", default=[0.25, 1.0])
    parser.add_argument("--forms", nargs="+", default=FORMS)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    shape = (arguments.batch, *arguments.frame, 3)
    frames = torch.from_numpy(np.random.default_rng(0).integers(0, 256, shape, np.uint8))
    found: dict[str, Any] = {"command": command(), "machine": machine(), "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        for scale in arguments.scales:
            for form in arguments.forms:
                packs, digits = form.startswith("packed"), "digits" in form
                precision = "nvfp4" if packs else "fp16"
                path = checkpoint(Path(folder), scale, precision, tuple(arguments.size), digits)
                if packs:
                    packed = path.with_suffix(".fp4")
                    pack(path, packed, verify=False)
                    path = packed
                found["rows"].append({"scale": scale, **measured(path, form, frames)})
                print(found["rows"][-1], flush=True)
                if arguments.json:
                    arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
