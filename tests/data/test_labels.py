"""Labels that no reader refuses and no training survives: binary masks, grey levels, crowds, classes of other names."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFilter

from fp4deploy.data import check_dataset, open_boxes, open_dataset, require_labels
from fp4deploy.data.coco.annotations import Annotation, ImageRecord, parse
from fp4deploy.data.inspection.labels import box_defect, repeated_defect
from fp4deploy.errors import InputError
from fp4deploy.models import ModelCard, build_unet, save_checkpoint
from fp4deploy.train.config import load_config
from fp4deploy.train.models import _require_same_classes, open_splits


def masks(root: Path, values: tuple[int, int], names: str = "", blur: float = 0, lonely: bool = False) -> Path:
    draw = np.random.default_rng(0)
    for split, count in (("train", 6), ("val", 3)):
        (root / split).mkdir(parents=True)
        (root / "masks" / split).mkdir(parents=True)
        for number in range(count):
            mask = np.full((64, 64), values[0], np.uint8)
            y, x = draw.integers(2, 30, 2)
            if not lonely or split == "train":
                mask[y : y + 30, x : x + 30] = values[1]
            noise = Image.fromarray(draw.integers(0, 60, (64, 64, 3)).astype(np.uint8))
            noise.save(root / split / f"{split}{number}.png")
            image = Image.fromarray(mask)
            image = image.filter(ImageFilter.GaussianBlur(blur)) if blur else image
            image.save(root / "masks" / split / f"{split}{number}.png")
    if names:
        (root / "classes.txt").write_text(names)
    return root


TWO = "background\nnucleus\n"


@pytest.mark.parametrize(
    ("kind", "values", "names", "blur"),
    [
        ("binary-masks", (0, 255), "", 0),
        ("binary-masks", (0, 255), TWO, 0),
        ("binary-masks", (255, 0), "", 0),
        ("binary-masks", (255, 1), TWO, 0),
        ("binary-masks", (0, 128), TWO, 0),
        ("sparse-values", (0, 128), "", 0),
        ("sparse-values", (0, 100), "", 0),
        ("grey-masks", (0, 255), TWO, 1),
        ("grey-masks", (0, 200), "", 1),
        ("grey-masks", (255, 0), TWO, 1.5),
        ("one-class", (0, 0), TWO, 0),
        ("all-void", (254, 255), TWO, 0),
    ],
)
def test_masks_of_two_values_are_noticed(
    tmp_path: Path, kind: str, values: tuple[int, int], names: str, blur: float
) -> None:
    root = masks(tmp_path, values, names, blur)
    found = [defect for defect in check_dataset(root) if defect.file == "masks/train"]
    assert [defect.kind for defect in found] == [kind]
    with pytest.raises(InputError, match=r"^The masks of train hold .* fp4deploy data check"):
        require_labels(open_dataset(root, "train"), root)


@pytest.mark.parametrize("blur", [1, 4])
def test_grey_levels_up_to_254_are_named_as_such(tmp_path: Path, blur: float) -> None:
    root = masks(tmp_path, (0, 255), "", blur)
    with pytest.raises(InputError, match="values up to 25[34], .* Grey levels .* write 0 and 1"):
        open_dataset(root, "train")
    assert "grey-masks" in {defect.kind for defect in check_dataset(root)}  # what no training takes has a defect


@pytest.mark.parametrize(("values", "names"), [((0, 1), ""), ((0, 1), TWO), ((1, 0), TWO), ((0, 5), "")])
def test_sound_masks_are_not_refused(tmp_path: Path, values: tuple[int, int], names: str) -> None:
    root = masks(tmp_path, values, names, lonely=True)  # in val one class alone
    assert not check_dataset(root)
    empty = require_labels(open_dataset(root, "train"), root)
    assert empty == [f"class_{value}" for value in range(1, 5)] if 5 in values else not empty


def coco(root: Path, crowd: Any, listed: tuple[tuple[str, ...], tuple[str, ...]] = (("cell",), ("cell",))) -> Path:
    (root / "annotations").mkdir(parents=True)
    for split, names in zip(("train", "val"), listed, strict=True):
        (root / split).mkdir()
        Image.effect_noise((32, 32), len(names) + len(split)).convert("RGB").save(root / split / "a.png")
        content = {
            "images": [{"id": 1, "file_name": "a.png", "height": 32, "width": 32}],
            "categories": [{"id": number, "name": name} for number, name in enumerate(names, 1)],
            "annotations": [
                {"id": 1, "image_id": 1, "category_id": names.index("cell") + 1, "iscrowd": crowd, "bbox": [4, 4, 8, 8]}
                | {"segmentation": [[4, 4, 12, 4, 12, 12, 4, 12]]}
            ],
        }
        (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
    return root


@pytest.mark.parametrize("crowd", [0, "0", "false", "False", None, False, "", 0.0])
def test_text_is_no_crowd(tmp_path: Path, crowd: Any) -> None:
    root = coco(tmp_path, crowd)
    assert 1 in open_dataset(root, "train").load(0).mask
    assert not check_dataset(root)


@pytest.mark.parametrize("crowd", [1, "1", "true", True, 1.0])
def test_crowds_alone_are_a_defect_of_every_task(tmp_path: Path, crowd: Any) -> None:
    root = coco(tmp_path, crowd)
    assert [defect.kind for defect in check_dataset(root)] == ["all-crowds"]
    for dataset in (open_dataset(root, "train"), open_boxes(root, "train")):
        with pytest.raises(InputError, match='all with "iscrowd": 1.*CVAT.*Write "iscrowd": 0'):
            require_labels(dataset, root)


def test_a_set_without_annotations_is_refused(tmp_path: Path) -> None:
    root = coco(tmp_path, 0)
    path = root / "annotations" / "instances_train.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"annotations": []}))
    assert [defect.kind for defect in check_dataset(root)] == ["no-annotations"]
    with pytest.raises(InputError, match="every pixel is background"):
        require_labels(open_dataset(root, "train"), root)


SHARES = [[0.1, 0.1, 0.4, 0.1, 0.4, 0.4, 0.1, 0.4]]
AWAY = [[90, 4, 98, 4, 98, 12, 90, 12]]


@pytest.mark.parametrize(
    ("box", "segmentation", "kinds"),
    [
        ([0.1, 0.1, 0.3, 0.3], SHARES, {"normalised-boxes", "zero-area"}),
        ([90, 4, 8, 8], AWAY, {"box-outside", "zero-area"}),
    ],
)
def test_objects_that_no_pixel_shows_are_refused(
    tmp_path: Path, box: list[float], segmentation: list[list[float]], kinds: set[str]
) -> None:
    root = coco(tmp_path, 0)
    path = root / "annotations" / "instances_train.json"
    content = json.loads(path.read_text())
    content["annotations"] = [content["annotations"][0] | {"bbox": box, "segmentation": segmentation}]
    path.write_text(json.dumps(content))
    assert {defect.kind for defect in check_dataset(root)} == kinds
    for dataset in (open_dataset(root, "train"), open_boxes(root, "train")):
        with pytest.raises(InputError, match="of 1 image with objects none shows one: .* pixels, not shares"):
            require_labels(dataset, root)


def _repeated(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return found + [each | {"id": 100 + each["id"]} for each in found]


def _cornered(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each | {"bbox": [x, y, x + w, y + h]} for each in found for x, y, w, h in [each["bbox"]]]


@pytest.mark.parametrize(
    ("kind", "change", "task"),
    [
        ("repeated-annotations", _repeated, open_dataset),
        ("corner-boxes", _cornered, open_boxes),
        ("similar-categories", lambda found: found, open_dataset),
        (None, lambda found: found, open_boxes),
    ],
)
def test_objects_that_are_written_otherwise_are_a_defect(tmp_path: Path, kind: str, change: Any, task: Any) -> None:
    names = ("cell", "Cell ") if kind == "similar-categories" else ("cell",)
    root = coco(tmp_path, 0, (names, names))
    for path in (root / "annotations").iterdir():
        content = json.loads(path.read_text())
        first = content["annotations"][0]
        boxes = [[4, 4, 8, 8], [18, 20, 12, 12], [2, 20, 9, 10], [18, 2, 14, 9]]
        boxes = [[x - more, y, w, h] for x, y, w, h in boxes for more in (0, 1, 2)]
        each = [first | {"id": number, "bbox": box} for number, box in enumerate(boxes, 1)]
        path.write_text(json.dumps(content | {"annotations": change(each)}))
    found = {defect.kind for defect in check_dataset(root)} - {"box-outside"}
    assert found == ({kind} if kind else set())
    if kind == "corner-boxes":
        with pytest.raises(InputError, match="two corners"):
            require_labels(task(root, "train"), root)
    else:
        require_labels(task(root, "train"), root)


def _boxes(boxes: list[list[float] | None]) -> list[Annotation]:
    return [
        Annotation(id=at, image_id=1, category_id=1, box=box, segmentation=[], crowd=False)
        for at, box in enumerate(boxes)
    ]


@pytest.mark.parametrize(
    "boxes",
    [
        [[20, 20, 50, 50], [0, 0, 64, 64], [5, 5, 40, 40]],
        [[4, 4, 59 + at % 4, 50] for at in range(40)],  # a fourth of the objects goes on beyond the image
    ],
)
def test_boxes_that_the_border_cuts_may_be_trained_on(boxes: list[list[float]]) -> None:
    image = {1: ImageRecord(1, "a.png", 64, 64)}
    found = box_defect(_boxes([*boxes]), image)
    assert found is not None
    assert "they may be [x1, y1, x2, y2]" in found[1]
    assert box_defect(_boxes([*boxes]), image, certain=True) is None


@pytest.mark.parametrize("box", [None, [0, 0, 0, 0]])
def test_annotations_of_an_image_alone_are_not_repeated(box: list[float] | None) -> None:
    assert repeated_defect(_boxes([box] * 3)) is None
    assert repeated_defect(_boxes([[4, 4, 8, 8]] * 3)) is not None


def test_boxes_of_zeros_beside_segmentations_are_no_shares_of_the_image(tmp_path: Path) -> None:
    root = coco(tmp_path, 0)
    for path in (root / "annotations").iterdir():
        content = json.loads(path.read_text())
        content["annotations"][0]["bbox"] = [0, 0, 0, 0]
        path.write_text(json.dumps(content))
    assert "normalised-boxes" not in {defect.kind for defect in check_dataset(root)}
    assert not require_labels(open_dataset(root, "train"), root)


@pytest.mark.parametrize(
    ("classes", "said"), [(["sky"], "sky, the masks of train hold 1"), (["sky", "car"], "no pixel is car")]
)
def test_one_class_to_learn_is_refused(tmp_path: Path, classes: list[str], said: str) -> None:
    root = masks(tmp_path, (0, 1), "sky\nroad\ncar\n")
    assert not check_dataset(root)
    with pytest.raises(InputError, match=f"{said}.*nothing to tell apart"):
        require_labels(open_dataset(root, "train", classes), root)


def test_an_iscrowd_that_is_no_truth_value_is_named(tmp_path: Path) -> None:
    root = coco(tmp_path, "many")
    (defect,) = parse(root / "annotations" / "instances_train.json").defects
    assert "annotation 1 has an iscrowd of" in defect.message
    assert "valid: 0, 1" in defect.message


def test_an_image_that_is_listed_twice_is_a_defect(tmp_path: Path) -> None:
    path = coco(tmp_path, 0) / "annotations" / "instances_train.json"
    content = json.loads(path.read_text())
    content["images"].append(content["images"][0] | {"id": 2})
    path.write_text(json.dumps(content))
    assert [defect.kind for defect in check_dataset(tmp_path)] == ["repeated-image"]


@pytest.mark.parametrize("task", ["semantic", "instance", "detection"])
@pytest.mark.parametrize("val", [("dog", "cell"), ("bird", "cell", "dog"), ("cell",), ("cell", "bird")])
def test_splits_have_the_classes_of_the_training_split_by_name(tmp_path: Path, task: str, val: tuple[str, ...]) -> None:
    root = coco(tmp_path, 0, (("cell", "dog"), val))
    config = load_config(sets=[f"task={task}", f"data.root={root}"])
    if "dog" not in val:
        with pytest.raises(InputError, match=r"validation split of .* does not list dog.*--classes cell\."):
            open_splits(config)
        return
    train, validation = open_splits(config)
    assert train.class_names == validation.class_names == ("background", "cell", "dog")
    if task == "semantic":
        assert 1 in validation.load(0).mask
    assert require_labels(train, root) == ["dog"]


def test_a_run_is_resumed_with_the_classes_it_began_with(tmp_path: Path) -> None:
    """Also where the data has since got another order: the settings of a run do not show it."""
    card = ModelCard("fp16", 0.125, ("background", "cell", "dog"), 32, 32, (0.5,) * 3, (0.2,) * 3, True)
    save_checkpoint(tmp_path / "best.safetensors", build_unet(3, 0.125), card)
    _require_same_classes(tmp_path / "best.safetensors", card)
    with pytest.raises(
        InputError, match=r"classes background, cell, dog, and this run has background, dog, cell\..*--cl"
    ):
        _require_same_classes(tmp_path / "best.safetensors", replace(card, class_names=("background", "dog", "cell")))
