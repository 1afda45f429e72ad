"""Small sets of NIfTI volumes in the raw layout: bright ellipsoids, whose class is their brightness, in noise."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

nibabel = pytest.importorskip("nibabel", reason="nibabel is missing: pip install -e '.[medical]' -c constraints.txt")


def affine_of(axes: str, spacing: Sequence[float]) -> np.ndarray:
    """The affine of a file whose axes run towards these, such as "LPS", with millimetres along each."""
    start = nibabel.orientations.axcodes2ornt(axes)
    affine = np.zeros((4, 4))
    for own, (to, sign) in enumerate(start):
        affine[int(to), own] = sign * spacing[own]
    affine[:3, 3], affine[3, 3] = (5.0, -7.0, 11.0), 1.0
    return affine


def scene(shape: Sequence[int], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Voxels float32 and labels uint8 of one volume, of the file's axes."""
    random = np.random.default_rng(seed)
    labels = np.zeros(shape, np.uint8)
    grids = np.meshgrid(*(np.arange(side) for side in shape), indexing="ij")
    for value in (1, 2):
        centre = [random.uniform(0.3, 0.7) * side for side in shape]
        inside = sum(((at - c) / (0.22 * side)) ** 2 for at, c, side in zip(grids, centre, shape, strict=True)) < 1
        labels[inside] = value
    voxels = 100 * labels + random.normal(0, 20, shape)
    return voxels.astype(np.float32), labels


def write_set(
    root: Path,
    train: int = 5,
    test: int = 1,
    shape: Sequence[int] = (20, 22, 18),
    spacing: Sequence[float] = (1.0, 1.0, 1.0),
    axes: str = "RAS",
    channels: Sequence[str] = ("MRI",),
) -> Path:
    """Write a set; every fifth training case is validated on."""
    description = {
        "channel_names": {str(number): name for number, name in enumerate(channels)},
        "labels": {"background": 0, "small": 1, "large": 2},
        "numTraining": train,
        "file_ending": ".nii.gz",
    }
    for part, count in (("Tr", train), ("Ts", test)):
        for number in range(count):
            voxels, labels = scene(shape, seed=number + 100 * (part == "Ts"))
            for channel in range(len(channels)):
                write(
                    root / f"images{part}" / f"case_{number:03d}_{channel:04d}.nii.gz",
                    voxels * (channel + 1),
                    axes,
                    spacing,
                )
            write(root / f"labels{part}" / f"case_{number:03d}.nii.gz", labels, axes, spacing)
    (root / "dataset.json").write_text(json.dumps(description))
    return root


def write(path: Path, values: np.ndarray, axes: str = "RAS", spacing: Sequence[float] = (1.0, 1.0, 1.0)) -> None:
    """Write an array as a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(values, affine_of(axes, spacing)), path)
