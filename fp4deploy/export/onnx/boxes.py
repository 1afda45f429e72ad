"""The decoding of a detector's output as ONNX operators, for a file that gives boxes and needs no code around it.

    raw [N, channels, places] -> images [K], boxes [K, 4], classes [K], scores [K]

Sigmoid, the distances of the method and the priors (a constant of the input's size) give boxes in pixels of the input:
left, top, right, bottom. NonMaxSuppression of the standard opset leaves the best. The raw output stays the first one.
Classes begin at 1, as in COCO results: 0 is background. `max_detections` limits each class of an image; whoever reads
the file keeps as many of an image. These are the boxes of `detection.decode_boxes`.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir

from fp4deploy.errors import InputError
from fp4deploy.export.onnx.writer import NodeWriter
from fp4deploy.models.boxes import FURTHEST, WIDEST, DetectionHead

OUTPUTS = ("images", "boxes", "classes", "scores")
END = np.iinfo(np.int64).max


def with_boxes(portable: onnx.ModelProto, head: DetectionHead, size: tuple[int, int]) -> onnx.ModelProto:
    """Append the decoding to a decomposed graph whose images have `size` (height, width); a new model.

    Raises:
        InputError: the graph has another number of places.
    """
    model = ir.from_proto(portable)
    graph = model.graph
    (raw,) = graph.outputs
    priors = head.priors(*size).numpy()
    if raw.shape is None or raw.shape[2] != priors.shape[1]:
        raise InputError(
            f"The decoding of boxes has the places of {size[0]} x {size[1]} pixels, and the graph is of another or of "
            "an open size. Export it without --dynamic-size."
        )
    writer = NodeWriter(graph, "boxes", None, ir.DataType.FLOAT)
    scores = _scores(writer, raw, head)
    boxes = _boxes(writer, raw, head, priors)
    limit = writer.constant("most", np.array(head.max_detections, np.int64))
    overlap, least = (
        writer.constant(role, np.array(value, np.float32))
        for role, value in (("iou", head.nms), ("least_score", head.threshold))
    )
    chosen = writer.add("NonMaxSuppression", "kept", boxes, scores, limit, overlap, least, dtype=ir.DataType.INT64)
    image, number = (_column(writer, chosen, at, role) for at, role in ((0, "image"), (1, "class")))
    pairs = writer.add(
        "Gather", "image_and_place", chosen, writer.integers("columns", 0, 2), dtype=ir.DataType.INT64, axis=1
    )
    found = {
        "images": image,
        "boxes": writer.add("GatherND", "kept_boxes", boxes, pairs, shape=("K", 4)),
        "classes": writer.add("Add", "class_id", number, writer.integers("one", 1), dtype=ir.DataType.INT64),
        "scores": writer.add("GatherND", "kept_scores", scores, chosen, shape=("K",)),
    }
    for name in OUTPUTS:
        value = found[name]
        value.name = name
        if value.shape is None:
            value.shape = ir.Shape(["K"])
        graph.outputs.append(value)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    return proto


def _slice(writer: NodeWriter, role: str, raw: ir.Value, first: int, last: int) -> ir.Value:
    start, end = writer.integers(f"{role}_start", first), writer.integers(f"{role}_end", last)
    return writer.add("Slice", role, raw, start, end, writer.integers("channel_axis", 1))


def _scores(writer: NodeWriter, raw: ir.Value, head: DetectionHead) -> ir.Value:
    classes = writer.add("Sigmoid", "class_scores", _slice(writer, "class_logits", raw, 0, head.classes))
    if not head.centred:
        return classes
    centred = _slice(writer, "centre_logits", raw, head.classes + 4, head.classes + 5)
    product = writer.add("Mul", "product", classes, writer.add("Sigmoid", "centre_scores", centred))
    return writer.add("Sqrt", "all_scores", product)


def _boxes(writer: NodeWriter, raw: ir.Value, head: DetectionHead, priors: np.ndarray) -> ir.Value:
    x, y, width, height = priors
    outwards = np.stack((-width, -height, width, height))[None]
    centres = np.stack((x, y, x, y))[None]
    lengths = LENGTHS[head.method](writer, raw, head.classes)
    sides = writer.add("Mul", "sides", lengths, writer.constant("outwards", outwards))
    edges = writer.add("Add", "edges", sides, writer.constant("centres", centres))
    return writer.add("Transpose", "all_boxes", edges, perm=[0, 2, 1])


def _exponential(writer: NodeWriter, raw: ir.Value, first: int) -> ir.Value:
    return _limited_exp(writer, _slice(writer, "distances", raw, first, first + 4), FURTHEST)


def _positive(writer: NodeWriter, raw: ir.Value, first: int) -> ir.Value:
    return writer.add("Relu", "lengths", _slice(writer, "distances", raw, first, first + 4))


def _around_anchors(writer: NodeWriter, raw: ir.Value, first: int) -> ir.Value:
    shift = _slice(writer, "shift", raw, first, first + 2)
    sides = _limited_exp(writer, _slice(writer, "log_sides", raw, first + 2, first + 4), WIDEST)
    half = writer.add("Mul", "half_sides", sides, writer.constant("half", np.array(0.5, np.float32)))
    before, after = writer.add("Sub", "before", half, shift), writer.add("Add", "after", half, shift)
    return writer.add("Concat", "lengths_around", before, after, axis=1)


LENGTHS = {"fcos": _exponential, "fcos_relu": _positive, "retinanet": _around_anchors}  # `models.boxes.DISTANCES`


def _limited_exp(writer: NodeWriter, numbers: ir.Value, most: float) -> ir.Value:
    limit = writer.constant("furthest", np.array(most, np.float32))
    return writer.add("Exp", "lengths", writer.add("Min", "limited", numbers, limit))


def _column(writer: NodeWriter, chosen: ir.Value, at: int, role: str) -> ir.Value:
    place = writer.constant(f"{role}_column", np.array(at, np.int64))
    return writer.add("Gather", role, chosen, place, dtype=ir.DataType.INT64, axis=1)
