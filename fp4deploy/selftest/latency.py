"""Latency of the packed network next to the same network in FP16, as torch runs it best.

The peer has channels_last weights and activations, is compiled by torch.compile with cuDNN's autotuning, and is
replayed from a CUDA graph like the packed network, so that neither pays for launches. Both are timed by
`bench.latency`: images and logits stay on the GPU. Weights are random, which changes no time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from fp4deploy.bench.latency import measure, time_cuda
from fp4deploy.bench.runtimes.packed import PackedRuntime
from fp4deploy.bench.runtimes.protocol import Array, Runtime
from fp4deploy.errors import UnavailableError
from fp4deploy.export.to_packed import pack
from fp4deploy.plugins.quantize.layout import CHANNELS_LAST
from fp4deploy.plugins.runtime.cache import keep_compiled_private
from fp4deploy.qat import load_model
from fp4deploy.selftest.context import Context
from fp4deploy.selftest.kernels import require_gemm_kernels
from fp4deploy.selftest.proof import Proof

BATCHES = (1, 8)
WARMUP = 3


class CompiledRuntime:
    """A checkpoint in FP16, channels_last, compiled and captured as a CUDA graph; a runtime as those of `bench`."""

    def __init__(self, path: Path, device: torch.device) -> None:
        model, self.card = load_model(path)
        self._device = device
        self._layout = CHANNELS_LAST[len(self.card.size) + 2]
        model = model.half().to(device).to(memory_format=self._layout)  # type: ignore[call-overload]
        keep_compiled_private()
        self._model = torch.compile(model, dynamic=False)
        self.name = f"torch {torch.__version__.partition('+')[0]}, compiled, CUDA graph"
        self.device = torch.cuda.get_device_name(device)
        self.precision = "FP16"

    def infer(self, images: Array) -> Array:
        """Logits float32 [N, classes, H, W]."""
        logits, replay = self._captured(images)
        replay()
        return logits.float().cpu().numpy()

    def time(self, images: Array, warmup: int, iterations: int, max_seconds: float) -> list[float]:
        """Milliseconds of a replay."""
        _logits, replay = self._captured(images)
        return time_cuda(replay, torch.cuda.current_stream(self._device), warmup, iterations, max_seconds)

    def _captured(self, images: Array) -> tuple[torch.Tensor, Callable[[], None]]:
        held = torch.from_numpy(np.ascontiguousarray(images)).to(self._device, torch.float16)
        held = held.contiguous(memory_format=self._layout)
        stream, graph = torch.cuda.Stream(self._device), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, benchmark=True):
            with torch.cuda.stream(stream):
                for _ in range(WARMUP):
                    self._model(held)
            stream.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                logits = self._model(held)

        def replay() -> None:
            assert held.is_cuda  # the graph reads it, so it has to stay
            graph.replay()

        return logits, replay


def compared(context: Context) -> Proof:
    """Median latency by batch and runtime.

    Raises:
        UnavailableError: kernels do not run here.
    """
    if context.device.type != "cuda":
        raise UnavailableError("latency is measured on a GPU: a CPU emulates FP4 with ordinary arithmetic")
    require_gemm_kernels(context.device)
    packed = pack(context.checkpoint("nvfp4", context.large), context.folder / "large.fp4", verify=False).file.path
    runtimes: dict[str, Runtime] = {
        "packed NVFP4": PackedRuntime(packed, str(context.device)),
        "FP16 compiled": CompiledRuntime(context.checkpoint("fp16", context.large), context.device),
    }
    medians: dict[str, float | int | str] = {}
    lines = []
    for batch in BATCHES:
        found = {name: round(measure(runtime, batch=batch).p50, 4) for name, runtime in runtimes.items()}
        medians |= {f"{name}, batch {batch}, ms": value for name, value in found.items()}
        lines.append(f"batch {batch}: " + ", ".join(f"{name} {value:g} ms" for name, value in found.items()))
    size = context.large
    shape = f"UNet of scale {size.scale:g}, {size.width} x {size.height} pixels"
    return Proof(f"measured, medians; {shape}; {'; '.join(lines)}", medians)
