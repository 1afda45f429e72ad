"""COCO annotations as boxes.

The box of an object is its "bbox", [x, y, width, height] in pixels, as annotated; without one, the smallest around its
segmentation, which is how masks of nuclei become boxes. What is no place to find an object is left out of the labels:

| box | to train on | to score against |
|---|---|---|
| not four finite numbers | an error that names the annotation | the same |
| no width or no height, or wholly outside the image | left out | left out |
| beyond the border | its part inside the image | the same |
| crowd | a region that counts neither way | COCO's rule for crowds |

`fp4deploy data check` lists them all. An image without boxes is background.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from fp4deploy.data.coco.annotations import Annotation, CocoFile, ImageRecord
from fp4deploy.data.coco.dataset import CocoDataset
from fp4deploy.data.coco.regions import RegionError, box, encode
from fp4deploy.data.sample import IGNORE, Boxes, Sample, data_error

LARGEST = 1e9  # pixels; a coordinate beyond it is damage


class BoxDataset(CocoDataset):
    """One split of a COCO-format dataset with the boxes of its objects; segmentations are not needed."""

    def __init__(self, root: Path, split: str, classes: Sequence[str] | None = None) -> None:
        """As of `CocoDataset`.

        Raises:
            InputError: also a box that is not four finite numbers, naming its annotation.
        """
        super().__init__(root, split, classes)
        sizes = {record.id: record for record in self._images}
        self._boxes: dict[int, list[tuple[Annotation, list[float]]]] = {}
        for found in self._annotations.values():
            for annotation in found:
                record = sizes[annotation.image_id]
                clipped = clip(self._box(annotation, record), record)
                if clipped is not None and self._class_of[annotation.category_id]:
                    self._boxes.setdefault(record.id, []).append((annotation, clipped))

    def _require_regions(self, parsed: CocoFile) -> None:
        """Boxes are enough."""

    def load(self, index: int) -> Sample:
        """Decode one image; its mask is empty.

        Raises:
            InputError: the image cannot be decoded or has another size than its annotation says.
        """
        record, image = self._decoded(index)
        rows = [
            [IGNORE if annotation.crowd else self._class_of[annotation.category_id], x, y, x + width, y + height]
            for annotation, (x, y, width, height) in self._boxes.get(record.id, [])
        ]
        boxes: Boxes = np.array(rows, dtype=np.float32).reshape(-1, 5)
        return Sample(image, np.zeros(image.shape[:2], np.uint8), record.file_name, boxes=boxes)

    def drawn(self, index: int) -> set[int]:
        """Classes of the boxes of an image that are a pixel wide and high, 255 for crowds."""
        found = self._boxes.get(self._images[index].id, [])
        return {IGNORE if each.crowd else self.class_of(each) for each, box in found if min(box[2:]) >= 1}

    def ground_truth(self) -> dict[str, Any]:
        """The split as the content of a COCO file, for scoring boxes."""
        names = {category: self.class_names[number] for number, category in self.category_ids.items()}
        annotations: list[dict[str, Any]] = []
        for record in self._images:
            for annotation, (x, y, width, height) in self._boxes.get(record.id, []):
                annotations.append(
                    {
                        "id": len(annotations) + 1,
                        "image_id": record.id,
                        "category_id": annotation.category_id,
                        "iscrowd": int(annotation.crowd),
                        "bbox": [x, y, width, height],
                        "area": width * height if annotation.area is None else annotation.area,
                    }
                )
        return {
            "images": [asdict(image) for image in self._images],
            "annotations": annotations,
            "categories": [{"id": category, "name": name} for category, name in names.items()],
        }

    def _box(self, annotation: Annotation, record: ImageRecord) -> list[float]:
        if annotation.box is not None:
            found = checked_box(annotation.box)
            if found is None:
                cause = (
                    f"Annotation {annotation.id} (image {record.file_name}) has a bbox that is not four finite numbers."
                )
                raise data_error(self.root, cause)
            return found
        try:
            region = encode(annotation.segmentation, record.height, record.width) if annotation.segmentation else None
        except RegionError as error:
            cause = f"Annotation {annotation.id} (image {record.file_name}) {error}."
            raise data_error(self.root, cause) from error
        return box(region) if region is not None else [0.0] * 4


def checked_box(found: object) -> list[float] | None:
    """[x, y, width, height] as numbers; None where it is something else, NaN or infinite."""
    if not isinstance(found, list) or len(found) != 4:
        return None
    if not all(type(value) in (int, float) and abs(value) < LARGEST for value in found):
        return None
    return [float(value) for value in found]


def clip(found: list[float], record: ImageRecord) -> list[float] | None:
    """The part of a box inside its image, [x, y, width, height]; None where that has no area."""
    x, y, width, height = found
    left, top = max(x, 0.0), max(y, 0.0)
    right, bottom = min(x + width, record.width), min(y + height, record.height)
    return [left, top, right - left, bottom - top] if right > left and bottom > top else None
