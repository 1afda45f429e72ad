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

The same drawing numbers the objects for instance segmentation: 1, 2, ... from the largest to the smallest, 0 in crowds,
in the background and in classes called stuff (sky, road: regions that are not counted). `ground_truth` gives the
objects as they are annotated, hidden parts included, which is what pycocotools scores against.

A category that is itself called "background" is class 0. Annotations that draw nothing (boxes without a segmentation,
polygons of two points) are skipped; `fp4deploy data check` lists them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from fp4deploy.data.coco.annotations import Annotation, CocoFile, ImageRecord, parse
from fp4deploy.data.coco.regions import RegionError, Rle, box, encode, pixel_count, pixels_of
from fp4deploy.data.images import ImageError, check_size, read_image
from fp4deploy.data.layouts import find_annotations, find_images
from fp4deploy.data.sample import IGNORE, InstanceIds, Pixels, Sample, data_error, select_classes
from fp4deploy.errors import InputError, suggest

BACKGROUND = "background"
MAX_DRAWN = 1_000_000_000  # pixels that the annotations of one image cover together; seconds of drawing


class CocoDataset:
    """One split of a COCO-format dataset; implements `SegmentationDataset`."""

    layout = "coco"
    background = True

    def __init__(
        self,
        root: Path,
        split: str,
        classes: Sequence[str] | None = None,
        instances: bool = False,
        stuff: Sequence[str] = (),
    ) -> None:
        """Read and check the annotation file, and see that every image exists.

        Args:
            root: the dataset's folder.
            split: "train", "val" or "test".
            classes: names to learn, in this order; None for all. "background" is always there and need not be named.
            instances: number the objects as well.
            stuff: classes that are not counted.

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
        self._folder, self.path = folder, path
        self._images = _existing_images(parsed, root, folder)
        self.class_names, self._class_of = _number_classes(parsed, classes)
        self.stuff = _stuff(self.class_names, stuff)
        self._instances = instances
        self._stems: Counter[Path] | None = None
        self._annotations: dict[int, list[Annotation]] = {}
        for annotation in parsed.annotations:
            self._annotations.setdefault(annotation.image_id, []).append(annotation)
        self._require_regions(parsed)

    def _require_regions(self, parsed: CocoFile) -> None:
        """Refuse a file without any segmentation."""
        if parsed.annotations and not any(annotation.segmentation for annotation in parsed.annotations):
            raise data_error(
                self.root, f"{parsed.path} holds boxes only: no annotation has a segmentation to learn from."
            )

    def __len__(self) -> int:
        return len(self._images)

    def keep(self, places: Sequence[int]) -> None:
        """Keep the images at these places alone."""
        self._images = [self._images[place] for place in places]
        self._stems = None

    @property
    def annotated(self) -> bool:
        """False for a file of images alone, as COCO's own test split is."""
        return bool(self._annotations)

    @property
    def annotations(self) -> list[Annotation]:
        """The annotations of the dataset's images whose class is learned."""
        found = (each for image in self._images for each in self._annotations.get(image.id, []))
        return [each for each in found if self.class_of(each)]

    def class_of(self, annotation: Annotation) -> int:
        """The class of an annotation, 0 where it is not learned."""
        return self._class_of[annotation.category_id]

    @property
    def images(self) -> tuple[ImageRecord, ...]:
        """The images in the dataset's order."""
        return tuple(self._images)

    @property
    def category_ids(self) -> dict[int, int]:
        """The file's category id of every class but background."""
        return {number: category for category, number in self._class_of.items() if number}

    def ground_truth(self) -> dict[str, Any]:
        """The split as the content of a COCO file, for scoring: RLE, classes that are counted, crowds included.

        Raises:
            InputError: a segmentation cannot be drawn, or an image has another size than its annotation says.
        """
        names = {category: self.class_names[number] for number, category in self.category_ids.items()}
        kept = [category for category, number in self._class_of.items() if number and number not in self.stuff]
        scored = set(kept)
        annotations: list[dict[str, Any]] = []
        for record in self._images:
            found = [each for each in self._annotations.get(record.id, []) if each.category_id in scored]
            if found:
                self._compare_size(record)
            for annotation in found:
                region = self._region(annotation, record)
                if region is not None:
                    annotations.append(_scored(annotation, region, number=len(annotations) + 1))
        return {
            "images": [asdict(image) for image in self._images],
            "annotations": annotations,
            "categories": [{"id": category, "name": names[category]} for category in kept],
        }

    def load(self, index: int) -> Sample:
        """Decode one image and draw its mask.

        Raises:
            InputError: the image cannot be decoded or has another size than its annotation says, or an RLE is broken.
        """
        record, image = self._decoded(index)
        mask, instances = self._draw(record)
        return Sample(image, mask, record.file_name, instances if self._instances else None)

    def drawn(self, index: int) -> set[int]:
        """Classes that the labels of an image show, 255 for crowds; of the image only its size is read."""
        record = self._images[index]
        self._compare_size(record)
        return set(np.unique(self._draw(record)[0]).tolist())

    def _decoded(self, index: int) -> tuple[ImageRecord, Pixels]:
        record = self._images[index]
        path = self._folder / record.file_name
        try:
            return record, read_image(path, (record.height, record.width))
        except ImageError as error:
            raise data_error(self.root, f"{path} {error}") from error

    def picture_name(self, index: int) -> str:
        """Name of a PNG file of one image: its own, with another suffix; with both where two images would share it."""
        if self._stems is None:
            self._stems = Counter(Path(image.file_name).with_suffix("") for image in self._images)
        name = Path(self._images[index].file_name)
        shared = self._stems[name.with_suffix("")] > 1
        return f"{name if shared else name.with_suffix('')}.png"

    def _compare_size(self, record: ImageRecord) -> None:
        """Compare the declared size with the image file: drawing takes memory by the declared one."""
        path = self._folder / record.file_name
        try:
            check_size(path, (record.height, record.width))
        except ImageError as error:
            raise data_error(self.root, f"{path} {error}") from error

    def _region(self, annotation: Annotation, record: ImageRecord) -> Rle | None:
        try:
            return encode(annotation.segmentation, record.height, record.width)
        except RegionError as error:
            cause = f"Annotation {annotation.id} (image {record.file_name}) {error}."
            raise data_error(self.root, cause) from error

    def _draw(self, record: ImageRecord) -> tuple[Pixels, InstanceIds]:
        mask = np.zeros(record.width * record.height, dtype=np.uint8)  # down the columns, as segmentations are
        instances = np.zeros(mask.shape, dtype=np.int32)
        objects = []
        drawn = 0
        for annotation in self._annotations.get(record.id, []):
            region = self._region(annotation, record)
            class_id = self._class_of[annotation.category_id]
            if region is None:
                continue
            size = pixel_count(region)
            drawn += size
            if drawn > MAX_DRAWN:
                raise data_error(
                    self.root,
                    f"The annotations of the image {record.file_name} cover {drawn} pixels together; the limit is "
                    f"{MAX_DRAWN}.",
                )
            if not annotation.crowd:
                objects.append((size, class_id, region))
            elif class_id:
                mask[pixels_of(region)] = IGNORE
        number = 0
        for _, class_id, region in sorted(objects, key=lambda item: -item[0]):
            where = pixels_of(region)
            mask[where] = class_id
            counted = class_id not in (0, *self.stuff)
            number += counted
            instances[where] = number if counted else 0
        shape = (record.width, record.height)
        return np.ascontiguousarray(mask.reshape(shape).T), np.ascontiguousarray(instances.reshape(shape).T)


