"""What every dataset layout provides: an RGB image and a mask of class ids of the same size.

Pixels that count neither in the loss nor in the score have the value `IGNORE`: crowd regions of COCO, void of semantic
masks, and the padding that a crop beyond the image adds.

For instance segmentation a second map of the same size numbers the objects. A pixel belongs to one object at most, that
which the mask shows there, so two maps hold any number of objects and are cropped and resized together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fp4deploy.errors import InputError, suggest

IGNORE = 255
MAX_CLASSES = 255  # ids 0..254 fit a uint8 mask together with IGNORE
TRAIN, VAL, TEST = "train", "val", "test"
SPLITS = (TRAIN, VAL)  # what a training reads
MEASURED = (VAL, TEST)  # what a model is measured on; TEST by `bench --split test` and, once it is trained, by a sweep
ALL_SPLITS = (*SPLITS, TEST)
IMAGE_MEAN = (0.485, 0.456, 0.406)  # ImageNet, RGB in [0, 1]
IMAGE_STD = (0.229, 0.224, 0.225)

Pixels = NDArray[np.uint8]
ClassIds = NDArray[np.unsignedinteger]  # [H, W], of `class_type`
InstanceIds = NDArray[np.int32]
Boxes = NDArray[
    np.floating
]  # [M, 5]: class or 255 (crowd), left, top, right, bottom in pixels; or [M, 4] without class


@dataclass(frozen=True)
class Sample:
    """One labelled image: `image` uint8 [H, W, 3] RGB, `mask` uint8 [H, W] of class ids or 255, `name` for messages.

    `instances` int32 [H, W]: 0 where there is no object, else its number, 1, 2, ...; None for semantic training.
    `boxes` float32 [M, 5] of a detection dataset, whose mask is empty.
    `others`: the images that augmentation joins to this one.
    Of a volume `image` is float32 [C, D, H, W], normalised already, and `mask` uint8 [D, H, W].
    """

    image: Pixels
    mask: Pixels
    name: str
    instances: InstanceIds | None = None
    boxes: Boxes | None = None
    others: tuple[Sample, ...] = ()


class SegmentationDataset(Protocol):
    """A labelled set of images that can be read in any order, and from several processes at once.

    `background` says that class 0 is everything unlabelled; `layout` is "coco", "masks" or "volumes".
    """

    @property
    def class_names(self) -> tuple[str, ...]: ...
    @property
    def background(self) -> bool: ...
    @property
    def layout(self) -> str: ...
    def __len__(self) -> int: ...
    def load(self, index: int) -> Sample:
        """Read one sample; raises InputError, naming the file, when it cannot be read."""
        ...


def background_class(names: Sequence[str], background: bool = False) -> int | None:
    """The class that stands for no object: the first one where a dataset says so, else one that is named background.

    Masks name every class, and nothing else tells the surroundings from what was labelled.

    >>> background_class(["road", "Background"]), background_class(["road", "car"])
    (1, None)
    """
    if background:
        return 0
    return next((number for number, name in enumerate(names) if name.strip("_ ").lower() == "background"), None)


def class_type(classes: int) -> type[np.unsignedinteger]:
    """The type of a map of so many classes: uint8 where they and `IGNORE` fit.

    >>> class_type(255), class_type(256)
    (<class 'numpy.uint8'>, <class 'numpy.uint16'>)
    """
    return np.uint8 if classes <= MAX_CLASSES else np.uint16


def data_error(root: Path, cause: str) -> InputError:
    """Make the error of a defect inside a dataset folder; it ends with the command that lists all defects."""
    return InputError(f"{cause} To list every defect: fp4deploy data check {root}")


def select_classes(names: Sequence[str], requested: Sequence[str] | None, source: Path) -> tuple[str, ...]:
    """Return the classes to learn, in the caller's order: all of `names` when `requested` is None or empty.

    Raises:
        InputError: `requested` holds an unknown or a repeated name, or there are more classes than a mask can hold.
    """
    chosen = tuple(requested) if requested else tuple(names)
    if len(chosen) >= MAX_CLASSES:
        raise InputError(
            f"{source} has {len(chosen)} classes, and at most {MAX_CLASSES - 1} can be learned at once. "
            "Choose some with: --classes a,b,c"
        )
    for name in chosen:
        if name not in names:
            listed = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
            raise InputError(
                f"{source} has no class '{name}'.{suggest(name, names)} Its classes are: {listed}. "
                "Choose among them with: --classes a,b,c"
            )
        if chosen.count(name) > 1:
            raise InputError(f"The class '{name}' is given twice; give every name once: --classes a,b,c")
    return chosen


def evenly(count: int, most: int) -> list[int]:
    """Up to `most` of `count` places, evenly spaced: where as many equal parts begin.

    >>> evenly(10, 4), evenly(2, 4)
    ([0, 2, 5, 7], [0, 1])
    """
    return [at * count // most for at in range(most)] if most < count else list(range(count))


def spread(count: int, most: int) -> list[int]:
    """Up to `most` of `count` places, evenly spaced, the first and the last among them.

    >>> spread(10, 4), spread(2, 4)
    ([0, 3, 6, 9], [0, 1])
    """
    return sorted({round(float(place)) for place in np.linspace(0, count - 1, min(count, most))})
