"""A folder of any known layout into a dataset folder: what `fp4deploy data import` does without annotation files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fp4deploy.data.dataset import has_split
from fp4deploy.data.importing.folder import Imported, write_coco
from fp4deploy.data.importing.masks import import_masks
from fp4deploy.data.importing.pairs import IMAGES, MASKS, LabelledImages, find_layout, masks_beside, pair
from fp4deploy.data.importing.splits import require_shares
from fp4deploy.data.importing.yolo import is_yolo, yolo_contents
from fp4deploy.data.sample import TRAIN
from fp4deploy.errors import InputError

KNOWN = (
    f"images/ beside labels/ or masks/ (also {', '.join(IMAGES[1:])}; {', '.join(MASKS[1:])}), YOLO (data.yaml), "
    "Cityscapes (leftImg8bit/ and gtFine/) and nnU-Net (dataset.json and imagesTr/)"
)


def import_folder(
    source: Path | None,
    images: Path | None,
    masks: Path | None,
    out: Path,
    *,
    suffix: str = "",
    val_share: float = 0.0,
    test_share: float = 0.0,
    seed: int = 0,
    **options: Any,
) -> list[Imported]:
    """Make the dataset folder `out` of a folder of a known layout, or of two folders.

    Args:
        source: a folder of a known layout; or None, and images: a folder of images, whose masks lie in `masks`, or in a
            folder of a usual name beside it.
        suffix: as of `pairs.pair`.
        options: as of `import_masks`.

    Raises:
        InputError: no such layout; or as `import_masks` and `write_coco`.
    """
    if source is not None and not source.is_dir():
        raise InputError(f"There is no folder {source}. Layouts that are read: {KNOWN}.")
    if source is not None and is_yolo(source) and images is None:
        if out.exists():
            raise InputError(f"{out} exists already. Choose another --out.")
        contents, places = yolo_contents(source)
        shares = require_shares(set(contents), val_share, test_share, "")
        return write_coco(contents, places.__getitem__, out, shares, seed)
    found = _pairs(source, images, masks, suffix)
    return import_masks(found, out, val_share=val_share, test_share=test_share, seed=seed, **options)


def _pairs(source: Path | None, images: Path | None, masks: Path | None, suffix: str) -> LabelledImages:
    if source is not None and images is None:
        found = find_layout(source, suffix)
        if found is None and has_split(source, TRAIN):
            raise InputError(f"{source} is a dataset already. Train on it with: fp4deploy train --data {source}")
        if found is None:
            raise InputError(f"{source} has none of the layouts that are read: {KNOWN}. Or give --images and --masks.")
        return found
    if images is None:
        raise InputError("Nothing to import: give a folder, --images DIR with --masks DIR, or --train-json FILE.")
    beside = masks or masks_beside(images)
    if beside is None:
        raise InputError(f"The masks of {images} are not beside it ({', '.join(MASKS)}). Give them with: --masks DIR")
    return LabelledImages(pair(images, beside, suffix))
