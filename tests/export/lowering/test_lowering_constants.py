"""Resizes of constants are computed before the build."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest

from fp4deploy.export.lowering.lower import lower
from fp4deploy.export.onnx.session import portable_session

NET = """<ir_version: 10, opset_import: ["": 20]>
net (float[1, 4, 8, 8] x) => (float[1, 4, 8, 8] y) <int64[4] form = {1, 4, 4, 4}, int64[4] size = {1, 4, 8, 8}>
{
  t = Transpose <perm = [0, 2, 1]> (SOURCE)
  r = Reshape (t, form)
  z = Resize <mode = "cubic", antialias = 1> (r, , , size)
  y = Add (x, z)
}"""


def network(source: str) -> onnx.ModelProto:
    model = onnx.parser.parse_model(NET.replace("SOURCE", source))
    embedding = np.random.default_rng(0).standard_normal((1, 16, 4), np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(embedding, "embedding"))
    return model


def test_a_position_embedding_is_resized_before_the_build() -> None:
    model = network("embedding")
    lowered = lower(model).model
    assert [node.op_type for node in lowered.graph.node] == ["Add"]
    assert [tensor.name for tensor in lowered.graph.initializer] == ["z.constant"]
    feed = {"x": np.random.default_rng(1).standard_normal((1, 4, 8, 8), np.float32)}
    (got,), (expected,) = (portable_session(each).run(None, feed) for each in (lowered, model))
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    "nodes",
    [
        "w = RandomNormal <shape = [1, 16, 4]> ()",
        "p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (x) w = Reshape (p, flat)",
    ],
)
def test_a_resize_of_what_changes_stays(nodes: str) -> None:
    model = network("w")
    made = onnx.parser.parse_graph(f"g (float[1, 4, 8, 8] x, int64[3] flat) => (float[1, 16, 4] w) {{ {nodes} }}")
    kept = [*made.node, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(kept)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1, 16, 4]), "flat"))
    assert "Resize" in [each.op_type for each in lower(model).model.graph.node]
