"""torch's exporter with its table of ONNX functions read once a process instead of for every graph, about a second."""

from __future__ import annotations

import functools

import pytest


def read_table_once(patch: pytest.MonkeyPatch) -> None:
    """Keep the table; an export does not change it."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(functools.cache(ONNXRegistry.from_torchlib)))
