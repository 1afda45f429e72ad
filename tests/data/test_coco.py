"""Masks drawn from COCO annotations."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO

from fp4deploy.data import IGNORE, CocoDataset, open_dataset
from fp4deploy.errors import InputError
from tests.data.hand_made import HEIGHT, SQUARE, WIDTH, runs


def box(left, top, right, bottom):
    return [left, top, right, top, right, bottom, left, bottom]


def area(left, top, right, bottom):
    mask = np.zeros((HEIGHT, WIDTH), dtype=bool)
    mask[top:bottom, left:right] = True
    return mask


def annotation(number, category, segmentation, crowd=0, image=7):
    return {
        "id": number,
        "image_id": image,
        "category_id": category,
        "iscrowd": crowd,
        "segmentation": segmentation,
        "bbox": [0, 0, 1, 1],
    }


def draw(make_coco, *annotations, classes=None):
    root = make_coco(lambda content: content.update(annotations=list(annotations)))
    return open_dataset(root, "train", classes).load(0).mask


def rle(mask, compressed):
    encoded = coco_mask.encode(np.asfortranarray(mask.astype(np.uint8)))
    counts = encoded["counts"].decode() if compressed else runs(mask)
    return {"size": [HEIGHT, WIDTH], "counts": counts}


def test_empty_pixels_are_background_and_not_the_first_category(make_coco):
    dataset = open_dataset(make_coco(), "train")
    assert dataset.class_names == ("background", "person", "bottle", "cup")
    assert (dataset.background, dataset.layout, len(dataset)) == (True, "coco", 2)
    np.testing.assert_array_equal(dataset.load(0).mask, np.where(area(2, 2, 8, 8), 2, 0))
    assert not dataset.load(1).mask.any()


@pytest.mark.parametrize("compressed", [True, False])
def test_rle(make_coco, compressed):
    region = area(3, 1, 9, 7) & ~area(5, 3, 7, 5)
    mask = draw(make_coco, annotation(1, 90, rle(region, compressed)))
    np.testing.assert_array_equal(mask, np.where(region, 3, 0))


def test_polygons_of_one_annotation_are_united(make_coco):
    mask = draw(make_coco, annotation(1, 1, [box(0, 0, 3, 3), box(10, 5, 14, 9)]))
    np.testing.assert_array_equal(mask, area(0, 0, 3, 3) | area(10, 5, 14, 9))


@pytest.mark.parametrize("small_first", [True, False])
def test_small_objects_are_drawn_over_large_ones(make_coco, small_first):
    large, small = annotation(1, 1, [box(1, 1, 12, 11)]), annotation(2, 90, [box(4, 4, 7, 7)])
    mask = draw(make_coco, *((small, large) if small_first else (large, small)))
    np.testing.assert_array_equal(mask, np.where(area(4, 4, 7, 7), 3, np.where(area(1, 1, 12, 11), 1, 0)))


@pytest.mark.parametrize("crowd_first", [True, False])
def test_crowds_are_ignored_but_never_overwrite_an_object(make_coco, crowd_first):
    crowd = annotation(1, 1, rle(area(4, 4, 6, 6), False), crowd=1)
    person = annotation(2, 44, [box(2, 2, 5, 5)])
    mask = draw(make_coco, *((crowd, person) if crowd_first else (person, crowd)))
    np.testing.assert_array_equal(mask, np.where(area(2, 2, 5, 5), 2, np.where(area(4, 4, 6, 6), IGNORE, 0)))


def test_an_image_may_be_all_crowd(make_coco):
    mask = draw(make_coco, annotation(1, 1, rle(area(0, 0, WIDTH, HEIGHT), False), crowd=1))
    assert (mask == IGNORE).all()


def test_a_subset_is_the_full_mask_with_the_rest_as_background(make_coco):
    annotations = (
        annotation(1, 1, [box(0, 0, 12, 12)]),
        annotation(2, 90, [box(2, 2, 6, 6)]),
        annotation(3, 44, rle(area(13, 0, 16, 3), False), crowd=1),
        annotation(4, 1, rle(area(13, 6, 16, 9), False), crowd=1),
    )
    expected = np.where(area(0, 0, 12, 12) & ~area(2, 2, 6, 6), 2, np.where(area(13, 6, 16, 9), IGNORE, 0))
    expected[area(2, 2, 6, 6)] = 1
    np.testing.assert_array_equal(draw(make_coco, *annotations, classes=["cup", "person"]), expected)


def test_a_subset_keeps_the_given_order_and_images_without_its_classes(make_coco):
    dataset = open_dataset(make_coco(), "train", ["background", "cup", "person"])
    assert dataset.class_names == ("background", "cup", "person")
    assert len(dataset) == 2
    assert not dataset.load(0).mask.any()


def test_an_unknown_class_is_refused_with_a_suggestion(make_coco):
    with pytest.raises(InputError, match=r"no class 'botle'. Did you mean 'bottle'\?.*person, bottle, cup"):
        open_dataset(make_coco(), "train", ["botle"])


def test_degenerate_polygons_draw_nothing(make_coco):
    mask = draw(make_coco, annotation(1, 1, [[1, 1, 5, 5], SQUARE]), annotation(2, 90, [[1, 1, 4, 4]]))
    np.testing.assert_array_equal(mask, area(2, 2, 8, 8))


@pytest.mark.parametrize(
    ("mode", "suffix"), [("L", "jpg"), ("CMYK", "jpg"), ("P", "png"), ("LA", "png"), ("I;16", "png"), ("1", "png")]
)
def test_images_of_any_mode_become_rgb(make_coco, mode, suffix):
    root = make_coco(lambda content: content["images"][0].update(file_name=f"b.{suffix}"))
    grey = np.arange(WIDTH) // 8 * 255 if mode in ("1", "P") else np.arange(WIDTH) * 17  # what a mode can show
    pixels = np.tile(grey.astype(np.uint8), (HEIGHT, 1))
    source = Image.fromarray(pixels.astype(np.uint16) * 257) if mode == "I;16" else Image.fromarray(pixels)
    source = source if mode == "I;16" else source.convert("RGB").convert(mode)
    source.save(root / "train2017" / f"b.{suffix}")
    image = open_dataset(root, "train").load(0).image
    assert image.shape == (HEIGHT, WIDTH, 3)
    assert image.dtype == np.uint8
    np.testing.assert_allclose(image.astype(int), np.repeat(pixels[..., None], 3, axis=2), atol=3)


@pytest.mark.parametrize(("height", "width", "rotated"), [(WIDTH, HEIGHT, True), (HEIGHT, WIDTH, False)])
def test_exif_rotation_follows_the_size_of_the_annotation(make_coco, height, width, rotated):
    def change(content):
        content["images"][0].update(file_name="b.png", height=height, width=width)
        content["annotations"] = []

    root = make_coco(change)
    pixels = np.arange(HEIGHT * WIDTH * 3, dtype=np.uint32).astype(np.uint8).reshape(HEIGHT, WIDTH, 3)
    exif = Image.Exif()
    exif[0x0112] = 6  # shown upright by a quarter turn clockwise
    Image.fromarray(pixels).save(root / "train2017" / "b.png", exif=exif)
    expected = np.rot90(pixels, -1) if rotated else pixels
    np.testing.assert_array_equal(open_dataset(root, "train").load(0).image, expected)


def test_a_size_that_disagrees_with_the_file_is_refused(make_coco):
    root = make_coco(lambda content: content["images"][0].update(height=13))
    with pytest.raises(InputError, match=r"a\.png is 16x12 pixels .* says 16x13\..*fp4deploy data check"):
        open_dataset(root, "train").load(0)


def test_names_without_2017(make_coco):
    root = make_coco()
    for split in ("train", "val"):
        (root / f"{split}2017").rename(root / split)
        (root / f"annotations/instances_{split}2017.json").rename(root / f"annotations/instances_{split}.json")
    assert len(open_dataset(root, "val")) == 2


def test_a_category_called_background_is_class_0(make_coco):
    root = make_coco(lambda content: content["categories"][1].update(name="background"))
    dataset = open_dataset(root, "train")
    assert dataset.class_names == ("background", "person", "cup")
    assert not dataset.load(0).mask.any()


def independent_mask(coco: COCO, image_id: int) -> np.ndarray:
    """The same rules, written with pycocotools' own annToMask."""
    info = coco.imgs[image_id]
    numbers = {category["id"]: n for n, category in enumerate(coco.dataset["categories"], start=1)}
    mask = np.zeros((info["height"], info["width"]), dtype=np.uint8)
    annotations = [(coco.annToMask(a).astype(bool), a) for a in coco.imgToAnns[image_id]]
    objects = [(m, a) for m, a in annotations if not a["iscrowd"]]
    covered = np.zeros(mask.shape, dtype=bool)
    for m, a in sorted(objects, key=lambda item: item[0].sum(), reverse=True):
        mask[m] = numbers[a["category_id"]]
        covered |= m
    for m, a in annotations:
        if a["iscrowd"]:
            mask[m & ~covered] = IGNORE
    return mask


