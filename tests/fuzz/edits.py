"""Every place of a file, changed one at a time: what is refused, what changes what was read, and what changes nothing.

A reader that stops looking at a field, or at whether its value is possible, gives another letter for one of the
changes. `tests/contract/recorded/edits.json` holds the letters of each place in the order of `CHANGES`.

    !  refused by an error        ~  read as something else        =  read as before
"""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from fp4deploy.data.coco.annotations import parse_content
from fp4deploy.errors import Fp4DeployError, InputError
from fp4deploy.models import ModelCard
from fp4deploy.train.config import Config
from tests.fuzz.harness import Loader
from tests.fuzz.loaders import CARDS, loaders
from tests.fuzz.mutate import of_json, of_lines

GONE, TWIN = object(), object()  # removed; the value that the same key has in the element before
CHANGES: tuple[Any, ...] = (GONE, TWIN, None, True, 0, 1, -1, 0.5, 1 << 62, "x", "1", [])
Read = Callable[[Any], object]
OWN_READERS = ("annotations", "boxes", "roboflow", "imported")  # of what is below, with images, and slow


def outcomes(tree: Any, read: Read) -> dict[str, str]:
    """Place -> a letter for each of `CHANGES`."""
    before = _read(copy.deepcopy(tree), read)
    found = {}
    for place in _places(tree):
        letters = ""
        for change in CHANGES:
            changed = copy.deepcopy(tree)
            holder = changed
            for key in place[:-1]:
                holder = holder[key]
            if not _changed(changed, holder, place, change):
                letters += " "
                continue
            after = _read(changed, read)
            letters += "!" if after is None else "=" if after == before else "~"
        found[".".join(map(str, place))] = letters
    return found


def _changed(tree: Any, holder: Any, place: tuple[Any, ...], change: Any) -> bool:
    """Change a place; False where there is nothing to change."""
    if change is GONE:
        del holder[place[-1]]
        return True
    if change is TWIN:
        at = max((n for n, key in enumerate(place) if isinstance(key, int) and key > 0), default=None)
        if at is None:
            return False
        twin = tree
        try:
            for key in (*place[:at], place[at] - 1, *place[at + 1 :]):
                twin = twin[key]
        except (KeyError, IndexError, TypeError):
            return False
        change = copy.deepcopy(twin)
    if type(holder[place[-1]]) is type(change) and holder[place[-1]] == change:
        return False
    holder[place[-1]] = change
    return True


def _places(tree: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """All keys; of lists the first and the last element."""
    keys = (
        list(tree) if isinstance(tree, dict) else sorted({0, len(tree) - 1}) if isinstance(tree, list) and tree else ()
    )
    for key in keys:
        yield (*place, key)
        yield from _places(tree[key], (*place, key))


def _read(tree: Any, read: Read) -> str | None:
    """What was read, as text; None where it was refused."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return re.sub(r"0x[0-9a-f]+", "", repr(read(tree)))
    except (Fp4DeployError, ValidationError):
        return None


def _coco() -> Any:
    """Two of everything: polygons and runs, crowds, areas, values of masks, a category that names a group."""
    runs = {"size": [8, 6], "counts": [10, 4, 34]}
    shapes = [[[1, 1, 5, 1, 5, 4, 1, 4]], [[0, 0, 3, 0, 3, 3], [4, 4, 5, 4, 5, 6]], runs, {**runs, "counts": "`0Q1"}]
    annotations = [
        {"id": n, "image_id": 1 + n % 2, "category_id": 3 + n % 2, "iscrowd": n // 3, "segmentation": shape,
         "bbox": [n, 1, 2, 3], "area": 6.0 + n}
        for n, shape in enumerate(shapes)
    ]  # fmt: skip
    return {
        "images": [{"id": n, "file_name": f"{n}.png", "height": 8, "width": 6} for n in (1, 2)],
        "categories": [
            {"id": 9, "name": "shapes", "supercategory": "none"},
            *({"id": n, "name": f"c{n}", "supercategory": "shapes", "mask_value": n} for n in (3, 4)),
        ],
        "annotations": annotations,
    }


def _annotations(tree: Any) -> object:
    found = parse_content(Path("annotations/a.json"), tree)
    if found.defects:
        raise InputError(found.defects[0].message)
    return found


def every_reader(folder: Path) -> dict[str, dict[str, str]]:
    """Reader -> `outcomes`."""
    return {name: outcomes(*given) for name, given in readers(loaders(folder / "seeds"), folder).items()}


def readers(every: dict[str, Loader], folder: Path) -> dict[str, tuple[Any, Read]]:
    """Name -> the tree of a file that is read without an error, and what reads a tree."""
    found: dict[str, tuple[Any, Read]] = {
        "coco": (_coco(), _annotations),
        "config": (Config().model_dump(mode="json"), lambda tree: Config.model_validate(tree)),
    }
    for number, card in enumerate(CARDS):
        found[f"card {number}"] = (json.loads(card.to_json()), lambda tree: ModelCard.from_json(json.dumps(tree)))
    for name, loader in every.items():
        if loader.mutate not in (of_json, of_lines) and not loader.file.endswith(".yaml"):
            continue
        if name in (*OWN_READERS, "card", "config"):
            continue
        parse, write = _form(loader)
        found[name] = (parse(loader.seeds[0].decode()), _through(loader, folder, write))
    return found


def _form(loader: Loader) -> tuple[Callable[[str], Any], Callable[[Any], str]]:
    if loader.file.endswith(".yaml"):
        return yaml.safe_load, yaml.safe_dump
    if loader.mutate is of_lines:
        return lambda text: [*map(json.loads, text.splitlines())], lambda tree: "".join(
            f"{json.dumps(line)}\n" for line in tree
        )
    return json.loads, json.dumps


def _through(loader: Loader, folder: Path, write: Callable[[Any], str]) -> Read:
    path = folder / loader.name / loader.file
    path.parent.mkdir(parents=True, exist_ok=True)

    def read(tree: Any) -> object:
        path.write_text(write(tree), encoding="utf-8")
        return loader.load(path)

    return read
