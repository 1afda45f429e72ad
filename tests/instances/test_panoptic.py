"""Panoptic files and pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from fp4deploy.data import generate_shapes, open_instances
from fp4deploy.instances import InstanceEvaluation, Instances
from fp4deploy.instances.draw import OUTLINE, PALETTE, draw_instances, label_objects, outline
from fp4deploy.instances.panoptic import PanopticWriter, panoptic, to_rgb
from fp4deploy.models import InstanceHead
from tests.instances.panoptic_files import from_rgb, read_panoptic
from tests.instances.perfect import labels_of, perfect_outputs


def test_ids_survive_rgb() -> None:
    ids = np.array([[0, 1, 255], [256, 65_536, 2**24 - 1]], dtype=np.int32)
    assert to_rgb(ids)[1].tolist() == [[0, 1, 0], [0, 0, 1], [255, 255, 255]]
    np.testing.assert_array_equal(from_rgb(to_rgb(ids)), ids)


def test_things_first_then_stuff_and_the_rest_is_void() -> None:
    ids = np.zeros((4, 6), dtype=np.int32)
    ids[0:2, 0:3], ids[2:4, 1] = 1, 2
    semantic = np.zeros((4, 6), dtype=np.uint8)
    semantic[:, 2:5] = 3  # stuff, partly behind the first thing
    semantic[3, 5] = 1  # a thing's class without an instance
    found = Instances(ids, np.array([1, 2]), np.array([0.9, 0.8], dtype=np.float32), semantic)
    whole = panoptic(found, {1: 10, 2: 20, 3: 30}, stuff=(3,))
    assert [(segment["id"], segment["category_id"], segment["area"]) for segment in whole.segments] == [
        (1, 10, 6), (2, 20, 2), (3, 30, 10),
    ]  # fmt: skip
    assert whole.segments[0]["bbox"] == [0, 0, 3, 2]
    assert whole.segments[1]["bbox"] == [1, 2, 1, 2]
    assert whole.ids[3, 5] == 0
    assert (whole.ids[0:2, 2] == 1).all(), "the thing lies on the stuff"


def test_segments_are_those_of_the_picture() -> None:
    """Whatever of the objects and of stuff is seen: an object without a pixel is none."""
    random = np.random.default_rng(0)
    for _ in range(50):
        ids = random.integers(0, 7, (3, 5)).astype(np.int32)
        semantic = random.integers(0, 6, ids.shape).astype(np.uint8)
        found = Instances(ids, random.integers(1, 4, 6), np.linspace(1, 0.1, 6, dtype=np.float32), semantic)
        whole = panoptic(found, {number: 10 * number for number in range(1, 6)}, stuff=(4, 5))
        seen = {number: whole.ids == number for number in np.unique(whole.ids).tolist() if number}
        assert [segment["id"] for segment in whole.segments] == list(seen)
        for segment, where in zip(whole.segments, seen.values(), strict=True):
            rows, columns = np.nonzero(where)
            box = [columns.min(), rows.min(), np.ptp(columns) + 1, np.ptp(rows) + 1]
            assert (segment["area"], segment["bbox"]) == (where.sum(), box)
            classes = np.where(ids > 0, found.classes[ids - 1], semantic)[where]
            assert set(classes.tolist()) == {segment["category_id"] // 10}
        assert (whole.ids[ids > 0] == ids[ids > 0]).all()


def test_files_of_generated_scenes(tmp_path: Path) -> None:
    generate_shapes(tmp_path / "shapes", train=1, val=6, size=64, seed=1)
    dataset = open_instances(tmp_path / "shapes", "val", stuff=["ring"])
    head = InstanceHead("centres", 7, stuff=dataset.stuff, nms=3)
    evaluation, writer = InstanceEvaluation(dataset, head), PanopticWriter(tmp_path / "out", dataset)
    for index in range(len(dataset)):
        output = perfect_outputs(labels_of(dataset.load(index)), head)[0]
        writer.add(index, evaluation.decode(output, index))
    assert writer.finish() == tmp_path / "out" / "panoptic.json"
    content = read_panoptic(tmp_path / "out")
    assert [category["name"] for category in content["categories"] if not category["isthing"]] == ["ring"]
    rings = 0
    for index, record in enumerate(content["annotations"]):
        assert record["image_id"] == dataset.images[index].id
        ids = from_rgb(np.asarray(Image.open(tmp_path / "out" / "panoptic" / record["file_name"])))
        areas = {segment["id"]: segment["area"] for segment in record["segments_info"]}
        assert areas == {number: int((ids == number).sum()) for number in np.unique(ids).tolist() if number}
        sample = dataset.load(index)
        for segment in record["segments_info"]:
            (category,) = np.unique(sample.mask[ids == segment["id"]])
            assert dataset.category_ids[int(category)] == segment["category_id"]
        stuff = [s for s in record["segments_info"] if s["category_id"] == dataset.category_ids[dataset.stuff[0]]]
        assert len(stuff) == int((sample.mask == dataset.stuff[0]).any())
        rings += len(stuff)
    assert rings


def test_neighbours_are_drawn_apart() -> None:
    ids = np.zeros((6, 8), dtype=np.int32)
    ids[1:5, 1:4], ids[1:5, 4:7] = 1, 8  # the palette has seven colours, so both get the same
    image = np.full((6, 8, 3), 100, dtype=np.uint8)
    void = np.zeros(ids.shape, dtype=bool)
    void[0, 0] = True
    drawn = draw_instances(image, ids, void)
    assert drawn[0, 7].tolist() == [100, 100, 100]
    assert drawn[0, 0].tolist() != [100, 100, 100]
    assert drawn[2, 2].tolist() == drawn[2, 5].tolist()
    assert drawn[2, 2].tolist() == [round(0.45 * 100 + 0.55 * int(value)) for value in PALETTE[0]]
    assert (drawn[1:5, 3] == OUTLINE).all()
    assert outline(ids)[1:5, 3].all()
    assert not outline(ids)[2, 1]


def test_objects_carry_their_texts() -> None:
    image = np.full((120, 160, 3), 90, np.uint8)
    ids = np.zeros((30, 40), np.int32)
    ids[5:15, 4:20] = 1
    ids[25:, 30:] = 2
    drawn = label_objects(image, ids, ["car 0.93", "bus 0.10", "not there 0.01"], factor=4.0)
    changed = (drawn != image).any(2)
    assert changed[20:60, 16:80].any()
    assert changed[80:, 90:].any()
    assert not changed[:10].any()
    assert drawn[changed].max() > 200
    np.testing.assert_array_equal(label_objects(image, ids, []), image)
