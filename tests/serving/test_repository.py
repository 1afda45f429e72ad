"""A model repository parses as the server parses it, and its Python backends give the masks of `predict`.

No server runs here. The configurations are read by the server's own protobuf schema, from the client library; the two
backends run with a stand-in for the module that the server gives them, around ONNX Runtime on the model file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from PIL import Image

from fp4deploy.data.images import FORMATS
from fp4deploy.errors import InputError
from fp4deploy.export.ledger.ledger import Ledger
from fp4deploy.models import InstanceHead
from fp4deploy.predict.predictor import load
from fp4deploy.runs import Run
from fp4deploy.serving.repository import Served, _network, _postprocess, _preprocess, write_repository
from tests.predict.pointwise import card, photo
from tests.serving.server import model_config, python_model


@pytest.fixture(scope="module")
def repository(untrained: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("served") / "repository"
    write_repository(untrained.export_dir / "unet.nvfp4.onnx", out)
    return out


def test_the_folders(repository: Path) -> None:
    files = sorted(str(path.relative_to(repository)) for path in repository.rglob("*") if path.is_file())
    assert files == [
        f"unet_nvfp4{name}"
        for name in (
            "/.fp4deploy.sha256", "/1/model.onnx", "/config.pbtxt", "/labels.txt",
            "_postprocess/.fp4deploy.sha256", "_postprocess/1/model.py", "_postprocess/config.pbtxt",
            "_preprocess/.fp4deploy.sha256", "_preprocess/1/model.py", "_preprocess/config.pbtxt",
            "_segment/.fp4deploy.sha256", "_segment/1/.keep", "_segment/config.pbtxt",
        )
    ]  # fmt: skip


def test_the_server_can_parse_the_configurations(repository: Path) -> None:
    from google.protobuf import text_format

    schema = model_config()
    configs = {
        path.parent.name: text_format.Parse(path.read_text(), schema()) for path in repository.glob("*/config.pbtxt")
    }
    assert {name: config.name for name, config in configs.items()} == {name: name for name in configs}
    network, ensemble = configs["unet_nvfp4"], configs["unet_nvfp4_segment"]
    session = ort.InferenceSession(repository / "unet_nvfp4" / "1" / "model.onnx", providers=["CPUExecutionProvider"])
    for declared, actual in (
        (network.input[0], session.get_inputs()[0]),
        (network.output[0], session.get_outputs()[0]),
    ):
        assert declared.name == actual.name
        assert list(declared.dims) == actual.shape[1:]
    tensors = {"IMAGE"}
    for step in ensemble.ensemble_scheduling.step:
        config = configs[step.model_name]
        assert set(step.input_map) == {each.name for each in config.input}
        assert set(step.input_map.values()) <= tensors
        assert set(step.output_map) <= {each.name for each in config.output}
        tensors |= set(step.output_map.values())
    assert "MASK" in tensors
    assert {config.max_batch_size for config in configs.values()} == {8}


def _backend(repository: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    config = json.dumps({"parameters": _parameters(repository / name / "config.pbtxt")})
    return python_model(repository / name, monkeypatch, {"model_config": config})


def _parameters(path: Path) -> dict[str, Any]:
    """Parameters of a configuration as the server hands them over."""
    found = {}
    for line in path.read_text().splitlines():
        if line.startswith("parameters"):
            key = line.split('"')[1]
            text = line[line.index("string_value: ") + len("string_value: ") : line.rindex(" } }")]
            found[key] = {"string_value": json.loads(text)}
    return found


def _encoded(image: np.ndarray) -> bytes:
    target = io.BytesIO()
    Image.fromarray(image).save(target, format="PNG")
    return target.getvalue()


def test_the_backends_give_the_masks_of_predict(
    repository: Path, untrained: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = [photo(45, 61), photo(32, 32, 1), photo(20, 90, 2)]  # larger than the network's input, smaller, and both
    before = _backend(repository, "unet_nvfp4_preprocess", monkeypatch)
    after = _backend(repository, "unet_nvfp4_postprocess", monkeypatch)
    session = ort.InferenceSession(repository / "unet_nvfp4" / "1" / "model.onnx", providers=["CPUExecutionProvider"])
    (ready,) = before.execute([{"IMAGE": np.array([[_encoded(image)] for image in images], dtype=np.object_)}])
    assert ready.outputs["SIZE"].tolist() == [[45, 61], [32, 32], [20, 90]]
    (logits,) = session.run(None, {"image": ready.outputs["image"]})
    (answer,) = after.execute([{"logits": logits, "SIZE": ready.outputs["SIZE"]}])
    predictor = load(untrained.export_dir / "unet.nvfp4.onnx")
    for image, (content,) in zip(images, answer.outputs["MASK"], strict=True):
        mask = Image.open(io.BytesIO(content))
        expected = predictor.predict(image)
        assert mask.mode == "P"
        assert (np.asarray(mask) == expected.mask).mean() > 0.998  # but for ties
        assert mask.getpalette() == expected.mask_image().getpalette()


def test_more_classes_than_a_palette_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = tuple(f"class {number}" for number in range(300))
    files = _postprocess(
        "many", Served(Path("m.onnx"), dataclasses.replace(card(), class_names=names), 300, False, 8, b"")
    )
    for name, content in files.items():
        path = tmp_path / "many_postprocess" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    after = _backend(tmp_path, "many_postprocess", monkeypatch)
    logits = np.zeros((1, 300, 4, 4), np.float32)
    logits[0, 299] = 1
    (answer,) = after.execute([{"logits": logits, "SIZE": np.array([[4, 4]])}])
    assert (np.asarray(Image.open(io.BytesIO(answer.outputs["MASK"][0, 0]))) == 299).all()


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_an_error_and_no_mask(
    repository: Path, monkeypatch: pytest.MonkeyPatch, number: float
) -> None:
    backend = _backend(repository, "unet_nvfp4_postprocess", monkeypatch)
    good = np.random.default_rng(0).standard_normal((1, 5, 32, 32)).astype(np.float32)
    bad = good.copy()
    bad[0, 3, 5, 5] = number
    size = np.array([[32, 32]])
    first, second = backend.execute([{"logits": bad, "SIZE": size}, {"logits": good, "SIZE": size}])
    assert "NaN or Inf" in first.error
    assert second.error is None


def test_a_broken_image_is_an_error_of_its_own_request(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = _backend(repository, "unet_nvfp4_preprocess", monkeypatch)
    good, bad = (np.array([[content]], dtype=np.object_) for content in (_encoded(photo(32, 32)), b"no image"))
    first, second = backend.execute([{"IMAGE": bad}, {"IMAGE": good}])
    assert "cannot be decoded" in first.error
    assert second.error is None
    bomb = io.BytesIO()
    Image.new("1", (16_384, 16_384)).save(bomb, format="PNG")  # 33 kB, 268 million pixels
    for content, cause in (
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n", "cannot identify"),
        (bomb.getvalue(), "decompression bomb"),
    ):
        (answer,) = backend.execute([{"IMAGE": np.array([[content]], dtype=np.object_)}])
        assert "cannot be decoded" in answer.error
        assert cause in answer.error


def test_the_server_decodes_the_formats_of_fp4deploy(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = _backend(repository, "unet_nvfp4_preprocess", monkeypatch)
    assert type(backend).initialize.__globals__["FORMATS"] == FORMATS


def test_writing_again_replaces_and_keeps_other_models(repository: Path, untrained: Run) -> None:
    (repository / "other").mkdir(exist_ok=True)
    (repository / "unet_nvfp4" / "2").mkdir()
    write_repository(untrained.export_dir / "unet.nvfp4.portable.onnx", repository, "unet_nvfp4")
    assert (repository / "other").is_dir()
    assert not (repository / "unet_nvfp4" / "2").exists()
    assert not [path for path in repository.iterdir() if path.name.startswith(".")]


def test_a_class_name_is_one_line_of_the_labels() -> None:
    named = dataclasses.replace(card(), class_names=("road\nside", "sky"))
    files = _network("unet_nvfp4", Served(Path("unet.nvfp4.onnx"), named, 2, False, 8, b""))
    assert files["labels.txt"] == b"road side\nsky\n"


@pytest.mark.parametrize(
    ("name", "message"), [("a.bin", ".onnx, .plan and .fp4 files are"), ("a.plan", "is not an engine plan")]
)
def test_other_files_are_refused(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"bytes")
    with pytest.raises(InputError, match=message):
        write_repository(tmp_path / name, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def _stand_in(folder: Path, largest: int = 8) -> bytes:
    """a.plan and its ledger, as the full TensorRT would write them; nobody reads the plan here."""
    content = b"ftrt" + bytes(60)
    made = ("tensorrt", "10", "sm120", "auto", "build log", "a.onnx", "0" * 64, "a.plan")
    digest = hashlib.sha256(content).hexdigest()
    ledger = Ledger(*made, digest, len(content), 0.5, (1, 1, largest), json.loads(card().to_json()), (), ())
    (folder / "a.ledger.json").write_text(ledger.to_json())
    (folder / "a.plan").write_bytes(content)
    return content


def test_the_server_can_parse_the_configurations_of_a_plan(tmp_path: Path) -> None:
    """As Triton's documentation has TensorRT models: 1/model.plan, dims without the batch, the profile's batch."""
    from google.protobuf import text_format

    schema = model_config()
    content = _stand_in(tmp_path, largest=4)
    write_repository(tmp_path / "a.plan", tmp_path / "out")
    configs = {
        path.parent.name: text_format.Parse(path.read_text(), schema())
        for path in (tmp_path / "out").glob("*/config.pbtxt")
    }
    assert set(configs) == {"a", "a_preprocess", "a_postprocess", "a_segment"}
    network, made = configs["a"], card()
    assert (network.backend, network.platform, network.default_model_filename) == ("tensorrt", "", "")
    assert (tmp_path / "out" / "a" / "1" / "model.plan").read_bytes() == content
    assert network.HasField("dynamic_batching")
    types = {value.name: value.number for value in schema.DESCRIPTOR.file.enum_types_by_name["DataType"].values}
    for tensor, name, channels in ((network.input[0], "image", 3), (network.output[0], "logits", made.channels)):
        assert (tensor.name, tensor.data_type, list(tensor.dims)) == (
            name,
            types["TYPE_FP16"],
            [channels, made.height, made.width],
        )
    assert configs["a_preprocess"].output[0] == schema(output=[{
        "name": "image", "data_type": types["TYPE_FP16"], "dims": list(network.input[0].dims),
    }]).output[0]  # fmt: skip
    assert configs["a_postprocess"].input[0].data_type == types["TYPE_FP16"]
    assert {config.max_batch_size for config in configs.values()} == {4}


def test_an_engine_of_another_ledger_is_refused(tmp_path: Path) -> None:
    """What is handed to the server is the plan whose digest the ledger has."""
    content = _stand_in(tmp_path)
    assert write_repository(tmp_path / "a.plan", tmp_path / "out")
    (tmp_path / "a.plan").write_bytes(content[:-1] + b"x")
    with pytest.raises(InputError, match="is not the plan that a.ledger.json was written for"):
        write_repository(tmp_path / "a.plan", tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("half", [False, True])
def test_every_model_of_a_repository_has_the_sizes_of_the_card(half: bool) -> None:
    served = Served(Path("net.onnx"), card(height=32, width=48), 4, half, 6, b"")
    files = {"net": _network("net", served), "pre": _preprocess("net", served), "post": _postprocess("net", served)}
    text = {name: each["config.pbtxt"].decode() for name, each in files.items()}
    assert all("max_batch_size: 6\n" in each for each in text.values())
    kind, image, logits = f"data_type: {served.kind}", "dims: [ 3, 32, 48 ]", "dims: [ 4, 32, 48 ]"
    assert [(each.count(f"{kind} {image}"), each.count(f"{kind} {logits}")) for each in text.values()] == [
        (1, 1), (1, 0), (0, 1),
    ]  # fmt: skip
    given = dict(re.findall(r'key: "(\w+)" value { string_value: "(.*)" }', text["pre"]))
    expected = {"height": 32, "width": 48, "mean": [0.0] * 3, "std": [1.0] * 3, "half": half}
    assert {name: json.loads(value) for name, value in given.items()} == expected


def test_an_rtx_engine_is_refused(plan: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no backend"):
        write_repository(plan, tmp_path / "out")


def test_the_batch_of_a_plan_is_its_own_limit(plan: Path, tmp_path: Path) -> None:
    ledger = json.loads(plan.with_suffix(".ledger.json").read_text())
    ledger["backend"] = "tensorrt"
    (tmp_path / "unet.nvfp4.sm120.plan").write_bytes(plan.read_bytes())
    (tmp_path / "unet.nvfp4.sm120.ledger.json").write_text(json.dumps(ledger))
    write_repository(tmp_path / "unet.nvfp4.sm120.plan", tmp_path / "out", most=1000)
    config = (tmp_path / "out" / "unet_nvfp4" / "config.pbtxt").read_text()
    assert f"max_batch_size: {ledger['batch'][2]}\n" in config
    assert "TYPE_FP16" in config
    assert (
        '"half" value { string_value: "true" }'
        in (tmp_path / "out" / "unet_nvfp4_preprocess" / "config.pbtxt").read_text()
    )


@pytest.mark.rtx
@pytest.mark.parametrize(
    "change", [{"interface": {"input": "uint8"}}, {"sizes": [[8, 8], [8, 8], [16, 16]]}, {"options": ["stripped"]}]
)
def test_a_plan_that_the_repository_does_not_describe(plan: Path, tmp_path: Path, change: dict[str, object]) -> None:
    ledger = json.loads(plan.with_suffix(".ledger.json").read_text()) | {"backend": "tensorrt"} | change
    (tmp_path / "unet.nvfp4.sm120.plan").write_bytes(plan.read_bytes())
    (tmp_path / "unet.nvfp4.sm120.ledger.json").write_text(json.dumps(ledger))
    with pytest.raises(InputError, match="does not describe"):
        write_repository(tmp_path / "unet.nvfp4.sm120.plan", tmp_path / "repository")


@pytest.mark.parametrize("name", ["../unet", "a b", "/tmp/unet", "."])
def test_names_stay_inside_the_repository(name: str, untrained: Run, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no name of a model"):
        write_repository(untrained.export_dir / "unet.nvfp4.onnx", tmp_path / "out", name)


def test_instance_models_have_no_ensemble(untrained: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp4deploy.serving import repository as module

    served = module._onnx(untrained.export_dir / "unet.nvfp4.onnx", 8)
    head = InstanceHead("centres", 4)
    card = dataclasses.replace(served.card, task="instance", head=head)
    monkeypatch.setattr(module, "_served", lambda path, most: dataclasses.replace(served, card=card))
    assert [path.name for path in write_repository(Path("unet.nvfp4.onnx"), tmp_path)] == ["unet_nvfp4"]


@pytest.mark.parametrize("folder", ["unet_nvfp4", "unet_nvfp4_segment"])
def test_a_folder_of_the_user_is_never_replaced(untrained: Run, tmp_path: Path, folder: str) -> None:
    mine = tmp_path / folder / "weights.txt"
    mine.parent.mkdir()
    mine.write_text("a month of work")
    with pytest.raises(InputError, match=rf"{folder} is in the way: it holds weights.txt.*Move it away"):
        write_repository(untrained.export_dir / "unet.nvfp4.onnx", tmp_path)
    assert mine.read_text() == "a month of work"
    assert [path.name for path in tmp_path.iterdir()] == [folder]


def test_a_repository_is_replaced_as_long_as_nobody_has_changed_it(untrained: Run, tmp_path: Path) -> None:
    model = untrained.export_dir / "unet.nvfp4.onnx"
    first = write_repository(model, tmp_path)
    assert write_repository(model, tmp_path) == first
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in first)
    (tmp_path / "unet_nvfp4" / "config.pbtxt").write_text("instance_group [ ]")
    with pytest.raises(InputError, match=r"its config\.pbtxt was changed"):
        write_repository(model, tmp_path)
    assert (tmp_path / "unet_nvfp4" / "config.pbtxt").read_text() == "instance_group [ ]"
