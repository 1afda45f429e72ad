"""Samples of COCO-2017 from several folders, merged by image id into one dataset folder.

    python -m benchmarks.coco_samples COCO128 COCO-MINI COCO_Tiny tiny_coco coco128_yolo --side 320 --out DATA/coco

Public repositories hold some dozen images of COCO-2017 each, with their original annotations, and share many of them. A
folder is searched for `instances_*.json`, then for `panoptic_*.json` with the folder of its PNG files, and for images
by their names. Of an image that is found again, the first annotations count: folders in the order given, instances
before panoptic ones. Panoptic segments of things become instances; they differ a little, as no two of them overlap.

`--side` shrinks an image whose longer side is larger, and its annotations with it: AP is then measured at that size. An
object that covers no pixel any more is left out.
Every fourth image or so goes to the validation split, by a hash of its name (`fp4deploy.data.importing.folder`): the
split does not change when folders are added. Where COCO has an image, train2017 or val2017, does not matter for it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pycocotools import mask as coco_mask

from fp4deploy.data import import_coco

QUALITY = 92  # of the JPEG files that are written anew


@dataclass
class Found:
    """One image: its file, its size as annotated (width, height), its annotations, and the folder they are from."""

    path: Path
    size: tuple[int, int]
    source: str
    annotations: list[dict[str, Any]] = field(default_factory=list)


def main() -> None:
    """Merge the folders and divide them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--side", type=int, help="longest side of an image in pixels")
    parser.add_argument("--val-share", type=float, default=0.25)
    options = parser.parse_args()
    images, categories = merge(options.folders)
    with tempfile.TemporaryDirectory() as folder:
        annotations = write(images, categories, Path(folder), options.side)
        for split in import_coco({"train": annotations}, [Path(folder)], options.out, val_share=options.val_share):
            print(f"{split.split}: {split.images} images, {split.annotations} annotations")
    for source, count in Counter(image.source for image in images.values()).items():
        print(f"{count} images from {source}")


def merge(folders: Iterable[Path]) -> tuple[dict[int, Found], dict[int, str]]:
    """Images by their id, ascending, and the names of the categories by their id.

    Raises:
        ValueError: two folders contradict each other in the size of an image or in the name of a category.
    """
    images: dict[int, Found] = {}
    categories: dict[int, str] = {}
    for folder in folders:
        files = {path.name: path for path in sorted(folder.rglob("*.jpg"))}
        paths = [*sorted(folder.rglob("instances_*.json")), *sorted(folder.rglob("panoptic_*.json"))]
        for path in paths:
            content = json.loads(path.read_text(encoding="utf-8"))
            names = {each["id"]: each["name"] for each in content["categories"] if each.get("isthing", 1)}
            for number, name in names.items():
                if categories.setdefault(number, name) != name:
                    raise ValueError(f"{path} calls category {number} '{name}', and others '{categories[number]}'.")
            by_image: dict[int, list[dict[str, Any]]] = {}
            for annotation in _instances(content, path, names):
                by_image.setdefault(annotation["image_id"], []).append(annotation)
            for record in content["images"]:
                file = files.get(Path(record["file_name"]).name)
                if file is None:
                    continue
                size = (record["width"], record["height"])
                known = images.setdefault(record["id"], Found(file, size, folder.name, by_image.get(record["id"], [])))
                if known.size != size:
                    raise ValueError(f"{path} has image {record['id']} of {size} pixels, {known.path} of {known.size}.")
    return dict(sorted(images.items())), categories


def _instances(content: dict[str, Any], path: Path, names: dict[int, str]) -> Iterator[dict[str, Any]]:
    """Annotations of objects, whatever the file has."""
    for annotation in content["annotations"]:
        if "segments_info" not in annotation:
            yield annotation
            continue
        with Image.open(path.with_suffix("") / annotation["file_name"]) as picture:
            pixels = np.asarray(picture.convert("RGB")).astype(np.uint32) @ np.array([1, 256, 65536], np.uint32)
        for segment in annotation["segments_info"]:
            if segment["category_id"] in names:
                yield {
                    "image_id": annotation["image_id"],
                    "category_id": segment["category_id"],
                    "iscrowd": segment.get("iscrowd", 0),
                    "segmentation": encoded(pixels == segment["id"]),
                    "area": segment["area"],
                    "bbox": segment["bbox"],
                }


def encoded(mask: np.ndarray[Any, Any]) -> dict[str, Any]:
    """A mask [H, W] as compressed RLE for JSON."""
    rle = coco_mask.encode(np.asfortranarray(mask.astype(np.uint8)))
    return {"size": [int(side) for side in rle["size"]], "counts": rle["counts"].decode("ascii")}


def write(images: dict[int, Found], categories: dict[int, str], folder: Path, side: int | None) -> Path:
    """Write the images to `folder`, none with a longer side than `side`, and return the path of their annotations."""
    records, annotations = [], []
    for number, image in images.items():
        with Image.open(image.path) as picture:
            size = shrunk(image.size, side)
            if size != image.size:
                picture.draft("RGB", size)  # decodes at half the size and less where that is enough
                small = picture.convert("RGB").resize(size, Image.Resampling.LANCZOS)
                small.save(folder / image.path.name, quality=QUALITY)
            else:
                (folder / image.path.name).write_bytes(image.path.read_bytes())
        records.append({"id": number, "file_name": image.path.name, "width": size[0], "height": size[1]})
        for annotation in image.annotations:
            found = scaled(annotation, image.size, size)
            if pixels(found["segmentation"], size):
                annotations.append({**found, "id": len(annotations) + 1})
    content = {
        "images": records,
        "annotations": annotations,
        "categories": [{"id": key, "name": name} for key, name in sorted(categories.items())],
    }
    path = folder / "instances.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def pixels(region: Any, size: tuple[int, int]) -> int:
    """How many pixels a segmentation covers in an image of `size` (width, height); overlaps count twice."""
    rle = coco_mask.frPyObjects(region, size[1], size[0]) if _is_raw(region) else region
    return int(np.sum(coco_mask.area(rle)))


def _is_raw(region: Any) -> bool:
    return isinstance(region, list) or not isinstance(region["counts"], str)


def shrunk(size: tuple[int, int], side: int | None) -> tuple[int, int]:
    """(Width, height) with a longer side of at most `side`.

    >>> shrunk((640, 480), 320)
    (320, 240)
    """
    longest = max(size)
    if side is None or longest <= side:
        return size
    return max(1, round(size[0] * side / longest)), max(1, round(size[1] * side / longest))


def scaled(annotation: dict[str, Any], before: tuple[int, int], after: tuple[int, int]) -> dict[str, Any]:
    """An annotation of an image that was resized from `before` to `after`, both (width, height)."""
    if before == after:
        return annotation
    across, down = after[0] / before[0], after[1] / before[1]
    region = annotation["segmentation"]
    if isinstance(region, list):
        factors = (across, down)
        new: Any = [[round(value * factors[at % 2], 2) for at, value in enumerate(polygon)] for polygon in region]
    else:
        rle = coco_mask.frPyObjects(region, before[1], before[0]) if _is_raw(region) else region
        mask = Image.fromarray(coco_mask.decode(rle)).resize(after, Image.Resampling.NEAREST)
        new = encoded(np.asarray(mask))
    box = [round(value * (across, down)[at % 2], 2) for at, value in enumerate(annotation["bbox"])]
    return {**annotation, "segmentation": new, "bbox": box, "area": annotation["area"] * across * down}


if __name__ == "__main__":
    main()
