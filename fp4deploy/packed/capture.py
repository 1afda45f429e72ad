"""A packed network as a CUDA graph: one launch for all its nodes, compiled where that is faster.

A UNet is a hundred small kernels, and at batch 1 launching them one by one is bound by the host. The first call with a
shape runs the network a few times (kernels are compiled and tuned, which must not happen during capture), then captures
it with static input and output buffers. Later calls copy their images in, or the packed operands that stand for them,
and replay. An operand is copied rather than written in place: frames are prepared while the graph still reads the last.

For a network whose steps are not all kernels of this package, the first call with a shape compiles it as well
(`program`), and keeps the faster one.

`FP4DEPLOY_GRAPHS=off` switches graphs off. Where capture fails, a warning says why and the kernels are launched one by
one.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from fp4deploy.errors import Fp4DeployError, InputError, UnavailableError
from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.packed.network import PackedNetwork, Result
from fp4deploy.packed.program import CHOICES, Program, choice_key, compile_program, left_to_torch
from fp4deploy.plugins.quantize.input_encoding import parts
from fp4deploy.plugins.quantize.norm_pack import FeatureMap
from fp4deploy.plugins.runtime.choices import fastest, remembered
from fp4deploy.system.progress import progress

WARMUP = 3  # runs before a capture
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
    """A network on a GPU, captured once for each shape of its inputs.

    enabled: as a CUDA graph; else it is launched kernel by kernel.
    compiled: "auto", "on" or "off", as `program` describes them.
    """

    def __init__(self, network: PackedNetwork, enabled: bool = True, compiled: str = "off") -> None:
        self.network = network
        on_gpu = network.device.type == "cuda"
        self.enabled, self.compiled = enabled and on_gpu, compiled if on_gpu else "off"
        self._runs: dict[Shapes, tuple[tuple[FeatureMap, ...], Callable[[], Result], Program | None]] = {}

    @property
    def programs(self) -> list[Program]:
        """Those of the shapes that a compiled program computes."""
        return [program for *_, program in self._runs.values() if program is not None]

    @property
    def image_amax(self) -> torch.Tensor | None:
        """As of the network, where nothing may compile it: a compiled program reads images."""
        return self.network.image_amax if self._by_steps else None

    def __call__(self, *inputs: FeatureMap) -> Result:
        """Outputs for `inputs`, in memory of their own."""
        return tree_map(torch.Tensor.clone, self.prepared(*inputs)())

    def prepared(self, *inputs: FeatureMap) -> Callable[[], Result]:
        """What computes the outputs for `inputs`, with nothing left to prepare; the next run overwrites its result.

        It owns all that it reads: it can be called after this object has dropped the shape, or is gone itself.
        """
        device, dtype = self.network.device, self.network.input_dtype
        if not self.enabled and self.compiled == "off":
            on_device = [x if isinstance(x, Nvfp4Tensor) else x.to(device) for x in inputs]
            return lambda: self.network(*on_device)
        shapes = tuple(tuple(part.shape) for x in inputs for part in parts(x))
        # Refuses them before another shape is dropped for theirs, and in every call an image packed with another amax.
        self.network.sizes(inputs)
        if shapes not in self._runs:
            if len(self._runs) >= SHAPES:
                del self._runs[next(iter(self._runs))]
            wanted = [torch.int64 if each.dtype == "int64" else dtype for each in self.network.graph.inputs]
            with torch.inference_mode(False):  # else no call outside of that mode could write to them
                static = tuple(_held(x, device, each) for x, each in zip(inputs, wanted, strict=True))
            self._runs[shapes] = static, *self._run(static)
        static, run, _ = self._runs[shapes]
        for held, x in zip(static, inputs, strict=True):
            for into, part in zip(parts(held), parts(x), strict=True):
                into.copy_(part)
        return run

    @property
    def _by_steps(self) -> bool:
        """Whether nothing is compiled: torch computes nothing that may be joined, or the network has options."""
        network = self.network
        if self.compiled != "auto":
            return self.compiled == "off"
        return not (network.by_default and (network.decodes_layers or left_to_torch(network.steps)))

    def _run(self, inputs: tuple[FeatureMap, ...]) -> tuple[Callable[[], Result], Program | None]:
        """By the program or by the network's own steps, as was chosen."""
        network, mode = self.network, self.compiled
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        if self._by_steps or len(tensors) < len(inputs):
            return self._record(network, inputs), None
        name = choice_key(network.file, tensors, self.enabled)
        choice = "program" if mode == "on" else remembered(name, CHOICES)
        if choice == "kernels":
            return self._record(network, inputs), None
        try:
            with progress("compiling the packed network for these sizes, once"):
                program = compile_program(network.file, tensors, network.dtype)
                run = self._record(lambda *inputs: network.named(program(*inputs)), inputs)
        except (UnavailableError, RuntimeError) as error:  # of memory, too: the steps need less
            warnings.warn(f"{error} Its nodes are run by kernels of this package and by torch.", stacklevel=2)
            return self._record(network, inputs), None
        if choice is None:
            steps = self._record(network, inputs)
            if fastest(name, {"program": run, "kernels": steps}, network.device) == "kernels":
                return steps, None
        return run, program

    @property
    def weights_bytes(self) -> int:
        """Bytes on the device: of the network and of its programs, which have weights of their own."""
        return self.network.weights_bytes + sum(program.weights_bytes for program in self.programs)

    @property
    def replays(self) -> bool:
        """Whether a call replays one graph: capture is switched on, and failed for none of the shapes."""
        return self.enabled and all(isinstance(run, Replay) for _, run, _ in self._runs.values())

    def _record(self, compute: Callable[..., Result], inputs: tuple[FeatureMap, ...]) -> Callable[[], Result]:
        if not self.enabled:
            return lambda: compute(*inputs)
        stream = torch.cuda.Stream(self.network.device)
        stream.wait_stream(torch.cuda.current_stream(self.network.device))
        with torch.cuda.device(self.network.device), torch.cuda.stream(stream):
            for _ in range(WARMUP):
                compute(*inputs)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with (
                torch.cuda.device(self.network.device),
                torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
            ):
                outputs = compute(*inputs)
        except (RuntimeError, Fp4DeployError) as error:
            warnings.warn(
                f"Capturing the packed network as a CUDA graph failed ({error}); its kernels are launched one by one.",
                stacklevel=2,
            )
            _end_recording(self.network.device)
            return lambda: compute(*inputs)
        return Replay(graph, (compute, inputs), outputs)


def _held(x: FeatureMap, device: torch.device, dtype: torch.dtype) -> FeatureMap:
    """A copy that a graph may read."""
    if isinstance(x, Nvfp4Tensor):
        return replace(x, codes=x.codes.clone(), scales=x.scales.clone())
    return x.to(device, dtype).clone()


def _end_recording(device: torch.device) -> None:
    """Let random numbers be drawn on `device` after a capture that failed.

    torch's generator leaves its capture state only when a capture ends without an error, and refuses to draw before.
    Capturing a single fill ends without an error.
    """
    with suppress(RuntimeError), torch.cuda.device(device), torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device=device)
