"""Checkpoint to packed network: the bytes of the ONNX file, the gate before writing, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path

import pytest
import torch
from onnx import numpy_helper
from torch import nn

from fp4deploy import __version__
from fp4deploy.data import IMAGE_MEAN, IMAGE_STD, generate_shapes, open_dataset
from fp4deploy.data.palette import colours
from fp4deploy.errors import GateError, InputError
from fp4deploy.export.onnx.graph import export_graph
from fp4deploy.export.to_packed import pack, pack_model
from fp4deploy.export.verify import packed as module
from fp4deploy.export.verify.nodes import NodeComparison, compare_nodes
from fp4deploy.export.verify.packed import require_packed, verify_packed
from fp4deploy.formats import global_amax
from fp4deploy.models import ModelCard, build_unet, save_checkpoint
from fp4deploy.packed import PackedFile, PackedNetwork, packed_file, read_packed
from fp4deploy.qat import calibrate, prepare, quantized_layers, round_to_deployed
from fp4deploy.system.files import file_digest
from tests.export.exported_models import Shapes, images, initializer, prepared, unet
from tests.samples import sample

NAMES = ("a", "b", "c", "d", "e")
SHAPE = (3, 16, 24)


def card(recipe: str | None = "nvfp4_qat") -> ModelCard:
    return ModelCard("nvfp4" if recipe else "fp16", 0.25, NAMES, 32, 32, IMAGE_MEAN, IMAGE_STD, False, recipe)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "shapes"
    generate_shapes(folder, train=2, val=4, size=32, seed=0)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    torch.manual_seed(0)
    names = open_dataset(data, "val").class_names
    model = prepare(build_unet(len(names), 0.125))
    calibrate(model, [images(2)])
    path = tmp_path_factory.mktemp("run") / "best.safetensors"
    save_checkpoint(path, model, ModelCard("nvfp4", 0.125, names, 32, 32, IMAGE_MEAN, IMAGE_STD, True, "nvfp4_qat"))
    return path


def small(recipe: str | None = None) -> nn.Module:
    """Three convolutions, of which the second is the one that a recipe quantises."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(8, 16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Conv2d(16, 4, 1)
    return prepared(nn.Sequential(*layers), recipe, SHAPE)


@cache
def packed_unet() -> PackedFile:
    """The packed network of `unet()`; for reading."""
    return packed_file(Path("unet.fp4"), card(), *pack_model(unet()[0], images(1), False))


@pytest.mark.parametrize(
    ("recipe", "layers"),
    [pytest.param("nvfp4_qat", 11, marks=pytest.mark.variants), ("nvfp4_qat_2d", 7), ("nvfp4_4o6_weight_qat", 7)],
)
def test_the_bytes_are_those_of_the_onnx_file(recipe: str, layers: int) -> None:
    if layers == 11:
        (model, graph), tensors = unet(), packed_unet().tensors
    else:
        torch.manual_seed(0)
        model = prepared(Shapes(), recipe, SHAPE)
        graph, tensors = export_graph(model, SHAPE), pack_model(model, images(2, SHAPE))[1]
    assert len(quantized_layers(model)) == layers
    for name in quantized_layers(model):
        codes, scales = (initializer(graph, f"{name}.weight.{part}") for part in ("codes", "scales"))
        assert tensors[f"{name}.weight.codes"].numpy().tobytes() == codes.raw_data
        assert tensors[f"{name}.weight.scales"].view(torch.uint8).numpy().tobytes() == scales.raw_data
        weight_scale, input_scale = (
            torch.tensor(numpy_helper.to_array(initializer(graph, f"{name}.{part}.global_scale")).item())
            for part in ("weight", "input")
        )
        e4m3_max = 256 if "4o6" in recipe else 448
        assert torch.equal(tensors[f"{name}.weight.amax"], global_amax(weight_scale, e4m3_max))
        assert torch.equal(tensors[f"{name}.input_amax"], global_amax(input_scale))


