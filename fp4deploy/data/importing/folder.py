"""COCO files of any origin into a dataset folder: `fp4deploy data import`.

Annotation tools write a file for each task, and images lie anywhere: Label Studio has result.json with images/, or its
own JSON with addresses of its server (`data.importing.label_studio`), CVAT one file a task, a colleague two files and
one folder of images. The folder that this makes has COCO's layout, with the annotations as they are and the images as
hard links (copies where the file system has none).

A file without splits is divided by the names of the images (`data.importing.splits`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp4deploy.data.coco.annotations import MAX_JSON_BYTES, inside_folder, parse_content
from fp4deploy.data.images import ImageError, image_size
from fp4deploy.data.importing.label_studio import coco_content, is_label_studio
from fp4deploy.data.importing.splits import divide, flat_names, link, require_images, require_shares
from fp4deploy.data.sample import TRAIN
from fp4deploy.errors import InputError
from fp4deploy.system.files import atomic_write
from fp4deploy.system.schema import parse_json, read_bytes


@dataclass(frozen=True)
class Imported:
    """Images and annotations of one split of the new folder."""

    split: str
    images: int
    annotations: int


def import_coco(
    files: Mapping[str, Path],
    images: Sequence[Path],
    out: Path,
    *,
    val_share: float = 0.0,
    test_share: float = 0.0,
    seed: int = 0,
) -> list[Imported]:
    """Make the dataset folder `out` of COCO files by split, and of the folders that have their images.

    Args:
        files: "train" and perhaps "val" and "test" to annotation files.
        images: folders that the files' names are looked up in, in this order; by the whole name, then without folders.
        out: a folder that does not exist.
        val_share, test_share: of the images of "train" that go to these splits, where they have no file.

    Raises:
        InputError: a file is no COCO file or has a defect, an image is missing, there would be no validation split, or
            `out` exists or cannot be written; nothing is left behind.
    """
    if out.exists():
        raise InputError(f"{out} exists already. Choose another --out.")
    shares = require_shares(set(files), val_share, test_share, "give --val-json FILE, or ")
    contents = {split: _read(path, images) for split, path in files.items()}
    return write_coco(contents, lambda name: _find(name, images), out, shares, seed)


def write_coco(
    contents: Mapping[str, dict[str, Any]],
    find: Callable[[str], Path],
    out: Path,
    shares: Mapping[str, float],
    seed: int,
) -> list[Imported]:
    """Make the dataset folder `out` of the contents of COCO files by split; `find` gives the file of an image's name.

    Raises:
        InputError: an image is missing, a split would be empty, or `out` cannot be written; nothing is left behind.
    """
    names = {split: [str(image["file_name"]) for image in content["images"]] for split, content in contents.items()}
    places = {name: find(name) for name in dict.fromkeys(name for each in names.values() for name in each)}
    flat = flat_names(list(places))
    found = []
    with atomic_write(out) as folder:
        for split, content in _divided(contents, shares, seed, places).items():
            found.append(_write(folder, split, content, places, flat))
            require_images({split: found[-1].images})
    return found


def _read(path: Path, folders: Sequence[Path]) -> dict[str, Any]:
    """The content of a COCO file whose records are all usable; repeated annotation ids are, too.

    Names of images become relative: where a server kept them ("/data/upload/1/a.jpg") says nothing about this machine.
    """
    try:
        whole = read_bytes(path, MAX_JSON_BYTES)
        text = whole.decode(json.detect_encoding(whole), "surrogatepass")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} cannot be read as JSON: {error}.") from None
    content = parse_json(text, path, nan="keep")
    if is_label_studio(content):
        try:
            content = coco_content(content, lambda name: _size(_find(_relative(name), folders)))
        except InputError as error:
            raise InputError(f"{path} {error}") from None
    if isinstance(content, dict) and isinstance(content.get("images"), list):
        content = {**content, "images": [_with_relative_name(record) for record in content["images"]]}
    parsed = parse_content(path, content)
    fatal = [defect for defect in parsed.defects if defect.kind != "duplicate-annotation"]
    if fatal:
        more = f" ({len(fatal) - 1} more defects)" if len(fatal) > 1 else ""
        raise InputError(f"{path} {fatal[0].message}{more}")
    known = parsed.categories.values()
    kept = [category for category in content["categories"] if category.get("name") in known]
    return {**content, "categories": kept}


def _with_relative_name(record: object) -> object:
    if not isinstance(record, dict) or not isinstance(record.get("file_name"), str):
        return record
    return {**record, "file_name": _relative(record["file_name"])}


def _relative(name: str) -> str:
    """A name without the address, drive or steps upwards before it.

    >>> [_relative(name) for name in ("/data/upload/1/a.jpg", "../b/a.jpg", "C:/b/a.jpg", "b/a.jpg")]
    ['data/upload/1/a.jpg', 'b/a.jpg', 'b/a.jpg', 'b/a.jpg']
    """
    if inside_folder(name):
        return name
    parts = name.replace("\\", "/").split("/")
    return "/".join(part for part in parts if part not in ("", ".", "..") and not part.endswith(":")) or name


def _size(path: Path) -> tuple[int, int]:
    try:
        return image_size(path)
    except ImageError as error:
        raise InputError(f"names the image {path}, which {error}.") from None


def _find(name: str, folders: Sequence[Path]) -> Path:
    plain = name.replace("\\", "/")
    for candidates in ([folder / plain for folder in folders], [folder / Path(plain).name for folder in folders]):
        found = list({path.resolve(): path for path in candidates if path.is_file()}.values())
        if len(found) > 1:
            raise InputError(f"The image {name} is in two folders: {found[0]} and {found[1]}. Rename one.")
        if found:
            return found[0]
    where = ", ".join(map(str, folders))
    raise InputError(f"The image {name} is in none of the folders: {where}. Give its folder with --images.")


def _divided(
    contents: Mapping[str, dict[str, Any]], shares: Mapping[str, float], seed: int, places: Mapping[str, Path]
) -> dict[str, dict[str, object]]:
    whole, train = dict(contents), contents[TRAIN]
    splits = [split for split, share in shares.items() if share]
    if not splits:
        return whole
    place = divide(
        {str(image["file_name"]): places[str(image["file_name"])] for image in train["images"]}, shares, seed
    )
    split_of = {image["id"]: place[str(image["file_name"])] for image in train["images"]}
    for split in (TRAIN, *splits):
        whole[split] = {
            **train,
            "images": [image for image in train["images"] if split_of[image["id"]] == split],
            "annotations": [each for each in train["annotations"] if split_of[each["image_id"]] == split],
        }
    return whole


def _write(
    folder: Path, split: str, content: dict[str, Any], places: Mapping[str, Path], flat: Mapping[str, str]
) -> Imported:
    (folder / "annotations").mkdir(parents=True, exist_ok=True)
    (folder / split).mkdir()
    for name in dict.fromkeys(str(image["file_name"]) for image in content["images"]):
        link(places[name], folder / split / flat[name])
    records = [{**image, "file_name": flat[str(image["file_name"])]} for image in content["images"]]
    text = json.dumps({**content, "images": records})
    (folder / "annotations" / f"instances_{split}.json").write_text(text, encoding="utf-8")
    return Imported(split, len(records), len(content["annotations"]))
