"""The synchronised comparison: no verdict against honest exports, and the right layer named for broken ones."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from exported_models import images, shapes, unet
from onnx import numpy_helper
from torch import nn

from fp4deploy.errors import GateError
from fp4deploy.export import to_portable, verify
from fp4deploy.export.synchronised import compare_synchronised
from fp4deploy.export.verify import Agreement, require_agreement


def edited(model: onnx.ModelProto, name: str, change: object) -> onnx.ModelProto:
    """A copy of the canonical graph with one initialiser changed."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    tensor = next(t for t in copy.graph.initializer if t.name == name)
    change(tensor)  # type: ignore[operator]
    return copy


def verdict(model: nn.Module, twin: onnx.ModelProto) -> None:
    """The gate as it decides when the free comparison failed."""
    found = compare_synchronised(model, twin, [images(1)])
    require_agreement(Agreement(1, 1000, 500, 1.0, found), "model")


def test_an_untrained_unet_is_judged_equal_layer_by_layer() -> None:
    model, canonical = unet()
    found = compare_synchronised(model, to_portable(canonical), [images(1), images(1, seed=5)])
    assert found.share == 1
    assert len(found.layers) == 21
    assert max(found.layers.values()) < 1e-3
    verdict(model, to_portable(canonical))


def test_every_layer_form_is_fed() -> None:
    model, canonical = shapes()
    found = compare_synchronised(model, to_portable(canonical), [images(1, (3, 16, 24))])
    assert set(found.layers) == {"strided", "dilated", "grouped", "up", "tokens", "pooled"}  # pointwise is used twice
    assert max(found.layers.values()) < 1e-3


def test_what_the_free_comparison_refuses_is_compared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a large model, where FP4 amplifies last bits: the free comparison fails, the synchronised one decides."""
    model, canonical = unet()
    monkeypatch.setattr(verify, "compare_with_torch", lambda *_: Agreement(1, 1000, 5, 0.1))
    agreement = verify.verify_twin(model, to_portable(canonical), [images(1)])
    assert agreement.synchronised is not None
    require_agreement(agreement, "model")
    broken = edited(canonical, "encoder.1.norm1.bias", scale_by(0.0))
    with pytest.raises(GateError, match="first layer to differ"):
        require_agreement(verify.verify_twin(model, to_portable(broken), [images(1)]), "model")


def test_a_model_that_agrees_is_compared_once() -> None:
    model, canonical = unet()
    agreement = verify.verify_twin(model, to_portable(canonical), [images(1)])
    assert agreement.share == 1
    assert agreement.synchronised is None


def scale_by(factor: float) -> object:
    def change(tensor: onnx.TensorProto) -> None:
        array = numpy_helper.to_array(tensor)
        tensor.CopyFrom(numpy_helper.from_array((array * np.float32(factor)).astype(array.dtype), tensor.name))

    return change


def reverse_bytes(tensor: onnx.TensorProto) -> None:
    tensor.raw_data = tensor.raw_data[::-1]


BROKEN = {
    "weight global scale": ("encoder.2.conv1.weight.global_scale", scale_by(1.1), "encoder.2.conv2"),
    "activation global scale": ("encoder.3.conv2.input.global_scale", scale_by(1.1), "encoder.3.conv2"),
    "weight codes": ("decoder.1.conv1.weight.codes", reverse_bytes, "decoder.1.conv2"),
    "block scales": ("up.2.weight.scales", reverse_bytes, "decoder.2.conv1"),
    "bias": ("encoder.1.norm1.bias", scale_by(0.0), "encoder.1.conv2"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_an_export_error_is_named_by_the_layer_that_first_sees_it(case: str) -> None:
    name, change, layer = BROKEN[case]
    model, canonical = unet()
    with pytest.raises(GateError, match=rf"first layer to differ is {layer.replace('.', r'[.]')},.*--no-verify"):
        verdict(model, to_portable(edited(canonical, name, change)))


def test_an_error_behind_the_last_quantised_layer_is_found() -> None:
    model, canonical = unet()
    broken = edited(canonical, "head.weight", scale_by(-1.0))
    with pytest.raises(GateError, match="after the last quantised layer"):
        verdict(model, to_portable(broken))
