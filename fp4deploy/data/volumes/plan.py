"""The input contract of a set of volumes: spacing, size of the network's input and intensities, by its training cases.

    spacing       the median of each axis; of an axis of thick slices (more than `ANISOTROPIC` times the finest) the
                  tenth percentile
    size          the median size at that spacing, each side down to a multiple of 16 (below that of 8), at most
                  `LARGEST`
    intensities   of a channel called CT: clipped to the 0.5 and 99.5 percentiles of the labelled voxels, then by their
                  mean and standard deviation, since Hounsfield units mean the same in every volume; of another channel
                  by the mean and standard deviation of each volume

Source: Isensee et al., "nnU-Net", 2021, for spacing and intensities.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fp4deploy.data.sample import data_error, spread
from fp4deploy.data.volumes.layout import Case, Layout
from fp4deploy.data.volumes.nifti import Spacing, VolumeError, read_grid, read_labels, read_volume
from fp4deploy.data.volumes.resample import ANISOTROPIC, size_at
from fp4deploy.models.volumes import Intensity, VolumeInput

CT = "ct"
LARGEST = 96  # voxels of a side of the network's input, unless another is chosen
STEP = 16
MAX_READ = 64  # cases whose intensities are read, evenly spaced
MAX_VALUES = 10_000  # voxels of each of them
PERCENTILES = (0.5, 99.5)


def plan(
    layout: Layout, cases: Sequence[Case], spacing: Spacing | None = None
) -> tuple[VolumeInput, tuple[int, int, int]]:
    """Spacing, depth and intensities of a set, and the size [D, H, W] of the network's input.

    Args:
        cases: the training cases.
        spacing: another one than that of the module's table.

    Raises:
        InputError: a file cannot be read.
    """
    grids = []
    for case in cases:
        try:
            grids.append(read_grid(case.images[0]))
        except VolumeError as error:
            raise data_error(layout.root, f"{case.images[0]} {error}") from error
    target = spacing or _spacing(np.array([grid.spacing for grid in grids]))
    sizes = np.array([size_at(grid.size, grid.spacing, target) for grid in grids])
    depth, height, width = (_side(side) for side in np.median(sizes, axis=0))
    intensities = tuple(_intensity(layout, cases, channel) for channel in range(len(layout.channels)))
    return VolumeInput(depth, target, layout.channels, intensities), (depth, height, width)


def _spacing(found: np.ndarray) -> Spacing:
    chosen = np.median(found, axis=0)
    thick = chosen > ANISOTROPIC * chosen.min()
    chosen[thick] = np.percentile(found[:, thick], 10, axis=0)
    depth, height, width = (float(step) for step in chosen)
    return depth, height, width


def _side(side: float) -> int:
    most = min(int(side), LARGEST)
    return max(8, most - most % (STEP if most >= STEP else 8))


def _intensity(layout: Layout, cases: Sequence[Case], channel: int) -> Intensity:
    if layout.channels[channel].lower() != CT:
        return Intensity()
    found = []
    random = np.random.default_rng(0)
    for at in spread(len(cases), MAX_READ):
        path = cases[at].images[channel]
        try:
            voxels, _ = read_volume(path)
            path = cases[at].labels
            labels, _ = read_labels(path)
        except VolumeError as error:
            raise data_error(layout.root, f"{path} {error}") from error
        if labels.shape == voxels.shape:
            inside = voxels[(labels > 0) & (labels != layout.ignored)]
            found.append(random.choice(inside, min(MAX_VALUES, len(inside)), replace=False) if len(inside) else inside)
    values = np.concatenate(found) if found else np.zeros(0, np.float32)
    if len(values) < 2 or values.std() == 0:
        return Intensity()
    low, high = np.percentile(values, PERCENTILES)
    return Intensity(float(low), float(high), float(values.mean()), float(values.std()))
