from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import fp4deploy.export.to_onnx as onnx_file
from fp4deploy.data import IMAGE_MEAN, IMAGE_STD, generate_shapes
from fp4deploy.errors import GateError, InputError
from fp4deploy.export import describe_onnx, export_checkpoint, inspect_onnx, read_onnx, to_portable
from fp4deploy.export.onnx.session import portable_session
from fp4deploy.export.verify.outputs import Agreement, compare_with_torch, require_agreement
from fp4deploy.models import ModelCard, build_unet, save_checkpoint
from tests.export.exported_models import images, pixels_that_differ, prepared, shapes, traced_once, unet

CLASSES = ("background", "circle", "square", "triangle", "star")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shapes")
    generate_shapes(folder, train=1, val=6, size=32, seed=0)
    return folder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Untrained models whose head prefers a class clearly, as a trained one would."""
    folder = tmp_path_factory.mktemp("run")
    paths = {}
    for precision, recipe in (("fp16", None), ("nvfp4", "nvfp4_qat")):
        torch.manual_seed(0)
        model = prepared(build_unet(len(CLASSES), 0.25), recipe)
        model.get_parameter("head.bias").data = torch.tensor([4.0, 0, 0, 0, 0])
        card = ModelCard(precision, 0.25, CLASSES, 32, 32, IMAGE_MEAN, IMAGE_STD, background=True, recipe=recipe)
        paths[precision] = folder / f"{precision}.safetensors"
        save_checkpoint(paths[precision], model, card)
    return paths


@pytest.fixture(scope="module", autouse=True)
def each_checkpoint_is_traced_once() -> Iterator[None]:
    """The tests look at what follows a trace; they export the same checkpoints again and again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnx_file, "export_graph", traced_once(onnx_file.export_graph))
        yield


@pytest.fixture(scope="module")
def exported(
    checkpoints: dict[str, Path], data: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, onnx_file.ExportResult]:
    folder = tmp_path_factory.mktemp("export")
    return {
        precision: export_checkpoint(path, folder / f"{precision}.onnx", portable=True, data=data, images=4)
        for precision, path in checkpoints.items()
    }


@pytest.mark.parametrize("precision", ["fp16", "nvfp4"])
def test_export_writes_both_files_after_verifying(exported: dict, precision: str) -> None:
    result = exported[precision]
    assert result.agreement is not None
    assert result.agreement >= 0.999
    assert result.verification.images == 4
    assert result.verification.pixels == 4 * 32 * 32
    assert result.path.stat().st_size == result.size_bytes
    assert result.portable_path.name == f"{precision}.portable.onnx"
    assert result.fp4_layers == (11 if precision == "nvfp4" else 0)
    assert sorted(path.name for path in result.path.parent.glob(".*")) == []
    card = next(entry.value for entry in read_onnx(result.path).metadata_props if entry.key == "fp4deploy.card")
    assert ModelCard.from_json(card) == result.card
    logits = portable_session(read_onnx(result.portable_path)).run(None, {"image": images(2).numpy()})[0]
    assert logits.shape == (2, 5, 32, 32)


def tamper(model: onnx.ModelProto) -> onnx.ModelProto:
    """The decomposed graph with another head bias: a wrong export."""
    portable = to_portable(model)
    bias = next(tensor for tensor in portable.graph.initializer if tensor.name == "head.bias")
    bias.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(bias)[::-1].copy(), "head.bias"))
    return portable


@pytest.mark.parametrize("precision", ["fp16", "nvfp4"])
def test_gate_refuses_a_tampered_model_and_writes_nothing(
    checkpoints: dict, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    monkeypatch.setattr(onnx_file, "to_portable", tamper)
    out = tmp_path / "unet.onnx"
    out.write_bytes(b"the last good file")
    with pytest.raises(GateError, match=r"disagree: 100\.000 % of 4096 pixels.*Nothing was written") as caught:
        export_checkpoint(checkpoints[precision], out, portable=True, data=data, images=4)
    assert caught.value.exit_code == 1
    assert [path.name for path in tmp_path.iterdir()] == ["unet.onnx"]
    assert out.read_bytes() == b"the last good file"


def test_not_a_number_never_passes() -> None:
    model, canonical = unet(None)
    portable = to_portable(canonical)
    bias = next(tensor for tensor in portable.graph.initializer if tensor.name == "head.bias")
    bias.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(bias) * float("nan"), "head.bias"))
    agreement = compare_with_torch(model, portable, [images(1)])
    assert agreement.share == 0
    with pytest.raises(GateError):
        require_agreement(agreement, "model")


def test_gate_is_at_a_thousandth() -> None:
    require_agreement(Agreement(1, pixels_that_differ(100_000, 100), 0.1), "model")
    with pytest.raises(GateError):
        require_agreement(Agreement(1, pixels_that_differ(100_000, 101), 0.1), "model")
    for nothing in ((), pixels_that_differ(0, 0)):
        with pytest.raises(GateError, match="there was nothing to compare"):
            require_agreement(Agreement(0, nothing, 0.0), "model")


def test_calls_of_an_older_version_keep_working(checkpoints: dict, tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning, match="export_checkpoint"):
        old = onnx_file.export_onnx(checkpoints["fp16"], tmp_path / "old.onnx", True, verify=False)
    new = export_checkpoint(checkpoints["fp16"], tmp_path / "new.onnx", portable=True, verify=False)
    assert old.portable_path is not None
    assert old.path.read_bytes() == new.path.read_bytes()
    with pytest.warns(DeprecationWarning, match="portable=True"):
        onnx_file.export_onnx(nn.Conv2d(3, 4, 1), torch.ones(1, 3, 4, 4), tmp_path / "a.onnx", with_portable=True)
    assert (tmp_path / "a.portable.onnx").is_file()


