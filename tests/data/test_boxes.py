"""Boxes of COCO annotations, damaged ones included, and boxes that move with the pixels."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fp4deploy.data import check_dataset, open_boxes, train_loader
from fp4deploy.data.augmentation.letterbox import BoxTrainTransform, LetterboxTransform, letterbox, visible
from fp4deploy.data.coco.annotations import ImageRecord
from fp4deploy.data.coco.boxes import clip
from fp4deploy.data.sample import IGNORE, Sample
from fp4deploy.errors import InputError


def dataset(root: Path, annotations: list[dict[str, Any]], images: int = 2) -> Path:
    for split in ("train", "val"):
        (root / split).mkdir(parents=True)
        (root / "annotations").mkdir(exist_ok=True)
        for number in range(1, images + 1):
            Image.fromarray(np.full((40, 80, 3), 90, np.uint8)).save(root / split / f"{number}.png")
        content = {
            "images": [{"id": n, "file_name": f"{n}.png", "height": 40, "width": 80} for n in range(1, images + 1)],
            "annotations": [
                {"id": n, "image_id": 1, "category_id": 7, **each} for n, each in enumerate(annotations, 1)
            ],
            "categories": [{"id": 7, "name": "cup"}, {"id": 9, "name": "dish"}],
        }
        (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
    return root


def test_boxes_without_segmentations(tmp_path: Path) -> None:
    root = dataset(
        tmp_path,
        [
            {"bbox": [10, 5, 20, 10]},
            {"bbox": [1, 1, 2, 3], "category_id": 9, "iscrowd": 1},
            {"bbox": [0, 0, 8, 9], "area": 37.5},
        ],
    )
    data = open_boxes(root, "train")
    boxes = data.load(0).boxes
    assert boxes is not None
    assert boxes.tolist() == [[1, 10, 5, 30, 15], [255, 1, 1, 3, 4], [1, 0, 0, 8, 9]]
    empty = data.load(1).boxes
    assert empty is not None
    assert empty.shape == (0, 5)
    truth = data.ground_truth()["annotations"]
    assert [(each["bbox"], each["area"], each["iscrowd"]) for each in truth] == [
        ([10, 5, 20, 10], 200, 0),
        ([1, 1, 2, 3], 6, 1),
        ([0, 0, 8, 9], 37.5, 0),  # that of the object, by which COCO calls it small, not that of its box
    ]


def test_boxes_of_segmentations_where_there_is_no_bbox(tmp_path: Path) -> None:
    root = dataset(tmp_path, [{"segmentation": [[10, 5, 30, 5, 30, 15, 10, 15]]}])
    boxes = open_boxes(root, "train").load(0).boxes
    assert boxes is not None
    assert boxes[0].tolist() == [1, 10, 5, 30, 15]


def test_what_has_no_area_is_left_out_and_what_is_beyond_the_border_is_cut(tmp_path: Path) -> None:
    given = [[10, 5, 0, 10], [10, 5, 4, 0], [200, 5, 4, 4], [-30, 0, 10, 10], [70, -5, 30, 15], [3, 3, -2, 5]]
    root = dataset(tmp_path, [{"bbox": box} for box in given])
    boxes = open_boxes(root, "train").load(0).boxes
    assert boxes is not None
    assert boxes.tolist() == [[1, 70, 0, 80, 10]]
    kinds = [defect.kind for defect in check_dataset(root) if defect.file.endswith("train.json")]
    assert kinds.count("empty-box") == 2
    assert kinds.count("box-outside") == 4


@pytest.mark.parametrize(
    "box", [[float("nan"), 0, 1, 1], [0, 0, float("inf"), 1], [0, 0, 1], "box", [0, 0, "1", 1], [True, 0, 1, 1]]
)
def test_a_damaged_box_is_an_error_that_names_it(tmp_path: Path, box: Any) -> None:
    root = dataset(tmp_path, [{"bbox": box}])
    with pytest.raises(InputError, match=r"Annotation 1 \(image 1.png\) has a bbox that is not four finite numbers"):
        open_boxes(root, "train")
    assert "broken-box" in {defect.kind for defect in check_dataset(root)}


def test_an_unknown_category_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="names the category id 3"):
        open_boxes(dataset(tmp_path, [{"bbox": [0, 0, 5, 5], "category_id": 3}]), "train")


def test_masks_alone_are_refused(tmp_path: Path) -> None:
    (tmp_path / "masks" / "train").mkdir(parents=True)
    with pytest.raises(InputError, match="have no boxes"):
        open_boxes(tmp_path, "train")


def test_a_subset_of_classes_drops_the_others(tmp_path: Path) -> None:
    root = dataset(tmp_path, [{"bbox": [0, 0, 5, 5]}, {"bbox": [9, 9, 5, 5], "category_id": 9}])
    data = open_boxes(root, "train", ["dish"])
    boxes = data.load(0).boxes
    assert boxes is not None
    assert boxes.tolist() == [[1, 9, 9, 14, 14]]
    assert [each["category_id"] for each in data.ground_truth()["annotations"]] == [9]


@pytest.mark.parametrize(
    ("size", "target"), [((50, 100), (64, 64)), ((100, 50), (64, 96)), ((7, 5), (64, 64)), ((64, 64), (64, 64))]
)
def test_letterbox_keeps_the_aspect_ratio_and_comes_back(size: tuple[int, int], target: tuple[int, int]) -> None:
    placed = letterbox(size, target)
    assert placed.rows <= target[0]
    assert placed.columns <= target[1]
    assert placed.rows == target[0] or placed.columns == target[1]
    assert placed.across == pytest.approx(placed.down, rel=0.6 / min(placed.rows, placed.columns))
    boxes = np.array([[1.0, 2.0, 4.5, 5.0]], np.float32)
    for each in (placed, replace(placed, left=5, top=-3)):  # as training places images, too
        np.testing.assert_allclose(each.to_image(each.to_input(boxes)), boxes, rtol=1e-5, atol=1e-5)


def marked(height: int, width: int, box: tuple[int, int, int, int]) -> Sample:
    """A grey image whose box alone is white."""
    image = np.full((height, width, 3), 100, np.uint8)
    left, top, right, bottom = box
    image[top:bottom, left:right] = 255
    return Sample(image, np.zeros((height, width), np.uint8), "one", boxes=np.array([[1, *box]], np.float32))


def white(image: np.ndarray) -> tuple[int, int, int, int]:
    rows, columns = np.nonzero(image[..., 0] > 180)
    return int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1


@pytest.mark.parametrize("epoch", range(12))
def test_training_moves_boxes_with_the_pixels(epoch: int) -> None:
    sample = marked(60, 100, (30, 20, 62, 44))
    augment = BoxTrainTransform(64, 96, seed=3, zoom=(0.6, 1.8), jitter=0.0, aspect=1.3, upside_down=True)
    image, boxes = augment.compact(sample, epoch, 0)
    assert image.shape == (64, 96, 3)
    assert boxes.shape == (1, 5)
    np.testing.assert_allclose(boxes[0, 1:].numpy(), white(image.numpy()), atol=1.5)


def test_evaluation_letterboxes_as_training_does_without_zoom() -> None:
    sample = marked(60, 100, (30, 20, 62, 44))
    image, index = LetterboxTransform(64, 64).compact(sample, 0, 5)
    assert int(index) == 5
    box = letterbox((60, 100), (64, 64)).to_input(np.array([[30, 20, 62, 44]], np.float32))[0]
    np.testing.assert_allclose(white(image.numpy()), box, atol=1.0)
    assert (image[40:] == image[63, 63]).all()


def test_random_numbers_depend_on_seed_epoch_and_index_alone() -> None:
    sample = marked(60, 100, (30, 20, 62, 44))
    first, second = BoxTrainTransform(64, 64, seed=1), BoxTrainTransform(64, 64, seed=1)
    assert (first.compact(sample, 2, 3)[0] == second.compact(sample, 2, 3)[0]).all()
    assert not (first.compact(sample, 2, 3)[0] == first.compact(sample, 3, 3)[0]).all()


def test_what_is_left_of_a_cut_box_must_be_enough() -> None:
    boxes = np.array([[1, -30, 0, 10, 10], [1, -20, 0, 20, 10], [2, 60, 60, 64.5, 63], [1, 5, 5, 5.5, 9]], np.float32)
    kept = visible(boxes, (64, 64))
    assert kept.tolist() == [[1, 0, 0, 10, 10], [1, 0, 0, 20, 10], [2, 60, 60, 64, 63]]
    little = np.array([[1, -31, 0, 10, 10], [1, -31, 0, 0.5, 10]], np.float32)
    assert len(visible(little, (64, 64))) == 0
    assert visible(little, (64, 64), rests=True).tolist() == [[IGNORE, 0, 0, 10, 10]]
    assert visible(boxes, (64, 64), rests=True).tolist() == kept.tolist()


def test_a_batch_is_padded_to_the_most_boxes(tmp_path: Path) -> None:
    root = dataset(tmp_path, [{"bbox": [10, 5, 20, 10]}, {"bbox": [40, 5, 20, 10]}])
    loader = train_loader(open_boxes(root, "train"), BoxTrainTransform(32, 64, zoom=(1.0, 1.0)), 2, compact=True)
    images, boxes = next(iter(loader))
    assert images.shape == (2, 32, 64, 3)
    assert boxes.shape == (2, 2, 5)
    assert sorted((boxes[..., 0] > 0).sum(1).tolist()) == [0, 2]
    assert (boxes[(boxes[..., 0] > 0).sum(1) == 0][..., 0] == -1).all()


MOSAIC = {"seed": 3, "zoom": (0.6, 1.8), "jitter": 0.0, "aspect": 1.3, "upside_down": True, "mosaic": 1.0}


@pytest.mark.parametrize("epoch", range(12))
def test_a_mosaic_moves_the_boxes_of_four_images_with_their_pixels(epoch: int) -> None:
    """Each has a box of its own colour, within a black image, on grey padding."""
    sizes, colours = ((60, 100), (90, 60), (64, 96), (120, 120)), ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1))
    samples = []
    for number, (size, colour) in enumerate(zip(sizes, colours, strict=True)):
        image = np.zeros((*size, 3), np.uint8)
        image[10:-10, 12:-14] = 255 * np.array(colour)
        box = np.array([[number + 1, 12, 10, size[1] - 14, size[0] - 10]], np.float32)
        samples.append(Sample(image, np.zeros(size, np.uint8), str(number), boxes=box))
    joined = replace(samples[0], others=tuple(samples[1:]))
    image, boxes = BoxTrainTransform(64, 96, **MOSAIC).compact(joined, epoch, 0)
    assert image.shape == (64, 96, 3)
    assert len(boxes) >= 2
    assert (boxes[:, 1:] >= 0).all()
    assert (boxes[:, 3] <= 96).all()
    assert (boxes[:, 4] <= 64).all()
    seen = {int(number): edges for number, *edges in boxes.tolist() if number != IGNORE}
    assert seen
    for number, edges in seen.items():
        rows, columns = np.nonzero(((image.numpy() > 127) == colours[number - 1]).all(2))
        np.testing.assert_allclose(edges, (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1), atol=1.6)


def test_mosaics_are_a_share_of_the_samples_and_depend_on_seed_epoch_and_index_alone() -> None:
    half, again, other = (BoxTrainTransform(64, 64, seed=seed, mosaic=0.5) for seed in (1, 1, 2))
    places = list(product(range(10), range(20)))
    chosen = [half.others(*place, 7) for place in places]
    assert 80 < sum(map(bool, chosen)) < 120
    assert {len(others) for others in chosen} == {0, 3}
    assert {number for others in chosen for number in others} == set(range(7))
    assert chosen == [again.others(*place, 7) for place in reversed(places)][::-1]
    assert chosen != [other.others(*place, 7) for place in places]
    sample, plain = marked(60, 100, (30, 20, 62, 44)), BoxTrainTransform(64, 64, seed=1)
    assert plain.others(2, 3, 7) == ()
    assert (plain.compact(sample, 2, 3)[0] == half.compact(sample, 2, 3)[0]).all()  # one that is not joined


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_reads_the_images_of_its_mosaics(tmp_path: Path, workers: int) -> None:
    root = dataset(tmp_path, [{"bbox": [10, 5, 20, 10]}, {"bbox": [40, 5, 20, 10]}])
    data, augment = open_boxes(root, "train"), BoxTrainTransform(32, 64, **MOSAIC)
    loader = train_loader(data, augment, 2, workers, seed=5, compact=True)
    loader.set_epoch(4)
    images, _ = next(iter(loader))
    loader.close()
    loader.set_epoch(4)
    for position, (epoch, index) in enumerate(loader.sampler):
        others = tuple(map(data.load, augment.others(epoch, index, len(data))))
        assert len(others) == 3
        assert (images[position] == augment.compact(replace(data.load(index), others=others), epoch, index)[0]).all()


@pytest.mark.parametrize(
    ("box", "expected"),
    [
        ([10, 5, 20, 10], [10, 5, 20, 10]),
        ([-4, -6, 20, 20], [0, 0, 16, 14]),
        ([80, 25, 40, 40], [80, 25, 20, 15]),
        ([0, 0, 200, 200], [0, 0, 100, 40]),
        ([100, 5, 10, 10], None),
        ([5, 40, 10, 10], None),
        ([-10, 5, 10, 10], None),
    ],
)
def test_a_box_is_cut_at_the_sides_of_its_image(box: list[float], expected: list[float] | None) -> None:
    assert clip([float(value) for value in box], ImageRecord(1, "a.png", height=40, width=100)) == expected
