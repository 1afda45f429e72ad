"""A plain folder of images as a dataset without labels, for all that only looks at images.

Calibration, comparing an exported file with torch, and comparing a quantised network with its source need no labels. A
folder has no splits either: every fifth image, in the order of paths, is for validation, so that nothing is compared on
an image that calibration saw. Of fewer than five images all are for both. Folders of masks beside the images, by their
names, are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fp4deploy.data.dataset import has_split
from fp4deploy.data.images import IMAGE_SUFFIXES, ImageError, read_image
from fp4deploy.data.importing.pairs import MASKS
from fp4deploy.data.sample import ALL_SPLITS, IGNORE, TRAIN, Sample, SegmentationDataset, evenly
from fp4deploy.errors import InputError

EVERY = 5
MEASURED = 16  # images whose size is looked at
MULTIPLE, LONGEST = 32, 512  # pixels


class PhotoDataset:
    """Images without labels: every pixel is void; implements `SegmentationDataset`."""

    layout = "photos"
    background = False

    def __init__(self, folder: Path, split: str | None = None, class_names: Sequence[str] = ()) -> None:
        """List the images at and below a folder.

        Args:
            split: "train" for the images to calibrate on, another one for the rest; None for all.
            class_names: what the classes of a model are called; no pixel has one.

        Raises:
            InputError: there are none.
        """
        if not folder.is_dir():
            raise InputError(f"There is no folder {folder}. Give one with images: --data DIR")
        self.class_names = tuple(class_names)
        self._paths = sorted(
            path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file()
        )
        masks = [path for path in self._paths if not {*MASKS}.isdisjoint(path.relative_to(folder).parts[:-1])]
        if len(masks) < len(self._paths):
            self._paths = sorted({*self._paths} - {*masks})
        if not self._paths:
            raise InputError(f"{folder} is no dataset and holds no image ({', '.join(IMAGE_SUFFIXES)}).")
        if split is not None and len(self._paths) >= EVERY:
            self._paths = [path for at, path in enumerate(self._paths) if (at % EVERY < EVERY - 1) == (split == TRAIN)]

    def __len__(self) -> int:
        return len(self._paths)

    def load(self, index: int) -> Sample:
        """Decode one image.

        Raises:
            InputError: it cannot be decoded.
        """
        path = self._paths[index]
        try:
            pixels = read_image(path)
        except ImageError as error:
            raise InputError(f"{path} {error}") from error
        return Sample(pixels, np.full(pixels.shape[:2], IGNORE, np.uint8), path.name)


def usual_size(dataset: SegmentationDataset) -> tuple[int, int]:
    """Height and width for a network that does not say its own: the median of some images, in multiples of `MULTIPLE`.

    The longer side is `LONGEST` at most: a network is seldom trained on whole photos of a camera.

    Raises:
        InputError: an image cannot be decoded.
    """
    shapes = np.array([dataset.load(at).image.shape[:2] for at in evenly(len(dataset), MEASURED)])
    median = np.median(shapes, axis=0)
    height, width = np.maximum(1, np.round(median * min(1, LONGEST / median.max()) / MULTIPLE)) * MULTIPLE
    return int(height), int(width)


def are_photos(folder: Path) -> bool:
    """Whether a folder holds images and none of the layouts of a dataset."""
    return folder.is_dir() and not any(has_split(folder, split) for split in ALL_SPLITS)
