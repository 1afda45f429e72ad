"""Masks, overlays, objects and a summary of many images.

    OUT/NAME.mask.png        indexed PNG at the image's own size: the value of a pixel is its class id
    OUT/NAME.overlay.png     the classes, or the objects, drawn over the image
    OUT/NAME.overlay.mp4     of a video
    OUT/instances.json       COCO: images, categories, annotations with score, box and mask (instance models)
    OUT/predictions.json     the model, the runtime, the classes with their colours, and what each image has of them

Every file is written as soon as it is known, and an image that cannot be read does not stop the others.
"""

from __future__ import annotations

import io
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain, groupby
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from PIL import Image
from pydantic import Field

from fp4deploy.bench.records import Record
from fp4deploy.data.palette import colours
from fp4deploy.errors import InputError
from fp4deploy.predict.decode import CPU, THREADS, Decoded, Decoder, Found, host_pixels
from fp4deploy.predict.pipeline import Frame
from fp4deploy.predict.prediction import Prediction
from fp4deploy.predict.predictor import Predictor
from fp4deploy.predict.sources import Source
from fp4deploy.predict.video import predict_video
from fp4deploy.system.files import write_json, write_whole
from fp4deploy.system.schema import read_json, validated
from fp4deploy.tasks import task_of

SCHEMA = "fp4deploy.predictions/1"
LISTING, OBJECTS = "predictions.json", "instances.json"
MAX_BYTES = 1 << 30
# zlib's levels. Measured fact: AMD EPYC, 2026-11-30, Pillow 13, 30 photographs of COCO and CamVid, +-5 %: level 2 takes
# 0.33 of the time of level 6, Pillow's default, and 1.06 of the bytes; level 1 is no faster.
PHOTO_LEVEL, MASK_LEVEL = 2, 6


class _Listing(Record):
    """What `require_own` reads of predictions.json."""

    schema_: Annotated[str, Field(alias="schema", pattern=r"fp4deploy\.predictions/.*")]


def require_own(out: Path, *names: str) -> None:
    """Refuse to replace predictions.json, and files with names that a user may give to others, unless it is of ours.

    Raises:
        InputError: the folder holds one, and no predictions.json that `describe` began.
    """
    present = next((name for name in (LISTING, *names) if os.path.lexists(out / name)), None)
    if present is None:
        return
    try:
        validated(_Listing, read_json(out / LISTING, most=MAX_BYTES), out / LISTING)
    except InputError:
        raise in_the_way(out / present) from None


def in_the_way(path: Path) -> InputError:
    """The error of a file that is not of an earlier prediction."""
    return InputError(
        f"{path} is in the way: no prediction wrote it, and only what fp4deploy wrote is ever replaced. Choose another "
        "folder with --out."
    )


@dataclass
class Written:
    """What `predict_files` has done so far: entries of predictions.json, COCO images and annotations, and failures."""

    entries: list[dict[str, Any]] = field(default_factory=list)
    images: list[dict[str, Any]] = field(default_factory=list)
    annotations: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def add(self, begun: Begun) -> None:
        """What predictions.json has of a source, and of one with objects what instances.json has."""
        entry = begun.entry
        self.entries.append(entry)
        if begun.objects is None:
            return
        number, size = len(self.images) + 1, {key: entry[key] for key in ("height", "width")}
        self.images.append({"id": number, "file_name": entry["file"], **size})
        for each in begun.objects:
            self.annotations.append({"id": len(self.annotations) + 1, "image_id": number, **each})


@dataclass
class Begun:
    """A source whose `files` are being written: its entry, and its objects where the model finds some."""

    entry: dict[str, Any]
    files: list[Future[None]] = field(default_factory=list)
    objects: list[dict[str, Any]] | None = None


