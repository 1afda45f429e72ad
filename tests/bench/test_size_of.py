"""The size of an artefact, with what an ONNX file keeps outside."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from fp4deploy.bench.artifact import size_of


def test_external_data_counts(tmp_path: Path) -> None:
    weight = numpy_helper.from_array(np.zeros((4, 1024), np.float32), "w")
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 1024])
    graph = helper.make_graph([helper.make_node("Identity", ["w"], ["y"])], "g", [], [y], [weight])
    model = helper.make_model(graph)
    onnx.save(model, tmp_path / "one.onnx")
    onnx.save(model, tmp_path / "two.onnx", save_as_external_data=True, location="two.data")
    assert (tmp_path / "two.onnx").stat().st_size < 1000
    assert size_of(tmp_path / "two.onnx") > 4 * 4096
    assert size_of(tmp_path / "one.onnx") == (tmp_path / "one.onnx").stat().st_size
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    assert size_of(tmp_path / "broken.onnx") == 8
