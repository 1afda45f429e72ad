"""The folder of a set of volumes, in the raw layout of nnU-Net:

    DIR/dataset.json                     channel_names {"0": "MRI"}, labels {"background": 0, "tumour": 1},
                                         file_ending ".nii.gz"
    DIR/imagesTr/CASE_0000.nii.gz        a file for each channel: CASE_0000, CASE_0001, ...
    DIR/labelsTr/CASE.nii.gz             the value of a voxel is its class
    DIR/imagesTs/, DIR/labelsTs/         a test split, where there is one
    DIR/splits_final.json                [{"train": [...], "val": [...]}, ...]: the first is used

Without splits_final.json every fifth case of imagesTr, in the order of their names, is validated on. A label called
"ignore" counts neither in the loss nor in a score. Labels of several values (regions) are not read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp4deploy.data.sample import IGNORE, MAX_CLASSES, TEST, VAL, data_error
from fp4deploy.data.volumes.nifti import SUFFIXES
from fp4deploy.models.volumes import MAX_CHANNELS
from fp4deploy.system.schema import read_json

DESCRIPTION, SPLITS_FILE = "dataset.json", "splits_final.json"
IGNORED = "ignore"  # a label of this name
EVERY = 5  # cases, one of which is validated on


@dataclass(frozen=True)
class Case:
    """One volume: a file for each channel, and its mask; the files need not exist."""

    name: str
    images: tuple[Path, ...]
    labels: Path


@dataclass(frozen=True)
class Layout:
    """What dataset.json says. classes: name -> value of the masks, background first; ignored: value of void voxels."""

    root: Path
    channels: tuple[str, ...]
    classes: dict[str, int]
    ignored: int | None
    ending: str

    def cases(self, split: str) -> list[Case]:
        """The cases of a split by name, of those that have an image or a mask.

        Raises:
            InputError: splits_final.json is unusable.
        """
        part = "Ts" if split == TEST else "Tr"
        folders = self.root / f"images{part}", self.root / f"labels{part}"
        images, labels = ({path.name.removesuffix(self.ending) for path in self._files(each)} for each in folders)
        names = sorted({name.rpartition("_")[0] for name in images if name.rpartition("_")[2].isdigit()} | labels)
        return [
            Case(
                name,
                tuple(folders[0] / f"{name}_{channel:04d}{self.ending}" for channel in range(len(self.channels))),
                folders[1] / f"{name}{self.ending}",
            )
            for name in (names if split == TEST else self._of_split(names, split))
        ]

    def has(self, split: str) -> bool:
        """Whether there are cases with masks."""
        return any(True for _ in self._files(self.root / ("labelsTs" if split == TEST else "labelsTr")))

    def _files(self, folder: Path) -> list[Path]:
        return sorted(folder.glob(f"*{self.ending}")) if folder.is_dir() else []

    def _of_split(self, names: list[str], split: str) -> list[str]:
        path = self.root / SPLITS_FILE
        if not path.is_file():
            return [name for at, name in enumerate(names) if (at % EVERY == EVERY - 1) == (split == VAL)]
        chosen = read_json(path)
        first = chosen[0] if isinstance(chosen, list) and chosen else None
        listed = first.get(split) if isinstance(first, dict) else None
        if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
            raise data_error(self.root, f'{path} must hold [{{"train": [CASE, ...], "val": [CASE, ...]}}].')
        unknown = [name for name in listed if name not in names]
        if unknown:
            raise data_error(self.root, f"{path} lists the case {unknown[0]}, of which there is no file in imagesTr.")
        return sorted(listed)


def is_volumes(root: Path) -> bool:
    """Whether a folder has this layout."""
    return (root / DESCRIPTION).is_file() and (root / "imagesTr").is_dir()


def read_layout(root: Path) -> Layout:
    """Read dataset.json.

    Raises:
        InputError: it is damaged, lacks a key, or describes what is not read.
    """
    path = root / DESCRIPTION
    content = read_json(path)
    given: dict[str, Any] = content if isinstance(content, dict) else {}
    channels, labels = given.get("channel_names"), given.get("labels")
    if not isinstance(channels, dict) or not isinstance(labels, dict):
        raise data_error(
            root,
            f'{path} must have channel_names, such as {{"0": "MRI"}}, and labels, such as {{"background": 0, "tumour": '
            "1}. (A set of the Medical Segmentation Decathlon is converted by nnU-Net's own script.)",
        )
    ending = given.get("file_ending", SUFFIXES[0])
    if ending not in SUFFIXES:
        raise data_error(
            root,
            f"{path}: file_ending is {str(ending)[:40]!r}, and files of {' or '.join(SUFFIXES)} are read. Images of "
            f"two axes become a dataset by: fp4deploy data import {root}",
        )
    names = [channels.get(str(number)) for number in range(len(channels))]
    if not 0 < len(names) <= MAX_CHANNELS or not all(isinstance(name, str) and name for name in names):
        raise data_error(root, f'{path}: channel_names must number 1 to {MAX_CHANNELS} channels "0", "1", ...')
    regions = [name for name, value in labels.items() if isinstance(value, list)]
    if regions:
        raise data_error(root, f"{path}: the label {regions[0]} is a region of several values, which is not read.")
    classes = {name: value for name, value in labels.items() if name != IGNORED}
    ordered = sorted(classes, key=lambda name: str(classes[name]).zfill(9))
    if [classes[name] for name in ordered] != list(range(len(classes))) or not 2 <= len(classes) < MAX_CLASSES:
        raise data_error(
            root, f"{path}: labels must number the background 0 and 1 to {MAX_CLASSES - 2} classes 1, 2, ..."
        )
    ignored = labels.get(IGNORED)
    if ignored is not None and (type(ignored) is not int or not 0 < ignored <= IGNORE):
        raise data_error(root, f"{path}: the label {IGNORED} must be a number of 1 to {IGNORE}.")
    return Layout(root, tuple(map(str, names)), {name: classes[name] for name in ordered}, ignored, ending)