def predict_files(
    predictor: Predictor,
    model: Path,
    sources: Sequence[Source],
    out: Path,
    batch: int = 1,
    overlays: bool = True,
    progress: Callable[[int, str], None] | None = None,
    decoder: Decoder = CPU,
) -> tuple[dict[str, object], list[str]]:
    """Predict images and videos into a folder; files of earlier predictions with the same names are replaced.

    Args:
        batch: images given to the network at once.
        overlays: also draw every image.
        progress: called with the number of sources done and the name of the last one.
        decoder: of image files.

    Returns:
        (content of predictions.json, one message for each source that could not be predicted).

    Raises:
        InputError: the folder cannot be written.
    """
    require_own(out, *([OBJECTS] if task_of(predictor.card).counts_objects else []))
    written = Written()
    begun: deque[Begun] = deque()

    def settle(most: int) -> None:
        while len(begun) > most:
            for file in begun[0].files:
                file.result()
            written.add(begun.popleft())

    try:
        with ThreadPoolExecutor(THREADS) as threads:
            for number, (source, result) in enumerate(_results(predictor, sources, out, batch, decoder), start=1):
                begun.append(_entry(written, predictor, source, result, out, overlays, threads))
                settle(THREADS)
                if progress:
                    progress(number, str(source.path))
            settle(0)
    finally:  # also after Ctrl-C: what is there is described
        for each in begun:
            if not any(file.exception() for file in each.files):
                written.add(each)
        document = {**describe(predictor, model), "images": written.entries}
        write_json(out / LISTING, document)
        if task_of(predictor.card).counts_objects:
            write_json(out / OBJECTS, _coco(predictor, written))
    return document, written.failures


def describe(predictor: Predictor, model: Path) -> dict[str, object]:
    """The part of predictions.json that is the same for all images."""
    card, runtime = predictor.card, predictor.runtime
    names = predictor.class_names
    palette = colours(names, predictor.background)
    return {
        "schema": SCHEMA,
        "model": str(model),
        "runtime": runtime.name,
        "device": runtime.device,
        "precision": runtime.precision,
        "input": dict(zip(("depth", "height", "width")[-len(card.size) :], card.size, strict=True)),
        "tile": {"overlap": predictor.overlap} if predictor.tile else None,
        "classes": [
            {"id": number, "name": name, "colour": "#{:02x}{:02x}{:02x}".format(*colour) if colour else None}
            for number, (name, colour) in enumerate(zip(names, palette, strict=True))
        ],
    }


def png_bytes(image: Image.Image) -> bytes:
    """An image as PNG; a photograph with little compression."""
    target = io.BytesIO()
    image.save(target, format="PNG", compress_level=PHOTO_LEVEL if image.mode == "RGB" else MASK_LEVEL)
    return target.getvalue()


Result = Prediction | dict[str, Any] | InputError


def _results(
    predictor: Predictor, sources: Sequence[Source], out: Path, batch: int, decoder: Decoder
) -> Iterator[tuple[Source, tuple[Decoded | None, Result]]]:
    """Each source with its pixels and prediction, the summary of its video, or the error that it met."""
    for are_videos, some in groupby(sources, lambda source: source.is_video):
        if are_videos:
            yield from ((source, (None, _video(predictor, source, out, batch))) for source in some)
        else:
            yield from _images(predictor, list(some), batch, decoder)


def _images(
    predictor: Predictor, sources: Sequence[Source], batch: int, decoder: Decoder
) -> Iterator[tuple[Source, tuple[Decoded | None, Result]]]:
    pending: deque[tuple[Source, Found]] = deque()

    def batches() -> Iterator[list[Frame]]:
        chosen: list[Frame] = []
        for source, found in zip(sources, decoder([source.path for source in sources]), strict=True):
            pending.append((source, found))
            if not isinstance(found, InputError):
                chosen.append(found.pixels)
            if len(chosen) == batch:
                yield chosen
                chosen = []
        if chosen:
            yield chosen

    answers = chain.from_iterable(predictor.predict_batches(batches()))
    for result in chain(answers, [None]):  # files that cannot be read may be behind the last
        while pending and isinstance(error := pending[0][1], InputError):
            yield pending.popleft()[0], (None, error)
        if result is not None:
            source, decoded = pending.popleft()
            assert not isinstance(decoded, InputError)
            named = InputError(f"{source.path}: {result}") if isinstance(result, InputError) else result
            yield source, (decoded, named)


