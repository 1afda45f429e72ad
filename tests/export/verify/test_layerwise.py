"""The synchronised comparison: no verdict against honest exports, and the right layer named for broken ones."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import fp4deploy as fd
from fp4deploy.errors import GateError
from fp4deploy.export import to_portable
from fp4deploy.export.verify import outputs
from fp4deploy.export.verify.layerwise import LayerwiseAgreement, compare_layerwise
from fp4deploy.export.verify.outputs import Agreement, require_agreement
from fp4deploy.models.meaning import Classes, OutputMeanings
from tests.export.exported_models import images, initializer, pixels_that_differ, shapes, unet
from tests.samples import sample

Change = Callable[[onnx.TensorProto], None]


def edited(model: onnx.ModelProto, changes: dict[str, Change]) -> onnx.ModelProto:
    """A copy of a graph with some constants changed."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for name, change in changes.items():
        change(initializer(copy, name))
    return copy


def verdict(model: nn.Module, portable: onnx.ModelProto) -> None:
    """The gate as it decides when the free comparison failed."""
    found = compare_layerwise(model, portable, [images(1)])
    require_agreement(Agreement(1, pixels_that_differ(1000, 500), 1.0, found), "model")


def test_an_untrained_unet_is_judged_equal_layer_by_layer() -> None:
    model, canonical = unet()
    found = compare_layerwise(model, to_portable(canonical), [images(1), images(1, seed=5)])
    assert found.share == 1
    assert len(found.layers) == 11
    assert found.worst < 1e-3
    assert found.sources["decoder.1.conv1"] == ("encoder.0.conv2", "up.1")
    verdict(model, to_portable(canonical))


def test_every_layer_form_is_fed() -> None:
    model, canonical = shapes()
    found = compare_layerwise(model, to_portable(canonical), [images(1, (3, 16, 24))])
    assert list(found.layers) == ["strided", "dilated", "grouped", "pointwise", "up", "tokens", "pooled"]
    assert found.worst < 1e-3
    assert found.sources == {
        "strided": (), "dilated": ("strided",), "grouped": ("dilated",), "pointwise": ("grouped", "pointwise"),
        "up": ("dilated", "pointwise"), "tokens": ("up",), "pooled": ("tokens",),
    }  # fmt: skip


def test_amplified_last_bits_are_no_error() -> None:
    """A norm's bias off by 3e-5 flips a few codes, ever more from layer to layer; synchronised they stay few."""
    model, canonical = unet()
    portable = edited(to_portable(canonical), {"encoder.0.norm1.bias": shift_by(3e-5)})
    agreement = outputs.verify_decomposed(model, portable, [images(1)])
    assert agreement.share < 0.999
    assert agreement.layerwise is not None
    assert agreement.layerwise.share == 1
    assert 0 < agreement.layerwise.worst < 1e-3
    require_agreement(agreement, "model")
    assert "end to end" in agreement.sentence()


@pytest.mark.parametrize(("blocks", "passes"), [(1, True), (2, False)])
def test_one_block_of_a_small_layer_is_no_error(blocks: int, passes: bool) -> None:
    """A last bit of a block's amax can change its scale, and with it the whole block."""
    same = pixels_that_differ(768, 0)
    found = LayerwiseAgreement(same, {"small": 3 / 1024}, {"small": ()}, blocks={"small": blocks})
    assert Agreement(1, pixels_that_differ(768, 2), 0.1, found).passed is passes


def test_a_model_that_agrees_is_compared_once() -> None:
    """How many pixels of this one agree depends on the order of sums on the CPU at hand."""
    model, canonical = unet()
    portable = to_portable(canonical)
    classes = OutputMeanings(Classes(1))
    share = outputs.compare_with_torch(model, portable, [images(1)], classes).share
    assert outputs.verify_decomposed(model, portable, [images(1)], share, classes).layerwise is None
    agreement = outputs.verify_decomposed(model, portable, [images(1)], share + 1e-6, classes)
    assert agreement.share == share
    assert agreement.layerwise is not None
    assert agreement.passed


def scale_by(factor: float) -> Change:
    def change(tensor: onnx.TensorProto) -> None:
        array = numpy_helper.to_array(tensor)
        set_to((array * np.float32(factor)).astype(array.dtype))(tensor)

    return change


def shift_by(amount: float) -> Change:
    return lambda tensor: set_to(numpy_helper.to_array(tensor) + np.float32(amount))(tensor)


def set_to(array: object) -> Change:
    return lambda tensor: tensor.CopyFrom(numpy_helper.from_array(np.asarray(array), tensor.name))


def reverse_bytes(tensor: onnx.TensorProto) -> None:
    tensor.raw_data = tensor.raw_data[::-1]


def double_one_scale(tensor: onnx.TensorProto) -> None:
    """Eight steps further in E4M3, of one block of 16 weights."""
    tensor.raw_data = bytes([tensor.raw_data[0] + 8]) + tensor.raw_data[1:]


def weight_of(model: onnx.ModelProto, source: str, target: str) -> dict[str, Change]:
    """The weight of `source` in the place of that of `target`."""

    def copy_from(role: str) -> Change:
        stored = initializer(model, f"{source}.weight.{role}").raw_data
        return lambda tensor: setattr(tensor, "raw_data", stored)

    return {f"{target}.weight.{role}": copy_from(role) for role in ("codes", "scales", "global_scale")}


