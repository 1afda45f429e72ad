"""Opening a dataset folder, whichever of the two layouts it has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fp4deploy.data.coco import CocoDataset
from fp4deploy.data.masks import MaskDataset
from fp4deploy.data.sample import SPLITS, SegmentationDataset
from fp4deploy.errors import InputError

LAYOUTS = (
    "annotations/instances_{train,val}2017.json with {train,val}2017/ (COCO), "
    "or masks/{train,val}/*.png with {train,val}/ (semantic masks)"
)


def has_masks(root: Path) -> bool:
    """Whether a folder has the masks layout, which takes priority over COCO annotations beside it."""
    return any((root / "masks" / split).is_dir() for split in SPLITS)


def require_folder(root: Path) -> None:
    """Raise InputError unless `root` is a folder with one of the two layouts."""
    if not root.is_dir():
        cause = "is not a folder" if root.exists() else "does not exist"
        raise InputError(f"The dataset folder {root} {cause}. To make a generated one: fp4deploy data shapes DIR")
    if not has_masks(root) and not (root / "annotations").is_dir():
        raise InputError(
            f"{root} is not a dataset folder: it needs {LAYOUTS}. To see an example: fp4deploy data shapes DIR"
        )


def open_dataset(root: Path, split: str, classes: Sequence[str] | None = None) -> SegmentationDataset:
    """Open one split of a dataset.

    Args:
        root: folder with COCO annotations or with PNG masks; masks win where both are there.
        split: "train" or "val".
        classes: names of the classes to learn, in this order; None for all.

    Raises:
        InputError: the folder, its layout or its content is wrong; the message ends with the next command.
    """
    root = Path(root)
    if split not in SPLITS:
        raise InputError(f"There is no split '{split}'; the splits are: {', '.join(SPLITS)}.")
    require_folder(root)
    return MaskDataset(root, split, classes) if has_masks(root) else CocoDataset(root, split, classes)
