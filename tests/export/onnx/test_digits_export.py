"""A UNet that reads digits, every layer in FP4, in every form it is exported to."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from fp4deploy.data import IMAGE_MEAN, IMAGE_STD, generate_shapes, open_dataset
from fp4deploy.export import export_checkpoint, inspect_onnx
from fp4deploy.export.engine.build import build_engine
from fp4deploy.export.ledger.ledger import ledger_path, load_ledger
from fp4deploy.export.lowering.lower import lower
from fp4deploy.export.onnx.decomposed import to_portable
from fp4deploy.export.onnx.graph import export_graph
from fp4deploy.export.onnx.session import portable_session
from fp4deploy.export.to_packed import pack
from fp4deploy.export.verify.outputs import compare_with_torch, require_agreement, verify_decomposed
from fp4deploy.models import ModelCard, UNet, build_unet, save_checkpoint
from fp4deploy.models.input_encoding import encode_input
from fp4deploy.qat import calibrate, load_model, prepare, round_to_deployed
from tests.export.exported_models import initializer
from tests.export.lowering.engine_graphs import widened
from tests.export.lowering.plugin_evaluator import evaluate_plugins
from tests.export.lowering.test_lowering_gemm import evaluate, with_function
from tests.samples import sample

SIZE = 32


def image(count: int, seed: int = 1) -> torch.Tensor:
    """Random 8-bit pixels, normalised, in FP32: not exact in FP16."""
    mean, std = (torch.tensor(numbers).view(1, 3, 1, 1) for numbers in (IMAGE_MEAN, IMAGE_STD))
    values = torch.randint(0, 256, (count, 3, SIZE, SIZE), generator=torch.Generator().manual_seed(seed))
    return (values / 255 - mean) / std


@cache
def exported(quantized: bool) -> tuple[UNet, onnx.ModelProto]:
    """An untrained UNet of scale 0.25 with digits, and its canonical graph."""
    torch.manual_seed(0)
    model = build_unet(5, 0.25, digits=True)
    if quantized:
        prepare(model, include=["*"])
        calibrate(model, [image(4, seed=0)])
    round_to_deployed(model)
    return model.eval(), export_graph(model, (3, SIZE, SIZE))


def stem(graph: onnx.ModelProto) -> list[onnx.NodeProto]:
    """The nodes up to the digits."""
    names = [node.op_type for node in graph.graph.node]
    return list(graph.graph.node)[: names.index("Concat") + 1]


def digits_of(graph: onnx.ModelProto) -> onnx.ModelProto:
    """The file cut off behind the digits."""
    cut = onnx.ModelProto()
    cut.CopyFrom(graph)
    del cut.graph.node[len(stem(graph)) :]
    del cut.graph.output[:]
    kind = graph.graph.input[0].type.tensor_type.elem_type
    cut.graph.output.append(onnx.helper.make_tensor_value_info(cut.graph.node[-1].output[0], kind, None))
    return cut


@pytest.mark.parametrize("quantized", [pytest.param(False, marks=pytest.mark.variants), True])
def test_the_canonical_graph_makes_fp16_digits_in_fp32(quantized: bool) -> None:
    _, graph = exported(quantized)
    nodes = stem(graph)
    assert nodes[0].op_type == "Cast"
    assert nodes[0].input[0] == "image"
    assert {node.op_type for node in nodes} >= {"Cast", "Mul", "Clip", "Round", "Sub", "ReduceSum", "Concat"}
    kinds = {
        value.name: value.type.tensor_type.elem_type
        for value in onnx.shape_inference.infer_shapes(graph).graph.value_info
    }
    assert all(kinds[node.output[0]] == onnx.TensorProto.FLOAT for node in nodes if node.op_type == "Round")
    assert kinds[nodes[-1].output[0]] == onnx.TensorProto.FLOAT16
    (found,) = onnx.reference.ReferenceEvaluator(digits_of(graph)).run(None, {"image": image(2).half().numpy()})
    assert torch.equal(torch.from_numpy(found), encode_input(image(2)).half())


def test_the_decomposed_graph_rounds_an_image_to_fp16_as_an_engine_reads_it() -> None:
    """Exactly: a last digit that differs would be a whole step."""
    _, graph = exported(True)
    portable = to_portable(graph)
    assert [node.op_type for node in portable.graph.node[:2]] == ["Cast", "Cast"]
    (found,) = portable_session(digits_of(portable)).run(None, {"image": image(4).numpy()})
    assert torch.equal(torch.from_numpy(found), encode_input(image(4)))


@pytest.mark.parametrize("quantized", [False, True])
def test_ort_and_torch_agree(quantized: bool) -> None:
    model, graph = exported(quantized)
    """As the export's gate: FP4 amplifies the order of a sum, which differs between CPUs, so layers decide there."""
    if quantized:
        require_agreement(verify_decomposed(model, to_portable(graph), image(4).split(1)), "model")
        return
    found = compare_with_torch(model, to_portable(graph), image(4).split(1))
    assert found.share == 1
    assert found.largest < 1e-4


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_image_shows_in_the_decomposed_graph(bad: float) -> None:
    x = image(1)
    x[0, 2, 3, 4] = bad
    (logits,) = portable_session(to_portable(exported(True)[1])).run(None, {"image": x.numpy()})
    assert np.isnan(logits).any()