def test_what_stays_in_fp16_has_the_values_of_the_model() -> None:
    model, _ = unet()
    tensors = packed_unet().tensors
    first = model.get_submodule("encoder.0.conv1").weight
    assert torch.equal(tensors["encoder.0.conv1.weight"].float(), first.detach().permute(0, 2, 3, 1))
    for name in ("encoder.0.norm1.weight", "up.0.bias", "decoder.1.conv1.bias", "head.bias"):
        assert torch.equal(tensors[name].float(), model.get_parameter(name).detach())


def test_export_verifies_writes_and_is_deterministic(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    result = pack(checkpoint, tmp_path / "unet.fp4", data, images=3)
    assert result.verification is not None
    assert (result.verification.images, result.verification.pixels) == (3, 3 * 32 * 32)
    assert "argmax over axis 1 equal to torch on" in result.verification.sentence()
    assert read_packed(tmp_path / "unet.fp4").graph == result.file.graph
    palette = colours(result.file.card.class_names, True) if result.file.card else []
    assert json.loads(read_packed(tmp_path / "unet.fp4").about) == {
        "version": __version__,
        "checkpoint_sha256": file_digest(checkpoint),
        "palette": [colour and list(colour) for colour in palette],
    }
    pack(checkpoint, tmp_path / "again.fp4", verify=False)
    assert (tmp_path / "again.fp4").read_bytes() == (tmp_path / "unet.fp4").read_bytes()


def test_the_rest_of_a_checkpoint_is_chosen_on_its_data(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    chosen = pack(checkpoint, tmp_path / "auto.fp4", data, images=1, rest="auto")
    assert chosen.file.graph.rest == "fp16"
    assert not chosen.file.graph.wide
    with pytest.raises(InputError, match="measures the network's ranges on images. Give --data DIR"):
        pack(checkpoint, tmp_path / "other.fp4", verify=False, rest="auto")
    assert not (tmp_path / "other.fp4").exists()


@pytest.mark.parametrize(("options", "cause"), [({}, "--data DIR"), ({"images": 0, "verify": False}, "At least one")])
def test_wrong_options(checkpoint: Path, tmp_path: Path, options: dict, cause: str) -> None:
    with pytest.raises(InputError, match=cause):
        pack(checkpoint, tmp_path / "unet.fp4", **options)
    assert not list(tmp_path.iterdir())


def test_another_suffix(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="should end in .fp4"):
        pack(checkpoint, tmp_path / "unet.onnx", verify=False)


@pytest.mark.parametrize("recipe", ["fp4_all_the_way", "nvfp4_4o6_qat", "mx_baseline"])
def test_recipes_without_a_packed_form(recipe: str) -> None:
    with pytest.raises(InputError, match=f"recipe '{recipe}'"):
        pack_model(small(recipe), images(1, SHAPE), False)


def test_another_network() -> None:
    model = prepared(Shapes(), "nvfp4_qat", SHAPE)
    x = torch.randn(2, *SHAPE)
    file = packed_file(Path("x.fp4"), None, *pack_model(model, x))
    with torch.inference_mode():
        errors = compare_nodes(model, PackedNetwork(file), x).errors
    assert max(errors.values()) < 1e-3, errors


@pytest.mark.parametrize("name", ["3.weight", "4.weight", "1.bias"])
def test_nan_weights_are_refused(name: str) -> None:
    model = small("nvfp4_qat")
    model.get_parameter(name).data.flatten()[3] = float("nan")
    with pytest.raises(InputError, match=f"{name.removesuffix('.weight')}.* holds NaN"):
        pack_model(model, images(1, SHAPE), False)


def test_activations_beyond_fp16_are_refused() -> None:
    model = small("nvfp4_qat")
    layer = model.get_submodule("3")
    layer.input_amax.fill_(87590.4)  # type: ignore[union-attr, operator]
    with pytest.raises(InputError, match=r"3\.input_amax reaches 87590\.4, and FP16's largest number is 65504"):
        pack_model(model, torch.randn(1, 3, 16, 16))


def test_layers_kept_in_fp16_by_choice() -> None:
    """Any mixture of precisions: what an FP16 layer reads is plain, and concatenated for it."""
    torch.manual_seed(0)
    model = build_unet(5, 0.25)
    prepare(model, exclude=["decoder.1.conv1", "up.0", "encoder.2.*"])
    calibrate(model, [images(2)])
    round_to_deployed(model)
    file = packed_file(Path("x.fp4"), card(), *pack_model(model.eval(), images(1), False))
    with torch.inference_mode():
        errors = compare_nodes(model, PackedNetwork(file), images(2)).errors
    assert max(errors.values()) < 1e-3


def broken_networks() -> dict[str, PackedFile]:
    """The network of `unet()` with one thing wrong that a checker cannot see."""
    good = packed_unet()
    amax = {**good.tensors, "decoder.0.conv2.input_amax": good.tensors["decoder.0.conv2.input_amax"] / 4}
    codes = {**good.tensors, "up.1.weight.codes": good.tensors["up.1.weight.codes"].flip(0)}
    bias = {**good.tensors, "encoder.2.conv1.bias": good.tensors["encoder.2.conv1.bias"].flip(0)}
    found = {
        name: dataclasses.replace(good, tensors=t) for name, t in (("amax", amax), ("codes", codes), ("bias", bias))
    }
    nodes = [
        node.model_copy(update={"inputs": node.inputs[::-1]}) if len(node.inputs) == 2 else node
        for node in good.graph.nodes
    ]
    found["swapped sources"] = dataclasses.replace(good, graph=good.graph.model_copy(update={"nodes": nodes}))
    return found


@pytest.mark.parametrize(
    ("fault", "layer"),
    [
        ("amax", "decoder.0.norm1"),
        ("codes", "up.1"),
        ("bias", "encoder.2.norm1"),
        ("swapped sources", "decoder.0.conv1"),
    ],
)
def test_the_gate_names_the_node_that_is_wrong(fault: str, layer: str) -> None:
    model, _ = unet()
    found = verify_packed(model, broken_networks()[fault], images(2).split(1))
    with pytest.raises(GateError, match=f"the first node to differ is {layer}, by"):
        require_packed(found, "best.safetensors")


@pytest.mark.parametrize("errors", [(0.5, 0.0), (float("nan"), 0.0), (0.0, 0.5)])
def test_a_node_is_judged_by_its_worst_batch(errors: tuple[float, float], monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = unet()
    of_batch = iter(errors)
    given = [model(images(1))]
    monkeypatch.setattr(module, "compare_nodes", lambda *_, **__: NodeComparison({"head": next(of_batch)}, given))
    found = verify_packed(model, broken_networks()["amax"], images(2).split(1), flat=False)
    assert [name for name, _ in found.wrong_nodes] == ["head"]
    assert not found.passed


def test_nothing_to_compare_is_no_agreement() -> None:
    model, _ = unet()
    found = verify_packed(model, broken_networks()["amax"], [])
    with pytest.raises(GateError, match="there was nothing to compare"):
        require_packed(found, "best.safetensors")


def test_last_bits_alone_pass() -> None:
    """An untrained model amplifies them beyond the end-to-end bound; with reference inputs they pass."""
    model, _ = unet()
    found = verify_packed(model, packed_unet(), images(2).split(1))
    require_packed(found, "best.safetensors")


@pytest.mark.parametrize("digits", sample([False, True], every=2))
def test_a_quantised_first_layer_reads_its_image_packed(digits: bool) -> None:
    torch.manual_seed(0)
    model = prepared(prepare(build_unet(5, 0.125, digits), include=["*"]), None)
    calibrate(model, [images(2)])
    round_to_deployed(model)
    file = packed_file(Path("x.fp4"), dataclasses.replace(card(), digits=digits), *pack_model(model, images(1), False))
    (read,) = file.graph.inputs[0].outputs
    assert (file.graph.digits, read.amax) == (digits, "encoder.0.conv1.input_amax")
    found = verify_packed(model, file, images(2).split(1))
    require_packed(found, "best.safetensors")
