"""A packed network as a CUDA graph: one launch for all its nodes.

A UNet is a hundred small kernels, and at batch 1 launching them one by one is bound by the host. The first call with a
shape runs the network a few times (kernels are compiled and tuned, which must not happen during capture), then captures
it with static input and output buffers. Later calls copy their images in and replay.

`FP4DEPLOY_GRAPHS=off` switches it off. Where capture fails, a warning says why and the kernels are launched one by one.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import suppress

import torch

from fp4deploy.errors import Fp4DeployError, InputError
from fp4deploy.packed.network import PackedNetwork

WARMUP = 3
SHAPES = 4  # graphs kept; each holds the memory of its activations


def graphs_enabled() -> bool:
    """What FP4DEPLOY_GRAPHS says.

    Raises:
        InputError: it says neither "on" nor "off".
    """
    value = os.environ.get("FP4DEPLOY_GRAPHS", "on")
    if value not in ("on", "off", ""):
        raise InputError(f"FP4DEPLOY_GRAPHS is '{value}'. Valid: on (the default), off.")
    return value != "off"


class CapturedNetwork:
    """A network on a GPU, captured once for each shape of its input."""

    def __init__(self, network: PackedNetwork, enabled: bool = True) -> None:
        self.network = network
        self.enabled = enabled and network.device.type == "cuda"
        self._runs: dict[tuple[int, ...], Callable[[], torch.Tensor]] = {}
        self._inputs: dict[tuple[int, ...], torch.Tensor] = {}

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Logits of `images`, in memory of their own."""
        return self.prepared(images)().clone()

    def prepared(self, images: torch.Tensor) -> Callable[[], torch.Tensor]:
        """What computes the logits of `images`, with nothing left to prepare; the next run overwrites its result."""
        if not self.enabled:
            on_device = images.to(self.network.device)
            return lambda: self.network(on_device)
        shape = tuple(images.shape)
        if shape not in self._runs:
            if len(self._runs) >= SHAPES:
                oldest = next(iter(self._runs))
                del self._runs[oldest], self._inputs[oldest]
            self._inputs[shape] = images.to(self.network.device, self.network.dtype).clone()
            self._runs[shape] = self._record(self._inputs[shape])
        self._inputs[shape].copy_(images)
        return self._runs[shape]

    def _record(self, images: torch.Tensor) -> Callable[[], torch.Tensor]:
        stream = torch.cuda.Stream(self.network.device)
        stream.wait_stream(torch.cuda.current_stream(self.network.device))
        with torch.cuda.device(self.network.device), torch.cuda.stream(stream):
            for _ in range(WARMUP):
                self.network(images)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.device(self.network.device), torch.cuda.graph(graph, stream=stream):
                logits = self.network(images)
        except (RuntimeError, Fp4DeployError) as error:
            warnings.warn(
                f"Capturing the packed network as a CUDA graph failed ({error}); its kernels are launched one by one.",
                stacklevel=2,
            )
            _end_recording(self.network.device)
            return lambda: self.network(images)

        def replay() -> torch.Tensor:
            graph.replay()
            return logits

        return replay


def _end_recording(device: torch.device) -> None:
    """Let random numbers be drawn on `device` after a capture that failed.

    torch's generator leaves its capture state only when a capture ends without an error, and refuses to draw before.
    Capturing a single fill ends without an error.
    """
    with suppress(RuntimeError), torch.cuda.device(device), torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device=device)
