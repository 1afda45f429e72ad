"""Images and their masks where they lie, by layout: the folders of people, Cityscapes, nnU-Net's raw datasets.

| layout | images | masks |
|---|---|---|
| two folders | any files below one | below the other, of the same name, before a suffix such as "_L" |
| siblings | images/, image/, imgs/, JPEGImages/, photos/ | labels/, masks/, mask/, annotations/, gt/ beside it |
| Cityscapes | leftImg8bit/{train,val}/CITY/X_leftImg8bit.png | gtFine/{train,val}/CITY/X_gtFine_labelIds.png |
| nnU-Net, images | imagesTr/CASE_0000.png | labelsTr/CASE.png, named in dataset.json |

Splits are those of Cityscapes, and those that both of two folders have as folders of their own; others are made.
Cityscapes' ids become its 19 classes, and the others void, as its benchmark counts them; its test split has no labels.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fp4deploy.data.images import IMAGE_SUFFIXES
from fp4deploy.data.layouts import ALIASES, has_mask_split
from fp4deploy.data.sample import ALL_SPLITS, IGNORE, MAX_CLASSES, TRAIN, VAL, Pixels
from fp4deploy.errors import InputError, counted
from fp4deploy.system.schema import briefly, read_json

IMAGES = ("images", "image", "imgs", "img", "JPEGImages", "photos")
MASKS = ("masks", "mask", "labels", "label", "annotations", "gt", "SegmentationClass")
MASK_ADVICE = "Give both folders: --images DIR --masks DIR"
CITYSCAPES = {  # class by label id, as its benchmark counts them
    7: "road", 8: "sidewalk", 11: "building", 12: "wall", 13: "fence", 17: "pole", 19: "traffic light",
    20: "traffic sign", 21: "vegetation", 22: "terrain", 23: "sky", 24: "person", 25: "rider", 26: "car",
    27: "truck", 28: "bus", 31: "train", 32: "motorcycle", 33: "bicycle",
}  # fmt: skip
MAX_NAMED = 3  # files in a message
MAX_TRIED = 20  # images whose name, and more, is looked for among the masks


@dataclass(frozen=True)
class Pair:
    """An image and its mask; `name` tells it from others, without suffix; `split` None where none is given."""

    name: str
    image: Path
    mask: Path
    split: str | None = None


@dataclass(frozen=True)
class LabelledImages:
    """Images with masks; `names` of the classes, () where nobody says them.

    table: [256], the class of each value of the masks; None where they are to be read from the masks.
    """

    pairs: tuple[Pair, ...]
    names: tuple[str, ...] = ()
    table: Pixels | None = None


def find_layout(root: Path, suffix: str = "") -> LabelledImages | None:
    """Images and masks of a folder in one of the layouts; None where it has none of them. suffix: as of `pair`.

    Raises:
        InputError: it has, but cannot be read.
    """
    if (root / "leftImg8bit").is_dir() or (root / "gtFine").is_dir():
        return _cityscapes(root)
    if (root / "dataset.json").is_file() and (root / "imagesTr").is_dir():
        return _nnunet(root)
    images, masks = (_first_folder(root, names) for names in (IMAGES, MASKS))
    if images is None and has_mask_split(root, TRAIN) and (root / "masks").is_dir():
        images, masks = root, root / "masks"  # this project's own layout, whose values may be none of classes
    if images is None or masks is None or images == masks or not any(_files(masks)):
        return None
    return LabelledImages(pair(images, masks, suffix))


def masks_beside(images: Path) -> Path | None:
    """The folder of masks beside a folder of images, if there is one."""
    return _first_folder(images.resolve().parent, MASKS) if images.name in IMAGES else None


def pair(images: Path, masks: Path, suffix: str = "") -> tuple[Pair, ...]:
    """Every image below one folder with the mask of its name below the other.

    suffix: what the name of a mask has after that of its image.

    Raises:
        InputError: images without a mask or masks without an image, all in one message; with the suffix that would
            explain them.
    """
    for folder in (images, masks):
        if not folder.is_dir():
            raise InputError(f"There is no folder {folder}. {MASK_ADVICE}")
    pictures, labels = _by_name(images, masks), _by_name(masks, images)
    if not pictures or not labels:
        empty = masks if pictures else images
        raise InputError(f"{empty} holds no image ({', '.join(IMAGE_SUFFIXES)}). {MASK_ADVICE}")
    found = [(name, name + suffix) for name in pictures if name + suffix in labels]
    lonely = sorted(pictures.keys() - {name for name, _ in found})
    unused = sorted(labels.keys() - {mask for _, mask in found})
    if lonely or unused:
        raise InputError(_unpaired(images, masks, suffix, lonely, unused))
    return tuple(Pair(name, pictures[name], labels[mask], _split_of(name)) for name, mask in found)


def _unpaired(images: Path, masks: Path, suffix: str, lonely: list[str], unused: list[str]) -> str:
    """What has no partner, and what would make pairs of it."""
    parts = []
    if lonely:
        wanted = f"{Path(lonely[0]).name}{suffix}"
        parts.append(
            f"{counted(len(lonely), 'image')} of {images} without a mask ({_some(lonely)}; wanted {wanted}.png)"
        )
    if unused:
        parts.append(f"{counted(len(unused), 'mask')} of {masks} without an image ({_some(unused)})")
    text = f"{' and '.join(parts)}."
    few, left = lonely[:MAX_TRIED], set(unused)
    ends = {other[len(name) :] for name in few for other in unused if other.startswith(name) and other != name}
    counts = {end: sum(name + end in left for name in few) for end in sorted(ends)}
    if best := max(counts, key=lambda end: counts[end], default=None):
        return (
            f"{text} Did you mean {Path(lonely[0]).name}{best}.png? Masks whose names end in {best} are paired by: "
            f"--mask-suffix {best}"
        )
    suffixes = "" if suffix else ", or give the suffix of the masks' names: --mask-suffix _L"
    return f"{text} Add what is missing, or remove them{suffixes}."


def _some(names: list[str]) -> str:
    more = f", {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def _by_name(folder: Path, other: Path) -> dict[str, Path]:
    """Files by their path without the file's suffix; a folder that lies inside is left out if it is the other one.

    Raises:
        InputError: two files have one name.
    """
    found: dict[str, Path] = {}
    inner, outer = other.resolve(), folder.resolve()
    nested = inner != outer and inner.is_relative_to(outer)
    for path in _files(folder):
        if nested and path.resolve().is_relative_to(inner):
            continue
        name = path.relative_to(folder).with_suffix("").as_posix()
        if name in found:
            raise InputError(f"{found[name]} and {path} have one name. Remove or rename one.")
        found[name] = path
    return found


def _files(folder: Path) -> Iterator[Path]:
    yield from sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".") and path.is_file()
    )


def _split_of(name: str) -> str | None:
    """The split that the first folder of a path is called by, if there is one."""
    first = name.partition("/")[0] if "/" in name else ""
    return next((split for split in ALL_SPLITS if first in ALIASES.get(split, (split,))), None)


def _first_folder(root: Path, names: tuple[str, ...]) -> Path | None:
    return next((root / name for name in names if (root / name).is_dir()), None)


def _cityscapes(root: Path) -> LabelledImages:
    found = []
    for split in (TRAIN, VAL):
        for image in _files(root / "leftImg8bit" / split):
            stem = image.name.removesuffix("_leftImg8bit.png")
            mask = root / "gtFine" / split / image.parent.name / f"{stem}_gtFine_labelIds.png"
            if not mask.is_file():
                raise InputError(
                    f"{root} is laid out as Cityscapes, and {image.name} has no {mask.relative_to(root)}. Extract "
                    "gtFine_trainvaltest.zip there."
                )
            found.append(Pair(f"{split}/{stem}", image, mask, split))
    if not found:
        raise InputError(
            f"{root} is laid out as Cityscapes, and leftImg8bit/train and val hold no image. Extract "
            "leftImg8bit_trainvaltest.zip there."
        )
    table = np.full(256, IGNORE, np.uint8)
    table[list(CITYSCAPES)] = np.arange(len(CITYSCAPES))
    return LabelledImages(tuple(found), tuple(CITYSCAPES.values()), table)


def _nnunet(root: Path) -> LabelledImages:
    about = read_json(root / "dataset.json")
    ending = about.get("file_ending") if isinstance(about, dict) else None
    if ending not in IMAGE_SUFFIXES:
        raise InputError(
            f"{root} is a raw dataset of nnU-Net of volumes ({briefly(ending)}), which is read where it is. Check it "
            f"with: fp4deploy data check {root}; train on it with: fp4deploy train --data {root}"
        )
    channels = about.get("channel_names", about.get("modality"))
    files = sorted((root / "imagesTr").glob(f"*{ending}"))
    if any(not re.search(r"_0000\Z", path.name.removesuffix(ending)) for path in files):
        raise InputError(
            f"{root} is a raw dataset of nnU-Net with channels in files of their own ({briefly(channels)}). Write an "
            "RGB image of each case, in a folder of images beside one of masks, and give these."
        )
    names, table = _nnunet_classes(root, about.get("labels"))
    pairs = []
    for image in files:
        case = image.name.removesuffix(ending).removesuffix("_0000")
        mask = root / "labelsTr" / f"{case}{ending}"
        if not mask.is_file():
            raise InputError(f"{root} is a raw dataset of nnU-Net, and {image.name} has no labelsTr/{mask.name}.")
        pairs.append(Pair(case, image, mask))
    return LabelledImages(tuple(pairs), names, table)


def _nnunet_classes(root: Path, labels: object) -> tuple[tuple[str, ...], Pixels]:
    """Names by value, and the class of each value; "ignore" is void."""
    given: Mapping[str, Any] = labels if isinstance(labels, dict) else {}
    values = {name: value for name, value in given.items() if name != "ignore"}
    if sorted(values.values(), key=str) != sorted(range(len(values)), key=str) or not 0 < len(values) < MAX_CLASSES:
        raise InputError(
            f"{root / 'dataset.json'} has the labels {briefly(labels)}. Read are numbers from 0 without gaps: regions "
            "of several labels (a list of numbers) overlap, and a pixel has one class here."
        )
    table = np.full(256, IGNORE, np.uint8)
    table[: len(values)] = np.arange(len(values))
    return tuple(sorted(values, key=lambda name: values[name])), table
