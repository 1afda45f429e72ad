"""Images and masks of any folders into a dataset folder of masks: `fp4deploy data import --images DIR --masks DIR`.

The masks that people have are not numbered: 0 and 255, grey levels with soft edges, greyscale saved as RGB, JPEG. Here
they become PNG files of one channel whose pixel is the number of the class, and 255 is void:

| values of all masks | class |
|---|---|
| with a threshold | 1 from it on, else 0 |
| two, of which one is 255 | 0 and 1: binary masks |
| a few, far apart, without 255 | their number in order |
| others | as they are |

Masks that are numbered already are linked like the images, not written again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from fp4deploy.data.images import ImageError, check_size, open_image, read_class_ids
from fp4deploy.data.importing.folder import Imported
from fp4deploy.data.importing.pairs import LabelledImages, Pair
from fp4deploy.data.importing.splits import divide, flat_names, link, require_images, require_shares
from fp4deploy.data.inspection.labels import Histogram, value_defect
from fp4deploy.data.masks import class_colours
from fp4deploy.data.sample import ALL_SPLITS, IGNORE, TRAIN, Pixels
from fp4deploy.errors import InputError, counted
from fp4deploy.system.files import atomic_write
from fp4deploy.system.processors import cores

Advance = Callable[[str, int, int | None], None]
Say = Callable[[str], None]
MAX_NAMED = 3
SAME = 3  # largest difference between the channels of a grey pixel, after JPEG


def import_masks(
    found: LabelledImages,
    out: Path,
    *,
    val_share: float = 0.0,
    test_share: float = 0.0,
    seed: int = 0,
    classes: Sequence[str] = (),
    threshold: int | None = None,
    say: Say = lambda text: None,
    progress: Advance = lambda text, done, of: None,
) -> list[Imported]:
    """Make the dataset folder `out`; `annotations` of the result counts masks.

    Args:
        found: images and masks, with splits or without.
        val_share, test_share: of the images without a split, or of those of "train".
        classes: names by number; else those of the layout.
        threshold: value from which on a pixel is of class 1.

    Raises:
        InputError: files that cannot be read or differ in size, all in one message; values that are no classes; no
            validation split; `out` exists or cannot be written. Nothing is left behind.
    """
    if out.exists():
        raise InputError(f"{out} exists already. Choose another --out.")
    given = {each.split for each in found.pairs if each.split is not None}
    shares = require_shares(given, val_share, test_share, "")
    counts = _read_all(found.pairs, progress)
    table = found.table if found.table is not None else _classes_by_value(counts, threshold, say)
    names = tuple(classes) or found.names
    _require_classes(counts, table, names)
    undivided = [each for each in found.pairs if each.split in (None, TRAIN)]
    split_of = divide({each.name: each.image for each in undivided}, shares, seed)
    splits = {each.name: split_of.get(each.name, each.split or TRAIN) for each in found.pairs}
    wanted = [
        split for split in ALL_SPLITS if split in (TRAIN, *given, *(name for name, share in shares.items() if share))
    ]
    require_images({split: sum(each == split for each in splits.values()) for split in wanted})
    flat = {name: Path(each).stem for name, each in flat_names([each.name + ".png" for each in found.pairs]).items()}
    with atomic_write(out) as folder:
        for split in wanted:
            (folder / split).mkdir(parents=True)
            (folder / "masks" / split).mkdir(parents=True)
        for number, each in enumerate(found.pairs):
            progress("writing masks", number, len(found.pairs))
            split, stem = splits[each.name], flat[each.name + ".png"]
            link(each.image, folder / split / f"{stem}{each.image.suffix.lower()}")
            _write(each.mask, folder / "masks" / split / f"{stem}.png", table)
        if names:
            (folder / "classes.txt").write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    return [Imported(split, count, count) for split in wanted if (count := sum(s == split for s in splits.values()))]


def _read_all(pairs: Sequence[Pair], progress: Advance) -> Histogram:
    """[256]: pixels of each value in all masks, which are all read, and compared with their images in size."""
    counts, wrong = np.zeros(256, np.int64), []

    def read(each: Pair) -> Histogram | str:
        try:
            values = mask_values(each.mask)
            check_size(each.image, (values.shape[0], values.shape[1]))
            return np.bincount(values.ravel(), minlength=256)
        except ImageError as error:
            return f"{each.image if 'annotation says' in str(error) else each.mask} {error}"

    with ThreadPoolExecutor(cores()) as pool:
        for number, found in enumerate(pool.map(read, pairs)):
            progress("reading masks", number + 1, len(pairs))
            if isinstance(found, str):
                wrong.append(found)
            else:
                counts += found
    if wrong:
        more = f" And {len(wrong) - MAX_NAMED} more." if len(wrong) > MAX_NAMED else ""
        raise InputError(
            f"{counted(len(wrong), 'pair')} of image and mask, of {len(pairs)}, cannot be used: "
            f"{' '.join(wrong[:MAX_NAMED])}{more}"
        )
    return counts


def mask_values(path: Path) -> Pixels:
    """Values uint8 [H, W] of a mask; greyscale saved as RGB is read as greyscale, colours by a labelmap.txt near it.

    Raises:
        ImageError: it cannot be decoded, or has colours and there is no list of them.
    """
    image = open_image(path)
    if image.mode in ("RGB", "RGBA", "LA", "CMYK"):
        pixels = np.asarray(image.convert("RGB"))
        if (np.ptp(pixels.astype(np.int16), axis=-1) <= SAME).all():
            return pixels[..., 1]
        for folder in (path.parent, path.parent.parent):
            if colours := class_colours(folder):
                return read_class_ids(path, colours)
        seen = Counter(map(tuple, pixels.reshape(-1, 3)[:: max(1, pixels.size // 3_000_000)].tolist()))
        shown = "; ".join(",".join(map(str, colour)) for colour, _ in seen.most_common(4))
        raise ImageError(
            f"is a colour image. Write {path.parent / 'labelmap.txt'} with a line NAME:R,G,B:: for each class, in the "
            f"order of their numbers; its most frequent colours are {shown}."
        )
    return read_class_ids(path)


def _classes_by_value(counts: Histogram, threshold: int | None, say: Say) -> Pixels:
    """[256]: the class of each value, as the module's table says."""
    values = np.arange(256, dtype=np.uint8)
    present = [int(value) for value in np.flatnonzero(counts)]
    if threshold is not None:
        return (values >= threshold).astype(np.uint8)
    if len(present) == 2 and present[1] == IGNORE:
        say(f"Binary masks: {present[0]} is class 0, 255 is class 1.")
        return (values == IGNORE).astype(np.uint8)
    defect = value_defect(counts, max((v for v in present if v != IGNORE), default=0) + 1, False)
    if defect is not None and defect[0] == "sparse-values" and IGNORE not in present:
        table = np.full(256, IGNORE, np.uint8)
        table[present] = np.arange(len(present))
        say(f"Values {', '.join(map(str, present))} are the classes 0 to {len(present) - 1}.")
        return table
    return values


