"""The annotation file of a COCO-format dataset, read into checked records.

`parse` yields records and the defects of those that cannot be used, so that opening a dataset (stop at the first
defect) and `fp4deploy data check` (list them all) agree on what a defect is. The file may be anyone's: names stay
inside their folder, numbers fit 64 bits, a size is one that an image can have, and reading takes time linear in its
length.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp4deploy.data.coco.regions import Polygons, RegionError, Rle, parse_segmentation
from fp4deploy.data.images import MAX_PIXELS
from fp4deploy.errors import InputError
from fp4deploy.system.schema import briefly, read_bytes

MAX_JSON_BYTES = 2 << 30  # COCO's largest file has 0.5 GB
LONGEST_NAME = 500
NUMBERS = ("id", "image_id", "category_id", "height", "width", "mask_value")
FLAGS = {"": 0, "0": 0, "0.0": 0, "false": 0, "no": 0, "1": 1, "1.0": 1, "true": 1, "yes": 1}


@dataclass(frozen=True)
class Defect:
    """One thing wrong with a dataset; `file` is relative to its folder, `annotation_id` None where none is meant."""

    file: str
    annotation_id: int | None
    kind: str
    message: str


@dataclass(frozen=True)
class ImageRecord:
    """One image of the annotation file."""

    id: int
    file_name: str
    height: int
    width: int


@dataclass(frozen=True)
class Annotation:
    """One annotated region; `box` is the unchecked "bbox", [x, y, width, height] in pixels; `area` may be None."""

    id: int
    image_id: int
    category_id: int
    crowd: bool
    segmentation: Polygons | Rle
    box: object
    area: float | None = None


@dataclass
class CocoFile:
    """A parsed annotation file; `categories` maps ids to names in the file's order."""

    path: Path
    categories: dict[int, str] = field(default_factory=dict)
    mask_values: dict[int, str] = field(default_factory=dict)
    images: dict[int, ImageRecord] = field(default_factory=dict)
    annotations: list[Annotation] = field(default_factory=list)
    defects: list[Defect] = field(default_factory=list)

    @property
    def file(self) -> str:
        """The file as a defect names it: relative to the dataset's folder."""
        return f"{self.path.parent.name}/{self.path.name}"

    def report(self, kind: str, message: str, annotation_id: int | None = None) -> None:
        """Add a defect of this file."""
        self.defects.append(Defect(self.file, annotation_id, kind, message))


def parse(path: Path) -> CocoFile:
    """Read an annotation file; what is wrong with it is in `.defects`, the rest is usable. Never raises."""
    try:
        content = json.loads(read_bytes(path, MAX_JSON_BYTES))  # noqa: TID251  what is wrong becomes a list of defects
    except RecursionError:
        return _unreadable(path, "it is nested too deeply")
    except (InputError, ValueError) as error:
        return _unreadable(path, str(error).rstrip("."))
    return parse_content(path, content)


def _unreadable(path: Path, cause: str) -> CocoFile:
    parsed = CocoFile(path)
    parsed.report("broken-json", f"cannot be read as JSON: {cause}.")
    return parsed


def parse_content(path: Path, content: object) -> CocoFile:
    """`parse` of what the JSON of `path` holds."""
    parsed = CocoFile(path)
    for key in ("images", "annotations", "categories"):
        if not isinstance(content, dict) or not isinstance(content.get(key), list):
            parsed.report("broken-json", f"is not a COCO annotation file: it has no list '{key}'.")
            return parsed
    assert isinstance(content, dict)
    categories, images, annotations = (
        [_numbered(record) for record in content[key]] for key in ("categories", "images", "annotations")
    )
    _parse_categories(parsed, _without_group(categories, annotations))
    _parse_images(parsed, images)
    _parse_annotations(parsed, annotations)
    return parsed


def _numbered(record: object) -> object:
    """The record with whole numbers where a converter wrote them as text or with a point: "id": "1", "height": 64.0."""
    if not isinstance(record, dict):
        return record
    written = {key: record[key] for key in NUMBERS if isinstance(record.get(key), str | float)}
    found = {key: _number(value) for key, value in written.items()}
    return record | {key: value for key, value in found.items() if value is not None} if written else record


def _number(value: str | float) -> int | None:
    if isinstance(value, str):
        return int(value) if re.fullmatch(r"-?[0-9]{1,18}", value.strip(), re.ASCII) else None
    return int(value) if value.is_integer() and abs(value) < 1 << 53 else None


def _unnumbered(record: object, *keys: str) -> str:
    """What a message adds where one of these is there, and is no whole number."""
    if not isinstance(record, dict):
        return ""
    wrong = [key for key in keys if record.get(key) is not None and not _whole(record, key)]
    return f" as a whole number ({wrong[0]} is {briefly(record[wrong[0]])})" if wrong else ""


def _whole(record: object, *keys: str) -> bool:
    """Whether `record` is an object with whole numbers of 64 bits under all `keys`."""
    return isinstance(record, dict) and all(
        type(record.get(key)) is int and -(1 << 63) <= record[key] < 1 << 63 for key in keys
    )


def _name(value: object) -> bool:
    """Whether this is text that a table or a message can hold."""
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST_NAME or "\0" in value:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def inside_folder(name: str) -> bool:
    """Whether a file name stays in the folder that it is joined to, on any system.

    >>> [inside_folder(name) for name in ("a.jpg", "b/a.jpg", "/a.jpg", "../a.jpg", "b/../../a.jpg", "C:a.jpg")]
    [True, True, False, False, False, False]
    """
    parts = re.split(r"[\\/]", name)
    return parts[0] != "" and ".." not in parts and re.match(r"[A-Za-z]:", name) is None


