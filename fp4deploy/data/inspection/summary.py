"""What a dataset holds: images, classes, sizes of each split, and images that are in two splits.

A validation image that is also trained on makes every score too good. Such images are found by content: files of equal
bytes, whatever their names are (COCO128's two splits are one folder of the same files).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fp4deploy.data.coco.annotations import CocoFile, parse
from fp4deploy.data.dataset import has_split, require_folder
from fp4deploy.data.folders import class_folders, images_of, is_class_folders, labels_of
from fp4deploy.data.images import ImageError, image_size, read_class_ids
from fp4deploy.data.layouts import find_annotations, find_images, has_masks, mask_files, split_images
from fp4deploy.data.masks import class_colours, class_values
from fp4deploy.data.sample import ALL_SPLITS
from fp4deploy.data.volumes.check import grids_of, masks_with
from fp4deploy.data.volumes.layout import is_volumes, read_layout
from fp4deploy.errors import InputError
from fp4deploy.system.files import file_digest
from fp4deploy.system.progress import Phase


@dataclass(frozen=True)
class SplitSummary:
    """One split; `sizes` are width and height of the smallest, the median and the largest image by pixels.

    Of volumes: width, height and depth; `spacings`: millimetres along them of the finest, median and coarsest grid.

    `annotations` counts regions by class, None for semantic masks; `in_masks` counts the masks that a class is in, None
    where there are none. Of folders of classes, `annotations` counts the images of each.
    """

    split: str
    images: int
    annotations: dict[str, int] | None
    sizes: tuple[tuple[int, ...], ...]
    in_masks: dict[str, int] | None = None
    spacings: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True)
class Shared:
    """One image in two splits, by the paths of the two files."""

    first: str
    second: str


def parse_splits(root: Path) -> dict[str, CocoFile]:
    """The annotation files of a dataset by split: none of a set of masks.

    Raises:
        InputError: `root` is not a dataset folder.
    """
    require_folder(root)
    return {split: parse(path) for split in ALL_SPLITS if (path := find_annotations(root, split))}


def summarise(
    root: Path, parsed: Mapping[str, CocoFile] | None = None, phase: Phase = lambda text, done, of: None
) -> list[SplitSummary]:
    """The splits that can be read; `parsed` is what `parse_splits` gives, where the caller has it.

    phase: told how many masks of a split are read.

    Raises:
        InputError: `root` is not a dataset folder.
    """
    parsed = parse_splits(root) if parsed is None else parsed
    return [_summary(root, split, parsed.get(split), phase) for split in ALL_SPLITS if has_split(root, split)]


def shared_images(root: Path, parsed: Mapping[str, CocoFile] | None = None) -> list[Shared]:
    """Images that two splits have in common, by content; only files of equal size are read. `parsed` as of `summarise`.

    Raises:
        InputError: `root` is not a dataset folder.
    """
    parsed = parse_splits(root) if parsed is None else parsed
    by_size: dict[int, list[tuple[Path, str]]] = {}
    for split in ALL_SPLITS:
        for path in _files(root, split, parsed.get(split)):
            if path.is_file():
                by_size.setdefault(path.stat().st_size, []).append((path, split))
    found = []
    for equal in by_size.values():
        if len({split for _, split in equal}) < 2:
            continue
        first: dict[str, tuple[Path, str]] = {}
        for path, split in equal:
            before, origin = first.setdefault(file_digest(path), (path, split))
            if origin != split:
                found.append(Shared(before.relative_to(root).as_posix(), path.relative_to(root).as_posix()))
    return found


def _summary(root: Path, split: str, parsed: CocoFile | None, phase: Phase) -> SplitSummary:
    files = _files(root, split, parsed)
    if is_volumes(root):
        grids = grids_of(root, split)
        sizes = _three([grid.size[::-1] for grid in grids])
        spacings = _three([tuple(round(step, 6) for step in grid.spacing[::-1]) for grid in grids])
        return SplitSummary(split, len(grids), None, sizes, masks_with(root, split, phase), spacings)
    if is_class_folders(root):
        return SplitSummary(split, len(files), labels_of(root, split), _sizes(files))
    annotations = None
    if parsed is not None and not has_masks(root):
        annotations = dict.fromkeys(parsed.categories.values(), 0)
        for annotation in parsed.annotations:
            annotations[parsed.categories[annotation.category_id]] += 1
    in_masks = _in_masks(root, split, phase) if has_masks(root) else None
    return SplitSummary(split, len(files), annotations, _sizes(files), in_masks)


def _in_masks(root: Path, split: str, phase: Phase) -> dict[str, int]:
    """Masks that each class is in; what cannot be read is left to `check_dataset`."""
    try:
        classes, colours = class_values(root), class_colours(root)
    except InputError:
        return {}
    counts = np.zeros(256, np.int64)
    paths = mask_files(root, split).values()
    for number, path in enumerate(paths):
        phase(f"masks of {split}", number, len(paths))
        with suppress(ImageError):
            counts[np.unique(read_class_ids(path, colours))] += 1
    return {name: int(counts[value]) for name, value in classes.items()}


def _files(root: Path, split: str, parsed: CocoFile | None) -> list[Path]:
    if is_volumes(root):
        return [path for case in read_layout(root).cases(split) for path in case.images]
    if is_class_folders(root):
        return [path for folder in class_folders(root, split).values() for path in images_of(folder)]
    if has_masks(root):
        return list(split_images(root, split).values())
    folder = find_images(root, split)
    if parsed is None or folder is None:
        return []
    return [folder / record.file_name for record in parsed.images.values()]


def _sizes(files: Sequence[Path]) -> tuple[tuple[int, int], ...]:
    sizes = []
    for path in files:
        try:
            sizes.append(image_size(path))
        except ImageError:
            continue  # `check_dataset` lists it
    return _three(sizes)


def _three(values: Sequence[tuple[Any, ...]]) -> tuple[tuple[Any, ...], ...]:
    """Of sizes, or of sides of voxels, the smallest, the median and the largest by their product."""
    ordered = sorted(values, key=math.prod)
    return (ordered[0], ordered[len(ordered) // 2], ordered[-1]) if ordered else ()
