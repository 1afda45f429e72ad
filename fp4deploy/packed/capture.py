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
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

from fp4deploy.errors import Fp4DeployError, InputError
from fp4deploy.packed.network import PackedNetwork, Result

WARMUP = 3
Shapes = tuple[tuple[int, ...], ...]
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


@dataclass(frozen=True, eq=False)
class Replay:
    """A CUDA graph and what it reads and writes: `graph` alone knows addresses, whose memory would be freed.

    owned: whatever holds the tensors that the captured kernels read.
    """

    graph: torch.cuda.CUDAGraph
    owned: Any
    outputs: Any = None

    def __call__(self) -> Any:
        self.graph.replay()
        return self.outputs


class CapturedNetwork:
    """A network on a GPU, captured once for each shape of its inputs."""

    def __init__(self, network: PackedNetwork, enabled: bool = True) -> None:
        self.network = network
        self.enabled = enabled and network.device.type == "cuda"
        self._runs: dict[Shapes, tuple[tuple[torch.Tensor, ...], Callable[[], Result]]] = {}  # static inputs, run

    def __call__(self, *inputs: torch.Tensor) -> Result:
        """Outputs for `inputs`, in memory of their own."""
        return tree_map(torch.Tensor.clone, self.prepared(*inputs)())

    def prepared(self, *inputs: torch.Tensor) -> Callable[[], Result]:
        """What computes the outputs for `inputs`, with nothing left to prepare; the next run overwrites its result.

        It owns all that it reads: it can be called after this object has dropped the shape, or is gone itself.
        """
        device, dtype = self.network.device, self.network.dtype
        if not self.enabled:
            on_device = [x.to(device) for x in inputs]
            return lambda: self.network(*on_device)
        shapes = tuple(tuple(x.shape) for x in inputs)
        if shapes not in self._runs:
            self.network.sizes(inputs)  # refused before another shape is dropped for it
            if len(self._runs) >= SHAPES:
                del self._runs[next(iter(self._runs))]
            static = tuple(x.to(device, dtype).clone() for x in inputs)
            self._runs[shapes] = static, self._record(static)
        static, run = self._runs[shapes]
        for held, x in zip(static, inputs, strict=True):
            held.copy_(x)
        return run

    @property
    def replays(self) -> bool:
        """Whether a call replays one graph: capture is switched on, and failed for none of the shapes."""
        return self.enabled and all(isinstance(run, Replay) for _, run in self._runs.values())

    def _record(self, inputs: tuple[torch.Tensor, ...]) -> Callable[[], Result]:
        stream = torch.cuda.Stream(self.network.device)
        stream.wait_stream(torch.cuda.current_stream(self.network.device))
        with torch.cuda.device(self.network.device), torch.cuda.stream(stream):
            for _ in range(WARMUP):
                self.network(*inputs)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.device(self.network.device), torch.cuda.graph(graph, stream=stream):
                outputs = self.network(*inputs)
        except (RuntimeError, Fp4DeployError) as error:
            warnings.warn(
                f"Capturing the packed network as a CUDA graph failed ({error}); its kernels are launched one by one.",
                stacklevel=2,
            )
            _end_recording(self.network.device)
            return lambda: self.network(*inputs)
        return Replay(graph, (self.network, inputs), outputs)


def _end_recording(device: torch.device) -> None:
    """Let random numbers be drawn on `device` after a capture that failed.

    torch's generator leaves its capture state only when a capture ends without an error, and refuses to draw before.
    Capturing a single fill ends without an error.
    """
    with suppress(RuntimeError), torch.cuda.device(device), torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device=device)
