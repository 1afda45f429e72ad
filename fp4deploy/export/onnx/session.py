"""ONNX Runtime on the CPU."""

from __future__ import annotations

import onnx
import onnxruntime

from fp4deploy.errors import InputError, first_line

NOT_IMPLEMENTED = onnxruntime.capi.onnxruntime_pybind11_state.NotImplemented
FATAL = 4  # log level: an error is raised as well, and the log prints names of the file as they are


def portable_session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    """An ONNX Runtime CPU session of a decomposed graph; raises ONNX Runtime's own errors."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = FATAL
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def verifying_session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    """A session that is compared with torch.

    Raises:
        InputError: an operator that ONNX Runtime does not compute on a CPU, such as random numbers in FP16.
    """
    try:
        return portable_session(model)
    except NOT_IMPLEMENTED as error:
        raise InputError(f"ONNX Runtime does not compute this network on a CPU: {first_line(error)}.") from error
