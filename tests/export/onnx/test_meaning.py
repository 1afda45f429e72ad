"""Files that break ONNX's rules are refused before they are audited or built; what runtimes take anyway is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, helper, numpy_helper

from fp4deploy.audit.report import audit_file
from fp4deploy.errors import InputError
from fp4deploy.export.lowering.lower import lower, read_buildable
from tests.interop.onnx_files import segmenter

Change = Callable[[onnx.ModelProto], object]


def convolutions(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == "Conv"]


def attribute(name: str, value: object, at: int = 1, kind: int | None = None) -> Change:
    """Give the convolution number `at` another attribute."""

    def change(model: onnx.ModelProto) -> None:
        node = convolutions(model)[at]
        kept = [each for each in node.attribute if each.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute(name, value, attr_type=kind)])

    return change


def tensor(name: str, content: object, dtype: type = np.float32) -> Change:
    """Another value for a weight or bias."""

    def change(model: onnx.ModelProto) -> None:
        place = [each.name for each in model.graph.initializer].index(name)
        model.graph.initializer[place].CopyFrom(numpy_helper.from_array(np.asarray(content, dtype), name))

    return change


def image(axis: int, size: int) -> Change:
    def change(model: onnx.ModelProto) -> None:
        model.graph.input[0].type.tensor_type.shape.dim[axis].dim_value = size

    return change


def rewire(model: onnx.ModelProto) -> None:
    convolutions(model)[0].input[1] = "nowhere"


def shorten(model: onnx.ModelProto) -> None:
    weight = next(each for each in model.graph.initializer if each.name == "block.conv.weight")
    weight.raw_data = weight.raw_data[:100]


REFUSED: dict[str, tuple[Change, str]] = {
    "strides are text": (attribute("strides", "two", 0), "attribute type in 'conv_0 : strides'"),
    "strides are one number": (attribute("strides", 2, 0), "attribute type in 'conv_0 : strides'"),
    "groups are a fraction": (attribute("group", 2.0, 2, AttributeProto.FLOAT), "'conv_5 : group'"),
    "an attribute of no operator": (attribute("colour", "red"), "Unrecognized attribute: colour"),
    "a stride of 0": (attribute("strides", [0, 0]), "strides must only contain positive values"),
    "a negative dilation": (attribute("dilations", [1, -3]), "dilations must only contain positive values"),
    "7 groups": (attribute("group", 7), r"conv_3 \(Conv\): 32 channels of its weight in 7 groups"),
    "a padding of no kind": (attribute("auto_pad", "AROUND"), r"conv_3 \(Conv\): its auto_pad"),
    "a weight of other channels": (tensor("block.conv.weight", np.zeros((32, 5, 3, 3))), "for 5 input.*reads 16"),
    "a transposed weight": (tensor("up.weight", np.zeros((31, 16, 2, 2))), "for 31 input channels, and it reads 32"),
    "a weight of two axes": (tensor("block.conv.weight", np.zeros((32, 16))), "Number of spatial dimensions"),
    "an integer weight": (tensor("block.conv.weight", np.zeros((32, 16, 3, 3)), np.int64), "unsupported type"),
    "a bias too short": (tensor("block.conv.bias", np.zeros(31)), r"its bias has the shape \[31\]"),
    "a weight cut short": (shorten, "raw_data size"),
    "an image of 5 channels": (image(1, 5), "for 3 input channels, and it reads 5"),
    "a negative image": (image(2, -4), "image has the shape"),
    "an input that nothing writes": (rewire, "input 'nowhere'"),
    "no opset": (lambda model: model.ClearField("opset_import"), "its opset is missing"),
    "an opset to come": (lambda model: setattr(model.opset_import[0], "version", 9999), "its opset is 9999"),
    "no IR version": (lambda model: model.ClearField("ir_version"), "ir_version"),
}


def changed(change: Change, path: Path) -> Path:
    model = segmenter(size=(1, 3, 32, 32))
    del model.graph.value_info[:]
    change(model)
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.parametrize("name", REFUSED)
def test_a_broken_file_is_one_message(name: str, tmp_path: Path) -> None:
    change, message = REFUSED[name]
    path = changed(change, tmp_path / "net.onnx")
    with pytest.raises(InputError, match=f"net.onnx.*{message}"):
        audit_file(path)
    with pytest.raises(InputError):
        lower(read_buildable(path))


def reverse(model: onnx.ModelProto) -> None:
    nodes = [*model.graph.node][::-1]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def stale(model: onnx.ModelProto) -> None:
    """Declared shapes that were true before the file was edited."""
    model.graph.value_info.append(helper.make_tensor_value_info("conv_0", onnx.TensorProto.FLOAT, [1, 777, 3]))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info(model.graph.output[0].name, 1, [9, 9]))


def plugin(model: onnx.ModelProto) -> None:
    """As TensorRT's plugins are written: in the default domain."""
    last = model.graph.output[0].name
    model.graph.node.append(helper.make_node("EfficientNMS_TRT", [last], ["boxes"], score_threshold=0.5))
    model.graph.output.append(helper.make_tensor_value_info("boxes", onnx.TensorProto.FLOAT, None))


def other_domain(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("FusedThing", [model.graph.output[0].name], ["z"], domain="com.example"))
    model.opset_import.append(helper.make_opsetid("com.example", 1))


@pytest.mark.parametrize("change", [reverse, stale, plugin, other_domain, lambda model: None])
def test_what_runtimes_take_is_audited(change: Change, tmp_path: Path) -> None:
    path = changed(change, tmp_path / "net.onnx")
    before = path.read_bytes()
    assert len(audit_file(path).rows) == 6
    assert lower(read_buildable(path)).layers
    assert path.read_bytes() == before
