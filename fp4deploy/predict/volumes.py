"""Volumes in, masks out: NIfTI files of the input's own grid, affine and header.

    files of a case -> axes turned, normalised, at the model's spacing -> network in windows -> scores at the file's own
    voxels -> most likely class -> axes turned back

    OUT/CASE.nii.gz          the value of a voxel is its class
    OUT/predictions.json     the model, the runtime, the classes, and what each volume has of them

Scores of all classes are many times a volume. Above `HELD` they are written to a file that is mapped into memory, a
band of slices at a time, and read again in bands; the volume itself is held. A case that cannot be read does not stop
the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4deploy.bench.runtimes.protocol import Runtime
from fp4deploy.data.sample import Pixels
from fp4deploy.data.tiles import sliding_window
from fp4deploy.data.volumes.dataset import normalised
from fp4deploy.data.volumes.nifti import (
    SUFFIXES,
    Grid,
    VolumeError,
    is_mask,
    is_volume,
    name_of,
    read_volume,
    write_labels,
)
from fp4deploy.data.volumes.resample import most_likely, resample_image, size_at
from fp4deploy.errors import InputError
from fp4deploy.models.card import ModelCard
from fp4deploy.predict.write import LISTING, in_the_way, require_own
from fp4deploy.system.children import owned_folder
from fp4deploy.system.files import write_json

HELD = 1 << 30  # bytes of scores that are held in memory
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class VolumeSource:
    """A case: its name, and a file for each channel."""

    name: str
    files: tuple[Path, ...]


def holds_volumes(given: Sequence[str]) -> bool:
    """Whether volumes are given: a NIfTI file, or a folder with one."""
    paths = [Path(text) for text in given]
    return any(is_volume(path) or (path.is_dir() and any(map(is_volume, path.iterdir()))) for path in paths)


def find_volumes(given: Sequence[str], channels: Sequence[str]) -> list[VolumeSource]:
    """The cases of files and folders, in order and without repeats.

    Args:
        channels: of the model. With several, a case is CASE_0000.nii.gz, CASE_0001.nii.gz, ..., of which any file, or
            the folder, is given; with one, the number may be left out.

    Raises:
        InputError: a file is missing, is no volume, or two cases would be written to one file.
    """
    files: dict[Path, None] = {}
    for text in given:
        path = Path(text)
        found = sorted(filter(is_volume, path.iterdir())) if path.is_dir() else [path]
        if not found or not all(map(is_volume, found)) or not found[0].is_file():
            cause = "holds no volume" if path.is_dir() else "is no volume" if path.exists() else "does not exist"
            raise InputError(f"{path} {cause}. Files of {' or '.join(SUFFIXES)} are read, and folders of them.")
        files.update(dict.fromkeys(found))
    cases: dict[tuple[Path, str], VolumeSource] = {}
    for path in files:
        ending = path.name[len(name_of(path)) :]
        case, _, number = name_of(path).rpartition("_")
        numbered = bool(case) and len(number) == 4 and number.isdigit()
        if not numbered and len(channels) > 1:
            raise InputError(
                f"{path}: the model reads {len(channels)} channels ({', '.join(channels)}), each of a file of its own: "
                f"{name_of(path)}_0000{ending}, {name_of(path)}_0001{ending}, ..."
            )
        name = case if numbered else name_of(path)
        members = [path.with_name(f"{name}_{channel:04d}{ending}") for channel in range(len(channels))]
        source = VolumeSource(name, tuple(members) if numbered else (path,))
        other = cases.setdefault((path.parent, name), source)
        if other != source or any(key[1] == name and key[0] != path.parent for key in cases):
            raise InputError(f"Two cases are called {name}. Predict them one after the other, each with its --out.")
    return list(cases.values())


def predict_volume(
    runtime: Runtime, files: Sequence[Path], mirror: bool = False, batch: int = 1, progress: Progress | None = None
) -> tuple[Pixels, Grid]:
    """Classes uint8 [D, H, W] of one case at the voxels of its files, and their grid.

    Args:
        files: one for each channel of the model.
        mirror: average over the mirror images of each window: eight calls of the network for one.
        batch: windows given to the network at once.
        progress: called with what is counted, how much is done, and of how much.

    Raises:
        InputError: a file cannot be read, or the files lie on different grids.
    """
    card = runtime.card
    assert card.volume is not None
    volume, grid = _read(card, files)
    bands = sliding_window(volume, card.size, runtime.infer, batch, mirror)
    depth = volume.shape[1]
    size = volume.shape[1:]
    scores: NDArray[np.float32] | None = None
    large = card.channels * volume[0].nbytes > HELD
    with owned_folder() if large else nullcontext() as folder:
        for first, band in bands:
            if scores is None:
                shape = (len(band), *size)
                scores = np.empty(shape, np.float32) if folder is None else _mapped(folder / "scores", shape)
            scores[:, first : first + band.shape[1]] = band
            if progress:
                progress("slices", first + band.shape[1], depth)
        assert scores is not None
        labels = most_likely(scores, grid.size)
        del scores
    return labels, grid


def _mapped(path: Path, shape: tuple[int, ...]) -> NDArray[np.float32]:
    return np.memmap(path, np.float32, "w+", shape=shape)


def _read(card: ModelCard, files: Sequence[Path]) -> tuple[NDArray[np.float32], Grid]:
    """A case as the model reads it, float32 [C, D, H, W]."""
    assert card.volume is not None
    grid: Grid | None = None
    channels: list[NDArray[np.float32]] = []
    for path, intensity in zip(files, card.volume.intensities, strict=True):
        try:
            voxels, own = read_volume(path)
            if grid is not None and (differs := own.differs(grid, files[0].name)):
                raise VolumeError(differs)
        except VolumeError as error:
            raise InputError(f"{path} {error}") from error
        grid = own
        size = size_at(grid.size, grid.spacing, card.volume.spacing)
        channels.append(resample_image(normalised(voxels, intensity), size, grid.spacing))
    assert grid is not None
    return np.stack(channels), grid


def predict_volumes(
    runtime: Runtime,
    document: dict[str, object],
    sources: Sequence[VolumeSource],
    out: Path,
    mirror: bool = False,
    batch: int = 1,
    progress: Progress | None = None,
) -> tuple[dict[str, object], list[str]]:
    """Predict cases into a folder; files of earlier predictions with the same names are replaced.

    Args:
        document: the part of predictions.json that is the same for all of them (`write.describe`).

    Returns:
        (content of predictions.json, one message for each case that could not be read).

    Raises:
        InputError: the folder cannot be written.
    """
    entries: list[dict[str, Any]] = []
    failures: list[str] = []
    names = runtime.card.class_names
    require_own(out)
    for path in (out / f"{source.name}{SUFFIXES[0]}" for source in sources):
        if os.path.lexists(path) and not is_mask(path):  # such as the volume that is read
            raise in_the_way(path)
    try:
        for source in sources:
            entry: dict[str, Any] = {"files": [str(path) for path in source.files]}
            try:
                labels, grid = predict_volume(runtime, source.files, mirror, batch, progress)
            except InputError as error:
                failures.append(str(error))
                entries.append({**entry, "error": str(error)})
                continue
            mask = f"{source.name}{SUFFIXES[0]}"
            write_labels(out / mask, labels, grid)
            entry |= {"mask": mask, "size": list(grid.size), "spacing_mm": list(grid.spacing)}
            entries.append({**entry, "classes": _classes(labels, grid, names)})
    finally:  # also after Ctrl-C: what is there is described
        document = {**document, "mirror": mirror, "images": entries}
        write_json(out / LISTING, document)
    return document, failures


def _classes(labels: Pixels, grid: Grid, names: Sequence[str]) -> list[dict[str, object]]:
    """The classes in a volume, the largest first: id, name, voxels, share of the volume in 0..1, and millilitres."""
    counts = np.bincount(labels.ravel(), minlength=len(names))
    found = sorted(np.flatnonzero(counts).tolist(), key=lambda number: -counts[number])
    return [
        {
            "id": number,
            "name": names[number],
            "voxels": int(counts[number]),
            "share": float(counts[number] / labels.size),
            "ml": float(counts[number] * np.prod(grid.spacing) / 1000),
        }
        for number in found
    ]
