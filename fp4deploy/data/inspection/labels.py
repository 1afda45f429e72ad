"""Labels as they are read, before a network learns from them: what no reader refuses and no training survives.

| found | cause |
|---|---|
| one class, and the other pixels void | binary masks of 0 and 255, or inverted: 255 is void |
| most classes of masks without names occur nowhere | binary masks of 0 and 128, or another few values |
| many values between two that hold most pixels | binary masks with soft edges: blurred, resized, or stored as JPEG |
| every annotated object is a crowd | brush masks of CVAT, which are written with "iscrowd": 1; crowds are void |
| one class alone | objects were not drawn, or the other classes are not to be learned |
| no annotation | the wrong file |
| annotations that repeat others under other ids | two exports of one project in one file; each object counts twice |
| boxes that end beyond their images unless they are two corners | [x1, y1, x2, y2], as Pascal VOC has them |
| categories whose names differ in case or blanks | one class, typed twice |
| every pixel void | colours or values that no class has |

`fp4deploy data check` looks for all of these, in every mask. Training looks at some labels of its own split before it
begins, not for repeated annotations and names, and refuses boxes as two corners only where they can be nothing else.
Classes that occur nowhere are no defect, since small sets of many classes have some; training says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fp4deploy.data.coco.annotations import Annotation, Defect, ImageRecord
from fp4deploy.data.coco.boxes import BoxDataset, checked_box
from fp4deploy.data.coco.dataset import CocoDataset
from fp4deploy.data.coco.regions import region_key
from fp4deploy.data.masks import MaskDataset
from fp4deploy.data.sample import IGNORE, MAX_CLASSES, TRAIN, VAL, SegmentationDataset, data_error, evenly, spread
from fp4deploy.errors import counted

MAX_READ = 100  # masks that a training reads before it begins, evenly spaced
MIXED = 8  # values between two others; fewer may be classes
TWO_VALUES = 0.6  # share of the pixels that the two values of a binary mask have at least, beside soft edges
IMPORTED = "; fp4deploy data import does."
FEWEST = 3  # boxes that are worth a warning as corners
CERTAIN = 10  # boxes that are corners alike by no accident
SPREAD = 64  # the least distance of these two values

Histogram = NDArray[np.int64]  # [256], pixels of each value of the masks


def value_defect(values: Histogram, classes: int, named: bool) -> tuple[str, str] | None:
    """(kind, message) of what is wrong with masks of these values; None where nothing is.

    Args:
        values: how many pixels have each value, 255 being void.
        classes: classes of the dataset, numbered by value.
        named: they have names; else there is one for each value up to the largest.

    >>> counts = np.zeros(256, np.int64)
    >>> counts[[0, 255]] = 700, 300
    >>> value_defect(counts, 2, True)[0]
    'binary-masks'
    >>> counts[[1, 255]] = 300, 0
    >>> value_defect(counts, 2, True) is None
    True
    """
    total, present = int(values.sum()), np.flatnonzero(values)
    if not total:
        return None
    void = total - int(values[: min(classes, IGNORE)].sum())
    learned = [int(value) for value in present if value < min(classes, IGNORE)]
    if not learned:
        return "all-void", (
            f"hold no class: every pixel is void; values {_listed(present)}, classes 0 to {classes - 1}. Write the "
            "number of its class into each pixel."
        )
    first, second = sorted(int(value) for value in np.argsort(values, kind="stable")[-2:])
    between = [value for value in present if value not in (first, second)]
    two = int(values[first] + values[second])
    soft = second - first >= SPREAD and two > TWO_VALUES * total and not _by_name(named, classes)
    if len(between) > MIXED and (soft or (not named and classes >= MAX_CLASSES)):
        return "grey-masks", (
            f"hold {len(present)} values, and {100 * two / total:.0f} % of the pixels are {first} or {second}: grey "
            "levels between two classes, of masks that were blurred, resized or stored as JPEG. Write 0 and 1, by a "
            f"threshold{IMPORTED}"
        )
    if len(learned) == 1 and void:
        others = [int(value) for value in present if value not in learned]
        return "binary-masks", (
            f"hold one class: {100 * void / total:.0f} % of the pixels are {_listed(others)}, which is void and "
            f"ignored, and the others {learned[0]}, so that there is nothing to tell apart. In binary masks of 0 and "
            f"255 write 1 for 255{IMPORTED}"
        )
    if len(learned) == 1:
        return "one-class", f"hold the value {learned[0]} alone, so that there is nothing to tell apart."
    if not named and classes > 2 * len(learned) and classes - len(learned) > MIXED:
        return "sparse-values", (
            f"hold the values {_listed(learned)}, and a value is a class: {classes - len(learned)} of the {classes} "
            "classes occur nowhere. Number the classes 0, 1, 2, ..., or name those of these values in classes.txt."
        )
    return None


def _by_name(named: bool, classes: int) -> bool:
    """So many classes with names that values far apart are two of them."""
    return named and classes > SPREAD


def annotation_defect(annotations: Sequence[Annotation]) -> tuple[str, str] | None:
    """(kind, message) where there is no annotation, or every one is a crowd."""
    if not annotations:
        return "no-annotations", "has no annotation, so that every pixel is background and nothing is learned."
    if not all(annotation.crowd for annotation in annotations):
        return None
    return "all-crowds", (
        f'has {len(annotations)} annotations, all with "iscrowd": 1, so that every object is ignored. CVAT writes its '
        'brush masks so. Write "iscrowd": 0 for single objects.'
    )


def repeated_defect(annotations: Sequence[Annotation]) -> tuple[str, str] | None:
    """(kind, message) where a tenth of the annotations or more repeat another one under another id."""
    placed = [each for each in annotations if each.segmentation or any(checked_box(each.box) or ())]
    regions = {hash((each.image_id, each.category_id, str(each.box), region_key(each.segmentation))) for each in placed}
    again = len(placed) - len(regions)
    if again < 2 or 10 * again < len(placed):
        return None
    return "repeated-annotations", (
        f"has {again} annotations that repeat another one, of the same image, category, box and segmentation: each "
        "such object counts as several, of which a detector finds one. Leave them out."
    )


def category_defect(categories: Mapping[int, str]) -> tuple[str, str] | None:
    """(kind, message) where two names differ in case or blanks alone."""
    spelled: dict[str, list[str]] = {}
    for name in categories.values():
        spelled.setdefault("".join(name.casefold().split()), []).append(name)
    same = [names for names in spelled.values() if len(names) > 1]
    if not same:
        return None
    shown = "; ".join(", ".join(map(repr, names)) for names in same[:4])
    return "similar-categories", f"lists names that differ in case or blanks, and are classes of their own: {shown}."


def box_defect(
    annotations: Sequence[Annotation], images: Mapping[int, ImageRecord], certain: bool = False
) -> tuple[str, str] | None:
    """(kind, message) of boxes that are no [x, y, width, height] in pixels; tools that leave boxes out write zeros.

    Two corners are told by boxes that end beyond their images, where all are corners of boxes that do not: a tenth of
    the boxes, or with `certain` most of ten or more. Fewer may be of large objects that the image's border cuts.
    """
    boxes = [(checked_box(each.box), images.get(each.image_id)) for each in annotations]
    placed = [(box, image) for box, image in boxes if box and image and min(box[2:]) > 0]
    if placed and all(max(x + width, y + height) <= 1 for (x, y, width, height), _ in placed):
        return "normalised-boxes", (
            f"has {len(placed)} boxes, all within one pixel: shares of the image, as YOLO has them. Write pixels: "
            "multiply x and width by the image's width, y and height by its height."
        )
    beyond = sum(x + right > image.width + 1 or y + low > image.height + 1 for (x, y, right, low), image in placed)
    corners = all(
        0 <= x < right <= image.width + 1 and 0 <= y < low <= image.height + 1 for (x, y, right, low), image in placed
    )
    sure = len(placed) >= CERTAIN and 2 * beyond > len(placed)
    if len(placed) < FEWEST or not corners or 10 * beyond < len(placed) or (certain and not sure):
        return None
    return "corner-boxes", (
        f"has {len(placed)} boxes, of which {beyond} end beyond their images, and all lie inside as two corners: they "
        f"{'are' if sure else 'may be'} [x1, y1, x2, y2], as Pascal VOC has them. Write [x, y, width, height]: "
        "[x1, y1, x2 - x1, y2 - y1]."
    )


def mask_defects(values: dict[str, Histogram], classes: int, named: bool) -> list[Defect]:
    """Defects of the masks, by split."""
    found = {split: value_defect(counts, classes, named) for split, counts in values.items()}
    wrong = found.get(TRAIN) is not None  # else a small split may show one class
    reported = [(split, *each) for split, each in found.items() if each]
    return [
        Defect(f"masks/{split}", None, kind, message)
        for split, kind, message in reported
        if wrong or (split, kind) == (VAL, "all-void")
    ]


def require_labels(dataset: SegmentationDataset, root: Path) -> list[str]:
    """Look at some labels of a training split; classes that occur in none of them are returned.

    Raises:
        InputError: nothing can be learned from them.
    """
    if isinstance(dataset, CocoDataset):
        if wrong := annotation_defect(dataset.annotations):
            raise data_error(root, f"{dataset.path} {wrong[1]}")
        _require_drawn(dataset, root)
        sizes = {image.id: image for image in dataset.images}
        if isinstance(dataset, BoxDataset) and (wrong := box_defect(dataset.annotations, sizes, certain=True)):
            raise data_error(root, f"{dataset.path} {wrong[1]}")
        used = {dataset.class_of(annotation) for annotation in dataset.annotations if not annotation.crowd}
        first = 1 if dataset.background or isinstance(dataset, BoxDataset) else 0
        return [name for number, name in enumerate(dataset.class_names) if number >= first and number not in used]
    if not isinstance(dataset, MaskDataset) or not len(dataset):
        return []
    places = evenly(len(dataset), MAX_READ) if len(dataset) > MAX_READ else None
    counts = dataset.histogram(places)
    if wrong := value_defect(counts, dataset.values, dataset.named):
        raise data_error(root, f"The masks of {TRAIN} {wrong[1]}")
    present = dataset.classes_of(np.flatnonzero(counts))
    absent = [name for number, name in enumerate(dataset.class_names) if number not in present]
    if len(dataset.class_names) < 2 or (places is None and len(present) < 2):
        lacking = f"; no pixel is {', '.join(absent[:8])}" if absent else ""
        raise data_error(
            root,
            f"Of the classes to learn, {', '.join(dataset.class_names[:8])}, the masks of {TRAIN} hold "
            f"{len(present)}{lacking}. The pixels of other classes are void, so that there is nothing to tell apart: "
            "learn two classes or more.",
        )
    return absent


def _require_drawn(dataset: CocoDataset, root: Path) -> None:
    objects = {each.image_id for each in dataset.annotations if not each.crowd}
    places = [place for place, image in enumerate(dataset.images) if image.id in objects]
    sample = [places[at] for at in spread(len(places), MAX_READ)]
    if not any(dataset.drawn(place) - {0, IGNORE} for place in sample):
        raise data_error(
            root,
            f"{dataset.path}: of {counted(len(sample), 'image')} with objects none shows one: their coordinates lie "
            "outside of the images, or within one pixel. They are pixels, not shares of the image.",
        )


def _listed(values: Sequence[int] | NDArray[np.int64]) -> str:
    shown = ", ".join(str(int(value)) for value in values[:6])
    return shown + (f" and {len(values) - 6} more" if len(values) > 6 else "")
