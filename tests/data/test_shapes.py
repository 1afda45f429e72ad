"""Generated scenes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fp4deploy.data import IGNORE, check_dataset, generate_shapes, open_dataset
from fp4deploy.errors import InputError


def files(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shapes") / "set"
    generate_shapes(folder, train=60, val=5, size=64, seed=0)
    return folder


def test_the_same_seed_gives_the_same_files(tmp_path, root):
    generate_shapes(tmp_path / "again", train=60, val=5, size=64, seed=0)
    assert files(tmp_path / "again") == files(root)
    generate_shapes(tmp_path / "other", train=60, val=5, size=64, seed=1)
    assert files(tmp_path / "other") != files(root)


def test_more_images_do_not_change_the_first_ones(tmp_path, root):
    generate_shapes(tmp_path / "more", train=62, val=5, size=64, seed=0)
    before, after = files(root), files(tmp_path / "more")
    assert all(after[name] == data for name, data in before.items() if name.endswith(".jpg"))


def test_splits_differ(root):
    images = files(root)
    assert images["train2017/000000000001.jpg"] != images["val2017/000000000001.jpg"]


def test_the_set_has_no_defect_and_exercises_every_form_of_annotation(root):
    assert check_dataset(root) == []
    content = json.loads((root / "annotations" / "instances_train2017.json").read_text())
    annotations = content["annotations"]
    assert content["info"]["generator"] == {"images": 60, "size": 64, "seed": 0}
    assert any(isinstance(a["segmentation"], list) for a in annotations)
    assert any(isinstance(a["segmentation"], dict) and not a["iscrowd"] for a in annotations)
    assert any(a["iscrowd"] and isinstance(a["segmentation"]["counts"], list) for a in annotations)
    assert {a["category_id"] for a in annotations} == set(range(1, len(content["categories"]) + 1))
    assert {image["id"] for image in content["images"]} - {a["image_id"] for a in annotations}
    modes = {Image.open(path).mode for path in (root / "train2017").iterdir()}
    assert modes == {"L", "RGB"}


def test_everything_that_the_annotations_name_is_there(root):
    for split in ("train", "val"):
        content = json.loads((root / "annotations" / f"instances_{split}2017.json").read_text())
        known = {part: [each["id"] for each in content[part]] for part in ("images", "categories", "licenses")}
        assert all(len(set(ids)) == len(ids) for ids in known.values())
        assert {image["license"] for image in content["images"]} == set(known["licenses"])
        assert {each["image_id"] for each in content["annotations"]} <= set(known["images"])
        assert {each["category_id"] for each in content["annotations"]} <= set(known["categories"])
        for image in content["images"]:
            with Image.open(root / f"{split}2017" / image["file_name"]) as file:
                assert file.size == (image["width"], image["height"])
        for each in content["annotations"]:
            left, top, width, height = each["bbox"]
            assert 0 <= left <= left + width <= 64
            assert 0 <= top <= top + height <= 64
            assert 0 < each["area"] <= width * height


def test_masks_are_what_the_annotations_count(root):
    dataset = open_dataset(root, "train")
    content = json.loads((root / "annotations" / "instances_train2017.json").read_text())
    for index, image in enumerate(content["images"]):
        counted = np.zeros(len(dataset.class_names), dtype=int)
        for annotation in content["annotations"]:
            if annotation["image_id"] == image["id"] and not annotation["iscrowd"]:
                counted[annotation["category_id"]] += annotation["area"]
        mask = dataset.load(index).mask
        drawn = np.bincount(mask[mask != IGNORE], minlength=len(counted))
        np.testing.assert_array_equal(drawn[1:], counted[1:])


def test_nothing_is_overwritten_and_nothing_half_written_is_left(tmp_path, monkeypatch):
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine.txt").write_text("x")
    with pytest.raises(InputError, match="not empty"):
        generate_shapes(taken, 1, 1, 32, 0)
    assert [path.name for path in taken.iterdir()] == ["mine.txt"]

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fp4deploy.data.generated.shapes._save", full)
    with pytest.raises(InputError, match="No space left"):
        generate_shapes(tmp_path / "new", 1, 1, 32, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize(
    ("arguments", "name"), [((0, 1, 64, 0), "train"), ((1, 1, 8, 0), "size"), ((1, 1, 64, -1), "seed")]
)
def test_arguments_out_of_range(tmp_path, arguments, name):
    with pytest.raises(InputError, match=f"^{name} is "):
        generate_shapes(tmp_path / "set", *arguments)
