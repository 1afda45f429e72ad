"""Files of other tools that say the same in another way: numbers as text, byte order marks, flat polygons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fp4deploy.data import open_boxes, open_dataset
from fp4deploy.errors import InputError

TRIANGLE = [4, 4, 24, 4, 24, 24]


def coco(root: Path, segmentation: Any, image: dict[str, Any] | None = None, number: Any = 1) -> Path:
    (root / "annotations").mkdir(parents=True)
    (root / "train").mkdir()
    Image.new("RGB", (64, 64)).save(root / "train" / "a.png")
    annotation = {"id": number, "image_id": number, "category_id": number, "bbox": [4, 4, 20, 20]}
    content = {
        "images": [{"id": 1, "file_name": "a.png", "height": 64, "width": 64} | (image or {})],
        "categories": [{"id": number, "name": "cat"}],
        "annotations": [annotation | {"segmentation": segmentation}],
    }
    (root / "annotations" / "instances_train.json").write_text(json.dumps(content))
    return root


@pytest.mark.parametrize("segmentation", [[[]], [], None, [[], []]])
def test_empty_segmentations_are_boxes(tmp_path: Path, segmentation: Any) -> None:
    root = coco(tmp_path, segmentation)
    with pytest.raises(InputError, match="holds boxes only"):
        open_dataset(root, "train")
    boxes = open_boxes(root, "train").load(0).boxes
    assert boxes is not None
    assert boxes.tolist() == [[1, 4, 4, 24, 24]]


def test_a_polygon_without_the_list_around_it_is_one(tmp_path: Path) -> None:
    flat, listed = (
        open_dataset(coco(tmp_path / str(at), each), "train") for at, each in enumerate((TRIANGLE, [TRIANGLE]))
    )
    assert np.array_equal(flat.load(0).mask, listed.load(0).mask)
    assert flat.load(0).mask.any()


@pytest.mark.parametrize(
    ("image", "number"),
    [({"id": "1"}, 1), ({"id": 1.0}, "1"), ({"height": 64.0, "width": "64"}, 1.0), ({"id": " 1 "}, 1)],
)
def test_numbers_may_be_text(tmp_path: Path, image: dict[str, Any], number: Any) -> None:
    assert open_dataset(coco(tmp_path, [TRIANGLE], image, number), "train").load(0).mask.any()


@pytest.mark.parametrize("image", [{"id": "one"}, {"height": 64.5}, {"width": "64px"}])
def test_what_is_no_number_is_named(tmp_path: Path, image: dict[str, Any]) -> None:
    (key,) = image
    with pytest.raises(InputError, match=rf"as a whole number \({key} is "):
        open_dataset(coco(tmp_path, [TRIANGLE], image), "train")


@pytest.mark.parametrize("suffix", ["tif", "tiff", "TIF"])
def test_images_may_be_tiff(tmp_path: Path, suffix: str) -> None:
    for folder in (tmp_path / "train", tmp_path / "masks" / "train"):
        folder.mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "train" / f"a.{suffix}", format="TIFF")
    Image.fromarray(np.eye(8, dtype=np.uint8)).save(tmp_path / "masks" / "train" / "a.png")
    assert open_dataset(tmp_path, "train").load(0).image.shape == (8, 8, 3)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("listing", ["classes.txt", "labelmap.txt"])
def test_lists_may_have_a_byte_order_mark(tmp_path: Path, encoding: str, listing: str) -> None:
    for folder in (tmp_path / "train", tmp_path / "masks" / "train"):
        folder.mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "train" / "a.png")
    Image.fromarray(np.eye(8, dtype=np.uint8)).save(tmp_path / "masks" / "train" / "a.png")
    text = "background\r\nk\u00e4fer\r\n" if listing == "classes.txt" else "background:0,0,0::\nk\u00e4fer:1,1,1::\n"
    (tmp_path / listing).write_bytes(text.encode(encoding))
    assert open_dataset(tmp_path, "train").class_names == ("background", "k\u00e4fer")
