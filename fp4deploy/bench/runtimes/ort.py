"""ONNX Runtime on the CPU: portable files as they are, canonical files and those with TensorRT's operators through the
portable lowering in memory.

ONNX Runtime has no FP4 kernels, so the lowering decomposes NVFP4 into standard operators of FP32 and INT8: the numbers
are those of docs/numerics.md, the speed is that of an emulation.

ONNX has loops, and one without an end would never return to Python. A timer asks ONNX Runtime to stop, which it does
between two operators.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fp4deploy.bench.environment import cpu_name
from fp4deploy.bench.latency import time_cpu
from fp4deploy.bench.runtimes.like import Like
from fp4deploy.bench.runtimes.onnx_file import find_card, is_fp4, ports_of, require_card, weights
from fp4deploy.bench.runtimes.ports import Outputs, fed, in_batches, named, warn_of_others
from fp4deploy.bench.runtimes.precision import of_onnx, of_rest
from fp4deploy.bench.runtimes.protocol import EXPORT_AGAIN, TIMEOUT, Array, Given, checked, described, finite
from fp4deploy.detection.decode import FoundBoxes
from fp4deploy.errors import InputError
from fp4deploy.export import read_onnx, to_portable
from fp4deploy.export.onnx.boxes import OUTPUTS
from fp4deploy.export.onnx.canonical import foreign_graph, is_canonical, rest_of_file
from fp4deploy.export.onnx.session import FATAL, portable_session
from fp4deploy.export.onnx.trt_operators import has_trt_operators
from fp4deploy.models.card import ModelCard
from fp4deploy.system.onnx_runtime import ort

LIKE = "Give --like the network's own classes and size."


class OrtRuntime:
    """An `.onnx` file; one without a model card runs, but what it takes and gives is not known (`card`)."""

    def __init__(self, path: Path, timeout: float = TIMEOUT, like: Like | None = None) -> None:
        """`timeout`: most seconds that one inference may take; `like`: the card, where the file has none."""
        model = read_onnx(path)
        self._path, self._timeout = path, timeout
        self._card = find_card(model, path)
        self._advice = EXPORT_AGAIN if self._card else LIKE
        with foreign_graph(path):
            fp4, quantized = is_fp4(model, self._card), of_onnx(model, self._card)
            own = weights(model)
            lowered = is_canonical(model) or has_trt_operators(model)
            self._session = portable_session(to_portable(model) if lowered else model)
        self.inputs = ports_of(self._session, path)
        self._names = [each.name for each in self._session.get_outputs()]
        self.precision = f"{quantized} (emulated)" if quantized else of_rest(rest_of_file(model), False)
        if self._card is None:
            self.precision = self.precision if quantized or is_canonical(model) else own
            if like is not None:
                first = self._session.get_outputs()[0]
                self._card = like.card(self.inputs, (first.name, first.shape), fp4, path)
        form = "CPU, decomposed in memory" if lowered else "CPU"
        self.name = f"ONNX Runtime {ort.__version__} ({form})"
        self.device = cpu_name()

    @property
    def card(self) -> ModelCard:
        """The card in the file's metadata.

        Raises:
            InputError: there is none.
        """
        return require_card(self._card, self._path)

    def __repr__(self) -> str:
        return described(self, self._path)

    def infer(self, images: Array) -> Array:
        """Logits float32 [N, classes, H, W]."""
        found: Array = in_batches(self.inputs, images, self._first, self._path, self._advice)
        if self._card is None:
            warn_of_others(self._names, self._path)
            return finite(found, images, self._path) if found.dtype.kind == "f" else found
        return checked(found, images, self._card, self._path, self._advice)

    def _first(self, images: Array) -> Any:
        """The first output of one call."""
        return self._outputs(fed(self.inputs, [images], self._path))[0]

    def __call__(self, *inputs: Any) -> Outputs:
        """The output of these inputs, or several by name (`ports`)."""
        return named(self._names, self._outputs(fed(self.inputs, inputs, self._path)))

    @property
    def decodes(self) -> bool:
        """Whether the file gives boxes as well (`export.onnx.boxes`)."""
        return self._names[1:] == list(OUTPUTS)

    def detect(self, images: Array) -> list[FoundBoxes]:
        """Boxes [K, 4] in pixels of the input, classes [K] and scores [K] of each image, of a file that `decodes`."""
        _, image, boxes, classes, scores = self._outputs(fed(self.inputs, [images], self._path))
        if not _are_boxes(image, boxes, classes, scores, len(self.card.class_names) - 1):
            raise InputError(f"{self._path} answers no boxes of its classes. Export it again: fp4deploy export")
        return [
            (boxes[image == number], classes[image == number], scores[image == number]) for number in range(len(images))
        ]

    def time(self, images: Given, warmup: int, iterations: int, max_seconds: float) -> list[float]:
        """Milliseconds a session run."""
        feed = fed(self.inputs, [images], self._path)
        self._outputs(feed)  # an inference that ends once ends again on the same images; the timed ones start no thread
        return time_cpu(lambda: self._session.run(None, feed), warmup, iterations, max_seconds)

    def _outputs(self, feed: Mapping[str, object]) -> list[Any]:
        options = ort.RunOptions()
        options.log_severity_level = FATAL
        timer = threading.Timer(self._timeout, setattr, (options, "terminate", True))
        timer.daemon = True
        timer.start()
        try:
            return list(self._session.run(None, feed, options))
        except Exception as error:
            if not options.terminate:
                with foreign_graph(self._path):
                    raise
            raise InputError(
                f"{self._path} did not finish an inference within {self._timeout:g} seconds; a loop in it may have no "
                "end. If it only needs longer, give it more with --timeout."
            ) from error
        finally:
            timer.cancel()


def _are_boxes(image: Array, boxes: Array, classes: Array, scores: Array, most: int) -> bool:
    """Whether these are images [K], boxes [K, 4], classes [K] from 1 to `most`, and scores [K]."""
    count = len(boxes) if boxes.ndim else 0
    return (
        (image.shape, boxes.shape, classes.shape, scores.shape) == ((count,), (count, 4), (count,), (count,))
        and boxes.dtype.kind == scores.dtype.kind == "f"
        and image.dtype.kind == classes.dtype.kind == "i"
        and bool(np.isfinite(boxes).all() and ((scores >= 0) & (scores <= 1)).all())
        and bool(((classes >= 1) & (classes <= most)).all())
    )
