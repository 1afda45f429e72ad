"""Folders of DeepStream and Holoscan: the network gives the file's classes from pixels, the configurations name it."""

from __future__ import annotations

import configparser
import functools
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import yaml

from fp4deploy.errors import InputError
from fp4deploy.export.lowering.lower import lower, read_buildable
from fp4deploy.export.onnx.decomposed import to_portable
from fp4deploy.models.card import CARD_KEY, ModelCard
from fp4deploy.runs import Run
from fp4deploy.serving.pipelines import write_pipeline


@functools.cache
def _session(path: Path) -> ort.InferenceSession:
    model = to_portable(onnx.load(path))
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def _run(path: Path, image: Any) -> Any:
    (given,) = _session(path).get_inputs()
    return _session(path).run(None, {given.name: image.astype(np.float32)})[0]


@pytest.fixture(scope="module", params=["deepstream", "holoscan"])
def folder(request: pytest.FixtureRequest, untrained: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pipelines") / request.param
    return write_pipeline(untrained.export_dir / "unet.nvfp4.onnx", out, request.param, 4)


def test_the_network_gives_the_classes_of_the_file_from_pixels(folder: Path, untrained: Run) -> None:
    source = untrained.export_dir / "unet.nvfp4.onnx"
    written = folder / "unet.nvfp4.onnx"
    text = next(each.value for each in onnx.load(source).metadata_props if each.key == CARD_KEY)
    card = ModelCard.from_json(text)
    pixels = np.random.default_rng(0).integers(0, 256, (1, 3, *card.size)).astype(np.float32)
    mean, std = (np.array(values, np.float32).reshape(1, 3, 1, 1) for values in (card.mean, card.std))
    expected = _run(source, (pixels / 255 - mean) / std).argmax(1)
    given = _session(written).get_inputs()[0]
    assert given.type == "tensor(float)"
    if folder.name == "deepstream":
        classes = _run(written, pixels)
        assert classes.dtype == np.int32
    else:
        assert given.shape[1:] == [*card.size, 3]
        classes = _run(written, pixels.transpose(0, 2, 3, 1)).argmax(1)
    assert (classes == expected).mean() > 0.99  # a code of FP4 may flip by the last bit of the normalisation
    plans = [
        [(layer.name, layer.compute) for layer in lower(read_buildable(file)).layers] for file in (source, written)
    ]
    assert plans[0] == plans[1]


def test_the_configuration_names_what_the_network_has(folder: Path) -> None:
    graph = onnx.load(folder / "unet.nvfp4.onnx").graph
    image, result = graph.input[0].name, graph.output[0].name
    classes = len((folder / "labels.txt").read_text().split(";")) if folder.name == "deepstream" else 0
    if folder.name == "deepstream":
        parser = configparser.ConfigParser(inline_comment_prefixes=None)
        parser.read(folder / "nvinfer.txt")
        settings = parser["property"]
        assert settings["output-blob-names"] == result
        assert settings["onnx-file"] == "unet.nvfp4.onnx"
        assert int(settings["num-detected-classes"]) == classes
        extents = [dim.dim_value for dim in graph.input[0].type.tensor_type.shape.dim]
        assert settings["infer-dims"] == ";".join(map(str, extents[1:]))
        function = settings["parse-segmentation-func-name"]
        assert f'extern "C" bool {function}(' in (folder / "segmentation_parser.cpp").read_text()
        return
    document = yaml.safe_load((folder / "segment.yaml").read_text())
    assert document["inference"]["pre_processor_map"] == {"segment": [image]} != {"segment": [result]}
    assert document["frame"]["out_tensor_name"] == image
    assert document["classes"]["in_tensor_name"] == result
    extents = [dim.dim_value for dim in graph.output[0].type.tensor_type.shape.dim]
    assert len(document["screen"]["color_lut"]) == extents[1]
    assert (document["frame"]["resize_height"], document["frame"]["resize_width"]) == (*extents[2:],)
    compile((folder / "segment.py").read_text(), "segment.py", "exec")


def test_what_it_refuses(untrained: Run, tmp_path: Path) -> None:
    source = untrained.export_dir / "unet.nvfp4.onnx"
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="in the way"):
        write_pipeline(source, kept, "deepstream")
    plain = onnx.load(source)
    del plain.metadata_props[:]
    onnx.save(plain, tmp_path / "plain.onnx")
    with pytest.raises(InputError, match="no fp4deploy model card"):
        write_pipeline(tmp_path / "plain.onnx", tmp_path / "out", "holoscan")
    assert not (tmp_path / "out").exists()