def _require_classes(counts: Histogram, table: Pixels, names: Sequence[str]) -> None:
    """Raise InputError where nothing could be learned from masks of these classes."""
    classes = np.zeros(256, np.int64)
    np.add.at(classes, table, counts)
    learned = np.flatnonzero(classes[:IGNORE])
    if names and len(learned) and learned[-1] >= len(names):
        raise InputError(
            f"The masks hold the values {', '.join(map(str, np.flatnonzero(counts)[:8]))}, classes 0 to {learned[-1]}, "
            f"and {len(names)} names are given: {', '.join(names[:8])}. Name them all with --classes a,b,c, or make "
            "two classes of them with --threshold N."
        )
    wrong = value_defect(classes, len(names) or int(learned.max(initial=0)) + 1, bool(names))
    if wrong is not None:
        advice = " A threshold is taken by: --threshold 128" if wrong[0] in ("grey-masks", "sparse-values") else ""
        raise InputError(f"The masks {wrong[1]}{advice}")


def _write(source: Path, target: Path, table: Pixels) -> None:
    """The mask with its classes as values; where they are its values already, the same file."""
    values = mask_values(source)
    classes = table[values]
    if (
        source.suffix.lower() == ".png"
        and np.array_equal(classes, values)
        and open_image(source).mode in ("L", "P", "1")
    ):
        link(source, target)
    else:
        Image.fromarray(classes).save(target)
