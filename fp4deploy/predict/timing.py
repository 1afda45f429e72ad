"""Latency from file to mask: decoding, preprocessing, network, postprocessing, with the copies between them.

`bench` times the network alone, between data that lies on the GPU. A user waits for more than that: an image is read
and decoded, copied, resized and normalised, computed, and its outputs are enlarged to the image's own size. Each stage
is timed by the clock, one image after the other, after one image that is not counted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fp4deploy.errors import InputError
from fp4deploy.predict.decode import CPU, Decoder
from fp4deploy.predict.predictor import Predictor

STAGES = ("decode", "preprocess", "network", "postprocess", "total")
COLUMNS = ("stage", "p50 ms", "p90 ms", "p99 ms")


@dataclass(frozen=True)
class StageTime:
    """Quantiles of a stage over the images, milliseconds."""

    stage: str
    p50: float
    p90: float
    p99: float


def stage_times(
    predictor: Predictor, paths: Sequence[Path], decoder: Decoder = CPU
) -> tuple[list[StageTime], dict[str, int]]:
    """Times of each of `STAGES` over image files, and how many were decoded by what; none is tiled, but made smaller.

    Raises:
        InputError: no image, or one that cannot be decoded.
    """
    if not paths:
        raise InputError("There is no image to time. Name files or a folder with images.")
    rows, names = zip(*[_times(predictor, path, decoder) for path in (paths[0], *paths)][1:], strict=True)
    columns = np.array([[*row, sum(row)] for row in rows]) * 1e3
    return [
        StageTime(stage, *(float(np.quantile(column, q)) for q in (0.5, 0.9, 0.99)))
        for stage, column in zip(STAGES, columns.T, strict=True)
    ], dict(Counter(names))


def _times(predictor: Predictor, path: Path, decoder: Decoder) -> tuple[list[float], str]:
    """Seconds of the four stages of one image, and what decoded it."""
    assert predictor.pipeline is not None
    start = time.perf_counter()
    (decoded,) = decoder.decode([path])
    if isinstance(decoded, InputError):
        raise decoded
    decode = time.perf_counter() - start
    row, answer = predictor.pipeline.timed(torch.as_tensor(decoded.pixels)[None], launches=True)
    start = time.perf_counter()
    predictor.predictions(answer)
    seconds = {part: value / 1e3 for part, value in row.items()}
    after = seconds["classes"] + seconds["copy out"] + time.perf_counter() - start
    return [decode, seconds["copy in"] + seconds["prepare"], seconds["network"], after], decoded.decoder
