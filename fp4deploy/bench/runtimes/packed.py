"""Packed networks (`.fp4`): on a GPU as one CUDA graph of packed kernels, on the CPU decoded in torch.

Normalised images go in as FP32 and are rounded where the network computes (on a GPU in FP16, or what else its rest is).
In addition to accuracy and latency, the memory of weights and activations is known from the graph, here and in FP16;
weights that a GPU decodes at load count as decoded.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from fp4deploy import __version__
from fp4deploy.bench.environment import cpu_name
from fp4deploy.bench.latency import time_cpu, time_cuda
from fp4deploy.bench.runtimes.ports import (
    Outputs,
    Port,
    fed,
    fixed_batch,
    in_batches,
    named,
    require_fitting,
    require_one_input,
    warn_of_others,
)
from fp4deploy.bench.runtimes.precision import of_layers, of_rest
from fp4deploy.bench.runtimes.protocol import EXPORT_AGAIN, Array, Given, described, finite
from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.graph.capture import file_names
from fp4deploy.models.card import ModelCard
from fp4deploy.packed import PackedFile, PackedNetwork, activation_bytes, full_precision, plain_bytes, read_packed
from fp4deploy.packed.capture import CapturedNetwork, graphs_enabled
from fp4deploy.packed.graph import Input, Layer, is_quantized, quantizes_itself
from fp4deploy.packed.network import Result, has_mixed_kernel
from fp4deploy.packed.program import compile_mode
from fp4deploy.plugins import why_unavailable
from fp4deploy.plugins.quantize.input_encoding import image_shape
from fp4deploy.plugins.quantize.norm_pack import FeatureMap
from fp4deploy.plugins.runtime.fallback import in_torch
from fp4deploy.precisions import LABELS
from fp4deploy.rest import rest_of


class PackedRuntime:
    """A `.fp4` file on CUDA where there is a GPU, else on the CPU."""

    def __init__(self, path: Path, device: str | None = None) -> None:
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        file = read_packed(path)
        self._path = path
        self.inputs = tuple(map(_port, file.graph.inputs))
        self._names = file_names([each.name for each in file.graph.outputs], [each.name for each in file.graph.inputs])
        self.card = file.card or card_of(file)
        self.cuda = self._device.type == "cuda"
        network = PackedNetwork(file, self._device, os.environ.get("FP4DEPLOY_PACKED_WEIGHTS") or None)
        self._network = CapturedNetwork(network, graphs_enabled(), compile_mode())
        self._missed = in_torch(self._device).missed
        self.device = torch.cuda.get_device_name(self._device) if self.cuda else cpu_name()
        self.precision = _precision(file, self.cuda)
        self._memory = memory(file)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of weights and activations (`memory`); on a GPU of the weights that it holds by now."""
        return self._memory | ({"weight_bytes": self._network.weights_bytes} if self.cuda else {})

    @property
    def name(self) -> str:
        """With what has computed the network so far: a kernel may be refused, and a capture may fail."""
        if not self.cuda:
            return f"fp4deploy {__version__} packed (CPU, decoded)"
        refused, missed = in_torch(self._device)
        some = " and torch" if refused or missed > self._missed else ""
        own = self._network.network.has_kernels and not why_unavailable(self._device)
        kernels = f"kernels{some}" if own else "torch"
        kernels = "compiled" if self._network.programs else kernels
        graph = ", one graph" if self._network.replays else ""
        return f"fp4deploy {__version__} packed (CUDA, {kernels}{graph})"

    def __repr__(self) -> str:
        return described(self, self._path)

    @property
    def where(self) -> torch.device:
        """What it computes on."""
        return self._device

    @property
    def image_amax(self) -> torch.Tensor | None:
        """What images are packed with that `on_device` takes packed; None where it takes none."""
        return None if fixed_batch(self.inputs) else self._network.image_amax

    def on_device(self, images: FeatureMap) -> torch.Tensor:
        """Logits of images that lie there; on a GPU the next call overwrites them.

        Args:
            images: float [N, 3, H, W], or what `packed_image` makes of them with `image_amax`.
        """
        require_one_input(self.inputs, self._path)

        def first(part: FeatureMap) -> torch.Tensor:
            require_fitting(self.inputs[0], np.dtype(np.float32), image_shape(part), self._path)
            return first_output(self._network.prepared(part)() if part is images else self._network(part))

        whole, run = (images.codes, lambda _: first(images)) if isinstance(images, Nvfp4Tensor) else (images, first)
        found: torch.Tensor = in_batches(self.inputs, whole, run, self._path, EXPORT_AGAIN)
        return found

    def infer(self, images: Array) -> Array:
        """Logits float32 [N, classes, H, W]."""
        outputs: Array = in_batches(self.inputs, images, self._first, self._path, EXPORT_AGAIN)
        if self._network.network.file.card is None:
            warn_of_others(self._names, self._path)
        return finite(outputs, images, self._path)

    def _first(self, images: Array) -> Array:
        """The first output of one call."""
        found: Array = first_output(self._network(*self._given([images]))).float().cpu().numpy()
        return found

    def __call__(self, *inputs: object) -> Outputs:
        """The output of these inputs, or several by name (`ports`)."""
        outputs = self._network(*self._given(inputs))
        return named(self._names, [each.float().cpu().numpy() for each in tree_leaves(outputs)])

    def time(self, images: Given, warmup: int, iterations: int, max_seconds: float) -> list[float]:
        """Milliseconds a forward pass."""
        call = self._network.prepared(*self._given([images]))
        if not self.cuda:
            return time_cpu(call, warmup, iterations, max_seconds)
        stream = torch.cuda.current_stream(self._device)
        return time_cuda(call, stream, warmup, iterations, max_seconds)

    def _given(self, inputs: Sequence[object]) -> list[torch.Tensor]:
        feed = fed(self.inputs, inputs, self._path)
        return [torch.from_numpy(feed[port.name]) for port in self.inputs]


