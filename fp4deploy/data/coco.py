"""COCO instance annotations as semantic masks.

Class 0 is "background": every pixel that no annotation covers. The categories follow as 1, 2, ... in the file's order,
whatever their ids (COCO's 80 ids run from 1 to 90). Without that class, empty pixels would read as person.

Several annotations may cover one pixel. The rules, in drawing order:

1. Crowd regions (`iscrowd`) are 255: they hold many objects and much between them. They are drawn first, so that a
   crowd never overwrites an object annotated on its own.
2. Objects are drawn from the largest to the smallest (in pixels; equal ones in the file's order), so that a cup on a
   table stays visible.
3. A subset of classes is the full mask with the other classes, crowds included, turned into background. A cup on the
   table is thus background where only tables are asked for, and images with none of the classes stay.

A category that is itself called "background" is class 0. Annotations that draw nothing (boxes without a segmentation,
polygons of two points) are skipped; `fp4deploy data check` lists them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fp4deploy.data.coco_json import Annotation, CocoFile, ImageRecord, find_annotations, find_images, parse
from fp4deploy.data.images import ImageError, read_image
from fp4deploy.data.regions import RegionError, decode, encode, pixel_count
from fp4deploy.data.sample import IGNORE, Pixels, Sample, data_error, select_classes
from fp4deploy.errors import InputError

BACKGROUND = "background"


class CocoDataset:
    """One split of a COCO-format dataset; implements `SegmentationDataset`."""

    layout = "coco"
    background = True

    def __init__(self, root: Path, split: str, classes: Sequence[str] | None = None) -> None:
        """Read and check the annotation file, and see that every image exists.

        Args:
            root: the dataset's folder.
            split: "train" or "val".
            classes: names to learn, in this order; None for all. "background" is always there and need not be named.

        Raises:
            InputError: anything in the annotation file that the masks depend on is wrong, or an image is missing.
        """
        self.root = root
        path, folder = find_annotations(root, split), find_images(root, split)
        if path is None or folder is None:
            lacking = f"annotations/instances_{split}2017.json" if path is None else f"folder {split}2017"
            raise data_error(root, f"The dataset {root} has no {lacking} (nor the same without 2017).")
        parsed = parse(path)
        fatal = [defect for defect in parsed.defects if defect.kind != "duplicate-annotation"]
        if fatal:
            raise data_error(root, f"{path} {fatal[0].message}{_more(len(fatal) - 1)}")
        self._folder = folder
        self._images = _existing_images(parsed, root, folder)
        self.class_names, self._class_of = _number_classes(parsed, classes)
        self._annotations: dict[int, list[Annotation]] = {}
        for annotation in parsed.annotations:
            self._annotations.setdefault(annotation.image_id, []).append(annotation)
        if parsed.annotations and not any(annotation.segmentation for annotation in parsed.annotations):
            raise data_error(root, f"{path} holds boxes only: no annotation has a segmentation to learn from.")

    def __len__(self) -> int:
        return len(self._images)

    def load(self, index: int) -> Sample:
        """Decode one image and draw its mask.

        Raises:
            InputError: the image cannot be decoded or has another size than its annotation says, or an RLE is broken.
        """
        record = self._images[index]
        path = self._folder / record.file_name
        try:
            image = read_image(path, (record.height, record.width))
        except ImageError as error:
            raise data_error(self.root, f"{path} {error}") from error
        return Sample(image, self._draw(record), record.file_name)

    def _draw(self, record: ImageRecord) -> Pixels:
        mask = np.zeros((record.height, record.width), dtype=np.uint8)
        objects = []
        for annotation in self._annotations.get(record.id, []):
            try:
                region = encode(annotation.segmentation, record.height, record.width)
            except RegionError as error:
                cause = f"Annotation {annotation.id} (image {record.file_name}) {error}."
                raise data_error(self.root, cause) from error
            class_id = self._class_of[annotation.category_id]
            if region is None:
                continue
            if not annotation.crowd:
                objects.append((class_id, region))
            elif class_id:
                mask[decode(region)] = IGNORE
        for class_id, region in sorted(objects, key=lambda item: -pixel_count(item[1])):
            mask[decode(region)] = class_id
        return mask


def _more(count: int) -> str:
    return f" And {count} more." if count else ""


def _existing_images(parsed: CocoFile, root: Path, folder: Path) -> list[ImageRecord]:
    images = list(parsed.images.values())
    if not images:
        raise data_error(root, f"{parsed.path} lists no image, so there is nothing to learn or to measure.")
    present = {entry.name for entry in os.scandir(folder)}
    missing = [
        image.file_name
        for image in images
        if image.file_name not in present and not (folder / image.file_name).is_file()
    ]
    if missing:
        cause = f"{parsed.path} names the image {missing[0]}, which is not in {folder}.{_more(len(missing) - 1)}"
        raise data_error(root, cause)
    return images


def _number_classes(parsed: CocoFile, wanted: Sequence[str] | None) -> tuple[tuple[str, ...], dict[int, int]]:
    """Names of the classes with background first, and the class of every category id (0 for those not chosen)."""
    names = [name for name in parsed.categories.values() if name != BACKGROUND]
    if not names:
        raise InputError(f"{parsed.path} lists no category, so there is no class to learn.")
    chosen = select_classes(names, [name for name in wanted or () if name != BACKGROUND], parsed.path)
    class_of = {name: number for number, name in enumerate(chosen, start=1)}
    return (BACKGROUND, *chosen), {key: class_of.get(name, 0) for key, name in parsed.categories.items()}
