"""Label Studio's "JSON" export: regions, names of images, and what is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as coco_mask

from fp4deploy.data import import_coco
from fp4deploy.data.importing.label_studio import coco_content, decode_rle
from fp4deploy.errors import InputError

# what label_studio_sdk 2.1.2 (converter.brush.mask2rle) writes for the mask below
BRUSH = [0, 0, 0, 192, 57, 27, 252, 127, 249, 28, 2, 255, 253, 240, 11, 255, 247, 192, 47, 255, 226, 48, 0]
MASK = np.zeros((6, 8), np.uint8)
MASK[2:5, 3:7] = 1
MASK[0, 0] = 1


def region(kind: str, label: str, **value: Any) -> dict[str, Any]:
    sizes = {"original_width": 8, "original_height": 6, "image_rotation": 0}
    return {"id": "a", "type": kind, **sizes, "value": {**value, kind: [label]}}


def task(number: int, *result: dict[str, Any], **data: str) -> dict[str, Any]:
    address = data or {"image": f"/data/upload/1/{number}%20a.png"}
    return {"id": number, "data": address, "annotations": [{"result": list(result), "was_cancelled": False}]}


def tasks() -> list[dict[str, Any]]:
    polygon = region("polygonlabels", "car", points=[[0, 0], [50, 0], [50, 100]])
    rectangle = region("rectanglelabels", "sign", x=25, y=50, width=50, height=50, rotation=0)
    skipped = {"id": 9, "data": {"image": "x.png"}, "annotations": [{"result": [], "was_cancelled": True}]}
    choice = {"id": "c", "type": "choices", "value": {"choices": ["rain"]}}
    brush = region("brushlabels", "road", format="rle", rle=BRUSH)
    return [task(1, polygon, brush), task(2, rectangle, choice), task(3), skipped]


def content(of: list[dict[str, Any]]) -> dict[str, Any]:
    return coco_content(of, lambda name: (8, 6))


def test_regions() -> None:
    found = content(tasks())
    assert [category["name"] for category in found["categories"]] == ["car", "road", "sign"]
    assert [image["file_name"] for image in found["images"]] == [f"/data/upload/1/{n} a.png" for n in (1, 2, 3)]
    polygon, brush, rectangle = found["annotations"]
    assert polygon["segmentation"] == [[0, 0, 4, 0, 4, 6]]
    assert (polygon["bbox"], polygon["area"]) == ([0, 0, 4, 6], 12)
    assert np.array_equal(coco_mask.decode(brush["segmentation"]), MASK)
    assert (brush["bbox"], brush["area"]) == ([0, 0, 7, 5], 13)
    assert (rectangle["bbox"], rectangle["segmentation"], rectangle["image_id"]) == ([2, 3, 4, 3], [], 2)


def test_a_brush_is_where_its_colour_is_opaque() -> None:
    pixels = np.full((6, 8, 4), 255, np.uint8)
    pixels[..., 3] = 255 * MASK
    bits = f"{pixels.size:032b}{7:05b}{'1111' * 4}000{pixels.size - 1:016b}"  # one chunk of values as they are
    bits += "".join(f"{value:08b}" for value in pixels.ravel())
    code = [int(bits[at : at + 8].ljust(8, "0"), 2) for at in range(0, len(bits), 8)]
    (brush,) = content([task(1, region("brushlabels", "road", format="rle", rle=code))])["annotations"]
    assert np.array_equal(coco_mask.decode(brush["segmentation"]), MASK)


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("/data/local-files/?d=set/a.png", "set/a.png"),
        ("s3://bucket/b/a.png", "/b/a.png"),
        ("https://host/a.png?sig=1.2", "/a.png"),
    ],
)
def test_addresses(address: str, name: str) -> None:
    assert content([task(1, image=address, text="a note")])["images"][0]["file_name"] == name


def change(path: str, value: Any) -> Callable[[list[Any]], None]:
    def apply(to: Any) -> None:
        *inner, last = (int(key) if key.isdigit() else key for key in path.split("."))
        for key in inner:
            to = to[key]
        to[last] = value

    return apply


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("0.annotations.0.result.0.type", "ellipselabels", "'ellipselabels', and those read are polygonlabels"),
        ("1.annotations.0.result.0.value.rotation", 30, "rotated"),
        ("0.annotations.0.result.0.original_width", 10**9, "1000000000 x 6 pixels"),
        ("0.annotations.0.result.0.value.polygonlabels", [], "has 0 labels"),
        ("0.annotations.0.result.0.value.points", [[1], [2]], "points are not pairs"),
        ("0.annotations.0.result.1.value.rle", BRUSH[:9], "ends too early"),
        ("0.annotations.0.result.1.value.rle", [0, 0, 0, 191, *BRUSH[4:]], "is not of 48 pixels"),
        ("0.annotations.0.result.1.value.rle", [300], "task 1, which cannot be read"),
        ("0.data", {"audio": "a.wav"}, "its data name 0 images"),
        ("0.annotations", [{"result": []}, {"result": []}], "mark one of them as ground truth"),
        ("0.annotations", [3], "not as Label Studio's JSON export writes it"),
    ],
)
def test_what_is_refused(path: str, value: Any, said: str) -> None:
    changed = copy.deepcopy(tasks())
    change(path, value)(changed)
    with pytest.raises(InputError, match=said):
        content(changed)


def test_every_length_of_a_damaged_code_ends() -> None:
    for at in range(len(BRUSH)):
        for value in (0, 255, BRUSH[at] ^ 1):
            try:
                found = decode_rle([*BRUSH[:at], value, *BRUSH[at + 1 :]], MASK.size * 4)
            except ValueError:
                continue
            assert found.shape == (MASK.size * 4,)


def test_an_export_becomes_a_folder(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for number in (1, 2, 3):
        Image.new("RGB", (8, 6)).save(tmp_path / "images" / f"{number} a.png")
    (tmp_path / "export.json").write_text(json.dumps(tasks()))
    found = import_coco(
        {"train": tmp_path / "export.json", "val": tmp_path / "export.json"}, [tmp_path / "images"], tmp_path / "out"
    )
    assert [(split.images, split.annotations) for split in found] == [(3, 3), (3, 3)]
    assert (tmp_path / "out" / "train" / "3 a.png").is_file()
    (tmp_path / "images" / "3 a.png").write_bytes(b"no image")  # its annotation is empty: the size is in the file
    with pytest.raises(InputError, match=r"export.json .*3 a.png"):
        import_coco({"train": tmp_path / "export.json"}, [tmp_path / "images"], tmp_path / "b", val_share=0.5)


@pytest.mark.parametrize("name", ["/data/upload/1/a.png", "../media/a.png", "C:\\media\\a.png"])
def test_names_of_a_server_are_looked_up_without_its_folders(tmp_path: Path, name: str) -> None:
    Image.new("RGB", (8, 6)).save(tmp_path / "a.png")
    coco = {
        "images": [{"id": 1, "file_name": name, "width": 8, "height": 6}],
        "annotations": [],
        "categories": [{"id": 0, "name": "car"}],
    }
    (tmp_path / "result.json").write_text(json.dumps(coco))
    files = dict.fromkeys(("train", "val"), tmp_path / "result.json")
    import_coco(files, [tmp_path], tmp_path / "out")
    assert (tmp_path / "out" / "val" / "a.png").is_file()
