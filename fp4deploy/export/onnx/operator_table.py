"""torch's table of ONNX functions for ATen operators, made once a process instead of once an export.

`torch.onnx.export` parses the source of all 500 functions of its table again in every call, a third of the time of a
small export, and takes no table from its caller. Nothing of the table depends on the model, and an export without
functions of its own only reads it. The names are private to torch: where a version has others, it makes its table as
before.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock


@contextmanager
def kept_operator_table() -> Iterator[None]:
    """Inside, torch's ONNX exporter reads a copy of one table for each opset."""
    try:
        from torch.onnx._internal.exporter._registration import ONNXRegistry

        make = ONNXRegistry.from_torchlib
    except (ImportError, AttributeError):
        yield
        return
    with mock.patch.object(ONNXRegistry, "from_torchlib", staticmethod(lambda *a, **k: _copied(_table(make, *a, **k)))):
        yield


@cache
def _table(make: Any, *arguments: Any, **options: Any) -> Any:
    return make(*arguments, **options)


def _copied(table: Any) -> Any:
    copied = copy.copy(table)
    copied.functions = {name: list(functions) for name, functions in table.functions.items()}
    return copied