def test_no_data_is_an_input_error_unless_unverified(checkpoints: dict, tmp_path: Path) -> None:
    out = tmp_path / "unet.onnx"
    with pytest.raises(InputError, match="--data DIR"):
        export_checkpoint(checkpoints["fp16"], out)
    assert not out.exists()
    result = export_checkpoint(checkpoints["fp16"], out, verify=False)
    assert (result.agreement, result.verification, result.portable_path) == (None, None, None)
    assert [path.name for path in tmp_path.iterdir()] == ["unet.onnx"]


def _edit(source: Path, target: Path, name: str, value: float) -> Path:
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    tensors = load_file(source)
    tensors[name] = tensors[name].clone()
    tensors[name].reshape(-1)[0] = value
    with safe_open(source, framework="pt") as file:
        save_file(tensors, target, metadata=file.metadata())
    return target


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("decoder.1.conv1.weight", float("nan"), "decoder.1.conv1.weight"),
        ("decoder.1.conv1.input_amax", 0.0, "decoder.1.conv1.*fp4deploy train"),
        ("head.bias", 1e6, "head.bias"),
    ],
)
def test_broken_checkpoints_are_named(
    checkpoints: dict, data: Path, tmp_path: Path, name: str, value: float, message: str
) -> None:
    broken = _edit(checkpoints["nvfp4"], tmp_path / "broken.safetensors", name, value)
    with pytest.raises(InputError, match=message):
        export_checkpoint(broken, tmp_path / "unet.onnx", data=data)
    assert not (tmp_path / "unet.onnx").exists()


def test_checkpoint_of_another_scale(tmp_path: Path, data: Path) -> None:
    card = ModelCard("fp16", 0.5, CLASSES, 32, 32, IMAGE_MEAN, IMAGE_STD, background=True)
    save_checkpoint(tmp_path / "wrong.safetensors", build_unet(5, 0.25), card)
    with pytest.raises(InputError, match="scale"):
        export_checkpoint(tmp_path / "wrong.safetensors", tmp_path / "unet.onnx", data=data)


def test_target_that_is_not_onnx(checkpoints: dict, data: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"\.onnx"):
        export_checkpoint(checkpoints["fp16"], tmp_path / "unet.plan", data=data)


@pytest.mark.parametrize("content", [b"", b"not a model\n" * 50, None])
def test_files_that_are_not_onnx(exported: dict, tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "file.onnx"
    whole = exported["nvfp4"].path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if content is None else content)
    for read in (inspect_onnx, describe_onnx, read_onnx):
        with pytest.raises(InputError, match=r"file\.onnx is not"):
            read(path)
    with pytest.raises(InputError, match="no file"):
        read_onnx(tmp_path / "absent.onnx")


def test_inspect_reads_precisions_from_the_graph(exported: dict) -> None:
    layers = {layer.name: layer for layer in inspect_onnx(exported["nvfp4"].path)}
    conv = layers["encoder.1.conv2"]
    assert (conv.kind, conv.precision, conv.weights) == ("Conv2d", "FP4", "FP4")
    assert conv.weight_shape == (32, 32, 3, 3)
    assert conv.input_shape == conv.output_shape == ("N", 32, 16, 16)
    assert conv.bytes == 32 * 32 * 9 // 2 + 32 * 32 * 9 // 16 + 4 + 2 * 32
    assert "16" in conv.reason
    assert (layers["head"].precision, layers["head"].bytes) == ("FP16", 2 * (5 * 16 + 5))
    assert layers["up.0"].kind == "ConvTranspose2d"
    assert layers["encoder.0.norm1"].kind == "GroupNorm"
    assert sum(layer.precision == "FP4" for layer in layers.values()) == 11
    assert len(layers) == 23


def test_inspect_the_decomposed_graph_and_fp16(exported: dict) -> None:
    portable = {layer.name: layer for layer in inspect_onnx(exported["nvfp4"].portable_path)}
    assert (portable["up.0"].precision, portable["up.0"].weights) == ("FP4", "INT8")
    assert portable["head"].weights == "FP32"
    assert len(portable) == 23
    assert {layer.precision for layer in inspect_onnx(exported["fp16"].path)} == {"FP16"}
    facts, columns, rows, last = describe_onnx(exported["nvfp4"].path)
    assert facts["opset"] == 23
    assert facts["inputs"] == {"image": "float16 Nx3x32x32"}
    assert all(len(row) == len(columns) for row in rows)
    assert last == "11 of 23 layers in FP4."


def test_inspect_does_not_believe_the_metadata(exported: dict, tmp_path: Path) -> None:
    model = read_onnx(exported["fp16"].path)
    plan = next(entry for entry in model.metadata_props if entry.key == "fp4deploy.layers")
    plan.value = plan.value.replace("FP16", "FP4")
    onnx.save(model, tmp_path / "boast.onnx")
    assert {layer.precision for layer in inspect_onnx(tmp_path / "boast.onnx")} == {"FP16"}


def test_inspect_foreign_file(tmp_path: Path) -> None:
    model = onnx.ModelProto()
    model.CopyFrom(shapes()[1])
    del model.metadata_props[:]
    onnx.save(model, tmp_path / "foreign.onnx")
    layers = {layer.name: layer for layer in inspect_onnx(tmp_path / "foreign.onnx")}
    assert (layers["tokens"].kind, layers["tokens"].precision) == ("MatMul", "FP4")
    assert layers["strided"].weight_shape == (8, 32, 3, 3)  # 24 channels, padded
    assert layers["first"].precision == "FP16"
