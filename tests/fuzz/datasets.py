"""Loaders of datasets: COCO with boxes, Roboflow, Pascal VOC with CVAT's colours, and what `data import` collects.

No layout is read from XML: CVAT and Pascal VOC are read by their masks and lists.
"""

from __future__ import annotations

import io
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fp4deploy.data import IGNORE, BoxDataset, CocoDataset, check_dataset, import_coco, open_dataset, summarise
from fp4deploy.detection import DetectionEvaluation, Detections
from fp4deploy.models.boxes import DetectionHead
from fp4deploy.report.figures.contact_sheet import draw_contact_sheet
from tests.fuzz.harness import Loader
from tests.fuzz.mutate import TOKENS, of_json, of_text

BOXES: tuple[Any, ...] = (
    [0, 0, 0, 0], [1, 1, 0, 5], [1, 1, -4, 5], [-9, -9, 4, 4], [-9, -9, 20, 20], [1e8, 1, 2, 2], [1, 1, 1e30, 1e30],
    [float("nan")] * 4, [1, 1, float("inf"), 2], [1, 2, 3], [1, 2, 3, 4, 5], ["1", 1, 2, 2], [True] * 4, [[1]] * 4, {},
    "x", None, [0.5, 0.5, 1e-30, 1e-30], [31.999999, 31.999999, 1, 1], [1 << 62, 1, 1, 1], [-(1 << 62), 0, 1 << 63, 4],
)  # fmt: skip
HEAD = DetectionHead("fcos", classes=5)
NAMES = ("000000000001", "000000000002")


def dataset_loaders(shapes: Path) -> list[Loader]:
    """Loaders whose images are those of a folder of generated scenes."""
    annotations = (shapes / "annotations" / "instances_train2017.json").read_bytes()
    images = {path.name: path.read_bytes() for path in sorted((shapes / "train2017").iterdir())}
    listing = ("\n".join((*NAMES, NAMES[0])) + "\n").encode()
    colours = b"# label:color_rgb:parts:actions\nbackground:0,0,0::\nroad:128,64,128::\nsky:0,0,230::\n"
    roboflow = "roboflow/train/_annotations.coco.json"
    return [
        Loader("boxes", "boxes/annotations/instances_train2017.json", (annotations,), _of_boxes, _boxes(images)),
        Loader("roboflow", roboflow, (_grouped(annotations),), of_json, _roboflow(images)),
        Loader("imported", "imported/result.json", (annotations, _grouped(annotations)), of_json, _imported(images)),
        Loader("listing", "voc/ImageSets/Segmentation/train.txt", (listing,), of_text(TOKENS), _voc(images, 2)),
        Loader("colours", "voc/labelmap.txt", (colours,), of_text(TOKENS), _voc(images, 0)),
    ]


def _of_boxes(content: bytes, draw: random.Random) -> bytes:
    """Odd boxes and categories, else any value of the file."""
    if draw.random() < 0.3:
        return of_json(content, draw)
    tree = json.loads(content)
    for _ in range(draw.choice((1, 1, 3))):
        each = draw.choice(tree["annotations"])
        key = draw.choice(("bbox", "bbox", "bbox", "category_id", "area", "iscrowd", "segmentation"))
        each[key] = draw.choice(BOXES) if key == "bbox" else draw.choice((0, -1, 99, None, [], 1e30, True, "1"))
        if draw.random() < 0.1:
            del each[key]
    return json.dumps(tree).encode()


def _grouped(content: bytes) -> bytes:
    """With Roboflow's category that names the group of the others."""
    tree = json.loads(content)
    for category in tree["categories"]:
        category["supercategory"] = "shapes"
    tree["categories"].insert(0, {"id": 0, "name": "shapes", "supercategory": "none"})
    return json.dumps(tree).encode()


def _write(folder: Path, images: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in images.items():
        if not (folder / name).is_file():
            (folder / name).write_bytes(content)


def _boxes(images: dict[str, bytes]) -> Callable[[Path], object]:
    def use(path: Path) -> object:
        root = path.parents[1]
        _write(root / "train2017", images)
        check_dataset(root)
        dataset = BoxDataset(root, "train")
        evaluation = DetectionEvaluation(dataset, HEAD, (32, 32))
        for index in range(len(dataset)):
            sample = dataset.load(index)
            assert sample.boxes is not None
            height, width = sample.image.shape[:2]
            left, top, right, bottom = sample.boxes[:, 1:].T
            assert ((left >= 0) & (top >= 0) & (right <= width) & (bottom <= height)).all()
            assert ((right > left) & (bottom > top)).all()
            found = sample.boxes[sample.boxes[:, 0] != IGNORE]
            classes = found[:, 0].astype(np.int64)
            evaluation.add(index, Detections(found[:, 1:], classes, np.ones(len(found), np.float32)))
        return evaluation.compute()

    return use


def _roboflow(images: dict[str, bytes]) -> Callable[[Path], object]:
    def use(path: Path) -> object:
        root = path.parents[1]
        _write(path.parent, images)
        check_dataset(root)
        summarise(root)
        draw_contact_sheet(root, "train", root / "sheet.png")
        return [CocoDataset(root, "train").load(index).mask.shape for index in range(len(images))]

    return use


def _imported(images: dict[str, bytes]) -> Callable[[Path], object]:
    def use(path: Path) -> object:
        out = path.parent / "out"
        _write(path.parent / "images", images)
        shutil.rmtree(out, ignore_errors=True)
        found = import_coco({"train": path}, [path.parent / "images"], out, val_share=0.5, seed=1)
        assert all(each.images for each in found)
        return open_dataset(out, "train").load(0)

    return use


def _voc(images: dict[str, bytes], largest: int) -> Callable[[Path], object]:
    """Masks with values up to `largest`; 0: masks in the colours of the seed."""
    rows = np.arange(32 * 32).reshape(32, 32) // 400
    colours = np.array([(0, 0, 0), (128, 64, 128), (0, 0, 230)], np.uint8)
    png = io.BytesIO()
    Image.fromarray(np.minimum(rows, largest).astype(np.uint8) if largest else colours[rows]).save(png, format="PNG")
    mask = png.getvalue()

    def use(path: Path) -> object:
        root = path.parent if path.name == "labelmap.txt" else path.parents[2]
        shutil.rmtree(root / "SegmentationClass", ignore_errors=True)
        _write(root / "JPEGImages", images)
        (root / "SegmentationClass").mkdir()
        for name in NAMES:
            (root / "SegmentationClass" / f"{name}.png").write_bytes(mask)
        listing = root / "ImageSets" / "Segmentation" / "train.txt"
        if listing != path:
            listing.parent.mkdir(parents=True, exist_ok=True)
            listing.write_text("\n".join(NAMES) + "\n", encoding="utf-8")
        else:
            (root / "labelmap.txt").unlink(missing_ok=True)
        check_dataset(root)
        summarise(root)
        dataset = open_dataset(root, "train")
        return [dataset.load(index).mask.shape for index in range(len(dataset))]

    return use
