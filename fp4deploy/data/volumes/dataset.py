"""One split of a set of volumes: each is normalised, brought to the spacing of the plan, and labelled."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fp4deploy.data.sample import IGNORE, TRAIN, Pixels, Sample, data_error, select_classes
from fp4deploy.data.volumes.layout import read_layout
from fp4deploy.data.volumes.nifti import Grid, Spacing, VolumeError, Voxels, read_labels, read_volume
from fp4deploy.data.volumes.plan import plan
from fp4deploy.data.volumes.resample import resample_image, resample_labels, size_at
from fp4deploy.models.volumes import Intensity, VolumeInput


class VolumeDataset:
    """Cases of a folder in the raw layout; implements `SegmentationDataset`.

    input: spacing, channels and intensities. size: [D, H, W] of the network's input that suits the set; None where a
    model's input was given.
    """

    layout = "volumes"
    background = True

    def __init__(
        self, root: Path, split: str, classes: Sequence[str] | None = None, volume: VolumeInput | None = None
    ) -> None:
        """Find the cases and the plan.

        Args:
            split: "train", "val" or "test".
            classes: names to learn besides the background, in this order; None for all. Others are background.
            volume: the input contract of a model; by default that of the set (`plan`).

        Raises:
            InputError: there is no case, dataset.json is unusable, or the model reads other channels.
        """
        self.root, self._layout = root, read_layout(root)
        self.cases = self._layout.cases(split)
        if not self.cases:
            part = "labelsTs" if split == "test" else "labelsTr"
            raise data_error(root, f"The dataset {root} has no case of the split {split} in {part}.")
        background, *others = self._layout.classes
        self.class_names = (background, *select_classes(others, classes, root))
        self._class_of = np.full(IGNORE + 1, 0, np.uint8)
        self._class_of[[self._layout.classes[name] for name in self.class_names]] = range(len(self.class_names))
        if self._layout.ignored is not None:
            self._class_of[self._layout.ignored] = IGNORE
        self.size: tuple[int, int, int] | None = None
        if volume is None:
            self.input, self.size = plan(self._layout, self._layout.cases(TRAIN))
        else:
            self.input = volume
            if len(volume.channels) != len(self._layout.channels):
                raise data_error(
                    root,
                    f"The model reads the channels {', '.join(volume.channels)}, and {root} has "
                    f"{', '.join(self._layout.channels)}.",
                )

    def __len__(self) -> int:
        return len(self.cases)

    def at(self, spacing: Spacing) -> VolumeDataset:
        """The same cases at another spacing."""
        found = copy.copy(self)
        found.input, found.size = plan(self._layout, self._layout.cases(TRAIN), spacing)
        return found

    def keep(self, places: Sequence[int]) -> None:
        """Keep the cases at these places alone."""
        self.cases = [self.cases[place] for place in places]

    def load(self, index: int) -> Sample:
        """A case at the spacing of `input`: float32 [C, D, H, W] normalised, and labels uint8 [D, H, W].

        Raises:
            InputError: a file cannot be read, or the files of the case do not go together.
        """
        case = self.cases[index]
        labels, grid = self.truth(index)
        size = size_at(grid.size, grid.spacing, self.input.spacing)
        channels = []
        for path, intensity in zip(case.images, self.input.intensities, strict=True):
            voxels = self._voxels(path, grid, case.labels)
            channels.append(resample_image(normalised(voxels, intensity), size, grid.spacing))
        return Sample(np.stack(channels), resample_labels(labels, size), case.name)

    def truth(self, index: int) -> tuple[Pixels, Grid]:
        """Classes uint8 [D, H, W] of a case at its own spacing, and their grid.

        Raises:
            InputError: the mask cannot be read, or holds a value that is no label.
        """
        path = self.cases[index].labels
        try:
            values, grid = read_labels(path)
            known = [*self._layout.classes.values(), *([] if self._layout.ignored is None else [self._layout.ignored])]
            unknown = unlisted(values, known)
            if len(unknown):
                raise VolumeError(f"holds the value {unknown[0]}, which dataset.json does not list.")
        except VolumeError as error:
            raise data_error(self.root, f"{path} {error}") from error
        return self._class_of[values], grid

    def _voxels(self, path: Path, grid: Grid, labels: Path) -> Voxels:
        try:
            voxels, own = read_volume(path)
            if differs := own.differs(grid, f"its mask {labels.name}"):
                raise VolumeError(differs)
        except VolumeError as error:
            raise data_error(self.root, f"{path} {error}") from error
        return voxels


def normalised(voxels: Voxels, intensity: Intensity) -> Voxels:
    """Voxels of one channel as the network reads them, of any shape; a volume of one value becomes 0."""
    if intensity.low is not None or intensity.high is not None:
        voxels = np.clip(voxels, intensity.low, intensity.high)
    mean = np.float32(voxels.mean(dtype=np.float64) if intensity.mean is None else intensity.mean)
    std = np.float32(voxels.std(dtype=np.float64) if intensity.std is None else intensity.std)
    return (voxels - mean) / max(std, np.float32(1e-8))


def unlisted(values: NDArray[np.int64], listed: Sequence[int]) -> NDArray[np.int64]:
    """The values of a mask that are none of `listed`, in ascending order."""
    found = np.unique(values)
    return found[~np.isin(found, listed)]