def memory(file: PackedFile, batch: int = 1) -> dict[str, int]:
    """Bytes of weights and of the activations that are live at once, of this file and of its model in FP16."""
    card = file.card or card_of(file)
    return {
        "weight_bytes": file.weight_bytes,
        "weight_bytes_fp16": plain_bytes(file.graph),
        "activation_bytes": activation_bytes(file.graph, *card.size, batch=batch),
        "activation_bytes_fp16": activation_bytes(full_precision(file.graph), *card.size, batch=batch),
    }


def card_of(file: PackedFile) -> ModelCard:
    """A card for a network that was packed without one: sizes of its example, no class names, no normalisation."""
    height, width = next((each.shape[2:4] for each in file.graph.inputs if len(each.shape) == 4), (1, 1))
    packed = any(map(is_quantized, file.graph.nodes))
    return ModelCard(
        "nvfp4" if packed else "fp16", 1.0, (), height, width, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), False,
        architecture="own", rest=file.graph.rest,
    )  # fmt: skip


def _port(each: Input) -> Port:
    """Free axes but the batch are left to the network, which says what sizes would fit."""
    free = {axis: "N" if axis == 0 else None for axis in each.free}
    extents = tuple(free.get(axis, size) for axis, size in enumerate(each.shape))
    return Port(each.name, np.dtype(each.dtype), extents)


def first_output(outputs: Result) -> torch.Tensor:
    """The first of a network's outputs, which is measured."""
    if isinstance(outputs, torch.Tensor):
        return outputs
    return next(iter(outputs.values())) if isinstance(outputs, dict) else outputs[0]


def _precision(file: PackedFile, cuda: bool) -> str:
    layers = [node for node in file.graph.nodes if isinstance(node, Layer)]
    quantized = of_layers(LABELS.get(node.precision, "") for node in layers)
    if not quantized:
        return of_rest(rest_of(file.graph), cuda)
    decoded = any(quantizes_itself(node) and not has_mixed_kernel(node) for node in layers)
    return f"{quantized} (emulated)" if decoded or not cuda else quantized
