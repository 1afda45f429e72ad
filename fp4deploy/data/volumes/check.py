"""Every defect of a set of volumes, and its summary, for `fp4deploy data check`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from fp4deploy.data.coco.annotations import Defect
from fp4deploy.data.sample import ALL_SPLITS, SPLITS, TEST
from fp4deploy.data.volumes.dataset import unlisted
from fp4deploy.data.volumes.layout import Case, Layout, read_layout
from fp4deploy.data.volumes.nifti import Grid, VolumeError, read_grid, read_labels, read_volume
from fp4deploy.errors import InputError


def check_volumes(root: Path, phase: Callable[[str, int, int], None]) -> list[Defect]:
    """Read every file of every split, on all cores; an empty list means that training can read everything.

    Raises:
        InputError: dataset.json is unusable.
    """
    layout, defects = read_layout(root), []
    for split in ALL_SPLITS:
        try:
            cases = layout.cases(split)
        except InputError as error:
            return [Defect("splits_final.json", None, "broken-json", str(error))]
        if not cases and split in SPLITS:
            defects.append(Defect("labelsTr", None, "missing-file", f"holds no case of the split {split}."))
        if split == TEST and not layout.has(split):
            continue  # images without masks are there to be predicted
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # decompression releases the GIL
            for done, found in enumerate(pool.map(lambda case: list(_case_defects(layout, case)), cases)):
                phase(f"volumes of {split}", done + 1, len(cases))
                defects += found
    return defects


def grids_of(root: Path, split: str) -> list[Grid]:
    """The grids of a split's volumes, of those that can be read."""
    found = []
    for case in read_layout(root).cases(split):
        try:
            found.append(read_grid(case.images[0]))
        except VolumeError:
            continue  # `check_volumes` lists it
    return found


def masks_with(root: Path, split: str, phase: Callable[[str, int, int], None]) -> dict[str, int]:
    """Masks that each class is in, of those that can be read."""
    layout = read_layout(root)
    cases = layout.cases(split)
    counts = dict.fromkeys(layout.classes, 0)
    for done, case in enumerate(cases):
        phase(f"masks of {split}", done, len(cases))
        try:
            present = set(np.unique(read_labels(case.labels)[0]).tolist())
        except VolumeError:
            continue
        for name, value in layout.classes.items():
            counts[name] += value in present
    return counts


def _case_defects(layout: Layout, case: Case) -> Iterator[Defect]:
    def defect(path: Path, kind: str, message: object) -> Defect:
        return Defect(path.relative_to(layout.root).as_posix(), None, kind, str(message))

    grid = None
    try:
        values, grid = read_labels(case.labels)
        listed = [*layout.classes.values(), *([] if layout.ignored is None else [layout.ignored])]
        if len(unknown := unlisted(values, listed)):
            shown = ", ".join(str(value) for value in unknown[:6])
            known = ", ".join(f"{value} {name}" for name, value in layout.classes.items())
            yield defect(case.labels, "unknown-label", f"holds {shown}; dataset.json lists {known}.")
    except VolumeError as error:
        yield defect(case.labels, "unreadable-mask" if case.labels.exists() else "missing-mask", error)
    for channel, path in enumerate(case.images):
        if not path.exists():
            yield defect(path, "missing-channel", f"does not exist: channel {channel}, {layout.channels[channel]}.")
            continue
        try:
            _, own = read_volume(path)
            if grid is not None and (differs := own.differs(grid, f"its mask {case.labels.name}")):
                yield defect(path, "grids-differ", differs)
        except VolumeError as error:
            yield defect(path, "unreadable-volume", error)
