"""PNG semantic masks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fp4deploy.data import IGNORE, open_dataset
from fp4deploy.data.images import read_class_ids
from fp4deploy.errors import InputError
from tests.data.hand_made import HEIGHT, WIDTH


def test_a_pixel_value_is_a_class_and_values_without_one_are_ignored(make_masks):
    dataset = open_dataset(make_masks(), "train")
    assert dataset.class_names == ("sky", "road", "car", "tree")
    assert (dataset.background, dataset.layout, len(dataset)) == (False, "masks", 1)
    mask = dataset.load(0).mask
    expected = np.zeros((HEIGHT, WIDTH), dtype=np.uint8)
    expected[2:5], expected[8:] = 3, IGNORE
    np.testing.assert_array_equal(mask, expected)


@pytest.mark.parametrize("mode", ["1", "L", "P", "I;16", "I"])
def test_a_mask_of_any_depth_holds_its_values_and_larger_ones_are_void(mode: str, tmp_path: Path) -> None:
    most = {"1": 1, "L": 255, "P": 255}.get(mode, 65535)
    values = np.array([[0, 1, 2, 254, 255, 256, 257, 511, 65535]]).clip(0, most)
    if mode == "1":
        image = Image.fromarray(values.astype(bool))
    elif mode == "P":
        image = Image.fromarray(values.astype(np.uint8))
        image.putpalette([7] * 768)
    else:
        image = Image.fromarray(values.astype({"L": np.uint8, "I;16": np.uint16, "I": np.int32}[mode]))
    image.save(tmp_path / f"mask.{'tif' if mode == 'I' else 'png'}")
    (path,) = tmp_path.iterdir()
    found = read_class_ids(path)
    assert found.dtype == np.uint8
    assert found.tolist() == values.clip(0, 255).tolist()


def test_a_subset_ignores_the_other_classes(make_masks):
    dataset = open_dataset(make_masks(), "train", ["tree", "car"])
    assert dataset.class_names == ("tree", "car")
    mask = dataset.load(0).mask
    assert (mask[2:5] == 0).all()
    assert (np.delete(mask, slice(2, 5), axis=0) == IGNORE).all()
    with pytest.raises(InputError, match="Did you mean 'tree'"):
        open_dataset(dataset.root, "train", ["trees"])


def test_classes_come_from_annotations_then_the_listing_then_the_masks(make_masks):
    root = make_masks()
    categories = [{"id": 5, "name": "void", "mask_value": 200}, {"id": 6, "name": "air", "mask_value": 0}]
    (root / "annotations").mkdir()
    path = root / "annotations" / "instances_train.json"
    path.write_text(json.dumps({"images": [], "annotations": [], "categories": categories}))
    dataset = open_dataset(root, "train")
    assert dataset.class_names == ("air", "void")
    mask = dataset.load(0).mask
    assert (mask[0] == 0).all()
    assert (mask[2:5] == IGNORE).all()
    assert (mask[8:] == 1).all()
    path.write_text("{")
    with pytest.raises(InputError, match="cannot be read as JSON"):
        open_dataset(root, "train")
    path.unlink()
    assert open_dataset(root, "train").class_names == ("sky", "road", "car", "tree")
    (root / "classes.txt").unlink()
    assert open_dataset(root, "val").class_names == tuple(f"class_{n}" for n in range(201))


@pytest.mark.parametrize(("train", "val", "test", "count"), [(3, 6, 9, 7), (6, 3, 9, 7), (None, None, 9, 10)])
def test_numbered_classes_are_those_of_both_splits(tmp_path, train, val, test, count):
    for split, value in (("train", train), ("val", val), ("test", test)):
        if value is not None:
            for folder, pixels in ((tmp_path / split, (0, 0, value)), (tmp_path / "masks" / split, value)):
                folder.mkdir(parents=True)
                Image.new("RGB" if folder.parent == tmp_path else "L", (8, 8), pixels).save(folder / "a.png")
    for split in ("train", "val") if train is not None else ("test",):
        dataset = open_dataset(tmp_path, split)
        assert dataset.class_names == tuple(f"class_{number}" for number in range(count))


@pytest.mark.parametrize("named", ["annotations", "classes.txt", "labelmap.txt", "nothing"])
def test_the_value_255_is_void_whatever_names_it(make_masks, named):
    """254 is the last class, and a mask may hold both."""
    root = make_masks(classes=None)
    values = np.zeros((HEIGHT, WIDTH), np.uint8)
    values[2:5], values[8:] = 254, IGNORE
    for split in ("train", "val"):
        Image.fromarray(values).save(root / "masks" / split / "x.png")
    names = [f"class_{value}" for value in range(256)]
    if named == "annotations":
        categories = [{"id": 1 + at, "name": names[at], "mask_value": at} for at in range(256)]
        categories.append({"id": 999, "name": "outside", "mask_value": -1})
        (root / "annotations").mkdir()
        content = {"images": [], "annotations": [], "categories": categories}
        (root / "annotations" / "instances_train.json").write_text(json.dumps(content))
    elif named == "classes.txt":
        (root / named).write_text("\n".join(names[:255]))
    elif named == "labelmap.txt":
        lines = [f"{name}:{value},{value},{value}::" for value, name in enumerate(names[:255])]
        (root / named).write_text("\n".join(lines))
    dataset = open_dataset(root, "train", ["class_0", "class_254"])
    mask = dataset.load(0).mask
    assert (mask[:2] == 0).all()
    assert (mask[2:5] == 1).all()
    assert (mask[8:] == IGNORE).all()
    for name in ("class_255", "outside"):
        with pytest.raises(InputError, match=f"has no class '{name}'"):
            open_dataset(root, "train", [name])
    if named in ("classes.txt", "labelmap.txt"):
        more = "class_255" if named == "classes.txt" else "class_255:255,255,255::"
        (root / named).write_text(f"{(root / named).read_text()}\n{more}\n")
        with pytest.raises(InputError, match="at most 255"):
            open_dataset(root, "train", ["class_0"])


WRITINGS = {
    "blanks around": lambda lines: "\n".join(f" {line}\t" for line in lines),
    "carriage returns": lambda lines: "\r\n".join(lines),
    "empty lines at the end": lambda lines: "\n".join([*lines, "", "  ", ""]),
    "a byte order mark": lambda lines: "\ufeff" + "\n".join(lines),
}


@pytest.mark.parametrize("writing", WRITINGS)
@pytest.mark.parametrize("listing", ["classes.txt", "labelmap.txt"])
def test_how_a_listing_is_written_changes_nothing(make_masks, writing, listing):
    names = ["sky", "dirt road", "car", "tree"]
    lines = names if listing == "classes.txt" else [f"{name}:{n},{n},{n}::" for n, name in enumerate(names)]
    root = make_masks(classes=None)
    (root / listing).write_text(WRITINGS[writing](lines), encoding="utf-8", newline="")
    assert open_dataset(root, "train").class_names == tuple(names)


def test_all_void_masks_have_no_class(make_masks):
    root = make_masks(classes=None)
    for split in ("train", "val"):
        Image.new("L", (WIDTH, HEIGHT), IGNORE).save(root / "masks" / split / "x.png")
    with pytest.raises(InputError, match="holds a class"):
        open_dataset(root, "train")


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda root: (root / "train" / "x.jpg").unlink(), "x.png has no image"),
        (lambda root: (root / "masks" / "train" / "x.png").unlink(), "no mask in masks/train"),
        (lambda root: Image.new("RGB", (4, 4)).save(root / "masks/train/x.png"), "is a colour image"),
        (lambda root: Image.new("L", (4, 4)).save(root / "masks/train/x.png"), "16x12 pixels"),
        (lambda root: (root / "classes.txt").write_text("sky\n\nroad\n"), "one class a line"),
    ],
)
def test_defects_are_refused(make_masks, damage, expected):
    root = make_masks()
    damage(root)
    with pytest.raises(InputError, match=expected) as caught:
        open_dataset(root, "train").load(0)
    assert str(caught.value).endswith(f"fp4deploy data check {root}")


def test_camvid(shared: Path):
    root = shared / "data" / "camvid"
    dataset = open_dataset(root, "val")
    assert dataset.layout == "masks"
    assert len(dataset) == 101
    assert dataset.class_names[:4] == ("Sky", "Building", "Pole", "Road")
    assert len(dataset.class_names) == 11
    sample = dataset.load(0)
    stored = np.asarray(Image.open(root / "masks" / "val" / Path(sample.name).with_suffix(".png").name))
    np.testing.assert_array_equal(sample.mask, np.where(stored >= 11, IGNORE, stored))
    assert (sample.mask == IGNORE).any()
