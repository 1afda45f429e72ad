"""COCO results: one JSON list of {image_id, category_id, segmentation, score}, the form every COCO tool reads.

Segmentations are compressed RLE at the size of the original image. Category and image ids are the annotation file's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp4deploy.data.coco.regions import RegionError, encode, encode_ids
from fp4deploy.data.images import MAX_PIXELS
from fp4deploy.errors import InputError
from fp4deploy.instances.decode import Instances
from fp4deploy.system.files import write_whole
from fp4deploy.system.schema import read_json

MAX_BYTES = 256 << 20
Result = dict[str, Any]


def as_results(found: Instances, image_id: int, category_ids: dict[int, int]) -> list[Result]:
    """Results of one image, the highest score first; `category_ids` maps classes to the file's ids."""
    return [
        {
            "image_id": image_id,
            "category_id": category_ids[int(found.classes[number - 1])],
            "segmentation": {"size": rle["size"], "counts": rle["counts"].decode("ascii")},
            "score": float(found.scores[number - 1]),
        }
        for number, rle in encode_ids(found.ids).items()
    ]


def write_results(results: Sequence[Result], path: Path) -> None:
    """Write results as JSON, atomically.

    Raises:
        InputError: the file cannot be written.
    """
    write_whole(path, json.dumps(list(results), allow_nan=False))


def read_results(path: Path | str) -> list[Result]:
    """Read what `write_results` wrote, or any COCO results with segmentations.

    Raises:
        InputError: the file is missing, is not JSON, or holds something else.
    """
    path = Path(path)
    results = read_json(path, "Write COCO results with: fp4deploy bench", MAX_BYTES)
    if not isinstance(results, list) or not all(_is_result(result) for result in results):
        raise InputError(
            f"{path} does not hold COCO results: a list of objects with image_id, category_id, segmentation (RLE) and "
            "score. Write some with: fp4deploy bench --results DIR"
        )
    return results


def _is_result(result: object) -> bool:
    if not isinstance(result, dict) or not {"image_id", "category_id", "segmentation", "score"} <= result.keys():
        return False
    ids = all(
        type(result[name]) is int and -(1 << 63) <= result[name] < 1 << 63 for name in ("image_id", "category_id")
    )
    if not ids or type(result["score"]) not in (int, float):
        return False
    rle = result["segmentation"]
    return isinstance(rle, dict) and isinstance(rle.get("counts"), str) and _is_drawable(rle)


def _is_drawable(rle: dict[str, object]) -> bool:
    size = rle.get("size")
    if not isinstance(size, list) or len(size) != 2 or not all(type(side) is int and side > 0 for side in size):
        return False
    try:
        encode(rle, *size)
    except RegionError:
        return False
    return size[0] * size[1] <= MAX_PIXELS
