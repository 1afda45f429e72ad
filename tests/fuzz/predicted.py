"""ONNX files whose outputs answer nothing that their cards promise, predicted and scored: the loader "predicted".

The network of a seed is a constant: of the right shape for a semantic, an instance and a detection model. Mutations
change its values (NaN, infinity), its shape and its type, the card, or the bytes of the file.
"""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from fp4deploy.bench.runtimes.ort import OrtRuntime
from fp4deploy.models import InstanceHead, ModelCard
from fp4deploy.models.boxes import DetectionHead
from fp4deploy.models.card import CARD_KEY
from fp4deploy.predict.predictor import Predictor
from tests.fuzz.harness import Loader
from tests.fuzz.mutate import of_bytes, of_json

CARD = ModelCard("fp16", 0.125, ("background", "a", "b"), 32, 32, (0.5, 0.5, 0.5), (0.2, 0.2, 0.2), True)
INSTANCE = dataclasses.replace(CARD, task="instance", head=InstanceHead("centres", 3, stuff=(1,)))
DETECTION = dataclasses.replace(CARD, task="detection", head=DetectionHead("fcos", 2, (4, 8, 16), 8, 1))
VALUES = (np.nan, np.inf, -np.inf, 1e38, 80.0, -80.0, 0.0)
TYPES = (np.float16, np.float64, np.int64, np.bool_, np.uint8)


def predicted_loaders() -> list[Loader]:
    """One loader."""
    return [Loader("predicted", "model.onnx", _seeds(), _mutate, _use)]


def of_onnx(content: bytes, draw: random.Random) -> bytes:
    """Change the bytes, or the JSON in the metadata."""
    if draw.random() < 0.6:
        return of_bytes(content, draw)
    model = onnx.load_from_string(content)
    entry = draw.choice(model.metadata_props)
    entry.value = of_json(entry.value.encode(), draw).decode("utf-8", errors="replace")
    return model.SerializeToString()


def _seeds() -> tuple[bytes, ...]:
    random_outputs = np.random.default_rng(0)
    shapes = ((CARD, (1, 3, 32, 32)), (INSTANCE, (1, INSTANCE.channels, 32, 32)), (DETECTION, (1, 7, 84)))
    return tuple(
        _model(card, random_outputs.normal(scale=3, size=shape).astype(np.float32)).SerializeToString()
        for card, shape in shapes
    )


def _model(card: ModelCard, outputs: NDArray[np.float32]) -> onnx.ModelProto:
    image = helper.make_tensor_value_info("image", onnx.TensorProto.FLOAT, ["N", 3, 32, 32])
    logits = helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, list(outputs.shape))
    nodes = [helper.make_node("Constant", [], ["logits"], value=numpy_helper.from_array(outputs))]
    graph = helper.make_graph(nodes, "graph", [image], [logits])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    helper.set_model_props(model, {CARD_KEY: card.to_json()})
    return model


def _mutate(content: bytes, draw: random.Random) -> bytes:
    """Other outputs, else another card or other bytes."""
    if draw.random() < 0.5:
        return of_onnx(content, draw)
    model = onnx.load_from_string(content)
    node = model.graph.node[0]
    outputs = numpy_helper.to_array(node.attribute[0].t).copy()
    match draw.randrange(4):
        case 0:
            outputs[...] = draw.choice(VALUES)
        case 1:
            flat = outputs.reshape(-1)
            for _ in range(50):
                flat[draw.randrange(len(flat))] = draw.choice(VALUES)
        case 2:
            sizes = [draw.choice((0, 1, 2, size, size + 1, 2 * size)) for size in outputs.shape]
            sizes = sizes[: draw.choice((len(sizes), len(sizes), 2, 1, 0))] + [1] * draw.choice((0, 0, 0, 1))
            outputs = np.resize(outputs, sizes)
        case _:
            outputs = np.nan_to_num(outputs).astype(draw.choice(TYPES))
    node.attribute[0].t.CopyFrom(numpy_helper.from_array(outputs))
    del model.graph.output[:]
    kind = helper.np_dtype_to_tensor_dtype(outputs.dtype)
    model.graph.output.append(helper.make_tensor_value_info("logits", kind, list(outputs.shape)))
    return model.SerializeToString()


def _use(path: Path) -> object:
    predictor = Predictor(OrtRuntime(path, timeout=5))
    card = predictor.card
    if card.height * card.width > 1 << 16:
        return None
    found = predictor.predict(np.zeros((24, 16, 3), np.uint8))
    found.overlay(np.zeros((24, 16, 3), np.uint8))
    return json.dumps([found.classes(), found.objects()], allow_nan=False), found.mask_image().size
