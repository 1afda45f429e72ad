"""torch: a checkpoint as it was trained, NVFP4 by fake quantisation.

fp16 autocast on CUDA, FP32 on the CPU (CPU convolutions in half precision are slower and rounded otherwise). Weights
are those that ship: `qat.load_model` has rounded them as an engine keeps them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from fp4deploy.bench.environment import cpu_name
from fp4deploy.bench.latency import time_cpu, time_cuda
from fp4deploy.bench.runtimes.protocol import Array
from fp4deploy.qat import load_model


class TorchRuntime:
    """A `.safetensors` checkpoint on CUDA where there is a GPU, else on the CPU."""

    def __init__(self, path: Path, device: str | None = None) -> None:
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._model, self.card = load_model(path, device=str(self._device))
        self.cuda = self._device.type == "cuda"
        self.name = (
            f"torch {torch.__version__.partition('+')[0]} ({'CUDA, fp16 autocast' if self.cuda else 'CPU, FP32'})"
        )
        self.device = torch.cuda.get_device_name(self._device) if self.cuda else cpu_name()
        self.precision = _precision(self.card.precision, self.cuda)

    def infer(self, images: Array) -> Array:
        """Logits float32 [N, classes, H, W]."""
        return self._forward(torch.from_numpy(images).to(self._device)).float().cpu().numpy()

    def time(self, images: Array, warmup: int, iterations: int, max_seconds: float) -> list[float]:
        """Milliseconds a forward pass."""
        held = torch.from_numpy(np.ascontiguousarray(images)).to(self._device)
        if not self.cuda:
            return time_cpu(lambda: self._forward(held), warmup, iterations, max_seconds)
        stream = torch.cuda.current_stream(self._device)
        return time_cuda(lambda: self._forward(held), stream, warmup, iterations, max_seconds)

    def _forward(self, images: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(), torch.autocast(self._device.type, dtype=torch.float16, enabled=self.cuda):
            return self._model(images)


def _precision(precision: str, cuda: bool) -> str:
    if precision == "nvfp4":
        return "NVFP4 (emulated)"
    return "FP16" if cuda else "FP16 (run in FP32)"
