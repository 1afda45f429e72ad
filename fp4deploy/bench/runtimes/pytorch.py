"""torch: a checkpoint as it was trained, NVFP4 by fake quantisation.

Autocast on CUDA, in FP16 or what else the card's rest is, FP32 on the CPU (CPU convolutions in half precision are
slower and rounded otherwise). Weights are those that ship: `qat.load_model` has rounded them as an engine keeps them.

| form | what runs on CUDA |
|---|---|
| `eager` | the module, launched kernel by kernel |
| `graph` | the module as one CUDA graph |
| `compiled` | `torch.compile`, as one CUDA graph |
| `max-autotune` | the same in that mode: Triton's convolutions compete with cuDNN's |

All but `eager` compute an FP16 model with FP16 weights (or of another rest) in channels_last, the fastest that torch
offers, and are what a packed network, which is one CUDA graph too, should be compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fp4deploy.bench.environment import cpu_name
from fp4deploy.bench.latency import time_cpu, time_cuda
from fp4deploy.bench.runtimes.ports import Outputs, fed, image_port, require_fitting
from fp4deploy.bench.runtimes.precision import of_layers, of_rest
from fp4deploy.bench.runtimes.protocol import Array, Given, described, finite
from fp4deploy.errors import InputError, UnavailableError
from fp4deploy.plugins.runtime.cache import keep_compiled_private
from fp4deploy.qat import load_model, quantized_layers
from fp4deploy.rest import rest_of

MODES = {"compiled": "default", "max-autotune": "max-autotune-no-cudagraphs"}  # of torch.compile
FORMS = ("eager", "graph", *MODES)
WARMUP = 3


class TorchRuntime:
    """A `.safetensors` checkpoint on CUDA where there is a GPU, else on the CPU.

    Raises:
        InputError: an unknown form.
        UnavailableError: a form other than "eager" without a GPU.
    """

    def __init__(self, path: Path, device: str | None = None, form: str = "eager", rest: str | None = None) -> None:
        if form not in FORMS:
            raise InputError(f"The form of torch '{form}' is unknown. Valid: {', '.join(FORMS)}.")
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.cuda = self._device.type == "cuda"
        if form != "eager" and not self.cuda:
            raise UnavailableError(f"torch runs a checkpoint as '{form}' on a GPU only. Without one: --torch eager")
        model, self.card = load_model(path, device=str(self._device), rest=rest)
        self._rest = rest_of(self.card)
        self._path, self.inputs = path, (image_port(self.card.inputs.channels, self.card.inputs.axes),)
        self._graph = form != "eager"
        self._run: tuple[torch.Tensor, Callable[[], torch.Tensor]] | None = None
        self._half = self._graph and self.card.precision == "fp16"
        if self._graph:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if self._half:
            model = model.to(self._rest.dtype)
        self._model: Callable[[torch.Tensor], Any] = model
        if form in MODES:
            keep_compiled_private()
            self._model = torch.compile(model, mode=MODES[form])
        self.name = f"torch {torch.__version__.partition('+')[0]} ({self._where(form)})"
        self.device = torch.cuda.get_device_name(self._device) if self.cuda else cpu_name()
        quantized = of_layers(each.recipe.precision for each in quantized_layers(model).values())
        self.precision = f"{quantized} (emulated)" if quantized else of_rest(self._rest, self.cuda)

    def __repr__(self) -> str:
        return described(self, self._path)

    @property
    def where(self) -> torch.device:
        """What it computes on."""
        return self._device

    def on_device(self, images: torch.Tensor) -> torch.Tensor:
        """Logits of images that lie there; of a form that is a CUDA graph the next call overwrites them."""
        require_fitting(self.inputs[0], np.dtype(np.float32), images.shape, self._path)
        if not self._graph:
            return self._forward(images)
        if self._run is None or self._run[0].shape != images.shape:
            with torch.inference_mode(False):  # a later call may be outside of that mode
                held = self._as_computed(images.clone())
            self._run = held, captured(lambda: self._forward(held), self._device)
        self._run[0].copy_(images)
        return self._run[1]()

    def infer(self, images: Array) -> Array:
        """Logits float32 [N, classes, H, W]."""
        return finite(self._forward(self._prepared([images])).float().cpu().numpy(), images, self._path)

    def __call__(self, *inputs: object) -> Outputs:
        """The logits; a checkpoint's network reads images alone, given as an array or a dict by its name."""
        return self._forward(self._prepared(inputs)).float().cpu().numpy()

    def time(self, images: Given, warmup: int, iterations: int, max_seconds: float) -> list[float]:
        """Milliseconds a forward pass."""
        held = self._prepared([images])
        if not self.cuda:
            return time_cpu(lambda: self._forward(held), warmup, iterations, max_seconds)
        call = captured(lambda: self._forward(held), self._device) if self._graph else lambda: self._forward(held)
        stream = torch.cuda.current_stream(self._device)
        return time_cuda(call, stream, warmup, iterations, max_seconds)

    def _prepared(self, inputs: Sequence[object]) -> torch.Tensor:
        (images,) = fed(self.inputs, inputs, self._path).values()
        return self._as_computed(torch.from_numpy(images).to(self._device))

    def _as_computed(self, images: torch.Tensor) -> torch.Tensor:
        """Images in the type and layout that the form computes in."""
        x = images.to(self._rest.dtype) if self._half else images
        return x.contiguous(memory_format=torch.channels_last) if self._graph else x

    def _forward(self, images: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(), self._rest.autocast(self._device.type, enabled=not self._half):
            return self._model(images)

    def _where(self, form: str) -> str:
        if not self.cuda:
            return "CPU, FP32"
        what = self._rest.name if self._half or self._rest.name == "fp32" else f"{self._rest.name} autocast"
        how = f", torch.compile {MODES[form]}" if form in MODES else ""
        return f"CUDA, {what}{how}{', one graph' if self._graph else ''}"


def captured(call: Callable[[], torch.Tensor], device: torch.device) -> Callable[[], torch.Tensor]:
    """`call` as a CUDA graph, captured after runs that compile and tune; a run overwrites the last one's result."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.device(device), torch.cuda.stream(stream):
        for _ in range(WARMUP):
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        result = call()

    def replay() -> torch.Tensor:
        graph.replay()
        return result

    return replay
