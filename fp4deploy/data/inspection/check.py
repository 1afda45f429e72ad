"""Every defect of a dataset folder, for `fp4deploy data check`.

Opening a dataset stops at the first thing it cannot work with; this lists all of them, and also what loading tolerates:
polygons of two points, boxes outside the image, repeated annotation ids. Values of a mask without a class are void, not
a defect. Nor is an annotation without a segmentation where no annotation has one: such a set is of boxes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fp4deploy.data.coco.annotations import Annotation, CocoFile, Defect, ImageRecord
from fp4deploy.data.coco.regions import MIN_COORDINATES, RegionError, encode, pixel_count
from fp4deploy.data.dataset import has_split
from fp4deploy.data.folders import EXAMPLE, class_folders, images_of, is_class_folders
from fp4deploy.data.images import ImageError, check_size, read_class_ids, read_image
from fp4deploy.data.inspection.labels import (
    Histogram,
    annotation_defect,
    box_defect,
    category_defect,
    mask_defects,
    repeated_defect,
)
from fp4deploy.data.inspection.summary import Shared, parse_splits, shared_images
from fp4deploy.data.layouts import find_images, has_masks, mask_files, split_images
from fp4deploy.data.masks import are_numbers, class_colours, class_values
from fp4deploy.data.sample import SPLITS, TEST, TRAIN
from fp4deploy.data.volumes.check import check_volumes
from fp4deploy.data.volumes.layout import is_volumes
from fp4deploy.errors import InputError
from fp4deploy.system.processors import cores

if TYPE_CHECKING:
    from fp4deploy.system.progress import Phase

Advance = Callable[[int, int], None]  # images read, all images
_BOX_TOLERANCE = 1.0  # pixels; COCO's own boxes are rounded to hundredths


def check_dataset(
    root: Path,
    parsed: Mapping[str, CocoFile] | None = None,
    progress: Phase = lambda phase, done, of: None,
    *,
    boxes: bool = False,
) -> list[Defect]:
    """List the defects of the splits to train and to validate on, and of a test split where there is one.

    An empty list means that training can read everything.

    Args:
        parsed: what `parse_splits` gives, where the caller has it.
        progress: is called with what is read, how much of it, and how much there is.
        boxes: for detection: annotations without a segmentation are no defect, and masks are not read.

    Raises:
        InputError: `root` is not a dataset folder at all. Defects of its content never raise.
    """
    root = Path(root)
    files = parse_splits(root) if parsed is None else parsed
    if is_volumes(root):
        shared = shared_images(root, files)
        return check_volumes(root, progress) + [_shared(pair) for pair in shared]
    if is_class_folders(root):
        return [*_check_folders(root, progress), *map(_shared, shared_images(root, files))]
    defects: list[Defect] = []
    masks = has_masks(root) and not boxes
    counts: dict[str, Histogram] = {}
    splits = (*SPLITS, TEST) if has_split(root, TEST) else SPLITS
    boxes = boxes or has_boxes_alone(files)
    for split in splits:
        advance = partial(progress, f"images of {split}")
        if masks:
            counts[split] = np.zeros(256, np.int64)
            defects += _check_masks(root, split, advance, counts[split])
        if split in files:
            defects += _check_annotations(root, split, files[split], None if masks else advance, boxes)
        elif not masks:
            defects.append(Defect(f"annotations/instances_{split}2017.json", None, "missing-file", "does not exist."))
    listed = [files[split] for split in splits if split in files and files[split].categories]
    for file in listed[1:]:
        if file.categories != listed[0].categories:
            file.report("different-categories", f"lists other categories than {listed[0].path.name}.")
            defects.append(file.defects[-1])
    defects += [_shared(pair) for pair in shared_images(root, files)]
    if masks:
        try:
            values = class_values(root)
            defects += mask_defects(counts, max(values.values(), default=0) + 1, not are_numbers(values))
        except InputError as error:
            defects.append(Defect("masks", None, "no-classes", str(error)))
    return defects


def _check_folders(root: Path, progress: Phase) -> Iterator[Defect]:
    """Classes that validation has no image of, or training none; images that cannot be decoded."""
    known = class_folders(root, TRAIN)
    for split in (*SPLITS, TEST) if class_folders(root, TEST) else SPLITS:
        found = class_folders(root, split)
        if not found:
            yield Defect(split, None, "missing-folder", f"has no images in folders of classes: {EXAMPLE}.")
            continue
        for name in (name for name in found if name not in known):
            yield Defect(f"{split}/{name}", None, "unknown-class", "is a class that the training split has not.")
        for name in (name for name in known if name not in found):
            yield Defect(f"{split}/{name}", None, "missing-class", "holds no image: the class is not measured.")
        images: list[tuple[Path, tuple[int, int] | None]] = [
            (path, None) for folder in found.values() for path in images_of(folder)
        ]
        yield from _check_images(root, images, partial(progress, f"images of {split}"))


def _shared(pair: Shared) -> Defect:
    return Defect(pair.second, None, "shared-image", f"is the same image as {pair.first}: scores mislead.")


def has_boxes_alone(files: Mapping[str, CocoFile]) -> bool:
    """Whether there are annotations, and every one has a box and no segmentation."""
    annotations = [annotation for file in files.values() for annotation in file.annotations]
    return bool(annotations) and all(each.box is not None and not each.segmentation for each in annotations)


def _check_annotations(
    root: Path, split: str, parsed: CocoFile, advance: Advance | None, boxes: bool
) -> Iterator[Defect]:
    """`advance`: the images are read, and it is called; None: they only have to be there. `boxes`: boxes suffice."""
    yield from parsed.defects
    file = parsed.file
    if split == TRAIN and parsed.images:
        found = (
            annotation_defect(parsed.annotations),
            box_defect(parsed.annotations, parsed.images),
            repeated_defect(parsed.annotations),
            category_defect(parsed.categories),
        )
        yield from (Defect(file, None, *wrong) for wrong in found if wrong)
    names = Counter(record.file_name for record in parsed.images.values())
    for name in (name for name, count in names.items() if count > 1):
        yield Defect(file, None, "repeated-image", f"lists the image {name} {names[name]} times, under several ids.")
    if not parsed.images and not parsed.defects:
        yield Defect(file, None, "no-images", "lists no image.")
    folder = find_images(root, split)
    paths = [((folder or root) / record.file_name, record) for record in parsed.images.values()]
    if folder is None:
        yield Defect(f"{split}2017", None, "missing-folder", "does not exist.")
    else:
        if advance is not None:
            yield from _check_images(root, [(path, (record.height, record.width)) for path, record in paths], advance)
        else:
            for path, _ in paths:
                if not path.is_file():
                    yield Defect(_relative(root, path), None, "missing-image", "does not exist.")
    drawable = {record.id for path, record in paths if _has_size(path, (record.height, record.width))}
    for annotation in parsed.annotations:
        draw = annotation.image_id in drawable  # drawing takes memory by the declared size
        for kind, cause in _region_defects(annotation, parsed.images[annotation.image_id], draw, boxes):
            yield Defect(file, annotation.id, kind, f"annotation {annotation.id} {cause}.")


def _check_images(
    root: Path, images: Sequence[tuple[Path, tuple[int, int] | None]], advance: Advance
) -> Iterator[Defect]:
    """Decode every image, on all cores (decoding releases the GIL)."""

    def check(item: tuple[Path, tuple[int, int] | None]) -> Defect | None:
        path, size = item
        try:
            read_image(path, size)
        except ImageError as error:
            return Defect(_relative(root, path), None, _image_kind(path, str(error)), str(error))
        return None

    with ThreadPoolExecutor(cores()) as pool:
        for number, defect in enumerate(pool.map(check, images)):
            advance(number + 1, len(images))
            if defect is not None:
                yield defect


def _has_size(path: Path, size: tuple[int, int]) -> bool:
    try:
        check_size(path, size)
    except ImageError:
        return False
    return True


def _image_kind(path: Path, cause: str) -> str:
    if not path.exists():
        return "missing-image"
    return "size-mismatch" if "pixels (width x height)" in cause else "unreadable-image"


def _region_defects(annotation: Annotation, image: ImageRecord, draw: bool, boxes: bool) -> Iterator[tuple[str, str]]:
    segmentation = annotation.segmentation
    if not segmentation and not boxes:
        yield "no-segmentation", "has no segmentation, only a box"
    elif not segmentation and annotation.box is None:
        yield "no-box", "has neither a box nor a segmentation"
    if isinstance(segmentation, list):
        short = sum(points.size < MIN_COORDINATES for points in segmentation)
        odd = sum(points.size % 2 for points in segmentation)
        if short:
            yield "degenerate-polygon", f"has {short} polygon(s) of fewer than three points"
        if odd:
            yield "degenerate-polygon", f"has {odd} polygon(s) with an odd number of coordinates"
    try:
        rle = encode(segmentation, image.height, image.width) if draw else None
        if rle is not None and pixel_count(rle) == 0:
            yield "zero-area", "covers no pixel"
    except RegionError as error:
        yield "broken-segmentation", str(error)
    yield from _box_defects(annotation.box, image)


def _box_defects(box: object, image: ImageRecord) -> Iterator[tuple[str, str]]:
    if box is None:
        return
    if (
        not isinstance(box, list)
        or len(box) != 4
        or not all(type(value) in (int, float) and abs(value) < 1e12 for value in box)
    ):
        yield "broken-box", "has a bbox that is not [x, y, width, height]"
        return
    x, y, width, height = box
    if width == 0 or height == 0:
        yield "empty-box", f"has the bbox {box}, which has no area"
    inside = min(x, y) >= -_BOX_TOLERANCE and width >= 0 and height >= 0
    if not (inside and x + width <= image.width + _BOX_TOLERANCE and y + height <= image.height + _BOX_TOLERANCE):
        yield "box-outside", f"has the bbox {box}, outside its image of {image.width}x{image.height} pixels"


def _check_masks(root: Path, split: str, advance: Advance, counts: Histogram) -> Iterator[Defect]:
    """`counts`: gets the pixels of each value."""
    folder, masks = find_images(root, split), mask_files(root, split)
    if not masks:
        yield Defect(f"masks/{split}", None, "missing-file", "holds no mask.")
    if folder is None:
        yield Defect(split, None, "missing-folder", "does not exist.")
        return
    images, colours = split_images(root, split), class_colours(root)
    for stem in sorted(masks.keys() - images.keys()):
        yield Defect(_relative(root, masks[stem]), None, "missing-image", "has no image.")
    for stem in sorted(images.keys() - masks.keys()):
        yield Defect(_relative(root, images[stem]), None, "missing-mask", "has no mask.")
    pairs: list[tuple[Path, tuple[int, int] | None]] = [(images[stem], None) for stem in images.keys() - masks.keys()]
    for stem in sorted(masks.keys() & images.keys()):
        try:
            values = read_class_ids(masks[stem], colours)
            counts += np.bincount(values.ravel(), minlength=256)
            pairs.append((images[stem], (values.shape[0], values.shape[1])))
        except ImageError as error:
            yield Defect(_relative(root, masks[stem]), None, "unreadable-mask", str(error))
    yield from _check_images(root, pairs, advance)


def _relative(root: Path, path: Path) -> str:
    return path.relative_to(root).as_posix()
