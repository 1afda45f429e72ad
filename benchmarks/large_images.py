"""`fp4deploy predict --tile` on large images: seconds and peak memory of the whole command.

    python benchmarks/large_images.py [--model FILE] [--json FILE]

Without `--model` an NVFP4 UNet of random weights is exported (scale 0.25, 8 classes, tiles of 512 x 512) and its
decomposed ONNX graph taken: neither time nor memory depends on what the weights are. A photo of random ellipses is
written as PNG, one for each of `--sizes`, and predicted in a process of its own, as a user calls it: start, decoding,
tiles (an overlap of a quarter), mask and overlay as PNG. Peak memory is the largest resident set of that process.
Beside it are what the logits of all pixels would take in FP32, which are never held at once, and the seconds of CPU,
which do not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw

from fp4deploy.bench.environment import environment
from fp4deploy.data.tiles import starts
from fp4deploy.export import export_checkpoint
from fp4deploy.models import ModelCard, build_unet, save_checkpoint
from fp4deploy.qat import calibrate, prepare

TILE, CLASSES, SCALE = 512, 8, 0.25
START = 128  # side of the first, small image: what the program itself takes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="an artefact with a model card; tiles are of its input size")
    parser.add_argument("--sizes", type=int, nargs="+", default=[START, 2048, 8192], help="sides of the images")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = arguments.model or random_model(folder)
        rows = [predicted(folder, model, side, arguments.batch) for side in arguments.sizes]
    if arguments.json:
        found = {
            "command": "python benchmarks/large_images.py",
            "machine": environment(),
            "model": arguments.model.name if arguments.model else f"UNet, scale {SCALE}, NVFP4, decomposed ONNX",
            "tile": TILE,
            "classes": CLASSES,
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


def random_model(folder: Path) -> Path:
    """The decomposed ONNX graph of an untrained NVFP4 UNet."""
    torch.manual_seed(0)
    model = build_unet(CLASSES, SCALE)
    prepare(model, "nvfp4_qat")
    calibrate(model, [torch.randn(1, 3, 128, 128)])
    names = tuple(f"class {number}" for number in range(CLASSES))
    rgb = ((0.5, 0.5, 0.5), (0.2, 0.2, 0.2))
    checkpoint = folder / "unet.safetensors"
    save_checkpoint(checkpoint, model, ModelCard("nvfp4", SCALE, names, TILE, TILE, *rgb, False, "nvfp4_qat"))
    export_checkpoint(checkpoint, folder / "unet.onnx", portable=True, verify=False)
    return folder / "unet.portable.onnx"


def photo(side: int) -> Image.Image:
    """Ellipses of random colours."""
    draw = np.random.default_rng(side)
    image = Image.new("RGB", (side, side), (90, 110, 120))
    canvas = ImageDraw.Draw(image)
    for _ in range(side * side // 20_000):
        left, top = draw.integers(0, side, 2).tolist()
        width, height = draw.integers(20, 400, 2).tolist()
        canvas.ellipse((left, top, left + width, top + height), fill=tuple(draw.integers(0, 256, 3).tolist()))
    return image


def predicted(folder: Path, model: Path, side: int, batch: int) -> dict[str, float | int]:
    """Seconds and peak memory of one call of the command."""
    image = folder / f"photo{side}.png"
    photo(side).save(image, compress_level=1)
    command = [sys.executable, "-m", "fp4deploy.cli", "--quiet", "predict", str(image), "--model", str(model), "--tile"]
    command += ["--batch", str(batch), "--out", str(folder / "out"), "--json"]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    document = json.loads(process.stdout.read())
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    if status or document["images"][0]["height"] != side:
        raise SystemExit(f"fp4deploy predict ended with {status}: {document}")
    overlap = document["tile"]["overlap"]
    tile = document["input"]["height"], document["input"]["width"]
    row: dict[str, float | int] = {
        "side": side,
        "batch": batch,
        "tiles": len(starts(side, tile[0], overlap)) * len(starts(side, tile[1], overlap)),
        "seconds": round(seconds, 1),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "peak_mib": used.ru_maxrss >> 10,
        "all_logits_mib": 4 * len(document["classes"]) * side * side >> 20,
    }
    print(row, flush=True)
    return row


if __name__ == "__main__":
    main()