def _video(predictor: Predictor, source: Source, out: Path, batch: int) -> Result:
    try:
        target = out / f"{source.name}.overlay.mp4"
        return predict_video(
            predictor, str(source.path), target, batch, lambda frames: predictor.progress("frames", frames, None)
        )
    except InputError as error:
        return error


def _entry(
    written: Written,
    predictor: Predictor,
    source: Source,
    result: tuple[Decoded | None, Result],
    out: Path,
    overlays: bool,
    threads: ThreadPoolExecutor,
) -> Begun:
    """What predictions.json has of a source, and the files that `threads` write of it."""
    decoded, found = result
    entry: dict[str, Any] = {"file": str(source.path)}
    if isinstance(found, InputError):
        written.failures.append(str(found))
        return Begun(entry | {"error": str(found)})
    if not isinstance(found, Prediction):
        return Begun(entry | {"overlay": f"{source.name}.overlay.mp4", **found})
    assert decoded is not None
    height, width = found.mask.shape
    entry |= {"decoder": decoded.decoder, "height": height, "width": width, "mask": None, "overlay": None}
    images = {"mask": found.mask_image()} if found.has_mask else {}
    if overlays:
        images["overlay"] = Image.fromarray(found.overlay(host_pixels(decoded.pixels)))
    entry |= {kind: f"{source.name}.{kind}.png" for kind in images}
    files = [threads.submit(_write_png, out / entry[kind], image) for kind, image in images.items()]
    entry["classes"], objects = found.classes(), None
    if found.counts_objects:
        objects = found.objects()
        entry["objects"] = len(objects)
    return Begun(entry, files, objects)


def _write_png(path: Path, image: Image.Image) -> None:
    write_whole(path, png_bytes(image))


def _coco(predictor: Predictor, written: Written) -> dict[str, object]:
    categories = [{"id": number, "name": name} for number, name in enumerate(predictor.class_names) if number]
    return {"images": written.images, "categories": categories, "annotations": written.annotations}


def mean_shares(entries: Sequence[dict[str, Any]]) -> list[tuple[str, int, float]]:
    """(class, images that have it, mean share of all images' pixels in 0..1), the largest share first."""
    shares: dict[str, list[float]] = {}
    measured = [entry for entry in entries if "classes" in entry]
    for entry in measured:
        for found in (each for each in entry["classes"] if "share" in each):
            shares.setdefault(found["name"], []).append(found["share"])
    rows = [(name, len(values), float(np.sum(values) / len(measured))) for name, values in shares.items()]
    return sorted(rows, key=lambda row: -row[2])


def objects_of_classes(entries: Sequence[dict[str, Any]]) -> list[tuple[str, int, int]]:
    """(class, images that have it, objects in all images) of a detector's entries; [] for other models."""
    counts: dict[str, list[int]] = {}
    for entry in entries:
        for found in (each for each in entry.get("classes", []) if "objects" in each):
            counts.setdefault(found["name"], []).append(found["objects"])
    return [(name, len(values), sum(values)) for name, values in counts.items()]


def likeliest_classes(entries: Sequence[dict[str, Any]]) -> list[tuple[str, int, float]]:
    """(class, images whose likeliest it is, their mean score in 0..1) of a classifier's entries, the most first."""
    scores: dict[str, list[float]] = {}
    for entry in entries:
        for found in entry.get("classes", [])[:1]:
            if "score" in found:
                scores.setdefault(found["name"], []).append(found["score"])
    rows = [(name, len(values), float(np.mean(values))) for name, values in scores.items()]
    return sorted(rows, key=lambda row: -row[1])
