"""A packed network in the server's Python backend answers what `predict` answers, byte for byte.

No server runs here: model.py of the repository runs with stand-ins (`server`), on the CPU and, where there is one, on
a GPU.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fp4deploy.bench.runtimes.packed import PackedRuntime
from fp4deploy.errors import InputError
from fp4deploy.export.to_packed import pack
from fp4deploy.models import InstanceHead, ModelCard, build_unet, save_checkpoint
from fp4deploy.models.boxes import DetectionHead
from fp4deploy.models.detector import UNetDetector
from fp4deploy.packed import read_packed, write_packed
from fp4deploy.predict.predictor import Predictor
from fp4deploy.runs import Run
from fp4deploy.serving.repository import write_repository
from tests.contract.invoke import fp4deploy
from tests.predict.pointwise import photo
from tests.serving.server import model_config, python_model

KINDS = [
    "CPU",
    "MODEL",
    pytest.param("GPU", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]),
]


def served(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str = "CPU", **parameters: object) -> Any:
    """A model as the server opens it, by its configuration in JSON; `parameters` are changed in it."""
    from google.protobuf import json_format, text_format

    parsed = text_format.Parse((folder / "config.pbtxt").read_text(), model_config()())
    config = json_format.MessageToDict(parsed, preserving_proto_field_name=True)
    config["parameters"] |= {name: {"string_value": json.dumps(value)} for name, value in parameters.items()}
    config["parameters"]["EXECUTION_ENV_PATH"] = {"string_value": "/opt/env.tar.gz"}  # the server's own
    given = {"model_config": json.dumps(config), "model_instance_kind": kind, "model_instance_device_id": "0"}
    return python_model(folder, monkeypatch, {**given, "model_repository": str(folder), "model_version": "1"})


@pytest.fixture(scope="module")
def packed(untrained: Run) -> Path:
    return untrained.exported("nvfp4").with_suffix(".fp4")


@pytest.fixture(scope="module")
def folder(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    (written,) = write_repository(packed, tmp_path_factory.mktemp("served"))
    return written


def frames(count: int, height: int, width: int) -> np.ndarray:
    return np.stack([photo(height, width, seed) for seed in range(count)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", [False, True])
def test_masks_are_those_of_predict(
    folder: Path, packed: Path, monkeypatch: pytest.MonkeyPatch, kind: str, tile: bool
) -> None:
    model = served(folder, monkeypatch, kind, tile=tile)
    predictor = Predictor(PackedRuntime(packed, "cpu" if kind == "CPU" else None), tile, batch=8)
    requests = [{"FRAMES": frames(2, 45, 61)}, {"FRAMES": frames(1, 32, 48)}, {"FRAMES": frames(3, 90, 20)}]
    answers = model.execute(requests)
    expected = iter(predictor.predict_batch([frame for request in requests for frame in request["FRAMES"]]))
    for request, answer in zip(requests, answers, strict=True):
        assert answer.error is None
        assert list(answer.outputs) == ["MASK"]
        assert answer.outputs["MASK"].dtype == np.uint8
        assert answer.outputs["MASK"].shape == request["FRAMES"].shape[:3]
        for mask in answer.outputs["MASK"]:
            assert np.array_equal(mask, next(expected).mask)


def test_more_frames_than_a_batch(folder: Path, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sizes = served(folder, monkeypatch), []
    whole = model.predictor.predict_batches
    monkeypatch.setattr(
        model.predictor, "predict_batches", lambda batches: whole([sizes.append(len(each)) or each for each in batches])
    )
    answers = model.execute([{"FRAMES": frames(5, 20, 30)}] * 4)
    assert sizes == [8, 8, 4]
    assert [len(answer.outputs["MASK"]) for answer in answers] == [5] * 4


def test_batches_of_any_size_are_filled_to_few(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed network keeps few CUDA graphs; what fills a batch answers nobody."""
    model, sizes = served(folder, monkeypatch), set()
    requests = [{"FRAMES": frames(count, 20, 30)} for count in range(1, 9)]
    expected = [model.execute([request])[0].outputs["MASK"] for request in requests]
    whole, decoded = model.predictor.pipeline, []
    monkeypatch.setattr(
        model.predictor, "pipeline", lambda batches: whole([sizes.add(len(each)) or each for each in batches])
    )
    semantic = model.predictor._semantic
    monkeypatch.setattr(model.predictor, "_semantic", lambda *given: decoded.append(1) or semantic(*given))
    graph_sizes = type(model).execute.__globals__["graph_sizes"]
    assert [graph_sizes(most) for most in (1, 2, 6, 64)] == [[1], [1, 2], [1, 2, 3, 6], [1, 4, 16, 64]]
    model.predictor.sizes = graph_sizes(8)  # as on a GPU
    for request, masks in zip(requests, expected, strict=True):
        assert np.array_equal(model.execute([request])[0].outputs["MASK"], masks)
    assert sizes == {1, 2, 4, 8}
    assert len(decoded) == sum(range(1, 9))