def test_the_first_layer_stands_in_the_file_with_13_channels_in_a_block() -> None:
    _, graph = exported(True)
    assert list(initializer(graph, "encoder.0.conv1.weight.codes").dims) == [16, 9 * 16]
    scale = numpy_helper.to_array(initializer(graph, "encoder.0.conv1.input.global_scale"))
    assert scale == np.float32(6) / np.float32(2688)


def same_classes(logits: np.ndarray) -> None:
    """Torch's, but for the last bits that another order of additions makes and FP4 amplifies."""
    with torch.inference_mode():
        expected = exported(True)[0](image(1)).argmax(1).numpy()
    assert len(np.unique(expected)) > 1
    assert (logits.argmax(1) == expected).mean() > 0.99


@pytest.mark.filterwarnings("ignore:.*encountered in divide:RuntimeWarning")
@pytest.mark.parametrize(("conv", "form"), [("qdq", "qdq"), ("gemm", "gemm")])
def test_lowered_for_an_engine_it_computes_the_same(conv: str, form: str) -> None:
    _, graph = exported(True)
    lowered = lower(graph, conv)
    plan = {layer.name: layer for layer in lowered.layers}
    assert (plan["encoder.0.conv1"].form, plan["encoder.0.conv1"].requested) == (form, "FP4")
    assert sum(layer.requested == "FP4" for layer in lowered.layers) == 13
    same_classes(evaluate(with_function(lowered.model, graph), image(1).half().float().numpy()))


@pytest.mark.filterwarnings("ignore:.*encountered in divide:RuntimeWarning")
def test_as_plugins_the_first_layer_is_one_of_them() -> None:
    lowered = lower(exported(True)[1], "plugin", "tensorrt")
    first = next(layer for layer in lowered.layers if layer.name == "encoder.0.conv1")
    assert (first.form, first.compute) == ("plugin", "FP4")
    same_classes(evaluate_plugins(widened(lowered.model), image(1).half().float().numpy(), wide=True))


@pytest.mark.rtx
@pytest.mark.nightly
@pytest.mark.parametrize(("conv", "realised"), [("auto", "FP8"), ("qdq", "FP16"), ("gemm", "FP4")])
def test_tensorrt_rtx_builds_it(tmp_path: Path, conv: str, realised: str) -> None:
    pytest.importorskip("tensorrt_rtx")
    onnx.save(exported(True)[1], tmp_path / "digits.onnx")
    build_engine(tmp_path / "digits.onnx", tmp_path / "digits.plan", conv=conv)
    ledger = load_ledger(ledger_path(tmp_path / "digits.plan"))
    first = next(row for row in ledger.rows() if row["layer"] == "encoder.0.conv1")
    stored = "FP8" if realised == "FP8" else "FP4"
    assert (first["wanted"], first["realised"], first["weights"]) == ("FP4", realised, stored)
    assert "0 fallbacks" in ledger.summary()


@pytest.mark.variants
@pytest.mark.parametrize("include", sample([("*",), None], every=2), ids=["every layer", "default choice"])
def test_from_a_checkpoint_through_the_gates(tmp_path: Path, include: tuple[str, ...] | None) -> None:
    """Free agreement where the head prefers a class clearly, as a trained model does."""
    generate_shapes(tmp_path / "data", train=1, val=4, size=SIZE, seed=0)
    names = open_dataset(tmp_path / "data", "val").class_names
    torch.manual_seed(0)
    model = prepare(build_unet(len(names), 0.125, digits=True), include=include)
    calibrate(model, [image(4)])
    model.get_parameter("head.bias").data[0] += 4
    card = ModelCard(
        "nvfp4", 0.125, names, SIZE, SIZE, IMAGE_MEAN, IMAGE_STD, True, "nvfp4_qat", include=include, digits=True
    )
    path = tmp_path / "best.safetensors"
    save_checkpoint(path, model, card)
    assert load_model(path)[1] == card
    result = export_checkpoint(path, tmp_path / "unet.onnx", data=tmp_path / "data", images=4)
    assert result.verification is not None
    assert result.verification.share >= 0.999
    first = next(layer for layer in inspect_onnx(tmp_path / "unet.onnx") if layer.name == "encoder.0.conv1")
    assert first.precision == ("FP4" if include else "FP16")
    packed = pack(path, tmp_path / "unet.fp4", data=tmp_path / "data", images=4)
    assert packed.verification is not None
    assert packed.file.graph.digits
