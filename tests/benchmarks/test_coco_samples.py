"""COCO samples of several folders: merged by id, shrunk with their annotations, divided by name."""

from __future__ import annotations

import json
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as coco_mask

from benchmarks import coco_samples
from fp4deploy.data import check_dataset, open_instances

CATEGORIES = [{"id": 1, "name": "person"}, {"id": 3, "name": "car"}]


def polygon(image: int, left: int, category: int = 1) -> dict[str, Any]:
    """A square of 20 pixels from (left, 10)."""
    corners = [left, 10, left + 20, 10, left + 20, 30, left, 30]
    box = {"bbox": [left, 10, 20, 20], "area": 400, "iscrowd": 0}
    return {"id": 7, "image_id": image, "category_id": category, "segmentation": [corners], **box}


def crowd(image: int) -> dict[str, Any]:
    """The upper half of an image of 80 x 60 as uncompressed runs."""
    box = {"bbox": [0, 0, 80, 30], "area": 2400, "iscrowd": 1}
    region = {"size": [60, 80], "counts": [0, *[30] * 160]}
    return {"id": 8, "image_id": image, "category_id": 3, "segmentation": region, **box}


def folder(path: Path, images: dict[int, list[dict[str, Any]]], categories: Any = CATEGORIES, side: int = 80) -> Path:
    """A folder with images of `side` x 60 pixels and their annotations."""
    (path / "annotations").mkdir(parents=True)
    (path / "train2017").mkdir()
    records = []
    for number in images:
        name = f"{number:012d}.jpg"
        Image.new("RGB", (side, 60), (30 * number % 256, 90, 250 - 30 * number % 250)).save(path / "train2017" / name)
        records.append({"id": number, "file_name": name, "width": side, "height": 60})
    records.append({"id": 999, "file_name": "000000000999.jpg", "width": 80, "height": 60})  # without a file
    content = {"images": records, "annotations": [*chain(*images.values())], "categories": categories}
    (path / "annotations" / "instances_train2017.json").write_text(json.dumps(content))
    return path


def test_an_image_counts_once_with_the_annotations_of_the_first_folder(tmp_path: Path) -> None:
    first = folder(tmp_path / "a", {4: [polygon(4, 5)], 9: []})
    second = folder(tmp_path / "b", {4: [polygon(4, 5), polygon(4, 40)], 2: [crowd(2)]})
    images, categories = coco_samples.merge([first, second])
    assert {number: (found.source, len(found.annotations)) for number, found in images.items()} == {
        2: ("b", 1), 4: ("a", 1), 9: ("a", 0),
    }  # fmt: skip
    assert categories == {1: "person", 3: "car"}


def test_folders_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    first = folder(tmp_path / "a", {4: []})
    with pytest.raises(ValueError, match=r"has image 4 of \(90, 60\) pixels"):
        coco_samples.merge([first, folder(tmp_path / "b", {4: []}, side=90)])
    with pytest.raises(ValueError, match="calls category 1 'dog'"):
        coco_samples.merge([first, folder(tmp_path / "c", {5: []}, [{"id": 1, "name": "dog"}])])


def test_things_of_panoptic_annotations_become_instances(tmp_path: Path) -> None:
    (tmp_path / "panoptic_val2017").mkdir(parents=True)
    ids = np.zeros((60, 80, 3), np.uint8)
    ids[:20, :40] = (1, 2, 0)  # 513
    ids[20:, :] = (9, 0, 0)
    Image.fromarray(ids).save(tmp_path / "panoptic_val2017" / "000000000004.png")
    Image.new("RGB", (80, 60)).save(tmp_path / "000000000004.jpg")
    segments = [
        {"id": 513, "category_id": 1, "iscrowd": 0, "area": 800, "bbox": [0, 0, 40, 20]},
        {"id": 9, "category_id": 200, "iscrowd": 0, "area": 3200, "bbox": [0, 20, 80, 40]},
    ]
    content = {
        "images": [{"id": 4, "file_name": "000000000004.jpg", "width": 80, "height": 60}],
        "annotations": [{"image_id": 4, "file_name": "000000000004.png", "segments_info": segments}],
        "categories": [{"id": 1, "name": "person", "isthing": 1}, {"id": 200, "name": "rug", "isthing": 0}],
    }
    (tmp_path / "panoptic_val2017.json").write_text(json.dumps(content))
    images, categories = coco_samples.merge([tmp_path])
    (found,) = images[4].annotations
    assert categories == {1: "person"}
    assert found["category_id"] == 1
    np.testing.assert_array_equal(coco_mask.decode(found["segmentation"]), ids[..., 1] == 2)


def test_a_shrunk_set_has_its_annotations_shrunk_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = {**polygon(1, 40), "segmentation": [[10.1, 10.1, 10.9, 10.1, 10.9, 10.2]]}
    images = {number: [polygon(number, 40), crowd(number)] for number in range(1, 9)}
    source = folder(tmp_path / "a", {**images, 1: [lost, *images[1]]})
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["coco_samples", str(source), "--side", "40", "--out", str(out)])
    coco_samples.main()
    assert not check_dataset(out)
    train, val = (open_instances(out, split) for split in ("train", "val"))
    assert (len(train), len(val)) == (5, 3)
    sample = train.load(0)
    assert sample.image.shape == (30, 40, 3)
    person = np.zeros((30, 40), bool)
    person[5:15, 20:30] = True
    np.testing.assert_array_equal(sample.mask == 1, person)
    assert (sample.mask[:15][~person[:15]] == 255).all()  # the crowd, half as high as the image
    assert (sample.mask[15:] == 0).all()
