"""Semantic masks as PNG files, one for every image:

    DIR/masks/{train,val,test}/NAME.png one channel (palette or greyscale); the pixel value is the class
    DIR/{train,val,test}/NAME.jpg       or .png; other layouts: `data.layouts`

The classes' names come from the first of these that exists:

1. `annotations/instances_*.json`, the categories that have a "mask_value", ordered by it;
2. `classes.txt`, one name a line, line n (from 0) for value n;
3. `labelmap.txt` of CVAT, "name:r,g,b::" a line, line n for value n; its masks may be in these colours;
4. "class_0", "class_1", ... up to the largest value below 255 in `train` and `val` (this reads every mask once).

There is no background class here: every class is named by the masks. A value without a class is 255 (ignored), the
usual meaning of void. With a subset of classes the others become 255 too and not "background": the pixels *are*
labelled, but as something the model has no class for. Images without a mask are not used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fp4deploy.data.coco.annotations import parse
from fp4deploy.data.images import Colours, ImageError, read_class_ids, read_image
from fp4deploy.data.layouts import find_annotations, find_images, mask_files, split_images
from fp4deploy.data.sample import (
    ALL_SPLITS,
    IGNORE,
    MAX_CLASSES,
    SPLITS,
    TEST,
    Pixels,
    Sample,
    data_error,
    select_classes,
)
from fp4deploy.models.card import numbered
from fp4deploy.system.schema import lines_of, read_bytes, text_of

MAX_LISTING_BYTES = 1 << 20  # of classes.txt and labelmap.txt
LABEL = re.compile(r"([^:]{1,200}):(\d{1,3}),(\d{1,3}),(\d{1,3}):[^:]*:[^:]*")


class MaskDataset:
    """One split of a dataset with PNG masks; implements `SegmentationDataset`."""

    layout = "masks"
    background = False

    def __init__(self, root: Path, split: str, classes: Sequence[str] | None = None) -> None:
        """Pair masks with images and find the classes.

        Args:
            root: the dataset's folder.
            split: "train", "val" or "test".
            classes: names to learn, in this order; None for all.

        Raises:
            InputError: no masks, a mask without an image, no class, an unknown class.
        """
        self.root = root
        folder = find_images(root, split)
        masks = mask_files(root, split)
        if folder is None or not masks:
            lacking = f"folder {split}" if folder is None else f"mask in masks/{split}/*.png"
            raise data_error(root, f"The dataset {root} has no {lacking}, so there is nothing to learn or to measure.")
        images = split_images(root, split)
        lonely = [path.name for stem, path in masks.items() if stem not in images]
        if lonely:
            more = f" And {len(lonely) - 1} more." if len(lonely) > 1 else ""
            raise data_error(root, f"The mask {lonely[0]} has no image in {folder}.{more}")
        self._pairs = [(images[stem], path) for stem, path in masks.items()]
        values = class_values(root)
        self.values, self.named = max(values.values(), default=0) + 1, not are_numbers(values)
        if not self.named and self.values >= MAX_CLASSES and not classes:
            raise data_error(
                root,
                f"The masks under {root / 'masks'} hold values up to {self.values - 1}, and each is a class. Grey "
                "levels are those of binary masks that were blurred, resized or stored as JPEG: write 0 and 1, by a "
                "threshold.",
            )
        self.class_names = select_classes(list(values), classes, root)
        self._colours = class_colours(root)
        self._class_of = np.full(256, IGNORE, dtype=np.uint8)
        for number, name in enumerate(self.class_names):
            self._class_of[values[name]] = number

    def __len__(self) -> int:
        return len(self._pairs)

    def histogram(self, places: Sequence[int] | None = None) -> NDArray[np.int64]:
        """[256]: how many pixels of the masks at these places, or of all, have each value.

        Raises:
            InputError: a mask cannot be decoded.
        """
        counts = np.zeros(256, np.int64)
        for place in range(len(self)) if places is None else places:
            path = self._pairs[place][1]
            try:
                counts += np.bincount(read_class_ids(path, self._colours).ravel(), minlength=256)
            except ImageError as error:
                raise data_error(self.root, f"{path} {error}") from error
        return counts

    def classes_of(self, values: NDArray[np.int64]) -> set[int]:
        """The classes that these values of the masks stand for."""
        return set(self._class_of[values].tolist()) - {IGNORE}

    def load(self, index: int) -> Sample:
        """Decode one image and its mask.

        Raises:
            InputError: one of the two cannot be decoded, or they differ in size.
        """
        image_path, mask_path = self._pairs[index]
        path = mask_path
        try:
            values = read_class_ids(mask_path, self._colours)
            path = image_path
            image = read_image(image_path, (values.shape[0], values.shape[1]))
        except ImageError as error:
            raise data_error(self.root, f"{path} {error}") from error
        mask: Pixels = self._class_of[values]
        return Sample(image, mask, image_path.name)


def class_values(root: Path) -> dict[str, int]:
    """Mask value of every class, by name, in the order of the values.

    Raises:
        InputError: the annotations or `classes.txt` are unusable, or no mask holds a class.
    """
    for split in ALL_SPLITS:
        path = find_annotations(root, split)
        if path is None:
            continue
        parsed = parse(path)
        if any(defect.kind == "broken-json" for defect in parsed.defects):
            raise data_error(root, f"{path}, which may name the classes of the masks, {parsed.defects[0].message}")
        named = parsed.mask_values
        if named:
            return {named[value]: value for value in sorted(named) if 0 <= value < IGNORE}
    listing = root / "classes.txt"
    if listing.is_file():
        names = [line.strip() for line in text_of(read_bytes(listing, MAX_LISTING_BYTES)).splitlines()]
        names = names[: max((n for n, name in enumerate(names, start=1) if name), default=0)]
        if not names or len(set(names)) < len(names) or "" in names or len(names) > IGNORE:
            raise data_error(root, f"{listing} must hold one class a line: no empty lines, no repeats, at most 255.")
        return {name: value for value, name in enumerate(names)}
    named_colours = _label_map(root)
    if named_colours:
        return {name: value for value, (name, _) in enumerate(named_colours)}
    return {name: value for value, name in enumerate(numbered(_largest_value(root) + 1))}


def are_numbers(values: Mapping[str, int]) -> bool:
    """Whether the classes are called by their values, for want of names."""
    return tuple(values) == numbered(len(values))


def class_colours(root: Path) -> Colours | None:
    """Class of each RGB colour by `labelmap.txt`; None where there is none.

    Raises:
        InputError: the file is unusable.
    """
    listed = _label_map(root)
    return {colour: value for value, (_, colour) in enumerate(listed)} if listed else None


def _label_map(root: Path) -> list[tuple[str, tuple[int, int, int]]]:
    """Names and colours of CVAT's labelmap.txt; [] where there is none."""
    path = root / "labelmap.txt"
    found = []
    content = text_of(b"\n".join(lines_of(path, MAX_LISTING_BYTES)))
    for line in content.splitlines():
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        match = LABEL.fullmatch(text)
        if match is None or max(map(int, match.groups()[1:])) > 255:
            raise data_error(root, f"{path} must hold lines such as 'road:128,64,128::', not '{text[:80]}'.")
        found.append((match[1], (int(match[2]), int(match[3]), int(match[4]))))
    if len({name for name, _ in found}) < len(found) or len({colour for _, colour in found}) < len(found):
        raise data_error(root, f"{path} repeats a name or a colour.")
    if len(found) > IGNORE:
        raise data_error(root, f"{path} has {len(found)} classes; at most 255 fit into a mask.")
    return found


def _largest_value(root: Path) -> int:
    largest = -1
    masks = [path for split in SPLITS for path in mask_files(root, split).values()]
    for path in masks or mask_files(root, TEST).values():
        try:
            values = read_class_ids(path)
        except ImageError as error:
            raise data_error(root, f"{path} {error}") from error
        largest = max(largest, int(np.where(values < IGNORE, values.astype(np.int16), -1).max(initial=-1)))
    if largest < 0:
        raise data_error(root, f"No mask under {root / 'masks'} holds a class.")
    return largest
