"""From JPEG files to pixels: Pillow by threads, nvJPEG by batches, and how far pixels and masks of the two differ.

    python -m benchmarks.decoding PHOTOS --model unet.fp4 --json benchmarks/results/decoding_h200.json

Needs an NVIDIA GPU. A row for each decoder and batch: milliseconds an image, of all files through
`predict.decode.Decoder`, the best of `--repeats`; frames of nvJPEG stay on the GPU. `differs`: of 255, between Pillow's
values and nvJPEG's, of the files that nvJPEG decodes; `other_class`: the share of their pixels whose class is another
in the model's masks.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.peers import command, machine
from fp4deploy.bench.environment import cpu_name
from fp4deploy.bench.runtimes.open import open_for_images
from fp4deploy.predict.decode import CPU, Decoded, Decoder, gpu, host_pixels
from fp4deploy.predict.predictor import Predictor
from fp4deploy.predict.sources import find_sources


def row(decoder: Decoder, paths: list[Path], repeats: int) -> dict[str, Any]:
    """The time of an image."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        found = sum(isinstance(each, Decoded) and each.decoder == decoder.name for each in decoder(paths))
        times.append(1e3 * (time.perf_counter() - start) / len(paths))
    about = {"decoder": decoder.name, "threads": decoder.threads, "batch": decoder.at_once}
    return {**about, "images": len(paths), "by_it": found, "ms_an_image": min(times[1:])}


def differences(one: list[Decoded], other: list[Decoded]) -> dict[str, float]:
    """Of values 0..255 of two decoders: mean, largest, and the share that differs by more than 8."""
    counts = np.zeros(256, np.int64)
    for first, second in zip(one, other, strict=True):
        values = np.abs(host_pixels(first.pixels).astype(np.int16) - host_pixels(second.pixels))
        counts += np.bincount(values.ravel(), minlength=256)
    total, values = counts.sum(), np.arange(256)
    largest, above = int(values[counts > 0].max()), float(counts[9:].sum() / total)
    return {"mean": float((counts * values).sum() / total), "largest": largest, "share_above_8": above}


def other_class(predictor: Predictor, one: list[Decoded], other: list[Decoded]) -> float:
    """The share of pixels that have another class."""
    pairs = [[each.pixels for each in pair] for pair in zip(one, other, strict=True)]
    masks = [[predictor.predict(host_pixels(each)).mask for each in pair] for pair in pairs]
    return float(np.mean([(first != second).mean() for first, second in masks]))


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    paths = [source.path for source in find_sources([arguments.photos]) if not source.is_video]
    decoders = [CPU, *(gpu(torch.device("cuda", 0), batch) for batch in arguments.batches)]
    found: dict[str, Any] = {"command": command(), "machine": machine() | {"cpu": cpu_name()}}
    found["rows"] = [row(decoder, paths, arguments.repeats) for decoder in decoders]
    pairs = [
        (first, second)
        for first, second in zip(CPU(paths), decoders[-1](paths), strict=True)
        if isinstance(first, Decoded) and isinstance(second, Decoded) and first.decoder != second.decoder
    ]
    one, other = ([pair[place] for pair in pairs] for place in (0, 1))
    found["differs"] = differences(one, other)
    if arguments.model:
        found["other_class"] = other_class(Predictor(open_for_images(arguments.model)), one, other)
    print(json.dumps(found, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