def _file_name(value: object) -> bool:
    """Whether this is text that file systems take as a path: at most 255 bytes a part."""
    return _name(value) and max(len(part.encode()) for part in re.split(r"[\\/]", str(value))) < 256


def _without_group(categories: list[object], annotations: list[object]) -> list[object]:
    """The categories without the one that Roboflow puts before them: the name of their group, without annotations."""
    records = [record for record in categories if isinstance(record, dict)]
    groups = {str(record.get("supercategory")) for record in records} - {"none"}
    used = {str(record.get("category_id")) for record in annotations if isinstance(record, dict)}

    def is_group(record: object) -> bool:
        return (
            isinstance(record, dict)
            and record.get("supercategory") == "none"
            and groups == {str(record.get("name"))}
            and str(record.get("id")) not in used
        )

    return [record for record in categories if not is_group(record)]


def _parse_categories(parsed: CocoFile, records: list[Any]) -> None:
    names: set[str] = set()
    for record in records:
        if not _whole(record, "id") or not _name(record.get("name")):
            parsed.report("broken-category", f"holds a category without 'id' and 'name': {briefly(record)}.")
        elif record["id"] in parsed.categories or record["name"] in names:
            parsed.report("duplicate-category", f"lists the category {record['id']} '{record['name']}' twice.")
        else:
            names.add(record["name"])
            parsed.categories[record["id"]] = record["name"]
            if _whole(record, "mask_value"):
                parsed.mask_values[record["mask_value"]] = record["name"]


def _parse_images(parsed: CocoFile, records: list[Any]) -> None:
    for record in records:
        if not _whole(record, "id", "height", "width") or not _file_name(record.get("file_name")):
            parsed.report(
                "broken-image",
                f"holds an image without 'id', 'file_name', 'height', 'width'"
                f"{_unnumbered(record, 'id', 'height', 'width')}: {briefly(record)}.",
            )
        elif record["id"] in parsed.images:
            parsed.report("duplicate-image", f"lists the image id {record['id']} twice.")
        elif record["height"] < 1 or record["width"] < 1:
            parsed.report("broken-image", f"gives the image {record['file_name']} no pixels.")
        elif record["height"] * record["width"] > MAX_PIXELS:
            parsed.report(
                "broken-image",
                f"gives the image {record['file_name']} {record['height']} x {record['width']} pixels; the limit is "
                f"{MAX_PIXELS}.",
            )
        elif not inside_folder(record["file_name"]):
            parsed.report(
                "outside-folder",
                f"names the image {record['file_name']}, which is outside the folder of the images: give a name "
                "relative to it, without '..'.",
            )
        else:
            parsed.images[record["id"]] = ImageRecord(
                id=record["id"], file_name=record["file_name"], height=record["height"], width=record["width"]
            )


def _parse_annotations(parsed: CocoFile, records: list[Any]) -> None:
    seen: set[int] = set()
    for record in records:
        if not _whole(record, "id", "image_id", "category_id"):
            parsed.report(
                "broken-annotation",
                f"holds an annotation without 'id', 'image_id' and 'category_id'"
                f"{_unnumbered(record, 'id', 'image_id', 'category_id')}: {briefly(record)}.",
                record["id"] if _whole(record, "id") else None,
            )
            continue
        number = record["id"]
        if number in seen:
            parsed.report("duplicate-annotation", f"lists the annotation id {number} twice.", number)
        seen.add(number)
        if record["image_id"] not in parsed.images:
            cause = f"annotation {number} names the image id {record['image_id']}, which the file does not list."
            parsed.report("unknown-image", cause, number)
        elif record["category_id"] not in parsed.categories:
            cause = (
                f"annotation {number} names the category id {record['category_id']}, which the file does not list "
                f"({_listed(list(parsed.categories))})."
            )
            parsed.report("unknown-category", cause, number)
        else:
            _parse_region(parsed, record)


def _parse_region(parsed: CocoFile, record: dict[str, Any]) -> None:
    try:
        segmentation = parse_segmentation(record.get("segmentation", []))
    except RegionError as error:
        parsed.report("broken-segmentation", f"annotation {record['id']} {error}.", record["id"])
        return
    crowd = _flag(record.get("iscrowd"))
    if crowd is None:
        cause = f"annotation {record['id']} has an iscrowd of {briefly(record['iscrowd'])}; valid: 0, 1."
        parsed.report("broken-annotation", cause, record["id"])
        return
    area: Any = record.get("area")
    annotation = Annotation(
        id=record["id"],
        image_id=record["image_id"],
        category_id=record["category_id"],
        crowd=crowd,
        segmentation=segmentation,
        box=record.get("bbox"),
        area=float(area) if type(area) in (int, float) and 0 <= area < 1e18 else None,
    )
    parsed.annotations.append(annotation)


def _flag(value: object) -> bool | None:
    """A truth value, also one that a converter wrote as text; None where it is none.

    >>> [_flag(value) for value in (1, "0", "false", " True", None, 0.0, "crowd")]
    [True, False, False, True, False, False, None]
    """
    if value is None or isinstance(value, bool):
        return bool(value)
    if isinstance(value, str):
        value = FLAGS.get(value.strip().lower())
    return bool(value) if isinstance(value, int | float) and value in (0, 1) else None


def _listed(ids: list[int]) -> str:
    shown = ", ".join(map(str, ids[:12]))
    return f"it lists {shown}" + (f" and {len(ids) - 12} more" if len(ids) > 12 else "")
