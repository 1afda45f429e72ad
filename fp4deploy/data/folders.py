"""Folders of images, one folder a class, as image classification has them.

    DIR/train/cat/001.jpg    DIR/val/cat/002.jpg    DIR/test/cat/...        or DIR/images/{train,val}/cat/...

Classes are the folders of the training split, in the order of their names; those of another split have to be among
them. Images lie anywhere below their class's folder. An image's mask has its class at every pixel, so that what counts
classes or compares labels reads it like any other dataset's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fp4deploy.data.images import IMAGE_SUFFIXES, ImageError, read_image
from fp4deploy.data.layouts import find_annotations, find_images, has_masks
from fp4deploy.data.sample import ALL_SPLITS, TRAIN, Sample, class_type, data_error
from fp4deploy.errors import InputError, suggest

LAYOUT = "folders"
EXAMPLE = "train/CLASS/*.jpg and val/CLASS/*.jpg, one folder a class"


def class_folders(root: Path, split: str) -> dict[str, Path]:
    """Folders of a split that hold images, by the names of their classes, sorted; {} where images lie outside them."""
    folder = find_images(root, split)
    if folder is None or any(_is_image(path) for path in folder.iterdir()):
        return {}
    inner = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    return {path.name: path for path in inner if any(map(_is_image, path.rglob("*")))}


def is_class_folders(root: Path) -> bool:
    """Whether a folder has a training split of two classes or more, as folders, and no annotations or masks."""
    if has_masks(root) or any(find_annotations(root, split) for split in ALL_SPLITS):
        return False
    return len(class_folders(root, TRAIN)) > 1


def images_of(folder: Path) -> list[Path]:
    """Images at and below the folder of a class, sorted."""
    return sorted(path for path in folder.rglob("*") if _is_image(path))


def labels_of(root: Path, split: str) -> dict[str, int]:
    """How many images of each class of the training split another one has; its own other classes behind them."""
    counts = {name: len(images_of(folder)) for name, folder in class_folders(root, split).items()}
    return {name: counts.get(name, 0) for name in dict.fromkeys((*class_folders(root, TRAIN), *counts))}


class FolderDataset:
    """One split of such a set; implements `SegmentationDataset`."""

    layout = LAYOUT
    background = False

    def __init__(self, root: Path, split: str, classes: Sequence[str] | None = None) -> None:
        """List the images.

        Args:
            classes: names of those to learn, in this order; images of others are left out. None for all.

        Raises:
            InputError: no such folders, an unknown class, or a class of this split that training has not.
        """
        self.root = root
        known = list(class_folders(root, TRAIN))
        found = class_folders(root, split)
        if len(known) < 2:
            raise InputError(f"{root} has no folders of two classes or more: classification reads {EXAMPLE}.")
        if not found:
            raise data_error(root, f"{root} has no images in folders of classes for the split {split}: {EXAMPLE}.")
        if strange := next((name for name in found if name not in known), None):
            cause = f"The split {split} of {root} has the class '{strange}', and training has not."
            raise data_error(root, f"{cause}{suggest(strange, known)}")
        for name in classes or ():
            if name not in known:
                raise InputError(
                    f"{root} has no class '{name}'.{suggest(name, known)} Its classes: {', '.join(known)}."
                )
        self.class_names = tuple(classes or known)
        self._images = [
            (path, number)
            for number, name in enumerate(self.class_names)
            if name in found
            for path in images_of(found[name])
        ]
        self.names = [path.relative_to(root).as_posix() for path, _ in self._images]

    def __len__(self) -> int:
        return len(self._images)

    def load(self, index: int) -> Sample:
        """Decode one image.

        Raises:
            InputError: it cannot be decoded.
        """
        path, number = self._images[index]
        try:
            pixels = read_image(path)
        except ImageError as error:
            raise data_error(self.root, f"{path} {error}.") from error
        mask = np.broadcast_to(np.array(number, class_type(len(self.class_names))), pixels.shape[:2])
        return Sample(pixels, mask, self.names[index])


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in IMAGE_SUFFIXES and path.is_file()
