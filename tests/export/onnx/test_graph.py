from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import nn

from fp4deploy.errors import InputError
from fp4deploy.export.onnx import graph as graph_module
from fp4deploy.export.onnx.decomposed import to_portable
from fp4deploy.export.onnx.exporter import short_export
from fp4deploy.export.onnx.graph import export_graph
from fp4deploy.export.onnx.layers import layers_of
from fp4deploy.export.onnx.quantize_function import QUANTIZE_OP
from fp4deploy.export.onnx.session import verifying_session
from fp4deploy.export.to_onnx import export_onnx
from fp4deploy.formats import global_amax, global_scale, quantize_nvfp4
from fp4deploy.models import build_unet
from fp4deploy.qat import calibrate, prepare, quantized_layers
from tests.export.exported_models import (
    UNET_SHAPE,
    Shapes,
    images,
    initializer,
    prepared,
    reference_logits,
    shapes,
    unet,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:onnx")  # 1 / 0 and NaN are part of the contract


def ohwi(layer: nn.Module) -> torch.Tensor:
    weight = layer.weight.detach()
    if isinstance(layer, nn.ConvTranspose2d):
        return weight.permute(1, 2, 3, 0)
    return weight.permute(0, 2, 3, 1) if isinstance(layer, nn.Conv2d) else weight


def relative_error(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.sqrt(((a - b) ** 2).mean() / (b**2).mean()))


@pytest.mark.parametrize("recipe", ["nvfp4_qat", None])
def test_contract_of_the_file(recipe: str | None) -> None:
    _, model = unet(recipe)
    onnx.checker.check_model(model, full_check=True)
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    assert model.ir_version == 11
    assert opsets == ({"": 23, "trt": 1} if recipe else {"": 23})
    assert len(model.functions) == (1 if recipe else 0)
    image, logits = model.graph.input[0], model.graph.output[0]
    assert (image.name, logits.name) == ("image", "logits")
    for value, sizes in ((image, ["N", 3, 32, 32]), (logits, ["N", 5, 32, 32])):
        kind = value.type.tensor_type
        assert kind.elem_type == onnx.TensorProto.FLOAT16
        assert [size.dim_param or size.dim_value for size in kind.shape.dim] == sizes


@pytest.mark.parametrize("make", [unet, shapes])
def test_every_layer_holds_the_bytes_of_formats(make) -> None:
    torch_model, model = make()
    layers = quantized_layers(torch_model)
    assert layers
    for name, layer in layers.items():
        expected = quantize_nvfp4(ohwi(layer))
        codes, scales = initializer(model, f"{name}.weight.codes"), initializer(model, f"{name}.weight.scales")
        assert codes.data_type == onnx.TensorProto.FLOAT4E2M1
        assert scales.data_type == onnx.TensorProto.FLOAT8E4M3FN
        rows = expected.codes.shape[0]
        assert list(codes.dims) == [rows, 2 * expected.codes.numel() // rows]
        assert list(scales.dims) == [rows, expected.scales.numel() // rows]
        assert codes.raw_data == expected.codes.contiguous().numpy().tobytes(), name
        assert scales.raw_data == expected.scales.view(torch.uint8).contiguous().numpy().tobytes(), name
        scale = numpy_helper.to_array(initializer(model, f"{name}.weight.global_scale"))
        assert (scale.dtype, scale.shape) == (np.float32, ())
        assert scale == np.float32(expected.amax.item()) / np.float32(2688)
        amax = np.float32(layer.input_amax.item())
        assert numpy_helper.to_array(initializer(model, f"{name}.input.global_scale")) == amax / np.float32(2688)


def test_a_delayed_recipe_exports_what_was_tracked_last() -> None:
    """Not what the last training step quantised with."""
    torch.manual_seed(0)
    model = prepare(nn.Sequential(nn.Conv2d(32, 16, 1)), "nvfp4_qat_delayed", include=["0"]).train()
    for largest in (2.0, 6.0):
        model(images(2, (32, 8, 8)).clamp(-1, 1) * largest)
    exported = export_graph(model.eval(), (32, 8, 8))
    assert numpy_helper.to_array(initializer(exported, "0.input.global_scale")) == np.float32(6) / np.float32(2688)


def test_no_float_copy_of_a_quantised_weight_is_left() -> None:
    torch_model, model = unet()
    quantised = quantized_layers(torch_model)
    sizes = {name: layer.weight.numel() for name, layer in quantised.items()}
    plain = sum(p.numel() for name, p in torch_model.named_parameters() if name.removesuffix(".weight") not in sizes)
    assert model.ByteSize() < 0.5625 * sum(sizes.values()) + 2 * plain + 150_000
    floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16)
    largest = max(np.prod(t.dims, dtype=int) for t in model.graph.initializer if t.data_type in floats)
    assert largest < min(sizes.values())


def test_nodes_are_called_after_torch_modules() -> None:
    torch_model, model = unet()
    nodes = {node.name: node.op_type for node in model.graph.node}
    assert len(nodes) == len(model.graph.node)
    assert nodes["encoder.1.conv2"] == "Conv"
    assert nodes["up.0"] == "ConvTranspose"
    assert nodes["encoder.1.norm2"] == "GroupNormalization"
    assert nodes["encoder.1.conv2.input.quantize"] == QUANTIZE_OP
    assert {"pool", "pool_2"} <= set(nodes)
    layers = json.loads(next(e.value for e in model.metadata_props if e.key == "fp4deploy.layers"))
    fp4 = {name for name, layer in layers.items() if layer["precision"] == "FP4"}
    assert fp4 == set(quantized_layers(torch_model))
    assert layers["head"]["precision"] == "FP16"
    assert all(layer["reason"] and layer["kind"] for layer in layers.values())


class _Twice(nn.Module):
    """Holds each layer under two names and calls it by the second, as blocks of nnU-Net do."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 4, 1)
        self.all = nn.Sequential(self.stem, nn.ReLU(), self.body, self.head)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.all(x)


def test_layers_of_several_names_have_the_first() -> None:
    model = prepare(_Twice())
    calibrate(model, torch.randn(1, 3, 8, 8))
    graph = export_graph(model, (3, 8, 8))
    convolutions = [node.name for node in graph.graph.node if node.op_type == "Conv"]
    assert convolutions == ["stem", "body", "head"]
    held = {tensor.name for tensor in graph.graph.initializer}
    assert {"stem.weight", "stem.bias", "body.weight.codes", "head.weight"} <= held
    assert not any(name.startswith("all.") for name in held)
    assert {layer.name for layer in layers_of(graph)} == {"stem", "body", "head"}


def test_same_model_gives_same_bytes_and_no_paths() -> None:
    torch_model, model = unet()
    content = model.SerializeToString(deterministic=True)
    assert export_graph(torch_model, UNET_SHAPE).SerializeToString(deterministic=True) == content
    assert b".py" not in content
    assert b"pkg.torch" not in content


def test_reference_evaluator_agrees_with_torch_on_every_layer_form() -> None:
    torch_model, model = shapes()
    x = images(3, (3, 16, 24), seed=5)
    with torch.no_grad():
        expected = torch_model(x).numpy()
    assert relative_error(reference_logits(model, x), expected) < 0.1  # FP16 sums move a few values over a boundary


def test_reference_evaluator_agrees_with_torch_tightly_on_one_layer() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(24, 16, 3, padding=1))
    prepare(model, "nvfp4_qat", include=["0"])
    quantized_layers(model)["0"].input_amax.fill_(3.0)  # smaller than the inputs: some saturate
    model.eval()
    canonical = export_graph(model, (24, 8, 8))
    x = images(2, (24, 8, 8))
    with torch.no_grad():
        expected = model(x).numpy()
    assert relative_error(reference_logits(canonical, x), expected) < 5e-3


def test_unet_reference_evaluator_follows_torch() -> None:
    torch_model, model = unet()
    x = images(1)
    with torch.no_grad():
        expected = torch_model(x).numpy()
    assert relative_error(reference_logits(model, x), expected) < 0.35  # untrained: flips reach the noise of FP4


def test_function_gives_the_codes_of_formats() -> None:
    amax = np.float32(2.7)
    scale = global_scale(np.float32(amax))
    x = images(2, (32, 40)).numpy() * np.float32(1.2)
    x[0, :16, 0], x[0, :16, 1], x[0, :16, 2], x[0, 3, 3], x[0, 4, 4] = 0, 1e-30, 50, np.nan, np.inf
    function = unet()[1].functions[0]
    node = onnx.helper.make_node(
        QUANTIZE_OP, ["x", "s"], ["codes", "scales"], domain="trt", axis=1, block_size=16, scale_type=17
    )
    values = [onnx.helper.make_tensor_value_info(n, 1, d) for n, d in (("x", [2, 32, 40]), ("s", []))]
    outputs = [
        onnx.helper.make_tensor_value_info("codes", onnx.TensorProto.FLOAT4E2M1, None),
        onnx.helper.make_tensor_value_info("scales", onnx.TensorProto.FLOAT8E4M3FN, None),
    ]
    opsets = [onnx.helper.make_opsetid("", 23), onnx.helper.make_opsetid("trt", 1)]
    graph = onnx.helper.make_graph([node], "q", values, outputs)
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=11, functions=[function])
    codes, scales = ReferenceEvaluator(model).run(None, {"x": x, "s": np.array(scale)})
    expected = quantize_nvfp4(torch.from_numpy(x).movedim(1, -1), amax=float(global_amax(scale)))
    packed = codes.view(np.uint8).transpose(0, 2, 1)
    assert ((packed[..., ::2] | packed[..., 1::2] << 4) == expected.codes.numpy()).all()
    assert (scales.view(np.uint8).transpose(0, 2, 1) == expected.scales.view(torch.uint8).numpy()).all()


def test_weights_in_2d_blocks() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(40, 24, 3))
    prepare(model, "nvfp4_qat_2d", include=["0"])
    layer = quantized_layers(model)["0"]
    layer.input_amax.fill_(4.0)
    canonical = export_graph(model.eval(), (40, 8, 8))
    per_tap = layer.weight.detach().permute(2, 3, 0, 1)
    expected = quantize_nvfp4(per_tap, block="2d")
    codes = np.frombuffer(initializer(canonical, "0.weight.codes").raw_data, np.uint8).reshape(24, 3, 3, 24)
    assert (codes == expected.codes.permute(2, 0, 1, 3).numpy()).all()


def test_reused_layer_shares_its_constants() -> None:
    _, model = shapes()
    codes = [tensor.name for tensor in model.graph.initializer if tensor.name.startswith("pointwise.weight.codes")]
    assert codes == ["pointwise.weight.codes"]
    assert {"pointwise", "pointwise_2"} <= {node.name for node in model.graph.node}


def test_uncalibrated_layer_is_named() -> None:
    model = prepare(build_unet(5, 0.25)).eval()
    with pytest.raises(InputError, match=r"encoder\.0\.conv2.*never calibrated.*fp4deploy train"):
        export_graph(model, UNET_SHAPE)


def test_a_layer_that_never_runs_is_no_layer_of_the_file(tmp_path: Path) -> None:
    """The auxiliary head of a network without its training: never calibrated, trained or not, and not in the file."""

    class WithAuxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.auxiliary = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 1)
            self.body, self.head = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(self.stem(x)))

    model = prepare(WithAuxiliary())
    calibrate(model, torch.ones(1, 3, 8, 8))
    result = export_onnx(model.eval(), torch.ones(1, 3, 8, 8), tmp_path / "own.onnx")
    assert (result.fp4_layers, result.unused_layers) == (1, ("auxiliary",))
    written = onnx.load(result.path)
    assert [layer.name for layer in layers_of(written)] == ["stem", "body", "head"]
    assert not [each.name for each in written.graph.initializer if "auxiliary" in each.name]


def test_an_operation_without_a_translation_is_named() -> None:
    model = nn.Sequential(nn.Conv3d(3, 4, 1), nn.AdaptiveAvgPool3d(3))
    with pytest.raises(InputError, match=r"does not know aten\._adaptive_avg_pool3d\.default, which Sequential calls"):
        export_graph(model, (3, 8, 8, 8))


def test_a_call_without_a_translation_is_named_with_its_line() -> None:
    class Decomposing(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.svd(super().forward(x))[0].contiguous()

    with pytest.raises(InputError, match=r"does not know aten\._linalg_svd.*\(test_graph\.py, line \d+\)"):
        export_graph(Decomposing(3, 4, 1), (3, 8, 8))


def test_a_size_that_the_code_takes_for_a_constant_is_named() -> None:
    """torch's exporter fixes the axis without a word."""

    class EachAlone(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return torch.cat([y[at : at + 1] for at in range(x.shape[0])])

    with pytest.raises(InputError, match=r"EachAlone takes the size of an axis \(N\).*a loop over the axis"):
        export_graph(EachAlone(3, 4, 1), (3, 8, 8))


def test_a_network_that_onnx_runtime_does_not_compute_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_module, "refuse_random", lambda *_: None)

    class Noisy(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + torch.randn_like(x[:, :1])

    graph = to_portable(export_graph(Noisy(3, 4, 1), (3, 8, 8)))
    with pytest.raises(InputError, match=r"does not compute this network on a CPU.*RandomNormalLike"):
        verifying_session(graph)


def test_an_output_that_is_no_tensor_is_named() -> None:
    class Text(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), "text"

    with pytest.raises(InputError, match="Text returns something that is no tensor"):
        export_graph(Text(3, 4, 1), (3, 8, 8))


@pytest.mark.parametrize("name", ["grouped.weight", "first.bias"])
def test_nan_parameter_is_named(name: str) -> None:
    model = prepared(Shapes(), "nvfp4_qat", (3, 16, 24))
    model.get_parameter(name).data.flatten()[0] = float("nan")
    with pytest.raises(InputError, match=name.split(".")[0]):
        export_graph(model, (3, 16, 24))


def test_parameter_beyond_fp16_is_named() -> None:
    model = prepared(Shapes(), "nvfp4_qat", (3, 16, 24))
    model.get_parameter("last.bias").data[0] = 1e6
    with pytest.raises(InputError, match=r"last\.bias.*65504"):
        export_graph(model, (3, 16, 24))


def test_image_size_that_the_model_refuses() -> None:
    model, _ = unet(None)
    with pytest.raises(InputError, match="multiples of 16"):
        export_graph(model, (3, 38, 38))


class Pair(nn.Module):
    """Two inputs, and a tuple in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 16, 1), nn.Conv2d(1, 16, 1)

    def forward(self, image: torch.Tensor, depth: torch.Tensor) -> Any:
        x = self.one(image) + self.two(depth)
        return x, (x.mean(1, keepdim=True),)


def test_outputs_of_nested_tuples_have_names_and_a_missing_input_is_named() -> None:
    graph = export_graph(Pair().eval(), (torch.zeros(1, 3, 8, 8), torch.zeros(1, 1, 8, 8)))
    assert [value.name for value in graph.graph.output] == ["output_0", "output_1.0"]
    with pytest.raises(InputError, match="missing a required argument: 'depth'") as refused:
        export_graph(Pair().eval(), torch.zeros(1, 3, 8, 8))
    assert "multiples of 16" not in str(refused.value)


@pytest.mark.rtx
@pytest.mark.nightly
@pytest.mark.parametrize("make", [unet, shapes])
def test_tensorrt_rtx_builds_the_graph_and_its_own_quantiser_wins(make) -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    model = make()[1]
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    del bare.functions[:]
    plans = [_plan(trt, each) for each in (model, bare)]
    assert len(plans[0]) == len(plans[1]) > 0


def _plan(trt, model: onnx.ModelProto) -> bytes:
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    assert parser.parse(model.SerializeToString()), [parser.get_error(i).desc() for i in range(parser.num_errors)]
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM120, 0)
    profile = builder.create_optimization_profile()
    image = network.get_input(0)
    profile.set_shape(image.name, *[(batch, *tuple(image.shape)[1:]) for batch in (1, 2, 4)])
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    assert plan is not None
    return bytes(plan)


def test_the_table_of_operators_is_made_once() -> None:
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    make = ONNXRegistry.from_torchlib
    with short_export():
        one, other = ONNXRegistry().from_torchlib(23), ONNXRegistry.from_torchlib(23)
    assert ONNXRegistry.from_torchlib == make
    (name, functions), *_ = other.functions.items()
    assert one.functions[name] == functions
    one.functions[name].clear()
    assert functions
    with short_export():
        assert ONNXRegistry.from_torchlib(23).functions[name] == functions


class Counted(nn.Module):
    """Whole numbers times a feature map."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x) * torch.arange(8)


def test_a_graph_is_run_again_for_casts_where_types_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.onnx._internal.exporter import _fx_passes

    run, insert = list[object](), _fx_passes.insert_type_promotion_nodes
    monkeypatch.setattr(_fx_passes, "insert_type_promotion_nodes", lambda module: run.append(module) or insert(module))
    export_graph(shapes()[0], (3, 16, 24))
    assert not run
    onnx.checker.check_model(export_graph(Counted().eval(), (3, 8, 8)), full_check=True)
    assert run
