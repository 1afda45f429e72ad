"""ONNX Runtime on the CPU."""

from __future__ import annotations

import onnx

from fp4deploy.errors import InputError, first_line
from fp4deploy.system.onnx_runtime import ort

NOT_IMPLEMENTED = ort.capi.onnxruntime_pybind11_state.NotImplemented
FATAL = 4  # log level: an error is raised as well, and the log prints names of the file as they are


def portable_session(model: onnx.ModelProto) -> ort.InferenceSession:
    """An ONNX Runtime CPU session of a decomposed graph; raises ONNX Runtime's own errors."""
    options = ort.SessionOptions()
    options.log_severity_level = FATAL
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def verifying_session(model: onnx.ModelProto) -> ort.InferenceSession:
    """A session that is compared with torch.

    Raises:
        InputError: an operator that ONNX Runtime does not compute on a CPU, such as random numbers in FP16.
    """
    try:
        return portable_session(model)
    except NOT_IMPLEMENTED as error:
        raise InputError(f"ONNX Runtime does not compute this network on a CPU: {first_line(error)}.") from error
