"""Datasets that somebody else made: names that leave their folder, sizes that are not so, files of another format."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as coco_mask

from fp4deploy.data import CocoDataset, check_dataset, import_coco, open_dataset
from fp4deploy.data.coco.annotations import inside_folder, parse
from fp4deploy.data.coco.regions import RegionError, decode, encode, pixel_count, pixels_of
from fp4deploy.data.images import ImageError, _classes_of_colours, read_image
from fp4deploy.data.layouts import mask_files
from fp4deploy.errors import InputError


def changed(root: Path, split: str = "train", **values: Any) -> Path:
    """Change the first image of a split."""
    path = root / "annotations" / f"instances_{split}2017.json"
    content = json.loads(path.read_text())
    content["images"][0].update(values)
    path.write_text(json.dumps(content))
    return root


@pytest.mark.parametrize(("corner", "far"), [(-127, False), (-129, True), (129, True)])
def test_a_polygon_far_outside_its_image_on_either_side_is_refused(corner: float, far: bool) -> None:
    polygon = np.array([0, 0, corner, 0, 0, 8], np.float64)
    if not far:
        assert encode([polygon], 8, 8) is not None
        return
    with pytest.raises(RegionError, match="far outside"):
        encode([polygon], 8, 8)


def test_a_run_of_too_many_characters_is_refused() -> None:
    assert encode({"size": [8, 8], "counts": "P2"}, 8, 8) is not None  # 64
    with pytest.raises(RegionError, match="cannot be decoded"):
        encode({"size": [8, 8], "counts": f"PR{'P' * 6}0"}, 8, 8)  # the same in nine


@pytest.mark.parametrize(
    "name",
    ["../logo.jpg", "/etc/logo.jpg", "a/../../logo.jpg", "..\\logo.jpg", "C:\\logo.jpg", "\\\\host\\logo.jpg", ".."],
)
def test_names_that_leave_the_folder(make_coco: Any, name: str) -> None:
    assert not inside_folder(name)
    root = changed(make_coco(), file_name=name)
    assert ("outside-folder", None) in {(d.kind, d.annotation_id) for d in check_dataset(root)}
    with pytest.raises(InputError, match="outside the folder of the images"):
        open_dataset(root, "train")


@pytest.mark.parametrize("name", ["\ud800.jpg", "a" * 501, "", "a\0.jpg", 3, None])
def test_names_that_no_file_has(make_coco: Any, name: Any) -> None:
    root = changed(make_coco(), file_name=name)
    assert "broken-image" in {d.kind for d in check_dataset(root)}
    with pytest.raises(InputError, match="holds an image without 'id', 'file_name'"):
        open_dataset(root, "train")


@pytest.mark.parametrize("side", [1 << 32, 1 << 64, 31_623, 10**9])
def test_a_declared_size_beyond_every_image(make_coco: Any, side: int) -> None:
    root = changed(make_coco(), height=side, width=side)
    assert "broken-image" in {d.kind for d in check_dataset(root)}
    with pytest.raises(InputError):
        open_dataset(root, "train")


def test_a_declared_size_is_compared_before_anything_is_drawn(make_coco: Any) -> None:
    root = changed(make_coco(), height=13_000, width=13_000)
    start = time.process_time()
    assert "size-mismatch" in {d.kind for d in check_dataset(root)}
    dataset = CocoDataset(root, "train", instances=True)
    with pytest.raises(InputError, match="but its annotation says 13000x13000"):
        dataset.ground_truth()
    with pytest.raises(InputError, match="but its annotation says 13000x13000"):
        dataset.load(0)
    assert time.process_time() - start < 2


def test_ids_and_areas_beyond_64_bits(make_coco: Any) -> None:
    def change(content: dict[str, Any]) -> None:
        content["annotations"][0] |= {"area": 10**400, "bbox": [10**400, 0.5, 1, 1]}
        content["annotations"].append({**content["annotations"][0], "id": 1 << 63})
        content["categories"].append({"id": 1 << 70, "name": "far"})

    kinds = {defect.kind for defect in check_dataset(make_coco(change))}
    assert {"broken-annotation", "broken-category", "broken-box"} <= kinds


def test_an_eps_file_is_no_image_whatever_it_is_called(tmp_path: Path) -> None:
    path = tmp_path / "photo.jpg"
    Image.new("RGB", (16, 16)).save(path, format="EPS")
    assert path.read_bytes().startswith(b"%!PS")
    with pytest.raises(ImageError, match="is not an image"):
        read_image(path)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "BMP", "WEBP", "TIFF", "GIF", "PPM"])
def test_the_usual_formats_are_read(tmp_path: Path, form: str) -> None:
    path = tmp_path / "photo.jpg"
    Image.new("RGB", (16, 8), (200, 100, 50)).save(path, format=form)
    pixels = read_image(path, (8, 16))
    assert pixels.shape == (8, 16, 3)
    assert abs(int(pixels[0, 0, 0]) - 200) < 8


def test_a_hundred_thousand_categories_are_read_in_linear_time(make_coco: Any) -> None:
    def change(content: dict[str, Any]) -> None:
        content["categories"] += [{"id": 1000 + number, "name": f"class {number}"} for number in range(100_000)]

    root = make_coco(change)
    start = time.process_time()
    parsed = parse(root / "annotations" / "instances_train2017.json")
    assert len(parsed.categories) > 100_000
    with pytest.raises(InputError, match="at most 254 can be learned at once"):
        open_dataset(root, "train")
    assert time.process_time() - start < 5


def test_deep_json_is_a_defect(make_coco: Any) -> None:
    root = make_coco()
    (root / "annotations" / "instances_train2017.json").write_text("[" * 100_000)
    assert next(d.kind for d in check_dataset(root)) == "broken-json"


@pytest.mark.parametrize("seed", range(4))
def test_pixels_of_is_decode(seed: int) -> None:
    draw = np.random.default_rng(seed)
    height, width = draw.integers(1, 40, 2)
    for density in (0.0, 0.02, 0.5, 1.0):
        mask = np.asfortranarray((draw.random((height, width)) < density).astype(np.uint8))
        rle = coco_mask.encode(mask)
        assert pixels_of(rle).size == pixel_count(rle)
        drawn = np.zeros(height * width, dtype=bool)
        drawn[pixels_of(rle)] = True
        assert (decode(rle) == drawn.reshape(width, height).T).all()


def test_two_images_that_differ_in_the_suffix_have_pictures_of_their_own(make_coco: Any) -> None:
    def change(content: dict[str, Any]) -> None:
        first = content["images"][0]
        stem = Path(first["file_name"]).stem
        content["images"].append({**first, "id": 99, "file_name": f"{stem}.webp"})

    root = make_coco(change)
    first = json.loads((root / "annotations" / "instances_train2017.json").read_text())["images"][0]["file_name"]
    Image.open(root / "train2017" / first).save(root / "train2017" / f"{Path(first).stem}.webp")
    dataset = CocoDataset(root, "train")
    names = [dataset.picture_name(index) for index in range(len(dataset))]
    assert len(set(names)) == len(names)
    assert names[0] == f"{first}.png"
    assert [Path(image.file_name).stem for image in dataset.images][1] + ".png" == names[1]


def test_annotations_that_cover_an_image_a_million_times(make_coco: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_coco()
    dataset = CocoDataset(root, "train")
    dataset.load(0)
    monkeypatch.setattr("fp4deploy.data.coco.dataset.MAX_DRAWN", 3)
    with pytest.raises(InputError, match="pixels together; the limit is 3"):
        dataset.load(0)


def test_a_pipe_or_device_is_neither_image_nor_mask_nor_annotations(make_coco: Any, tmp_path: Path) -> None:
    """An archive can hold pipes, and one that is opened for reading waits for ever."""
    root = make_coco()
    image = next((root / "train2017").iterdir())
    image.unlink()
    os.mkfifo(image)
    assert (f"train2017/{image.name}", "unreadable-image") in {(d.file, d.kind) for d in check_dataset(root)}
    masks = tmp_path / "set"
    (masks / "masks" / "train").mkdir(parents=True)
    os.mkfifo(masks / "masks" / "train" / "a.png")
    (masks / "train").mkdir()
    (masks / "train" / "a.png").symlink_to("/dev/zero")
    assert {"unreadable-mask"} <= {defect.kind for defect in check_dataset(masks)}
    for path in (image, Path("/dev/zero")):
        assert [defect.kind for defect in parse(path).defects] == ["broken-json"]
        with pytest.raises(InputError, match="There is no file"):
            import_coco({"train": path}, [tmp_path], tmp_path / "out", val_share=0.5)


def test_a_name_that_no_file_system_takes(make_coco: Any, tmp_path: Path) -> None:
    root = changed(make_coco(), file_name=f"{'a' * 300}.jpg")
    assert "broken-image" in {defect.kind for defect in check_dataset(root)}
    listing = tmp_path / "ImageSets" / "Segmentation" / "train.txt"
    listing.parent.mkdir(parents=True)
    listing.write_text("a" * 300)
    (tmp_path / "SegmentationClass").mkdir()
    with pytest.raises(InputError, match="at most 240 bytes"):
        mask_files(tmp_path, "train")


def test_masks_in_colours_are_read_by_them() -> None:
    colours = {(0, 0, 0): 0, (128, 64, 128): 1, (255, 255, 255): 2}
    pixels = np.array([[(0, 0, 0), (128, 64, 128)], [(255, 255, 255), (1, 0, 0)]], np.uint8)
    assert _classes_of_colours(pixels, colours).tolist() == [[0, 1], [2, 255]]
