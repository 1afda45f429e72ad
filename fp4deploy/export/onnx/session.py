"""ONNX Runtime on the CPU."""

from __future__ import annotations

import onnx
import onnxruntime

FATAL = 4  # log level: an error is raised as well, and the log prints names of the file as they are


def portable_session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    """An ONNX Runtime CPU session of a decomposed graph."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = FATAL
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
