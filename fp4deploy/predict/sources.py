"""What to predict: files, folders, patterns, videos, cameras, stdin."""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fp4deploy.data.images import IMAGE_SUFFIXES
from fp4deploy.errors import InputError

STDIN = "-"
CAMERA = "camera:"
VIDEO_SUFFIXES = (".mp4", ".mov", ".avi", ".mkv", ".webm", ".m4v")


@dataclass(frozen=True)
class Source:
    """One image or video file; `name` is the stem of what is written for it, without a suffix."""

    path: Path
    name: str

    @property
    def is_video(self) -> bool:
        return self.path.suffix.lower() in VIDEO_SUFFIXES


def find_sources(given: Iterable[str]) -> list[Source]:
    """Expand files, folders (with their subfolders) and patterns, in order and without repeats.

    Results of several folders are written into one, so a name keeps the subfolder that it has below the folder that was
    given, and the suffix where two files differ in nothing else.

    Raises:
        InputError: nothing is there, or a file is neither an image nor a video.
    """
    found: dict[Path, Path] = {}  # path -> name with suffix, relative to what was given
    for text in given:
        for path, name in _expand(text):
            found.setdefault(path, name)
    stems = [name.with_suffix("") for name in found.values()]
    sources = []
    times = Counter(stems)
    for (path, name), stem in zip(found.items(), stems, strict=True):
        sources.append(Source(path, str(name if times[stem] > 1 else stem)))
    twice = next((name for name, count in Counter(source.name for source in sources).items() if count > 1), None)
    if twice is not None:
        raise InputError(
            f"Two of the given files are called {twice}. Predict them one after the other, each with its --out."
        )
    return sources


def _expand(text: str) -> list[tuple[Path, Path]]:
    path = Path(text)
    if path.is_dir():
        inside = sorted(each for each in path.rglob("*") if each.suffix.lower() in IMAGE_SUFFIXES and each.is_file())
        if not inside:
            raise InputError(f"{path} holds no image ({', '.join(IMAGE_SUFFIXES)}).")
        return [(each, each.relative_to(path)) for each in inside]
    if path.is_file():
        if path.suffix.lower() not in (*IMAGE_SUFFIXES, *VIDEO_SUFFIXES):
            valid = ", ".join((*IMAGE_SUFFIXES, *VIDEO_SUFFIXES))
            raise InputError(f"{path} is neither an image nor a video by its name. Valid: {valid}.")
        return [(path, Path(path.name))]
    matching = sorted(glob.glob(text, recursive=True)) if glob.has_magic(text) else []
    known = (*IMAGE_SUFFIXES, *VIDEO_SUFFIXES)
    files = [path for path in map(Path, matching) if path.suffix.lower() in known and path.is_file()]
    if not files:
        kind = "No image matches" if glob.has_magic(text) else "There is no file or folder"
        raise InputError(f"{kind} {text}.")
    return [(each, Path(each.name)) for each in files]