def test_real_coco_images_match_an_independent_composition(shared: Path, capsys):
    root = shared / "data" / "coco2017_mini"
    with capsys.disabled():
        content = json.loads((root / "annotations/instances_val2017.json").read_text())
    coco = COCO()
    coco.dataset = content
    coco.createIndex()
    dataset = open_dataset(root, "val")
    assert len(dataset.class_names) == 81
    assert dataset.class_names[:2] == ("background", "person")
    crowds = 0
    for index, info in enumerate(content["images"]):
        sample = dataset.load(index)
        assert sample.image.shape == (info["height"], info["width"], 3)
        np.testing.assert_array_equal(sample.mask, independent_mask(coco, info["id"]), err_msg=sample.name)
        crowds += int((sample.mask == IGNORE).any())
    assert crowds > 0


def test_every_image_has_a_picture_of_its_own(tmp_path: Path) -> None:
    """Whatever the names share: their stem, their folder, or more of them than two."""
    names = ["a.jpg", "a.png", "b.jpg", "in/a.jpg", "in/b.png", "in/b.jpg", "in/b.bmp", "c.d.jpg", "c.png", "c.d.e.png"]
    for name in names:
        (tmp_path / "val" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 3)).save(tmp_path / "val" / name)
    box = {"segmentation": [[0, 0, 3, 0, 3, 3]], "category_id": 1, "iscrowd": 0, "area": 4, "bbox": [0, 0, 3, 3]}
    content = {
        "images": [{"id": at, "file_name": name, "height": 3, "width": 4} for at, name in enumerate(names)],
        "annotations": [{"id": at, "image_id": at, **box} for at in range(len(names))],
        "categories": [{"id": 1, "name": "thing"}],
    }
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations" / "instances_val.json").write_text(json.dumps(content))
    dataset = CocoDataset(tmp_path, "val")
    for kept in (range(len(names)), (0, 2), (0, 1), (4, 5, 6), (7, 8, 9)):
        dataset = CocoDataset(tmp_path, "val")
        dataset.keep(list(kept))
        found = [dataset.picture_name(at) for at in range(len(dataset))]
        assert len(set(found)) == len(found)
        stems = [Path(names[at]).with_suffix("") for at in kept]
        for at, name in zip(kept, found, strict=True):
            alone = stems.count(Path(names[at]).with_suffix("")) == 1
            assert name == (str(Path(names[at]).with_suffix(".png")) if alone else f"{names[at]}.png")