def _scored(annotation: Annotation, region: Rle, number: int) -> dict[str, object]:
    """An annotation for pycocotools, which takes the number 0 for "not matched" and sorts sizes by "area"."""
    return {
        "id": number,
        "image_id": annotation.image_id,
        "category_id": annotation.category_id,
        "iscrowd": int(annotation.crowd),
        "segmentation": region,
        "area": pixel_count(region) if annotation.area is None else annotation.area,
        "bbox": box(region),
    }


def _stuff(class_names: tuple[str, ...], names: Sequence[str]) -> tuple[int, ...]:
    for name in names:
        if name not in class_names[1:]:
            raise InputError(
                f"instance.stuff names the class '{name}', which is not one of those learned."
                f"{suggest(name, class_names[1:])} They are: {', '.join(class_names[1:])}."
            )
    found = tuple(sorted({class_names.index(name) for name in names}))
    if len(found) == len(class_names) - 1:
        raise InputError("instance.stuff names every class, so that nothing is left to count. Leave one out.")
    return found


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


def _number_classes(parsed: CocoFile, requested: Sequence[str] | None) -> tuple[tuple[str, ...], dict[int, int]]:
    """Names of the classes with background first, and the class of every category id (0 for those not chosen)."""
    names = [name for name in parsed.categories.values() if name != BACKGROUND]
    if not names:
        raise InputError(f"{parsed.path} lists no category, so there is no class to learn.")
    chosen = select_classes(names, [name for name in requested or () if name != BACKGROUND], parsed.path)
    class_of = {name: number for number, name in enumerate(chosen, start=1)}
    return (BACKGROUND, *chosen), {key: class_of.get(name, 0) for key, name in parsed.categories.items()}
