"""The Protocol of every runtime: what `evaluate` and `latency` call."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fp4deploy.models.card import ModelCard

Array = NDArray[np.float32]
TIMEOUT = 600.0  # seconds that one inference may take


class Runtime(Protocol):
    """A loaded artefact."""

    @property
    def name(self) -> str:
        """What runs it, for a table: "ONNX Runtime 1.31 (CPU)"."""
        ...

    @property
    def device(self) -> str:
        """Name of the CPU or GPU it runs on."""
        ...

    @property
    def precision(self) -> str:
        """Precision the model has in this runtime, "FP16" or "NVFP4", and whether it is emulated."""
        ...

    @property
    def card(self) -> ModelCard:
        """Input contract; `class_names` is empty where the file does not name them."""
        ...

    def infer(self, images: Array) -> Array:
        """Logits [N, classes, H, W] of normalised images [N, 3, H, W]; any N."""
        ...

    def time(self, images: Array, warmup: int, iterations: int, max_seconds: float) -> list[float]:
        """Milliseconds of each of up to `iterations` runs after `warmup` runs, stopping after `max_seconds`."""
        ...
