"""Video files and cameras: frames in, a video with the classes or objects drawn over it out. By OpenCV (extra `video`).

Frames are read, predicted and written one batch at a time, so a video of any length takes the memory of one batch.

OpenCV's FFmpeg goes by the content of a file and not by its name, and some of its formats are lists of other files and
addresses (`ffconcat`, `#EXTM3U`, `<MPD>`, SDP): a download `clip.mp4` could show another file of this machine, or ask a
server. A file is opened only where it begins as a container that holds its frames itself.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from fp4deploy.data.sample import Pixels
from fp4deploy.errors import InputError, UnavailableError
from fp4deploy.predict.predictor import Predictor
from fp4deploy.predict.sources import CAMERA
from fp4deploy.requirements import LIBRARIES
from fp4deploy.system.files import atomic_write

RATE = 25.0  # frames a second where the source does not tell
FASTEST = 1000.0
CODEC = "mp4v"
# The first byte of a list of files is never 0, and FFmpeg scores none of them above AVI or a named Matroska document.
CONTAINERS = {
    "MP4, MOV": re.compile(rb"\x00.{3}(ftyp|moov|mdat|free|skip|wide|pnot)", re.DOTALL),
    "AVI": re.compile(rb"RIFF.{4}AVI ", re.DOTALL),
    "Matroska, WebM": re.compile(rb"\x1a\x45\xdf\xa3.{0,200}\x42\x82.(matroska|webm)", re.DOTALL),
    "MPEG": re.compile(rb"\x00\x00\x01[\xb0-\xbf]"),
}


def require_opencv() -> None:
    """Raises UnavailableError where OpenCV is missing, with the command that adds it."""
    missing = LIBRARIES["cv2"].why_missing()
    if missing:
        raise UnavailableError(f"Videos and cameras are read by OpenCV: {missing}")


@contextmanager
def opened(source: str) -> Iterator[object]:
    """A video or a camera ("camera:0") as OpenCV reads it, closed at the end.

    Raises:
        UnavailableError: OpenCV is missing. InputError: the source cannot be opened, or is a list of other files.
    """
    require_opencv()
    import cv2

    live = source.startswith(CAMERA)
    if not live:
        _require_container(Path(source))
    capture = cv2.VideoCapture(_camera(source) if live else os.path.abspath(source))  # never "tcp:..." of a file name
    try:
        if not capture.isOpened():
            raise InputError(f"{source} cannot be opened as a {'camera' if live else 'video'}.")
        yield capture
    finally:
        capture.release()


def _require_container(path: Path) -> None:
    """Refuse a file that begins as none of `CONTAINERS`; one that is not there is left to OpenCV."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        start = file.read(256)
    if not any(pattern.match(start) for pattern in CONTAINERS.values()):
        raise InputError(
            f"{path} is no video by its content. Valid: {', '.join(CONTAINERS)}; lists of other files (ffconcat, M3U, "
            f"DASH, SDP) are not followed. Convert it: ffmpeg -i {path.name} {path.stem}_converted.mp4"
        )


def predict_video(
    predictor: Predictor, source: str, target: Path, batch: int, progress: Callable[[int], None] | None = None
) -> dict[str, object]:
    """`predict_frames` of a source that is opened for it."""
    with opened(source) as capture:
        return predict_frames(predictor, capture, source, target, batch, progress)


def predict_frames(
    predictor: Predictor,
    capture: Any,
    source: str,
    target: Path,
    batch: int,
    progress: Callable[[int], None] | None = None,
) -> dict[str, object]:
    """Predict all frames of a video or, until Ctrl-C, of a camera, and write the overlay video.

    Args:
        capture: the source, opened.
        source: its name.
        target: the .mp4 file; replaced when the last frame is written.
        batch: frames given to the network at once.
        progress: called with the frames done.

    Returns:
        frames, frames a second of the video, height, width, and the mean share of each class; of a detector the number
        of its boxes.

    Raises:
        InputError: the video cannot be decoded, or the target not be written.
    """
    import cv2

    rate = stated_rate(capture.get(cv2.CAP_PROP_FPS))
    found: dict[int, dict[str, Any]] = {}
    frames, size = 0, (0, 0)
    writer = None
    try:
        with atomic_write(target) as temporary:
            pending: deque[Pixels] = deque()

            def batches() -> Iterator[list[Pixels]]:
                reading = _frames(capture, source.startswith(CAMERA))
                while chosen := list(islice(reading, batch)):
                    pending.extend(chosen)
                    yield chosen

            for predictions in predictor.predict_batches(batches()):
                for prediction in predictions:
                    frames += 1
                    if isinstance(prediction, InputError):
                        raise InputError(f"{source}, frame {frames}: {prediction}") from prediction
                    pixels = pending.popleft()
                    if writer is None:
                        size = (pixels.shape[0], pixels.shape[1])
                        code = cv2.VideoWriter.fourcc(*CODEC)
                        writer = cv2.VideoWriter(str(temporary), code, rate, (size[1], size[0]))
                        if not writer.isOpened():
                            raise InputError(
                                f"{target} cannot be written: this OpenCV has no {CODEC} encoder, or no permission."
                            )
                    writer.write(np.ascontiguousarray(prediction.overlay(pixels)[..., ::-1]))
                    _add(found, prediction.classes())
                if progress:
                    progress(frames)
            if writer is None:
                raise InputError(f"{source} holds no frame that can be decoded.")
            writer.release()
    finally:
        if writer is not None:
            writer.release()
    return {
        "frames": frames,
        "frames_per_s": float(rate),
        "height": size[0],
        "width": size[1],
        "classes": _classes(found, frames),
    }


def _add(found: dict[int, dict[str, Any]], classes: list[dict[str, Any]]) -> None:
    """Add what a frame has of each class to what those before it had: shares, or boxes of a detector."""
    for each in classes:
        entry = found.setdefault(each["id"], {"id": each["id"], "name": each["name"]})
        key = "objects" if "objects" in each else "share"
        entry[key] = entry.get(key, 0) + each[key]


def _classes(found: dict[int, dict[str, Any]], frames: int) -> list[dict[str, object]]:
    """What a video has of each class, the most first: the mean share, or all boxes."""
    for entry in found.values():
        if "share" in entry:
            entry["share"] /= frames
    return sorted(found.values(), key=lambda entry: (-entry.get("objects", entry.get("share", 0)), entry["id"]))


def stated_rate(rate: float) -> float:
    """Frames a second as a file states them; `RATE` where that is no rate.

    >>> [stated_rate(rate) for rate in (29.97, 0.0, -1.0, 1e9, float("nan"), float("inf"))]
    [29.97, 25.0, 25.0, 25.0, 25.0, 25.0]
    """
    return rate if 0 < rate <= FASTEST else RATE


def _frames(capture: Any, live: bool) -> Iterator[Pixels]:
    """Frames as RGB; Ctrl-C is how the picture of a camera ends."""
    try:
        while True:
            good, frame = capture.read()
            if not good:
                return
            yield np.ascontiguousarray(frame[..., ::-1])
    except KeyboardInterrupt:
        if not live:
            raise


def _camera(source: str) -> int:
    number = source.removeprefix(CAMERA)
    if not re.fullmatch("[0-9]{1,3}", number):
        raise InputError(f"'{source}' names no camera; write its number: camera:0")
    return int(number)
