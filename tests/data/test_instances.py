"""Instance targets: numbers agree with classes through every transform, crowds and stuff are not counted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fp4deploy.data import (
    IGNORE,
    EvalTransform,
    NumberedEvalTransform,
    TrainTransform,
    cache_dataset,
    generate_shapes,
    open_instances,
)
from fp4deploy.data.coco.dataset import CocoDataset
from fp4deploy.data.coco.regions import decode, encode_ids
from fp4deploy.data.sample import Sample
from fp4deploy.errors import InputError
from tests.data.hand_made import HEIGHT, WIDTH, runs

INNER = [4, 4, 6, 4, 6, 6, 4, 6]  # columns and rows 4..5, inside SQUARE


def annotation(number: int, polygon: list[int], category: int = 44, crowd: int = 0) -> dict:
    segmentation: object = [polygon]
    if crowd:
        mask = np.zeros((HEIGHT, WIDTH), dtype=bool)
        mask[polygon[1] : polygon[5], polygon[0] : polygon[2]] = True
        segmentation = {"size": [HEIGHT, WIDTH], "counts": runs(mask)}
    return {
        "id": number, "image_id": 7, "category_id": category, "iscrowd": crowd, "segmentation": segmentation,
    }  # fmt: skip


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "shapes"
    generate_shapes(folder, train=12, val=2, size=64, seed=0)
    return folder


def test_the_smaller_object_lies_on_top_and_numbers_follow_the_size(make_coco) -> None:
    root = make_coco(lambda content: content["annotations"].insert(0, annotation(5, INNER, category=90)))
    sample = open_instances(root, "train").load(0)
    assert sample.instances is not None
    assert sample.instances.dtype == np.int32
    assert (sample.instances[4:6, 4:6] == 2).all()
    assert sample.instances[2, 2] == 1
    assert sample.instances[0, 0] == 0
    assert (sample.mask[4:6, 4:6] == 3).all()
    assert np.unique(sample.instances).tolist() == [0, 1, 2]


def test_a_crowd_is_void_and_no_object(make_coco) -> None:
    def change(content: dict) -> None:
        content["annotations"].append(annotation(6, [9, 0, 14, 0, 14, 10, 9, 10], crowd=1))

    dataset = open_instances(make_coco(change), "train")
    sample = dataset.load(0)
    assert sample.instances is not None
    assert (sample.mask[:10, 9:14] == IGNORE).all()
    assert not sample.instances[:10, 9:14].any()
    truth = dataset.ground_truth()
    assert [record["iscrowd"] for record in truth["annotations"]] == [0, 1]
    assert [record["id"] for record in truth["annotations"]] == [1, 2], "pycocotools takes 0 for 'not matched'"


def test_stuff_has_a_class_and_no_number(make_coco) -> None:
    root = make_coco(lambda content: content["annotations"].append(annotation(6, INNER, category=90)))
    dataset = open_instances(root, "train", stuff=["cup"])
    sample = dataset.load(0)
    assert sample.instances is not None
    assert dataset.stuff == (3,)
    assert (sample.mask[4:6, 4:6] == 3).all()
    assert not sample.instances[4:6, 4:6].any()
    assert np.unique(sample.instances).tolist() == [0, 1]
    truth = dataset.ground_truth()
    assert {record["id"] for record in truth["categories"]} == {1, 44}
    assert [record["category_id"] for record in truth["annotations"]] == [44]


def test_wrong_stuff_is_named(make_coco) -> None:
    root = make_coco()
    with pytest.raises(InputError, match=r"stuff names the class 'botle'.*Did you mean 'bottle'"):
        open_instances(root, "train", stuff=["botle"])
    with pytest.raises(InputError, match="nothing is left to count"):
        open_instances(root, "train", stuff=["person", "bottle", "cup"])


def test_the_ground_truth_keeps_the_file_s_ids_area_and_hidden_parts(make_coco) -> None:
    def change(content: dict) -> None:
        content["annotations"][0]["area"] = 36.5
        content["annotations"].append(annotation(6, INNER, category=90))

    truth = open_instances(make_coco(change), "train", ["cup", "bottle"]).ground_truth()
    first, second = truth["annotations"]
    assert (first["category_id"], first["image_id"], first["area"]) == (44, 7, 36.5)
    assert second["area"] == 4, "the pixels, where the file gives no area"
    assert decode(first["segmentation"])[4:6, 4:6].all(), "whole, though something lies on it"
    assert first["bbox"] == [2, 2, 6, 6]
    assert [record["id"] for record in truth["images"]] == [7, 9]


def test_an_image_without_objects(make_coco) -> None:
    dataset = open_instances(make_coco(), "train")
    sample = dataset.load(1)
    assert sample.instances is not None
    assert not sample.instances.any()
    assert not sample.mask.any()


def test_semantic_masks_are_refused(make_masks) -> None:
    with pytest.raises(InputError, match=r"semantic masks.*--task semantic"):
        open_instances(make_masks(), "train")


@pytest.mark.parametrize("zoom", [(0.5, 0.8), (1.0, 1.0), (1.3, 2.5)])
def test_numbers_and_classes_come_from_the_same_pixel(shapes: Path, zoom: tuple[float, float]) -> None:
    dataset = open_instances(shapes, "train")
    transform = TrainTransform(48, 80, seed=3, zoom=zoom, upside_down=True)
    seen = 0
    for index in range(len(dataset)):
        sample = dataset.load(index)
        assert sample.instances is not None
        pairs = {*zip(sample.mask.ravel().tolist(), sample.instances.ravel().tolist(), strict=True)}
        _, labels = transform(sample, 1, index)
        assert labels.shape == (2, 48, 80)
        assert labels.dtype == torch.int64
        found = {*zip(labels[0].ravel().tolist(), labels[1].ravel().tolist(), strict=True)}
        assert found <= pairs | {(IGNORE, 0)}, "nearest: no value between two"
        seen += len(found)
    assert seen > 2 * len(dataset)


def test_labels_are_the_semantic_mask_s_and_follow_the_same_flips(shapes: Path) -> None:
    dataset = open_instances(shapes, "train")
    plain = TrainTransform(48, 48, seed=3)
    for index in range(4):
        sample = dataset.load(index)
        image, labels = plain(sample, 0, index)
        bare = Sample(sample.image, sample.mask, sample.name)
        other_image, mask = plain(bare, 0, index)
        assert torch.equal(labels[0], mask)
        assert torch.equal(image, other_image)


def test_upside_down_flips_everything_and_leaves_the_other_draws_alone() -> None:
    random = np.random.default_rng(0)
    labels = np.arange(32 * 32, dtype=np.int32).reshape(32, 32)
    sample = Sample(random.integers(0, 256, (32, 32, 3), dtype=np.uint8), (labels % 7).astype(np.uint8), "x", labels)
    plain, turned = (TrainTransform(32, 32, zoom=(1.0, 1.0), jitter=0.0, upside_down=on) for on in (False, True))
    seen = set()
    for index in range(12):
        (image, target), (other_image, other) = plain(sample, 0, index), turned(sample, 0, index)
        flipped = not torch.equal(target, other)
        seen.add(flipped)
        assert torch.equal(other, target.flip(-2) if flipped else target)
        torch.testing.assert_close(other_image, image.flip(-2) if flipped else image)
    assert seen == {True, False}


def test_evaluation_says_which_image_it_is(shapes: Path) -> None:
    sample = open_instances(shapes, "val").load(1)
    image, index = NumberedEvalTransform(32, 32)(sample, 0, 1)
    assert index.item() == 1
    assert torch.equal(image, EvalTransform(32, 32)(sample)[0])


def test_a_cached_set_keeps_and_counts_the_numbers(shapes: Path) -> None:
    dataset = open_instances(shapes, "train")
    cached = cache_dataset(dataset)
    np.testing.assert_array_equal(cached.load(3).instances, dataset.load(3).instances)
    assert not cached.load(3).instances.flags.writeable
    size = 12 * 64 * 64 * 8
    assert cache_dataset(dataset, size) is not dataset
    assert cache_dataset(dataset, size - 1) is dataset


def test_rle_of_a_map_of_numbers() -> None:
    random = np.random.default_rng(1)
    ids = random.integers(0, 9, size=(13, 17)).astype(np.int32)
    ids[ids == 4] = 0
    ids[ids == 5] = 5000
    found = encode_ids(ids)
    assert list(found) == sorted(set(np.unique(ids).tolist()) - {0})
    for number, rle in found.items():
        np.testing.assert_array_equal(decode(rle), ids == number)
    assert encode_ids(np.zeros((3, 4), dtype=np.int32)) == {}
    whole = encode_ids(np.ones((3, 4), dtype=np.int32))
    assert decode(whole[1]).all()


def test_broken_areas_are_counted_again(make_coco) -> None:
    def change(content: dict) -> None:
        content["annotations"][0]["area"] = "large"

    truth = open_instances(make_coco(change), "train").ground_truth()
    assert truth["annotations"][0]["area"] == 36


def test_regions_of_equal_area_are_drawn_in_the_order_of_the_file(make_coco) -> None:
    def change(content):
        first = content["annotations"][0]
        others = [category["id"] for category in content["categories"] if category["id"] != first["category_id"]]
        content["annotations"] = [first, {**first, "id": 2, "category_id": others[0]}]

    dataset = CocoDataset(make_coco(change), "train", instances=True)
    sample = dataset.load(0)
    second = dataset.ground_truth()["annotations"][1]
    drawn = {number for number in np.unique(sample.mask).tolist() if number}
    assert drawn == {next(n for n, category in dataset.category_ids.items() if category == second["category_id"])}
    assert set(np.unique(sample.instances).tolist()) == {0, 2}
    assert [each["id"] for each in dataset.ground_truth()["annotations"]] == [1, 2]
