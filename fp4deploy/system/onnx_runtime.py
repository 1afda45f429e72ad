"""ONNX Runtime, imported here alone: its usage reports are switched off before (`usage_reports`).

from fp4deploy.system.onnx_runtime import ort
"""

from __future__ import annotations

import os

from fp4deploy.system.usage_reports import switch_off

switch_off(os.environ)  # a program may have changed its environment since fp4deploy was imported

import onnxruntime as ort  # noqa: E402, TID251

ort.disable_telemetry_events()  # where the program had imported it before: no more events, at least

__all__ = ["ort"]
