"""Generated scenes as a COCO-format dataset: `fp4deploy data shapes`, and what training uses when given no data.

    OUT/annotations/instances_{train,val}2017.json    OUT/{train,val}2017/000000000001.jpg

Annotations hold the visible part of every object: a polygon where it is whole, compressed RLE where it is partly
hidden or has a hole, uncompressed RLE with `iscrowd` 1 for groups of tiny shapes, so that every form of the format is
exercised. Greyscale scenes are stored with one channel. An image depends on (seed, split, its number) alone: asking
for more images does not change the first ones. Files are the same byte for byte on one platform.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pycocotools import mask as coco_mask

from fp4deploy.data.generated.scenes import SHAPES, Drawn, draw_scene
from fp4deploy.data.sample import SPLITS
from fp4deploy.errors import InputError
from fp4deploy.system.files import atomic_write

VERSION = "1"  # goes up whenever the same arguments give other scenes
MIN_SIZE = 32


def generate_shapes(out: Path, train: int, val: int, size: int, seed: int) -> None:
    """Write a dataset of generated scenes.

    Args:
        out: folder to create; it may exist if it is empty.
        train: number of training images.
        val: number of validation images.
        size: height and width in pixels.
        seed: any whole number from 0.

    Raises:
        InputError: `out` is not empty or cannot be written (nothing is left there), or a number is out of range.
    """
    out = Path(out)
    _check_arguments(out, train, val, size, seed)
    with atomic_write(out) as temporary:
        temporary.mkdir()
        for split, count in zip(SPLITS, (train, val), strict=True):
            _write_split(temporary, split, count, size, seed)


def _check_arguments(out: Path, train: int, val: int, size: int, seed: int) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists already and is not empty; name a new folder: fp4deploy data shapes DIR")
    for name, value, least in (("train", train, 1), ("val", val, 1), ("size", size, MIN_SIZE), ("seed", seed, 0)):
        if value < least:
            raise InputError(f"{name} is {value}; it must be at least {least}. See: fp4deploy data shapes --help")


def _write_split(root: Path, split: str, count: int, size: int, seed: int) -> None:
    folder = root / f"{split}2017"
    folder.mkdir()
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number in range(1, count + 1):
        random = np.random.default_rng((seed, SPLITS.index(split), number))
        pixels, things = draw_scene(random, size)
        name = f"{number:012d}.jpg"
        _save(folder / name, pixels)
        images.append({"id": number, "file_name": name, "height": size, "width": size, "license": 1})
        for thing in things:
            annotations.append({"id": len(annotations) + 1, "image_id": number, **_annotation(thing)})
    content = {
        "info": {
            "description": "Generated scenes of geometric shapes, made by fp4deploy",
            "version": VERSION,
            "split": split,
            "generator": {"images": count, "size": size, "seed": seed},
        },
        "licenses": [{"id": 1, "name": "CC0 1.0", "url": "https://creativecommons.org/publicdomain/zero/1.0/"}],
        "images": images,
        "annotations": annotations,
        "categories": [{"id": n, "name": name, "supercategory": "shape"} for n, name in enumerate(SHAPES, start=1)],
    }
    path = root / "annotations" / f"instances_{split}2017.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


def _save(path: Path, pixels: NDArray[np.uint8]) -> None:
    grey = bool((pixels == pixels[..., :1]).all())
    Image.fromarray(pixels[..., 0] if grey else pixels).save(path, "JPEG", quality=95)


def _annotation(thing: Drawn) -> dict[str, Any]:
    rle = coco_mask.encode(np.asfortranarray(thing.visible.astype(np.uint8)))
    segmentation: object
    if thing.crowd:
        segmentation = {"size": list(thing.visible.shape), "counts": _runs(thing.visible)}
    elif thing.polygons is not None and bool((thing.visible == thing.whole).all()):
        segmentation = [points.tolist() for points in thing.polygons]
    else:
        segmentation = {"size": list(thing.visible.shape), "counts": rle["counts"].decode("ascii")}
    return {
        "category_id": thing.category + 1,
        "iscrowd": int(thing.crowd),
        "area": int(thing.visible.sum()),
        "bbox": [float(value) for value in coco_mask.toBbox(rle)],
        "segmentation": segmentation,
    }


def _runs(region: NDArray[np.bool_]) -> list[int]:
    """Lengths of the runs of 0, 1, 0, ... down the columns."""
    column_major = np.concatenate(([False], region.T.reshape(-1)))
    changes = np.flatnonzero(column_major[1:] != column_major[:-1])
    return [int(length) for length in np.diff(np.concatenate(([0], changes, [region.size])))]
