"""Opening a dataset folder, whichever of the layouts it has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fp4deploy.data.coco.boxes import BoxDataset
from fp4deploy.data.coco.dataset import CocoDataset
from fp4deploy.data.folders import class_folders, is_class_folders
from fp4deploy.data.layouts import LAYOUTS, find_annotations, has_mask_split, has_masks
from fp4deploy.data.masks import MaskDataset
from fp4deploy.data.sample import ALL_SPLITS, SegmentationDataset
from fp4deploy.data.volumes.dataset import VolumeDataset
from fp4deploy.data.volumes.layout import is_volumes, read_layout
from fp4deploy.errors import InputError
from fp4deploy.models.volumes import VolumeInput


def has_split(root: Path, split: str, instances: bool = False) -> bool:
    """Whether a folder has a split, in the layout that it is read in (`instances`: with object instances)."""
    if is_volumes(root):
        return not instances and read_layout(root).has(split)
    if is_class_folders(root):
        return not instances and bool(class_folders(root, split))
    if has_masks(root) and not instances:
        return has_mask_split(root, split)
    return find_annotations(root, split) is not None


def require_directory(root: Path) -> None:
    """Raise InputError unless `root` is a folder."""
    if not root.is_dir():
        cause = "is not a folder" if root.exists() else "does not exist"
        raise InputError(f"The dataset folder {root} {cause}. To make a generated one: fp4deploy data shapes DIR")


def require_folder(root: Path) -> None:
    """Raise InputError unless `root` is a folder with one of the layouts."""
    require_directory(root)
    if is_class_folders(root):
        return
    if not is_volumes(root) and not has_masks(root) and not any(find_annotations(root, split) for split in ALL_SPLITS):
        raise InputError(
            f"{root} is not a dataset folder: it needs {LAYOUTS}. Images and masks in other folders, YOLO, Cityscapes "
            f"and nnU-Net become one by: fp4deploy data import {root} --val-share 0.2 --out DIR. To see an example: "
            "fp4deploy data shapes DIR"
        )


def _require_pixels(root: Path) -> None:
    if is_class_folders(root):
        raise InputError(
            f"{root} holds folders of images, one folder a class, and neither masks nor boxes. Train on it with: "
            "--task classification"
        )


def require_split(split: str) -> None:
    """Raise InputError unless `split` is one that a dataset can have."""
    if split not in ALL_SPLITS:
        raise InputError(f"There is no split '{split}'; the splits are: {', '.join(ALL_SPLITS)}.")


def open_instances(
    root: Path | str, split: str, classes: Sequence[str] | None = None, stuff: Sequence[str] = (), numbered: bool = True
) -> CocoDataset:
    """Open one split with its object instances; arguments as of `open_dataset`, and more.

    Args:
        stuff: classes whose objects are not counted.
        numbered: samples carry the numbers of their objects (to train on; scoring takes the annotations).

    Raises:
        InputError: as `open_dataset`; and there are masks only, which do not tell objects apart.
    """
    masks = "which do not tell one object from the next. Instance segmentation needs"
    return CocoDataset(_with_objects(root, split, masks), split, classes, instances=numbered, stuff=stuff)


def open_boxes(root: Path | str, split: str, classes: Sequence[str] | None = None) -> BoxDataset:
    """Open one split with the boxes of its objects; arguments as of `open_dataset`.

    Raises:
        InputError: as `open_dataset`; and there are masks only, or a box is damaged.
    """
    return BoxDataset(_with_objects(root, split, "which have no boxes. Detection needs"), split, classes)


def _with_objects(root: Path | str, split: str, masks: str) -> Path:
    """The folder, which has annotations of objects; masks: what masks lack, and what needs it."""
    root = Path(root)
    require_split(split)
    require_folder(root)
    _require_pixels(root)
    if find_annotations(root, split) is None and (has_masks(root) or is_volumes(root)):
        raise InputError(
            f"{root} holds semantic masks, {masks} annotations/instances_{split}2017.json; or train with: "
            "--task semantic"
        )
    return root


def open_dataset(
    root: Path | str, split: str, classes: Sequence[str] | None = None, volume: VolumeInput | None = None
) -> SegmentationDataset:
    """Open one split of a dataset.

    Args:
        root: folder with volumes, COCO annotations or PNG masks; masks take priority where both exist.
        split: "train", "val" or "test".
        classes: names of the classes to learn, in this order; None for all.
        volume: of a model of volumes: its input contract, in place of the set's own.

    Raises:
        InputError: the folder, its layout or its content is wrong; the message ends with the next command.
    """
    root = Path(root)
    require_split(split)
    require_folder(root)
    _require_pixels(root)
    if is_volumes(root):
        return VolumeDataset(root, split, classes, volume)
    return MaskDataset(root, split, classes) if has_masks(root) else CocoDataset(root, split, classes)