BAD = {
    "rank": (np.zeros((4, 5, 3), np.uint8), r"uint8 \[4, 5, 3\]; RGB pixels uint8 \[N, H, W, 3\]"),
    "dtype": (np.zeros((1, 4, 5, 3), np.float32), "float32"),
    "batch": (np.zeros((0, 4, 5, 3), np.uint8), "N from 1"),
    "channels": (np.zeros((1, 4, 5, 4), np.uint8), r"\[4, 5, 4\] is no image"),
    "pixels": (np.zeros((1, 0, 5, 3), np.uint8), r"\[0, 5, 3\] is no image"),
    "tensor": (None, "FRAMES is nothing"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_request_is_an_error_of_its_own_response(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    model, (values, message) = served(folder, monkeypatch), BAD[kind]
    bad, good = {} if values is None else {"FRAMES": values}, {"FRAMES": frames(2, 45, 61)}
    first, second, third = model.execute([good, bad, good])
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(second.error)
    assert not second.outputs
    (alone,) = model.execute([good])
    for answer in (first, third):
        assert answer.error is None
        assert np.array_equal(answer.outputs["MASK"], alone.outputs["MASK"])
    (only,) = model.execute([bad])
    assert only.error == second.error


def test_frames_that_get_no_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN of one frame is an error of its request; what fails for all together is tried one request at a time."""
    model, good, bad = served(folder, monkeypatch), {"FRAMES": frames(1, 45, 61)}, {"FRAMES": frames(2, 99, 61)}
    predict = model.predictor.predict_batches
    error = InputError("The network answers NaN")

    def spoiled(batches: list[list[np.ndarray]]) -> list[list[Any]]:
        found = predict(batches)
        return [[error if frame.shape[0] == 99 else each for frame, each in zip(*both, strict=True)]
                for both in zip(batches, found, strict=True)]  # fmt: skip

    def too_large(batches: list[list[np.ndarray]]) -> list[list[Any]]:
        if any(frame.shape[0] == 99 for batch in batches for frame in batch):
            raise InputError("3 images do not fit into the memory")
        return list(predict(batches))

    for failing, message in ((spoiled, "answers NaN"), (too_large, "do not fit")):
        monkeypatch.setattr(model.predictor, "predict_batches", failing)
        answers = model.execute([good, bad, good])
        assert [answer.error is None for answer in answers] == [True, False, True]
        assert message in answers[1].error
        assert np.array_equal(answers[0].outputs["MASK"], answers[2].outputs["MASK"])


HEADS = {"objects": InstanceHead("centres", 4), "boxes": DetectionHead("fcos", classes=3, width=16, depth=1)}


@pytest.mark.parametrize("name", ["objects", pytest.param("boxes", marks=pytest.mark.variants)])
def test_objects_are_those_of_predict(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    head = HEADS[name]
    boxes = isinstance(head, DetectionHead)
    network = UNetDetector(head, 0.125) if boxes else build_unet(head.channels, 0.125)
    names, task = ("background", "a", "b", "c"), {"task": "detection" if boxes else "instance", "head": head}
    given = ("fp16", 0.125, names, 32, 64, (0.4,) * 3, (0.2,) * 3, False)
    save_checkpoint(tmp_path / "net.safetensors", network, ModelCard(*given, **task))
    pack(tmp_path / "net.safetensors", tmp_path / "net.fp4", verify=False)
    (folder,) = write_repository(tmp_path / "net.fp4", tmp_path / "out", most=4)
    model = served(folder, monkeypatch, min_score=0.01)
    requests = [{"FRAMES": frames(2, 45, 61)}, {"FRAMES": frames(1, 64, 64)}]
    answers = model.execute(requests)
    images = [frame for request in requests for frame in request["FRAMES"]]
    predictor = Predictor(PackedRuntime(tmp_path / "net.fp4", "cpu"), min_score=0.01)
    predictions = iter(predictor.predict_batch(images))
    found = 0
    for request, answer in zip(requests, answers, strict=True):
        assert set(answer.outputs) == ({"FOUND"} if boxes else {"MASK", "FOUND"})
        assert answer.outputs["FOUND"].shape == (len(request["FRAMES"]), 1)
        for at, expected in zip(range(len(request["FRAMES"])), predictions, strict=False):
            entry = json.loads(answer.outputs["FOUND"][at, 0])
            assert entry == json.loads(json.dumps({"classes": expected.classes(), "objects": expected.objects()}))
            found += len(entry["objects"])
            if not boxes:
                assert answer.outputs["MASK"].dtype == expected.mask.dtype
                assert np.array_equal(answer.outputs["MASK"][at], expected.mask)
    assert found


def test_the_folder_and_its_configuration(folder: Path, packed: Path) -> None:
    from google.protobuf import text_format

    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert files == [".fp4deploy.sha256", "1/model.fp4", "1/model.py", "config.pbtxt", "labels.txt"]
    assert (folder / "1" / "model.fp4").read_bytes() == packed.read_bytes()
    schema = model_config()
    config = text_format.Parse((folder / "config.pbtxt").read_text(), schema())
    assert (config.name, config.backend, config.max_batch_size) == ("unet_nvfp4_packed", "python", 8)
    types = {value.name: value.number for value in schema.DESCRIPTOR.file.enum_types_by_name["DataType"].values}
    for tensor, name, kind, dims in (
        (config.input[0], "FRAMES", "TYPE_UINT8", [-1, -1, 3]),
        (config.output[0], "MASK", "TYPE_UINT8", [-1, -1]),
    ):
        assert (tensor.name, tensor.data_type, list(tensor.dims)) == (name, types[kind], dims)
    assert (len(config.input), len(config.output)) == (1, 1)
    assert config.instance_group[0].Kind.Name(config.instance_group[0].kind) == "KIND_MODEL"
    assert config.HasField("dynamic_batching")


def test_a_network_that_says_nothing_of_images(packed: Path, tmp_path: Path) -> None:
    write_packed(dataclasses.replace(read_packed(packed), path=tmp_path / "a.fp4", card=None))
    with pytest.raises(InputError, match="no model card"):
        write_repository(tmp_path / "a.fp4", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command(packed: Path, untrained: Run, tmp_path: Path) -> None:
    for file in (packed, untrained.export_dir / "unet.nvfp4.onnx"):
        done = fp4deploy("export", file, "--format", "triton", "--max-batch", 3, folder=tmp_path)
        assert done.code == 0, done.stderr
    folders = {path.name for path in (tmp_path / "model_repository").iterdir()}
    assert {"unet_nvfp4_packed", "unet_nvfp4", "unet_nvfp4_segment"} <= folders
    assert "max_batch_size: 3\n" in (tmp_path / "model_repository" / "unet_nvfp4_packed" / "config.pbtxt").read_text()
