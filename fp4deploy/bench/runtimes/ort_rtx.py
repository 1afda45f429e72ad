"""ONNX Runtime with its TensorRT-RTX execution provider: the canonical file, compiled when it is opened.

The provider is a plugin: the package `onnxruntime-ep-nv-tensorrt-rtx` holds a shared library, which
`register_execution_provider_library` loads into the process, once. A session then takes the devices that the library
offers: none without an NVIDIA RTX GPU. The fallback to the CPU is switched off, because the time of a session that
computes on two devices would say nothing about either.

Images and logits lie in torch tensors on the GPU, bound to the session; a run ends when the logits are there, so that
it is timed by the clock. This project has run none of it on a GPU; registration was tried without one.

Source: ONNX Runtime, "Using a Plugin Execution Provider Library".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fp4deploy.bench.latency import time_cpu
from fp4deploy.bench.runtimes.onnx_file import find_card, ports_of, require_card
from fp4deploy.bench.runtimes.ports import Outputs, fed, named, require_one_input
from fp4deploy.bench.runtimes.precision import of_onnx
from fp4deploy.bench.runtimes.protocol import Array, Given, checked, described
from fp4deploy.errors import InputError, UnavailableError
from fp4deploy.export import read_onnx
from fp4deploy.export.onnx.canonical import is_canonical, rest_of_file
from fp4deploy.models.card import ModelCard
from fp4deploy.requirements import ORT_RTX
from fp4deploy.system.onnx_runtime import ort

TITLE = "ONNX Runtime's TensorRT-RTX provider"
TYPES = {"tensor(float16)": (torch.float16, np.float16), "tensor(float)": (torch.float32, np.float32)}


class OrtRtxRuntime:
    """A canonical `.onnx` file on an RTX GPU, through ONNX Runtime.

    Raises:
        InputError: a decomposed file, or none of this project.
        UnavailableError: the provider is missing, offers no device here, or does not take the whole graph.
    """

    def __init__(self, path: Path) -> None:
        model = read_onnx(path)
        self._path = path
        self._card = find_card(model, path)
        if not is_canonical(model):
            raise InputError(f"{path} is the decomposed graph, for CPUs. {TITLE} takes the canonical file.")
        options = ort.SessionOptions()
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        options.add_provider_for_devices(devices(), {})
        try:
            self._session = ort.InferenceSession(model.SerializeToString(), options)
        except Exception as error:  # ONNX Runtime has a class of its own for every cause
            raise UnavailableError(f"{path}: {TITLE} does not take the graph. It says: {_line(error)}") from error
        self.inputs = ports_of(self._session, path)
        self._names = [each.name for each in self._session.get_outputs()]
        self._output = self._session.get_outputs()[0]
        self.name = f"ONNX Runtime {ort.__version__} (TensorRT-RTX {ORT_RTX.version()})"
        self.device = torch.cuda.get_device_name()
        self.precision = of_onnx(model, self._card) or rest_of_file(model).label

    @property
    def card(self) -> ModelCard:
        """The card in the file's metadata.

        Raises:
            InputError: there is none.
        """
        return require_card(self._card, self._path)

    def __call__(self, *inputs: object) -> Outputs:
        """The output of these inputs, or several by name (`ports`)."""
        found = self._session.run(None, fed(self.inputs, inputs, self._path))
        return named(self._names, [each.astype(np.float32) if each.dtype == np.float16 else each for each in found])

    def __repr__(self) -> str:
        return described(self, self._path)

    def infer(self, images: Array) -> Array:
        """Logits float32 [N, classes, H, W]."""
        binding, logits = self._bound(images)
        self._session.run_with_iobinding(binding)
        return checked(logits.float().cpu().numpy(), images, self.card, self._path)

    def time(self, images: Given, warmup: int, iterations: int, max_seconds: float) -> list[float]:
        """Milliseconds of a session run; inputs and outputs stay on the GPU."""
        binding = self._bound_inputs([images]) if isinstance(images, Mapping) else self._bound(images)[0]
        if isinstance(images, Mapping):
            for name in self._names:
                binding.bind_output(name, "cuda")
        return time_cpu(lambda: self._session.run_with_iobinding(binding), warmup, iterations, max_seconds)

    def _bound(self, images: Array) -> tuple[Any, torch.Tensor]:
        require_one_input(self.inputs, self._path)
        binding = self._bound_inputs([images])
        dtype, element = TYPES[self._output.type]
        logits = torch.empty(len(images), self.card.channels, *images.shape[2:], device="cuda", dtype=dtype)
        binding.bind_output(self._output.name, "cuda", logits.device.index, element, logits.shape, logits.data_ptr())
        for name in self._names[1:]:
            binding.bind_output(name, "cuda")
        return binding, logits

    def _bound_inputs(self, inputs: Sequence[object]) -> Any:
        binding = self._session.io_binding()
        binding.held = []  # live as long as the binding, which has their addresses alone
        for name, array in fed(self.inputs, inputs, self._path).items():
            given = torch.from_numpy(array).to("cuda")
            binding.bind_input(name, "cuda", given.device.index, array.dtype, given.shape, given.data_ptr())
            binding.held.append(given)
        torch.cuda.synchronize()
        return binding


def devices() -> list[object]:
    """The devices that the provider offers on this machine.

    Raises:
        UnavailableError: the package is missing, its library does not load, or it offers none.
    """
    plugin: Any = ORT_RTX.require(TITLE)
    name = plugin.get_ep_name()
    why = _registered(name, plugin.get_library_path())
    if why:
        raise UnavailableError(f"{TITLE} does not load here: {why}")
    found = [device for device in ort.get_ep_devices() if device.ep_name == name]
    if not found or not torch.cuda.is_available():
        raise UnavailableError(f"{TITLE} offers no device here; it needs an NVIDIA RTX GPU (RTX 30 or newer).")
    return found[:1]


@lru_cache(maxsize=1)
def _registered(name: str, library: str) -> str:
    """Load the library into this process; why it does not load, or nothing."""
    if not hasattr(ort, "register_execution_provider_library"):
        return f"ONNX Runtime {ort.__version__} takes no provider plugins; pip install --upgrade onnxruntime"
    try:
        ort.register_execution_provider_library(name, library)
    except Exception as error:
        return _line(error)
    return ""


def _line(error: Exception) -> str:
    """The message without line breaks and without the folder of the library."""
    return " ".join(str(error).split()).replace(str(Path(ort.__file__).parents[1]), "…")[:400]
