"""Panoptic output in COCO's format: every pixel belongs to one segment, a thing or a region of stuff.

    DIR/panoptic.json          {"images", "annotations": [{"image_id", "file_name", "segments_info"}], "categories"}
    DIR/panoptic/NAME.png      RGB; the segment of a pixel is R + 256 G + 256² B, 0 where there is none

Things are the decoded instances. Every other pixel takes its most likely class where that is stuff: one segment a
class. Background, and a thing's class where no instance was found, stay 0 (void).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fp4deploy.data import CocoDataset
from fp4deploy.instances.decode import Instances
from fp4deploy.system.files import atomic_write, write_whole


@dataclass(frozen=True)
class Panoptic:
    """Segments of one image: ids int32 [H, W], 0 for void, and `segments_info` as COCO has it."""

    ids: NDArray[np.int32]
    segments: list[dict[str, object]]


def panoptic(found: Instances, category_ids: dict[int, int], stuff: Iterable[int] = ()) -> Panoptic:
    """Join things and stuff; `category_ids` maps classes to the file's ids."""
    ids = found.ids.copy()
    categories = [category_ids[int(number)] for number in found.classes]
    for number in stuff:
        where = (found.ids == 0) & (found.semantic == number)
        if where.any():
            categories.append(category_ids[number])
            ids[where] = len(categories)
    return Panoptic(ids, _segments(ids, categories))


def _segments(ids: NDArray[np.int32], categories: list[int]) -> list[dict[str, object]]:
    rows, columns = np.nonzero(ids)
    numbers = ids[rows, columns]
    area = np.bincount(numbers, minlength=len(categories) + 1)
    far = max(ids.shape)
    first = np.full((len(categories) + 1, 2), far)
    last = np.full_like(first, -1)
    for axis, place in enumerate((columns, rows)):
        np.minimum.at(first[:, axis], numbers, place)
        np.maximum.at(last[:, axis], numbers, place)
    return [
        {
            "id": number,
            "category_id": category,
            "area": int(area[number]),
            "bbox": [*first[number].tolist(), *(last[number] - first[number] + 1).tolist()],
            "iscrowd": 0,
        }
        for number, category in enumerate(categories, start=1)
        if area[number]
    ]


def to_rgb(ids: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Segment ids [H, W] below 2**24 as RGB [H, W, 3]."""
    return np.stack([ids >> shift & 255 for shift in (0, 8, 16)], axis=-1).astype(np.uint8)


class PanopticWriter:
    """Writes the PNG of every image as it comes, and the JSON at the end."""

    def __init__(self, folder: Path, dataset: CocoDataset) -> None:
        self.folder, self.dataset = Path(folder), dataset
        self._annotations: list[dict[str, object]] = []

    def add(self, index: int, found: Instances) -> None:
        """Write the segments of one image.

        Raises:
            InputError: the folder cannot be written.
        """
        record = self.dataset.images[index]
        whole = panoptic(found, self.dataset.category_ids, self.dataset.stuff)
        name = self.dataset.picture_name(index)
        with atomic_write(self.folder / "panoptic" / name) as temporary:
            Image.fromarray(to_rgb(whole.ids)).save(temporary, format="PNG")
        self._annotations.append({"image_id": record.id, "file_name": name, "segments_info": whole.segments})

    def finish(self) -> Path:
        """Write panoptic.json; its path.

        Raises:
            InputError: the folder cannot be written.
        """
        named = self.dataset.category_ids.items()
        content = {
            "images": [asdict(image) for image in self.dataset.images],
            "annotations": self._annotations,
            "categories": [
                {
                    "id": category,
                    "name": self.dataset.class_names[number],
                    "isthing": int(number not in self.dataset.stuff),
                }
                for number, category in named
            ],
        }
        path = self.folder / "panoptic.json"
        write_whole(path, json.dumps(content))
        return path
