"""The Protocol of every runtime: what `evaluate` and `latency` call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fp4deploy.bench.runtimes.ports import Outputs, Port
from fp4deploy.errors import InputError
from fp4deploy.models.card import ModelCard

Array = NDArray[np.float32]
Given = Array | Mapping[str, Any]  # images, or inputs by name
EXPORT_AGAIN = "Export it again: fp4deploy export"
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
        """Logits [N, classes, H, W] of normalised images [N, 3, H, W]; any N. Of volumes with D before H.

        Raises:
            NotFinite: NaN or Inf of finite images.
        """
        ...

    def time(self, images: Array, warmup: int, iterations: int, max_seconds: float) -> list[float]:
        """Milliseconds of each of up to `iterations` runs after `warmup` runs, stopping after `max_seconds`."""
        ...


class OpenRuntime(Runtime, Protocol):
    """What `open_runtime` gives: it is called like the module, with one input or several (`ports`).

    `time` takes a dict by the names of the inputs too; `infer` takes images and gives the first output.
    """

    @property
    def inputs(self) -> tuple[Port, ...]:
        """The file's inputs, in order."""
        ...

    def __call__(self, *inputs: object) -> Outputs:
        """The output of these inputs, or several by name; arrays in order, or one dict by the names of the inputs."""
        ...

    def time(self, images: Given, warmup: int, iterations: int, max_seconds: float) -> list[float]:
        """As of `Runtime`."""
        ...


def described(runtime: Runtime, path: object) -> str:
    """The `repr` of a runtime: one line."""
    return f"{type(runtime).__name__}({str(path)!r}, {runtime.name}, {runtime.precision})"


def checked(outputs: NDArray[Any], images: Array, card: ModelCard, source: object, advice: str = EXPORT_AGAIN) -> Array:
    """Outputs as float32, where they are what the card says of these images.

    A file may be anyone's, and whoever reads its outputs relies on their shape. Without names of classes in the card
    their number is open, and so is the size.

    Raises:
        InputError: another type or shape, NaN or Inf; `source` begins the message.
    """
    size = images.shape[2:] if card.head is None else card.head.output_size(*images.shape[2:])
    expected = (len(images), card.channels, *size)
    if card.channels:
        fits = outputs.shape == expected
    else:
        fits = outputs.ndim == len(expected) and len(outputs) == len(images) and min(outputs.shape) > 0
    if not fits or outputs.dtype.kind != "f":
        raise InputError(
            f"{source} answers {outputs.dtype} {list(outputs.shape)} where its card promises float {list(expected)}. "
            f"{advice}"
        )
    return finite(outputs.astype(np.float32, copy=False), images, source)


def finite(outputs: Array, images: Array, source: object) -> Array:
    """Outputs of finite images, where they are finite: the largest of NaNs is class 0, and a score like any other.

    Raises:
        NotFinite: NaN or Inf; `source` begins the message.
    """
    if not np.isfinite(outputs).all() and np.isfinite(images).all():
        raise NotFinite(source, outputs)
    return outputs


class NotFinite(InputError):
    """Outputs with NaN or Inf of finite images, perhaps of one of them alone."""

    def __init__(self, source: object, outputs: Array | None = None) -> None:
        self.outputs = outputs
        super().__init__(
            f"{source} answers NaN or Inf for finite images: its weights hold such values, or it computes some beyond "
            "FP16's largest, 65504. Export an earlier checkpoint or, for the latter: fp4deploy export --rest auto"
        )
