"""Stand-ins for Triton Inference Server: its schema of configurations, and its module of the Python backend."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest


def model_config() -> Any:
    """`ModelConfig` of the server, without the client's own dependencies."""
    found = importlib.util.find_spec("tritonclient")
    if found is None or found.submodule_search_locations is None:
        pytest.skip("tritonclient is not installed (pip install tritonclient)")
    file = Path(next(iter(found.submodule_search_locations))) / "grpc" / "model_config_pb2.py"
    spec = importlib.util.spec_from_file_location("model_config_pb2", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ModelConfig


class Tensor:
    """As the server's module has it."""

    def __init__(self, name: str, values: np.ndarray) -> None:
        self.name, self.values = name, values

    def as_numpy(self) -> np.ndarray:
        return self.values


class Response:
    """As the server's module has it."""

    def __init__(self, output_tensors: list[Tensor] | None = None, error: Any = None) -> None:
        self.outputs = {tensor.name: tensor.values for tensor in output_tensors or []}
        self.error = error


def python_model(folder: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str]) -> Any:
    """The model of a folder of the repository, initialised."""
    module = types.ModuleType("triton_python_backend_utils")
    module.Tensor, module.InferenceResponse, module.TritonError = Tensor, Response, str  # type: ignore[attr-defined]
    module.get_input_tensor_by_name = (  # type: ignore[attr-defined]
        lambda request, name: Tensor(name, request[name]) if name in request else None
    )
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", module)
    spec = importlib.util.spec_from_file_location(f"{folder.name}_model", folder / "1" / "model.py")
    assert spec is not None
    assert spec.loader is not None
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # the folder holds what was written, and nothing else
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    model = loaded.TritonPythonModel()
    model.initialize(given)
    return model