BROKEN: dict[str, tuple[dict[str, Change], str, str]] = {
    "weight global scale": (
        {"encoder.2.conv1.weight.global_scale": scale_by(1.1)},
        "encoder.2.conv2",
        "encoder.2.conv1",
    ),
    "activation global scale": (
        {"encoder.2.conv2.input.global_scale": scale_by(1.1)},
        "encoder.2.conv2",
        "encoder.2.conv1",
    ),
    "weight codes": ({"decoder.1.conv1.weight.codes": reverse_bytes}, "decoder.1.conv2", "decoder.1.conv1"),
    "block scales": ({"up.0.weight.scales": reverse_bytes}, "decoder.0.conv1", "encoder.1.conv2 and up.0"),
    "one block's scale": ({"encoder.2.conv1.weight.scales": double_one_scale}, "encoder.2.conv2", "encoder.2.conv1"),
    "norm bias": ({"encoder.1.norm1.bias": scale_by(0.0)}, "encoder.1.conv2", "encoder.1.conv1"),
    "convolution bias": ({"encoder.1.conv1.bias": scale_by(0.0)}, "encoder.1.conv2", "encoder.1.conv1"),
    "first layer": ({"encoder.0.conv1.bias": scale_by(0.0)}, "encoder.0.conv2", "the input image"),
}


@pytest.mark.parametrize("case", sample(BROKEN, every=2))
def test_an_export_error_is_named_by_the_layer_that_first_sees_it(case: str) -> None:
    changes, layer, origin = BROKEN[case]
    model, canonical = unet()
    with pytest.raises(GateError, match=rf"{named(layer, origin)}.*--no-verify"):
        verdict(model, to_portable(edited(canonical, changes)))


def named(layer: str, origin: str) -> str:
    return rf"first layer to differ is {re.escape(layer)}, .*, which is computed from {re.escape(origin)}\."


def test_two_layers_weights_swapped() -> None:
    model, canonical = unet()
    first, last = "encoder.0.conv2", "decoder.1.conv2"
    broken = edited(canonical, weight_of(canonical, first, last) | weight_of(canonical, last, first))
    with pytest.raises(GateError, match=named("encoder.1.conv1", first)):
        verdict(model, to_portable(broken))


def test_blocks_along_the_wrong_axis() -> None:
    """Blocks of 16 pixels instead of 16 channels: encoder.1.conv2 reads [N, 32, 16 x 16]."""
    model, canonical = unet()
    wrong = {"blocked_shape": set_to([0, 32, 16, 16]), "axis": set_to([3])}
    portable = edited(to_portable(canonical), {f"encoder.1.conv2.input.{role}": wrong[role] for role in wrong})
    with pytest.raises(GateError, match=named("encoder.1.conv2", "encoder.1.conv1")):
        verdict(model, portable)


def test_a_transposed_kernel() -> None:
    model, canonical = unet()
    portable = edited(to_portable(canonical), {})
    node = next(node for node in portable.graph.node if node.name == "decoder.0.conv1.weight.transposed")
    node.attribute[0].ints[:] = [0, 3, 2, 1]
    with pytest.raises(GateError, match=named("decoder.0.conv2", "decoder.0.conv1")):
        verdict(model, portable)


def test_a_quantiser_that_is_missing() -> None:
    """The GEMM reads what the quantiser should have read, so torch's operand has no place in the graph."""
    model, canonical = unet()
    portable = edited(to_portable(canonical), {})
    nodes = {node.name: node for node in portable.graph.node}
    nodes["encoder.2.conv1"].input[0] = nodes["encoder.2.conv1.input.flat"].input[0]
    assert compare_layerwise(model, portable, [images(1)]).unmatched == ("encoder.2.conv1",)
    with pytest.raises(GateError, match=r"cannot be compared layer by layer.*: encoder\.2\.conv1\. At most"):
        verdict(model, portable)


def test_a_layer_whose_result_nobody_reads_is_left_out() -> None:
    class Unread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = nn.Conv2d(16, 16, 3), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            self.second(y)
            return self.third(y)

    x = torch.randn(1, 16, 8, 8)
    model = fd.prepare(Unread().eval(), include="*")
    fd.calibrate(model, x)
    found = compare_layerwise(model, to_portable(fd.export_graph(model, x)), [x])
    assert not found.unmatched
    assert [*found.layers] == ["first", "third"]


def test_an_error_behind_the_last_quantised_layer_is_found() -> None:
    model, canonical = unet()
    broken = edited(canonical, {"head.weight": scale_by(-1.0)})
    with pytest.raises(GateError, match="after the last quantised layer"):
        verdict(model, to_portable(broken))


def test_every_batch_counts_in_whatever_order() -> None:
    model, canonical = unet()
    graph = to_portable(canonical)
    tensor = initializer(graph, "encoder.0.conv1.weight")
    tensor.CopyFrom(numpy_helper.from_array(1.01 * numpy_helper.to_array(tensor), tensor.name))
    batches = [images(1, seed=1), 0.01 * images(1, seed=2)]
    first, second = (compare_layerwise(model, graph, each) for each in (batches, batches[::-1]))
    alone = [compare_layerwise(model, graph, [each]) for each in batches]
    assert first.worst > 0
    for layer, share in first.layers.items():
        assert share == second.layers[layer] == sum(each.layers[layer] for each in alone) / 2
        assert first.blocks[layer] == second.blocks[layer] == sum(each.blocks[layer] for each in alone)


def test_what_is_not_finite_is_more_than_a_block() -> None:
    """A block may differ by its scale, and never by NaN."""
    model, canonical = unet()
    found = compare_layerwise(
        model, to_portable(edited(canonical, {"encoder.0.norm1.bias": scale_by(math.nan)})), [images(1)]
    )
    lost = [name for name, share in found.layers.items() if share == 1]
    assert lost == ["encoder.0.conv2"]
    assert found.blocks[lost[0]] > 1000
