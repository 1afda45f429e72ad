"""Patches of volumes, as nnU-Net preprocesses and cuts them for its network."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fp4deploy.data.sample import evenly
from fp4deploy.data.volumes.nifti import Grid, VolumeError, is_volume, read_volume
from fp4deploy.errors import InputError, counted, named_cause
from fp4deploy.models.nnunet.folder import ResultsFolder

TRAINING = "imagesTr"
STEP = 0.5  # of a window, in parts of the patch: nnU-Net's default
Case = list[Path]


def find_cases(folder: Path, ending: str, channels: int) -> dict[str, Case]:
    """Files of each case by its name, in the order of channels: NAME_0000.nii.gz, NAME_0001.nii.gz.

    Args:
        folder: of images, or a raw data set, whose training images are taken.
        ending: of files, as of dataset.json.

    Raises:
        InputError: no folder, no such file, or a case lacks a channel.
    """
    folder = folder / TRAINING if (folder / TRAINING).is_dir() else folder
    if not folder.is_dir():
        raise InputError(f"There is no folder {folder} with images NAME_0000{ending}.")
    name = re.compile(r"(.+)_(\d{4})" + re.escape(ending) + r"\Z")
    cases: dict[str, Case] = {}
    for path in sorted(folder.iterdir()):
        found = name.match(path.name)
        if found:
            cases.setdefault(found[1], []).append(path)
    if not cases:
        raise InputError(
            f"{folder} holds no image NAME_0000{ending}, which this model reads (file_ending of dataset.json)."
        )
    for case, files in cases.items():
        wanted = [f"{case}_{channel:04}{ending}" for channel in range(channels)]
        held = [path.name for path in files]
        if held != wanted:
            raise InputError(
                f"{folder} holds {', '.join(held)}, and this model reads {counted(channels, 'channel')} of a case: "
                f"{', '.join(wanted)}."
            )
    return cases


def check_cases(cases: Mapping[str, Case]) -> None:
    """Read every NIfTI file of these cases: nnU-Net's readers take truncated files, and its workers end without a name.

    Raises:
        InputError: a file of four axes, truncated, with NaN, or channels on different grids; the first, and how many.
    """
    wrong = []
    for files in cases.values():
        first: Grid | None = None
        for path in filter(is_volume, files):
            try:
                _, grid = read_volume(path)
                apart = first and grid.differs(first, files[0].name)
                if apart:
                    raise VolumeError(apart)
                first = first or grid
            except VolumeError as error:
                wrong.append(f"{path} {error}")
    if wrong:
        more = f" {len(wrong) - 1} more of these files cannot be used either." if len(wrong) > 1 else ""
        raise InputError(wrong[0] + more)


def patches_of(folder: ResultsFolder, data: Path, count: int) -> list[torch.Tensor]:
    """`count` patches [1, C, *patch size] of preprocessed cases, evenly spaced over cases and windows.

    Args:
        data: a raw data set of nnU-Net (its training images), or a folder of images.

    Raises:
        InputError: there are none, or nnU-Net cannot read one.
    """
    ending = str(folder.dataset.get("file_ending", ".nii.gz"))
    cases = find_cases(Path(data), ending, folder.input_channels)
    names = _spaced(list(cases), count)
    each = -(-count // len(names))  # windows of a case
    found = [patch for name in names for patch in _windows(folder, cases[name], each)]
    return found[:count]


def _windows(folder: ResultsFolder, files: Case, count: int) -> list[torch.Tensor]:
    """Up to `count` of the windows that nnU-Net would predict of a case, [1, C, *patch size]."""
    from acvl_utils.cropping_and_padding.padding import pad_nd_image
    from nnunetv2.inference.sliding_window_prediction import compute_steps_for_sliding_window

    size = folder.patch_size
    volume = pad_nd_image(torch.from_numpy(_preprocessed(folder, files)), size, "constant", {"value": 0})
    steps = compute_steps_for_sliding_window(tuple(volume.shape[-len(size) :]), size, STEP)
    slices = [range(volume.shape[1])] if len(size) < volume.ndim - 1 else []  # a 2-D network sees each slice
    found = []
    for corner in _spaced(list(itertools.product(*slices, *steps)), count):
        cuts = [slice(start, start + length) for start, length in zip(corner[-len(size) :], size, strict=True)]
        place = (slice(None), *corner[: -len(size)], *cuts)
        found.append(volume[place][None].clone())
    return found


def _preprocessed(folder: ResultsFolder, files: Case) -> np.ndarray:
    """A case [C, *extents] as nnU-Net's preprocessor of the plans gives it."""
    from nnunetv2.utilities.plans_handling.plans_handler import PlansManager

    plans = PlansManager(folder.plans)
    configuration: Any = plans.get_configuration(folder.configuration)
    try:
        preprocessor = configuration.preprocessor_class(verbose=False)
        data, _, _ = preprocessor.run_case([str(file) for file in files], None, plans, configuration, folder.dataset)
    except Exception as error:  # readers raise what they like
        raise InputError(
            f"{files[0]} cannot be read and preprocessed by nnU-Net: {named_cause(error, 200)}."
        ) from error
    return np.ascontiguousarray(data, dtype=np.float32)


def _spaced(values: list[object], count: int) -> list[Any]:
    return [values[at] for at in evenly(len(values), count)]
