"""A dataset of YOLO tools as the content of COCO files: polygons and boxes of `labels/*.txt`, named by data.yaml.

    data.yaml               path: ROOT   train: images/train   val: images/val   names: [a, b] or {0: a, 1: b}
    images/train/NAME.jpg
    labels/train/NAME.txt   CLASS X Y X Y X Y ...   a polygon;   CLASS X Y WIDTH HEIGHT   a box, by its centre

All numbers are shares of the image's width and height. An image without a file, or with an empty one, has no objects.
A set of boxes has no masks: it is for detection. Without data.yaml, classes.txt in the folder or in labels/ names the
classes, and the images below images/ have no splits.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fp4deploy.data.images import IMAGE_SUFFIXES, ImageError, image_size
from fp4deploy.data.layouts import ALIASES
from fp4deploy.data.sample import ALL_SPLITS, TRAIN
from fp4deploy.errors import InputError
from fp4deploy.system.schema import briefly, lines_of, read_yaml

YAML = ("data.yaml", "dataset.yaml", "data.yml")
MAX_LABELS = 1 << 26  # bytes of one file
LABELS = "labels"


def is_yolo(root: Path) -> bool:
    """Whether a folder is laid out so."""
    return any((root / name).is_file() for name in YAML) or next((root / LABELS).rglob("*.txt"), None) is not None


def yolo_contents(root: Path) -> tuple[dict[str, dict[str, object]], dict[str, Path]]:
    """The content of a COCO file for each split, and the image files by the names in them.

    Raises:
        InputError: no names of classes, no images, or a line that cannot be read, by file and number.
    """
    about = next((root / name for name in YAML if (root / name).is_file()), None)
    given = read_yaml(about, numbered=True) if about is not None else {}
    if not isinstance(given, dict):
        raise InputError(f"{about} is no data.yaml of YOLO: it has to map train, val and names.")
    names = _names(root, given.get("names"), about)
    folders = _folders(root, given) if about is not None else {TRAIN: root / "images"}
    contents: dict[str, dict[str, object]] = {}
    places: dict[str, Path] = {}
    for split, folder in folders.items():
        files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file())
        if not files:
            raise InputError(f"{folder}, the images of {split}, holds none ({', '.join(IMAGE_SUFFIXES)}).")
        named = {path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name: path for path in files}
        places |= named
        contents[split] = _content(named, names)
    return contents, places


def _names(root: Path, given: object, about: Path | None) -> list[str]:
    if given is None:
        listing = next((each for each in (root / "classes.txt", root / LABELS / "classes.txt") if each.is_file()), None)
        lines = lines_of(listing, MAX_LABELS) if listing is not None else []
        given = [line.decode("utf-8", "replace").strip() for line in lines if line.strip()]
    if isinstance(given, Mapping) and sorted(given, key=str) == sorted(range(len(given)), key=str):
        given = [given[number] for number in range(len(given))]
    found = [str(name) for name in given] if isinstance(given, list) else []
    if not found or len(set(found)) < len(found):
        raise InputError(
            f"{about or root} names no classes, or one twice. Write them into {about or root / 'data.yaml'}: "
            "names: [a, b], in the order of their numbers."
        )
    return found


def _folders(root: Path, given: Mapping[str, object]) -> dict[str, Path]:
    """Folder of the images of each split: below `path`, the folder of data.yaml, or without steps upwards before it."""
    found = {}
    for split in ALL_SPLITS:
        entry = next((given[name] for name in ALIASES.get(split, (split,)) if given.get(name)), None)
        if entry is None:
            continue
        if not isinstance(entry, str) or entry.endswith(".txt"):
            raise InputError(f"data.yaml gives {briefly(entry)} for {split}. Read are folders of images, one a split.")
        inner = Path(*(part for part in Path(entry).parts if part not in ("..", "/")))
        places = (root / str(given.get("path") or "") / entry, root / entry, root / inner)
        folder = next((place for place in places if place.is_dir()), None)
        if folder is None and split == "test":
            continue
        if folder is None:
            raise InputError(f"The images of {split} are not there: data.yaml says {entry}, in {root}.")
        found[split] = folder.resolve() if not folder.is_relative_to(root) else folder
    if TRAIN not in found:
        raise InputError(f"data.yaml in {root} names no folder of images to train on. Add: train: images/train")
    return found


def _content(images: Mapping[str, Path], names: list[str]) -> dict[str, object]:
    records: list[dict[str, object]] = []
    annotations: list[dict[str, object]] = []
    for number, (name, path) in enumerate(images.items(), 1):
        try:
            width, height = image_size(path)
        except ImageError as error:
            raise InputError(f"{path} {error}") from None
        records.append({"id": number, "file_name": name, "width": width, "height": height})
        for region in _regions(_label_file(path), len(names), width, height):
            annotations.append({"id": len(annotations) + 1, "image_id": number, "iscrowd": 0, **region})
    categories = [{"id": number, "name": name} for number, name in enumerate(names, 1)]
    return {"images": records, "annotations": annotations, "categories": categories}


def _label_file(image: Path) -> Path:
    """labels/.../NAME.txt of images/.../NAME.jpg: the last folder of that name is replaced."""
    parts = list(image.with_suffix(".txt").parts)
    at = max((place for place, part in enumerate(parts[:-1]) if part == "images"), default=None)
    if at is not None:
        parts[at] = LABELS
    return Path(*parts)


def _regions(path: Path, classes: int, width: int, height: int) -> list[dict[str, object]]:
    found = []
    for number, line in enumerate(lines_of(path, MAX_LABELS), 1):
        if not line.strip():
            continue
        try:
            first, *values = (float(word) for word in line.split())
            if not (first == int(first) and 0 <= first < classes) or any(not -1 <= value <= 2 for value in values):
                raise ValueError
            region = _box(values, width, height) if len(values) == 4 else _polygon(values, width, height)
        except (ValueError, OverflowError):
            raise InputError(
                f"{path}, line {number}: {briefly(line.decode('utf-8', 'replace'))}. Read are a class from 0 to "
                f"{classes - 1} and shares of the image: x y width height of a box, or the points of a polygon."
            ) from None
        found.append({"category_id": int(first) + 1, **region})
    return found


def _box(values: list[float], width: int, height: int) -> dict[str, object]:
    x, y, across, down = values
    box = [(x - across / 2) * width, (y - down / 2) * height, across * width, down * height]
    return {"segmentation": [], "bbox": box, "area": box[2] * box[3]}


def _polygon(values: list[float], width: int, height: int) -> dict[str, object]:
    if len(values) < 6 or len(values) % 2:
        raise ValueError
    across, down = [x * width for x in values[::2]], [y * height for y in values[1::2]]
    box = [min(across), min(down), max(across) - min(across), max(down) - min(down)]
    turns = sum(
        a * d - b * c for a, b, c, d in zip(across, down, across[1:] + across[:1], down[1:] + down[:1], strict=True)
    )
    points = [value for pair in zip(across, down, strict=True) for value in pair]
    return {"segmentation": [points], "bbox": box, "area": abs(turns) / 2}
