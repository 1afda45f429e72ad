"""What is wrong with a dataset is said in one paragraph that names the place and the next command."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile

from fp4deploy.data import EvalTransform, eval_loader, open_dataset, train_loader
from fp4deploy.data.images import ImageError, open_image
from fp4deploy.errors import InputError

NEXT = "fp4deploy data check"


def message_of(action) -> str:
    with pytest.raises(InputError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    return message


def broken(field, **values):
    """A change of the first record of one list."""
    return lambda content: content[field][0].update(values)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (broken("annotations", category_id=93), "annotation 1 names the category id 93"),
        (broken("annotations", image_id=555), "annotation 1 names the image id 555"),
        (broken("annotations", segmentation="abc"), "annotation 1 has a segmentation that is neither"),
        (broken("annotations", segmentation=[[1, 2, None, 4, 5, 6]]), "annotation 1 has a polygon that is not"),
        (broken("annotations", segmentation={"size": [12, 16]}), "annotation 1 has an RLE without"),
        (broken("annotations", segmentation=[]), "holds boxes only"),
        (broken("images", file_name="gone.jpg"), "gone.jpg, which is not in"),
        (broken("images", height="twelve"), "holds an image without"),
        (broken("categories", name="cup"), "lists the category 90 'cup' twice"),
        (lambda content: content.pop("images"), "no list 'images'"),
        (lambda content: content.update(images=[], annotations=[]), "lists no image"),
        (lambda content: content["images"].append(content["images"][0]), "lists the image id 7 twice"),
    ],
)
def test_annotation_files(make_coco, change, expected):
    root = make_coco(change)
    message = message_of(lambda: open_dataset(root, "train"))
    assert expected in message
    assert message.endswith(f"{NEXT} {root}")


@pytest.mark.parametrize(
    "segmentation",
    [
        {"size": [12, 16], "counts": [10, 20]},
        {"size": [12, 16], "counts": [10, -20, 202]},
        {"size": [12, 16], "counts": [10, 0.5]},
        {"size": [12, 16], "counts": []},
        {"size": [16, 12], "counts": [192]},
        {"size": [12, 16], "counts": "zzzz"},
        {"size": [12, 16], "counts": "0"},
        {"size": [12, 16], "counts": ""},
        {"size": [12, 16], "counts": "/51"},  # 191 and 1 if "/" were a digit
        {"size": [12, 16], "counts": [100, -8, 100]},
        {"size": [12, 16], "counts": "P"},  # a number that does not end
        {"size": [12, 16], "counts": "P6P"},
        {"size": [12, 16], "counts": "P6V"},
        {"size": [12, 16], "counts": "\u00e9"},
        [[0, 0, 1e9, 0, 1e9, 1e9]],
    ],
)
def test_segmentations_that_pycocotools_would_decode_to_garbage(make_coco, segmentation):
    root = make_coco(broken("annotations", segmentation=segmentation))
    message = message_of(lambda: open_dataset(root, "train").load(0))
    assert message.startswith("Annotation 1 (image a.png) has a")
    assert NEXT in message


@pytest.mark.parametrize(
    ("compressed", "runs"),
    [("P6", [192]), ("P60", [192, 0]), ("0P6", [0, 192]), ("3:d0KV4", [3, 10, 20, 5, 154])],
)
def test_runs_that_fill_the_image_are_drawn(make_coco, compressed, runs):
    """The fourth run and the fifth one are differences to those two before them in a compressed one."""
    expected = np.repeat(np.arange(len(runs)) % 2, runs).reshape(16, 12).T
    for name, counts in (("compressed", compressed), ("runs", runs)):
        root = make_coco(broken("annotations", segmentation={"size": [12, 16], "counts": counts}), name)
        np.testing.assert_array_equal(open_dataset(root, "train", ["bottle"]).load(0).mask, expected)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '{"images": 3}', "\x00"])
def test_broken_json(make_coco, text):
    root = make_coco()
    path = root / "annotations" / "instances_train2017.json"
    path.write_text(text)
    message = message_of(lambda: open_dataset(root, "train"))
    assert str(path) in message
    assert NEXT in message


def test_folders(make_coco, tmp_path):
    assert "does not exist" in message_of(lambda: open_dataset(tmp_path / "absent", "train"))
    empty = tmp_path / "empty"
    empty.mkdir()
    message = message_of(lambda: open_dataset(empty, "train"))
    assert "instances_{train,val}2017.json" in message
    assert "masks/{train,val}/*.png" in message
    root = make_coco()
    assert "no split 'tset'; the splits are: train, val" in message_of(lambda: open_dataset(root, "tset"))
    (root / "annotations" / "instances_val2017.json").unlink()
    assert "no annotations/instances_val2017.json" in message_of(lambda: open_dataset(root, "val"))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_truncated_image_is_named_whichever_process_reads_it(make_coco, workers):
    root = make_coco(broken("images", file_name="b.jpg"))
    path = root / "train2017" / "b.jpg"
    Image.effect_noise((16, 12), 90).convert("RGB").save(path, quality=95)
    path.write_bytes(path.read_bytes()[:-40])
    dataset = open_dataset(root, "train")
    expected = message_of(lambda: dataset.load(0))
    assert str(path) in expected
    assert "truncated" in expected
    assert expected.endswith(f"{NEXT} {root}")
    for loader in (
        eval_loader(dataset, EvalTransform(16, 16), 2, workers),
        train_loader(dataset, EvalTransform(16, 16), 2, workers, seed=0),
    ):
        assert message_of(lambda loader=loader: list(loader)) == expected


def test_an_error_keeps_its_message_through_accelerate(make_coco):
    from accelerate.data_loader import prepare_data_loader

    root = make_coco()
    dataset = open_dataset(root, "train")
    (root / "train2017" / "a.png").write_bytes(b"not an image")
    loader = prepare_data_loader(eval_loader(dataset, EvalTransform(16, 16), 2, workers=1), put_on_device=False)
    assert message_of(lambda: list(loader)) == message_of(lambda: dataset.load(0))


def test_json_in_another_encoding(make_coco):
    root = make_coco()
    path = root / "annotations" / "instances_train2017.json"
    content = json.loads(path.read_text())
    path.write_bytes(json.dumps(content).encode("utf-16"))
    assert len(open_dataset(root, "train")) == 2


def test_a_truncated_image_is_an_error_while_other_threads_decode(tmp_path, monkeypatch):
    """Another library has told Pillow to be tolerant: the first that is done must not tell it so for the others."""
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    for name in ("whole", "half"):
        Image.fromarray(np.arange(64 * 64 * 3, dtype=np.uint8).reshape(64, 64, 3)).save(tmp_path / f"{name}.png")
    content = (tmp_path / "half.png").read_bytes()
    (tmp_path / "half.png").write_bytes(content[: len(content) // 2])
    reached = {name: threading.Event() for name in ("whole", "half")}
    go = {name: threading.Event() for name in reached}
    load = ImageFile.ImageFile.load

    def slow(image):
        name = Path(image.filename).stem
        reached[name].set()
        assert go[name].wait(30)
        return load(image)

    monkeypatch.setattr(ImageFile.ImageFile, "load", slow)
    with ThreadPoolExecutor(2) as threads:
        found = {}
        for name in ("whole", "half"):
            found[name] = threads.submit(open_image, tmp_path / f"{name}.png")
            assert reached[name].wait(30)
        go["whole"].set()
        found["whole"].result()
        go["half"].set()
        with pytest.raises(ImageError, match="truncated"):
            found["half"].result()
    assert ImageFile.LOAD_TRUNCATED_IMAGES
