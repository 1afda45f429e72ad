"""The layouts of a detector's output: priors, distances, loss and decoding of each, in torch and in ONNX."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from fp4deploy.data import open_boxes
from fp4deploy.detection import DetectionEvaluation, decode_boxes
from fp4deploy.detection.decode import in_image, iou
from fp4deploy.errors import GateError
from fp4deploy.export.onnx.boxes import with_boxes
from fp4deploy.export.verify.outputs import require_same_boxes
from fp4deploy.models.boxes import DetectionHead
from fp4deploy.train.losses.boxes import BoxLoss, assign
from tests.detection.perfect import perfect_output

SIZE = (64, 48)
HEADS = [
    DetectionHead("fcos", 3, (4, 8, 16)),
    DetectionHead("fcos_relu", 3, (8, 16, 32)),
    DetectionHead("retinanet", 3, (8, 16)),
]
ANCHORS = HEADS[2]
of_each_method = pytest.mark.parametrize("head", HEADS, ids=[head.method for head in HEADS])


def labels(*rows: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(rows).reshape(1, -1, 5)


def test_points_and_anchors_by_hand() -> None:
    assert HEADS[1].priors(*SIZE)[:, :3].T.tolist() == [[0, 0, 8, 8], [8, 0, 8, 8], [16, 0, 8, 8]]
    priors = ANCHORS.priors(*SIZE)
    assert (ANCHORS.channels, ANCHORS.output_size(*SIZE)) == (7, (9 * (8 * 6 + 4 * 3),))
    assert priors[:, [0, 1, 6, 48]].T.tolist() == [[0, 0, 46, 22], [8, 0, 46, 22], [0, 8, 46, 22], [0, 0, 56, 28]]
    assert priors[:2, -1].tolist() == [32, 48]


def test_distances_by_hand() -> None:
    numbers = torch.tensor([0.5, -0.25, np.log(2.0), 9.0])[:, None]
    assert HEADS[1].distances(torch.cat((torch.zeros(3, 1), numbers))).flatten().tolist() == pytest.approx(
        [0.5, 0, np.log(2.0), 9]
    )
    wide = 1000 / 16 / 2  # the limit of a logarithm
    assert ANCHORS.distances(torch.cat((torch.zeros(3, 1), numbers))).flatten().tolist() == pytest.approx(
        [1 - 0.5, wide + 0.25, 1 + 0.5, wide - 0.25]
    )


def test_an_anchor_takes_what_it_overlaps() -> None:
    x, y, width, height = ANCHORS.priors(*SIZE)
    box = (16.0, 8.0, 48.0, 40.0)  # the anchor of 32 x 32 around (32, 24)
    found = assign(labels((2, *box), (255, 0, 44, 48, 64)), ANCHORS, SIZE)
    corners = torch.stack((x - width / 2, y - height / 2, x + width / 2, y + height / 2), 1).numpy()
    overlap = iou(corners, np.array([box]))[:, 0]
    crowded = ((y > 44) & (x > 0)).numpy()
    assert overlap.max() == 1
    assert ((found.classes[0] >= 0).numpy() == (overlap >= 0.5)).all()
    assert (found.ignored[0].numpy() == ((overlap < 0.5) & ((overlap >= 0.4) | crowded))).all()
    exact = int(overlap.argmax())
    torch.testing.assert_close(found.distances[0, :, exact], torch.full((4,), 0.5))
    assert set(found.classes[0][(found.classes[0] >= 0)].tolist()) == {1}


def test_an_object_that_no_anchor_fits_has_the_nearest_one() -> None:
    x, y, _, _ = ANCHORS.priors(*SIZE)
    found = assign(labels((1, 30, 30, 33, 33)), ANCHORS, SIZE)
    assert (found.classes >= 0).any()
    assert (x[(found.classes[0] >= 0)] - 31.5).abs().max() < 24
    assert (y[(found.classes[0] >= 0)] - 31.5).abs().max() < 24


@of_each_method
@pytest.mark.parametrize(
    "rows",
    [[(-1, 0, 0, 0, 0)], [(255, 0, 0, 48, 64)], [(1, 5, 5, 5, 9)], [(2, 20, 20, 20.5, 20.2), (1, 0, 0, 48, 64)]],
    ids=["no boxes", "all crowd", "no area", "tiny and all"],
)
def test_every_label_has_a_finite_loss(head: DetectionHead, rows: list[tuple[float, ...]]) -> None:
    torch.manual_seed(0)
    outputs = torch.randn(1, head.channels, *head.output_size(*SIZE), requires_grad=True)
    loss = BoxLoss(head, SIZE)(outputs, labels(*rows))
    loss.backward()
    assert outputs.grad is not None
    assert outputs.grad.isfinite().all()
    positive = assign(labels(*rows), head, SIZE).classes[0] >= 0
    assert bool(positive.any()) == (rows[0][0] == 2)
    if head.method != "fcos_relu":  # whose gradient ends at 0
        assert (outputs.grad[0, head.classes :, positive] != 0).any(0).all()


@of_each_method
def test_the_loss_falls_to_the_boxes(head: DetectionHead) -> None:
    torch.manual_seed(0)
    outputs = (torch.rand(1, head.channels, *head.output_size(*SIZE)) * 0.1).requires_grad_()
    boxes = labels((1, 8, 8, 40, 40), (3, 20, 30, 46, 62))
    optimizer = torch.optim.Adam([outputs], 0.1)
    loss = BoxLoss(head, SIZE)
    for _ in range(120):
        optimizer.zero_grad()
        loss(outputs, boxes).backward()
        optimizer.step()
    found = decode_boxes(outputs.detach()[0], head, SIZE, SIZE).above(0.3)
    overlap = iou(found.boxes, boxes[0, :, 1:].numpy())
    assert (overlap.max(0) > 0.8).all()
    assert found.classes[overlap.argmax(0)].tolist() == [1, 3]


@of_each_method
def test_perfect_outputs_give_the_annotated_boxes(head: DetectionHead, shapes: Path) -> None:
    data = open_boxes(shapes, "val")
    head = DetectionHead(head.method, len(data.class_names) - 1, head.strides)
    evaluation = DetectionEvaluation(data, head, SIZE)
    outputs = torch.stack([perfect_output(data.load(index), head, SIZE) for index in range(len(data))])
    evaluation.update(outputs, torch.arange(len(data)))
    assert evaluation.compute().ap50 > 0.8


def decoding(head: DetectionHead) -> tuple[onnx.ModelProto, torch.Tensor]:
    """A file that decodes its input, and such an input."""
    shape = [1, head.channels, *head.output_size(*SIZE)]
    raw = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("given", "raw")]
    graph = helper.make_graph([helper.make_node("Identity", ["given"], ["raw"])], "raw", raw[:1], raw[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    torch.manual_seed(3)
    return with_boxes(model, head, SIZE), torch.randn(*shape) - 1


@of_each_method
def test_the_operators_of_onnx_decode_the_same_boxes(head: DetectionHead) -> None:
    model, outputs = decoding(head)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    _, _, boxes, classes, scores = session.run(None, {"given": outputs.numpy()})
    given = in_image((boxes, classes, scores), head, SIZE, SIZE)
    expected = decode_boxes(outputs[0], head, SIZE, SIZE)
    assert len(expected) >= 10
    np.testing.assert_allclose(given.scores, expected.scores, atol=1e-6)
    np.testing.assert_allclose(given.boxes, expected.boxes, atol=1e-3)
    assert (given.classes == expected.classes).all()


@of_each_method
@pytest.mark.parametrize(("output", "amount"), [(2, 1.0), (3, 1), (4, 1e-3)], ids=["boxes", "classes", "scores"])
def test_a_file_that_decodes_few_boxes_otherwise_is_refused(head: DetectionHead, output: int, amount: float) -> None:
    model, outputs = decoding(head)
    card: Any = SimpleNamespace(head=head, height=SIZE[0], width=SIZE[1])
    require_same_boxes(model, card, [outputs])
    changed = model.graph.output[output].name
    (node,) = [node for node in model.graph.node if changed in node.output]
    node.output[list(node.output).index(changed)] = "right"
    session = onnxruntime.InferenceSession(decoding(head)[0].SerializeToString(), providers=["CPUExecutionProvider"])
    added = np.zeros_like(session.run(None, {"given": outputs.numpy()})[output])
    assert len(added) > 20
    added[: 1 + len(added) // 50] = amount  # of 2 to 5 %
    model.graph.initializer.append(numpy_helper.from_array(added, "added"))
    model.graph.node.append(helper.make_node("Add", ["right", "added"], [changed]))
    with pytest.raises(GateError, match="boxes that the ONNX file decodes differ"):
        require_same_boxes(model, card, [outputs])


@of_each_method
def test_outputs_agree_by_their_boxes(head: DetectionHead) -> None:
    expected = torch.full((1, head.channels, *head.output_size(*SIZE)), -20.0)
    expected[0, head.classes :], expected[0, 1, [10, 20]] = 0.5, 3.0
    assert head.agreeing(expected, expected.clone()).tolist() == [True, True]
    moved = expected.clone()
    moved[0, head.classes, 10] += 0.5
    assert head.agreeing(expected, moved).tolist() == [False, True]
    if head.method == "fcos_relu":  # a box without an area is none
        expected[0, [3, 5], 10], moved[0, [3, 5], 10] = -1.0, -2.0
        assert head.agreeing(expected, moved).tolist() == [True]
