"""Graphs that anyone may write are listed in time that grows with their nodes."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.external_data_helper import set_external_data

from fp4deploy.audit.operands import multiplications
from fp4deploy.errors import InputError
from fp4deploy.export.onnx.canonical import parse_onnx
from fp4deploy.export.onnx.layers import layers_of
from tests.export.lowering.engine_graphs import CanonicalGraph

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


@pytest.mark.parametrize("length", [None, 100 << 30])
def test_a_sparse_file_of_weights_is_not_read(length: int | None, tmp_path: Path) -> None:
    model = chain(1, doubling=False)
    for tensor in model.graph.initializer:
        set_external_data(tensor, "weights.bin", length=length)
        tensor.ClearField("raw_data")
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    with (tmp_path / "weights.bin").open("wb") as file:
        file.truncate(200 << 30)
    with pytest.raises(InputError, match="external data of 'w0' has .* the limit"):
        parse_onnx(tmp_path / "model.onnx")


def test_a_sparse_model_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "model.onnx").open("wb") as file:
        file.truncate(200 << 30)
    with pytest.raises(InputError, match="larger than 2 GiB"):
        parse_onnx(tmp_path / "model.onnx")


def test_weights_outside_of_the_model_are_read(tmp_path: Path) -> None:
    onnx.save(chain(1, doubling=False), tmp_path / "model.onnx", save_as_external_data=True, size_threshold=0)
    assert (tmp_path / "model.onnx").stat().st_size < sum(path.stat().st_size for path in tmp_path.iterdir())
    weights = parse_onnx(tmp_path / "model.onnx").graph.initializer
    assert all((numpy_helper.to_array(each) == 1).all() for each in weights)


def nested(depth: int, calls: int) -> onnx.ModelProto:
    """`depth` functions, each of which calls the next so many times."""
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("own", 1)]

    def function(at: int) -> onnx.FunctionProto:
        last = at == depth - 1
        names = ["x", *(f"t{call}" for call in range(calls - 1)), "y"]
        nodes = [
            helper.make_node("Relu" if last else f"F{at + 1}", [start], [end], domain="" if last else "own")
            for start, end in pairwise(names)
        ]
        return helper.make_function("own", f"F{at}", ["x"], ["y"], nodes, imports)

    values = [helper.make_tensor_value_info(name, FLOAT, [2, 4]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("F0", ["x"], ["y"], domain="own")], "graph", values[:1], values[1:])
    return helper.make_model(graph, opset_imports=imports, functions=[function(at) for at in range(depth)])


def test_functions_that_expand_without_measure_are_refused(tmp_path: Path) -> None:
    """onnx and ONNX Runtime expand them in memory: 30 that call the next twice would be 2^30 nodes."""
    path = tmp_path / "model.onnx"
    for depth, calls in ((30, 2), (3, 200)):
        path.write_bytes(nested(depth, calls).SerializeToString())
        with pytest.raises(InputError, match="its functions stand for more than .* nodes, and it holds"):
            parse_onnx(path)
    path.write_bytes(nested(5, 4).SerializeToString())
    assert len(parse_onnx(path).functions) == 5


@pytest.mark.parametrize("quantized", [True, False])
def test_a_layer_has_the_bytes_of_all_its_constants_and_the_precision_of_both_operands(quantized: bool) -> None:
    graph = CanonicalGraph(seed=3)
    image = graph.image(6, 4, channels=32)
    model = graph.model(graph.conv("conv", image, 24))
    (node,) = [each for each in model.graph.node if each.op_type == "Conv"]
    if not quantized:
        node.input[0] = image[0]
    (layer,) = layers_of(model)
    assert layer.precision == ("FP4" if quantized else "FP4 weights")
    codes, scales, global_scale, bias = 24 * 9 * 32 // 2, 24 * 9 * 32 // 16, 4, 24 * 2
    assert (layer.weights, layer.bytes) == ("FP4", codes + scales + global_scale + bias)
