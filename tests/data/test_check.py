"""`check_dataset` lists every defect, and none on sound data."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from PIL import Image

from fp4deploy.data import check_dataset
from fp4deploy.errors import InputError


def kinds(root: Path) -> set[tuple[str, int | None]]:
    return {(defect.kind, defect.annotation_id) for defect in check_dataset(root)}


def test_sound_folders_have_no_defect(make_coco, make_masks):
    assert check_dataset(make_coco()) == []
    assert check_dataset(make_masks()) == []


def test_nothing_is_drawn_at_a_size_that_the_image_has_not(make_coco):
    """A declared size costs memory; of an annotation that covers nothing only drawing it tells."""

    def change(content):
        sound = content["annotations"][0]
        sizes = {30: ("there.png", 40, 60), 31: ("small.png", 8000, 8000), 32: ("gone.png", 8000, 8000)}
        for number, (name, height, width) in sizes.items():
            content["images"].append({"id": number, "file_name": name, "height": height, "width": width})
            nothing = [[1, 1, 1.1, 1, 1.1, 1.1]]
            content["annotations"].append({**sound, "id": number, "image_id": number, "segmentation": nothing})

    root = make_coco(change)
    for name in ("there.png", "small.png"):
        Image.new("RGB", (60, 40)).save(root / "train2017" / name)
    assert kinds(root) == {("zero-area", 30), ("size-mismatch", None), ("missing-image", None)}


def test_every_defect_of_an_annotation_file_is_listed(make_coco):
    def change(content):
        sound = content["annotations"][0]

        def add(number, **values):
            content["annotations"].append({**sound, "id": number, **values})

        add(2, category_id=93)
        add(3, image_id=555)
        add(4, segmentation=[[1, 1, 2, 2]])
        add(5, segmentation=[[1, 1, 5, 1, 5, 5, 9]])
        add(6, segmentation={"size": [16, 12], "counts": [192]})
        add(7, segmentation={"size": [12, 16], "counts": "zzzz"})
        add(8, bbox=[10, 2, 20, 3])
        add(9, segmentation=[[1, 1, 1.1, 1, 1.1, 1.1]])
        add(10, segmentation=[])
        add(11, segmentation=7)
        add(12, bbox="wide")
        content["annotations"] += [dict(sound), {"id": 13}, "text"]
        content["images"] += [
            {"id": 20, "file_name": "gone.png", "height": 4, "width": 4},
            {"id": 21, "file_name": "empty.png", "height": 4, "width": 4},
            {"id": 7, "file_name": "a.png", "height": 4, "width": 4},
            {"id": 22},
        ]
        content["categories"] += [{"id": 1, "name": "again"}, {"id": 5}]

    root = make_coco(change)
    path = root / "train2017" / "b.jpg"
    Image.effect_noise((64, 64), 90).convert("RGB").save(path, quality=95)
    path.write_bytes(path.read_bytes()[:-200])
    expected = {
        ("unknown-category", 2),
        ("unknown-image", 3),
        ("degenerate-polygon", 4),
        ("degenerate-polygon", 5),
        ("broken-segmentation", 6),
        ("broken-segmentation", 7),
        ("box-outside", 8),
        ("zero-area", 9),
        ("no-segmentation", 10),
        ("broken-segmentation", 11),
        ("broken-box", 12),
        ("duplicate-annotation", 1),
        ("broken-annotation", 13),
        ("broken-annotation", None),
        ("missing-image", None),
        ("size-mismatch", None),
        ("duplicate-image", None),
        ("repeated-image", None),
        ("broken-image", None),
        ("duplicate-category", None),
        ("broken-category", None),
    }
    assert kinds(root) == expected
    files = {defect.file for defect in check_dataset(root)}
    assert {"annotations/instances_train2017.json", "train2017/gone.png", "val2017/empty.png"} <= files


def test_unreadable_images_and_files(make_coco):
    root = make_coco()
    path = root / "train2017" / "a.png"
    path.write_bytes(path.read_bytes()[:60])
    (root / "annotations" / "instances_val2017.json").write_text('{"images": [')
    defects = check_dataset(root)
    assert [(d.file, d.kind) for d in defects] == [
        ("train2017/a.png", "unreadable-image"),
        ("annotations/instances_val2017.json", "broken-json"),
    ]
    (root / "annotations" / "instances_val2017.json").unlink()
    (root / "train2017" / "empty.png").unlink()
    (root / "train2017" / "a.png").unlink()
    (root / "train2017").rmdir()
    assert kinds(root) == {("missing-folder", None), ("missing-file", None)}


def test_splits_with_different_categories(make_coco):
    root = make_coco()
    path = root / "annotations" / "instances_val2017.json"
    path.write_text(path.read_text().replace('"cup"', '"mug"'))
    assert kinds(root) == {("different-categories", None)}


def test_a_test_split_is_checked_where_there_is_one(make_coco, make_masks):
    root = make_coco()
    shutil.copytree(root / "val2017", root / "test2017")
    for image in (root / "test2017").iterdir():
        with Image.open(image) as opened:
            pixels = opened.convert("RGB")
        pixels.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(image)
    path = root / "annotations" / "instances_test2017.json"
    shutil.copy(root / "annotations" / "instances_val2017.json", path)
    assert check_dataset(root) == []
    image = root / "test2017" / "a.png"
    image.write_bytes(image.read_bytes()[:60])
    path.write_text(path.read_text().replace('"cup"', '"mug"'))
    assert [(d.file, d.kind) for d in check_dataset(root)] == [
        ("test2017/a.png", "unreadable-image"),
        ("annotations/instances_test2017.json", "different-categories"),
    ]
    root = make_masks()
    (root / "test").mkdir()
    Image.new("RGB", (4, 4)).save(root / "test" / "x.jpg")
    (root / "masks" / "test").mkdir()
    assert {(d.file, d.kind) for d in check_dataset(root)} == {
        ("masks/test", "missing-file"),
        ("test/x.jpg", "missing-mask"),
    }


def test_defects_of_masks(make_masks):
    root = make_masks()
    Image.new("L", (4, 4)).save(root / "masks" / "train" / "lonely.png")
    Image.new("RGB", (4, 4)).save(root / "train" / "unlabelled.jpg")
    Image.new("L", (4, 4)).save(root / "masks" / "val" / "x.png")
    Image.new("RGB", (5, 4)).save(root / "val" / "y.jpg")
    Image.new("RGB", (4, 4)).save(root / "masks" / "val" / "y.png")
    assert {(d.file, d.kind) for d in check_dataset(root)} == {
        ("masks/train/lonely.png", "missing-image"),
        ("train/unlabelled.jpg", "missing-mask"),
        ("val/x.jpg", "size-mismatch"),
        ("masks/val/y.png", "unreadable-mask"),
    }


def test_a_folder_that_is_no_dataset_is_refused(tmp_path):
    with pytest.raises(InputError, match="is not a dataset folder"):
        check_dataset(tmp_path)
    with pytest.raises(InputError, match="does not exist"):
        check_dataset(tmp_path / "absent")


@pytest.mark.parametrize("name", ["coco2017_mini", pytest.param("camvid", marks=pytest.mark.variants)])
def test_real_sets_have_no_defect(shared: Path, name):
    assert check_dataset(shared / "data" / name) == []


def test_a_set_of_boxes_needs_no_segmentations(make_coco):
    def boxes(content):
        for annotation in content["annotations"]:
            annotation.pop("segmentation", None)
            annotation["bbox"] = [1, 1, 4, 4]

    assert check_dataset(make_coco(boxes)) == []


def test_among_segmentations_a_box_alone_is_a_defect(make_coco):
    def one(content):
        content["annotations"].append({**content["annotations"][0], "id": 2, "segmentation": []})

    assert kinds(make_coco(one)) == {("no-segmentation", 2)}


def test_a_broken_box_among_boxes_is_a_defect(make_coco):
    def broken(content):
        for annotation in content["annotations"]:
            annotation.pop("segmentation", None)
            annotation["bbox"] = [float("nan"), 1, 4, 4]

    assert {kind for kind, _ in kinds(make_coco(broken))} == {"broken-box"}
