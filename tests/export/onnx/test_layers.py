"""Graphs that anyone may write are listed in time that grows with their nodes."""

from __future__ import annotations

import time

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from fp4deploy.audit.operands import multiplications
from fp4deploy.export.onnx.layers import layers_of

FLOAT = onnx.TensorProto.FLOAT


def chain(length: int, doubling: bool) -> onnx.ModelProto:
    """A MatMul whose weight is the end of a chain of Mul, each of the one before and of itself or a constant."""
    constants = [numpy_helper.from_array(np.ones((4, 4), np.float32), name) for name in ("w0", "one")]
    nodes = [
        helper.make_node("Mul", [f"w{at}", f"w{at}" if doubling else "one"], [f"w{at + 1}"], name=f"mul{at}")
        for at in range(length)
    ]
    nodes.append(helper.make_node("MatMul", ["x", f"w{length}"], ["y"], name="product"))
    values = [helper.make_tensor_value_info(name, FLOAT, [2, 4]) for name in ("x", "y")]
    return helper.make_model(helper.make_graph(nodes, "graph", values[:1], values[1:], constants))


@pytest.mark.parametrize(("length", "doubling"), [(60, True), (3000, False)], ids=["doubling", "long"])
def test_a_chain_before_a_weight(length: int, doubling: bool) -> None:
    model = chain(length, doubling)
    start = time.perf_counter()
    (layer,) = layers_of(model)
    assert layer.name == "product"
    assert [found.name for found in multiplications(model)] == ["product"]
    assert time.perf_counter() - start < 20
