"""`fp4deploy bench --pipeline`: images a second from frames to masks, with the share of each part."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp4deploy.errors import InputError

from ...artifacts import write_json
from ...console import note, notes, results, shown, table, typed

if TYPE_CHECKING:
    from fp4deploy.bench.runtimes.like import Like
    from fp4deploy.data.sample import Pixels


def pipeline(
    chosen: list[tuple[Path, dict[str, Any]]],
    data: Path,
    split: str,
    batch: int,
    timeout: float,
    like: Like | None,
    out: str | None,
) -> None:
    """Measure each artefact on a batch of the images of a data set's split, a folder or a file; print a row of each.

    Raises:
        InputError: nothing to measure, no image, or a model whose output is no map of classes.
    """
    from fp4deploy.bench.environment import environment
    from fp4deploy.bench.runtimes.open import open_for_images
    from fp4deploy.errors import UnavailableError
    from fp4deploy.predict.pipeline import PARTS, Pipeline, frames_of

    frames = frames_of(*_images(data, split), batch)
    height, width = frames.shape[1:3]
    note(f"Batches of {batch} images of {width} x {height} pixels of {shown(data)}.")
    numbers = (*PARTS, "overlapped", "images/s", "x network")
    found, rows = [], []
    for path, settings in chosen:
        try:
            runtime = open_for_images(path, timeout, like=like, **settings)
        except UnavailableError as error:
            note(f"Not {shown(path)}: {error}")
            continue
        try:
            pipelined = Pipeline(runtime)
            measured = pipelined.times(frames).to_json()
        except InputError as error:
            raise InputError(f"{shown(path)}: {error} Its latency: fp4deploy bench {typed(path)}") from error
        note(f"{shown(path)}: network on {runtime.device}; prepare and classes on {pipelined.beside}.")
        about = {"path": str(path), "runtime": runtime.name, "precision": runtime.precision}
        devices = {part: runtime.device if part == "network" else pipelined.beside for part in PARTS}
        found.append({**about, "devices": devices, **measured})
        parts = [f"{measured['ms'][part]:.2f} ({100 * measured['share'][part]:.0f} %)" for part in PARTS]
        whole = measured["ms"]["overlapped"]
        rates = ["-" if whole is None else f"{whole:.2f}", f"{measured['images_per_s']:.1f}"]
        rows.append([shown(path), runtime.name, *parts, *rates, f"{measured['over_network']:.2f}"])
    if not found:
        raise InputError("None of these artefacts runs here. What this machine can run: fp4deploy doctor")
    printed = table(("artefact", "runtime", *numbers), rows, right=numbers)
    (notes() if out == "-" else results()).print(printed)
    write_json({"pipeline": found, "height": height, "width": width, "environment": environment()}, out)


def _images(data: Path, split: str) -> tuple[Callable[[int], Pixels], int]:
    """What decodes each of the images, and how many they are; labels are not images.

    Raises:
        InputError: there are none, they are volumes, or a video is given.
    """
    from fp4deploy.data import VAL, PhotoDataset, are_photos
    from fp4deploy.data.folders import is_class_folders
    from fp4deploy.data.volumes.layout import is_volumes
    from fp4deploy.predict.predictor import as_pixels
    from fp4deploy.predict.sources import find_sources
    from fp4deploy.tasks import TASKS

    if data.is_dir() and is_volumes(data):
        raise InputError(f"--pipeline is of images, and {data} holds volumes. Time its network by: fp4deploy bench")
    if data.is_dir() and not are_photos(data):
        task = TASKS["classification" if is_class_folders(data) else "semantic"]
        dataset = task.open(data, split, labelled=False)
        return lambda at: dataset.load(at).image, len(dataset)
    if split != VAL:
        raise InputError(f"--split is of a data set, and {data} is none: all its images are taken. Leave out --split.")
    if data.is_dir():
        photos = PhotoDataset(data)
        return lambda at: photos.load(at).image, len(photos)
    sources = find_sources([str(data)])
    if any(source.is_video for source in sources):
        raise InputError(f"--pipeline is measured on images, and {data} is a video. Name images: --data PATH")
    return lambda at: as_pixels(sources[at].path), len(sources)
