"""Which image of an imported set goes into which split, and how its files get there.

A split is taken by the name of each image: SHA-256 of seed and name, read as a number in [0, 1). So an image stays in
its split when others are added, and the division is the same on every machine. Copies of one file, whatever they are
called, go where the first of their names goes: an image that is also trained on makes every score too good.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

from fp4deploy.data.sample import TEST, TRAIN, VAL
from fp4deploy.errors import InputError
from fp4deploy.system.files import file_digest

SHARE = "give a share of the images: --val-share 0.2"


def require_shares(given: set[str], val_share: float, test_share: float, files: str) -> dict[str, float]:
    """The shares by split, where they make a validation split.

    Args:
        given: splits that the source has.
        files: what gives the source's validation split, for the message.

    Raises:
        InputError: there would be no validation split, a split twice, or no image left to train on.
    """
    for split, share in ((VAL, val_share), (TEST, test_share)):
        if share and split in given:
            raise InputError(f"--{split}-share divides the training images, and there is a split {split} already.")
    if VAL not in given and not val_share:
        raise InputError(f"There is no validation split: {files}{SHARE}")
    if val_share + test_share >= 1:
        raise InputError(f"--val-share and --test-share take {val_share + test_share:g} of the images; leave some.")
    return {VAL: val_share, TEST: test_share}


def divide(places: Mapping[str, Path], shares: Mapping[str, float], seed: int) -> dict[str, str]:
    """The split of every image, by its name; `places` says where the files lie."""
    ends, taken = [], 0.0
    for split, share in shares.items():
        if share:
            taken += share
            ends.append((taken, split))

    def split_of(name: str) -> str:
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        number = int.from_bytes(digest[:8], "big") / 2**64
        return next((split for end, split in ends if number < end), TRAIN)

    return {name: split_of(first) for name, first in _firsts(places).items()}


def _firsts(places: Mapping[str, Path]) -> dict[str, str]:
    """Of every image the first name among those with the same content; only files of equal size are read."""
    by_size: defaultdict[int, list[str]] = defaultdict(list)
    for name in sorted(places):
        by_size[places[name].stat().st_size].append(name)
    found: dict[str, str] = {}
    for names in by_size.values():
        first: dict[str, str] = {}
        for name in names:
            found[name] = first.setdefault(file_digest(places[name]), name) if len(names) > 1 else name
    return found


def require_images(counts: Mapping[str, int]) -> None:
    """Raise InputError for a split that got no image."""
    for split, count in counts.items():
        if not count:
            raise InputError(f"No image falls into the split {split}. Give a larger share, or another --seed.")


def flat_names(names: list[str]) -> dict[str, str]:
    """A name without folders for every image; those that would share one, whatever their suffix, get a number.

    Raises:
        InputError: numbers do not tell them apart.
    """
    found: dict[str, str] = {}
    used: Counter[str] = Counter()
    for name in names:
        path = Path(name.replace("\\", "/"))
        used[path.stem] += 1
        found[name] = path.name if used[path.stem] == 1 else f"{path.stem}.{used[path.stem]}{path.suffix}"
    if len({Path(each).stem for each in found.values()}) < len(found):
        raise InputError("Two images would get one name. Rename images such as a.2.jpg.")
    return found


def link(source: Path, target: Path) -> None:
    """The same file under another name; a copy where the file system cannot."""
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)
