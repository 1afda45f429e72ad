"""Label Studio's "JSON" export as the content of a COCO file.

A list of tasks. A task names its image in `data` and holds `annotations`, each with a list `result` of regions:

| region | value |
|---|---|
| polygonlabels | `points`, [x, y] in per cent of the image's width and height |
| rectanglelabels | `x`, `y`, `width`, `height` in per cent; no mask, so `segmentation` is empty |
| brushlabels | `rle`: bytes of a run-length code (`decode_rle`) of all RGBA values; the region is where A is not 0 |

Label Studio's own "COCO" export leaves brush regions out, which is why this file is read as it is. Regions of other
kinds are refused, since leaving them out would make them background. A task without an annotation that was submitted is
no image of the dataset; one whose annotation is empty is an image without objects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np

from fp4deploy.data.images import MAX_PIXELS
from fp4deploy.errors import InputError

NOT_REGIONS = {"choices", "textarea", "rating", "number", "datetime", "taxonomy", "relation"}
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp", ".gif")


def is_label_studio(content: object) -> bool:
    """Whether this is a list of tasks, as "JSON" exports them ("JSON-MIN" has no annotations in its tasks).

    >>> is_label_studio([{"id": 1, "data": {}, "annotations": []}]), is_label_studio({"images": []})
    (True, False)
    """
    return (
        isinstance(content, list)
        and bool(content)
        and all(isinstance(task, dict) and isinstance(task.get("annotations"), list) for task in content)
    )


def coco_content(tasks: list[Any], size_of: Callable[[str], tuple[int, int]]) -> dict[str, Any]:
    """The images, annotations and categories of tasks; categories in the order of their names.

    Args:
        size_of: width and height of the image of this name, for images whose annotation is empty.

    Raises:
        InputError: a task that cannot be read, by its number.
    """
    images: list[dict[str, Any]] = []
    regions: list[dict[str, Any]] = []
    for number, task in enumerate(tasks):
        try:
            result = _submitted(task)
            if result is None:
                continue
            name = _image_name(task)
            found = [region for each in result for region in _regions(each)]
            width, height = found[0]["size"] if found else size_of(name)
        except InputError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            cause = error if type(error) is ValueError else "it is not as Label Studio's JSON export writes it"
            raise InputError(f"holds task {task.get('id', number)}, which cannot be read: {cause}.") from None
        image = len(images) + 1
        images.append({"id": image, "file_name": name, "width": width, "height": height})
        regions += [{**region, "image_id": image} for region in found]
    names = sorted({region["label"] for region in regions})
    return {
        "images": images,
        "categories": [{"id": number, "name": name} for number, name in enumerate(names, 1)],
        "annotations": [_annotation(number, region, names) for number, region in enumerate(regions, 1)],
    }


def _annotation(number: int, region: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    kept = {key: region[key] for key in ("image_id", "segmentation", "bbox", "area")}
    return {"id": number, "category_id": names.index(region["label"]) + 1, "iscrowd": 0, **kept}


def _submitted(task: Mapping[str, Any]) -> list[Any] | None:
    """The result of the annotation to use: of several, the one marked as ground truth."""
    found = [each for each in task["annotations"] if not each.get("was_cancelled")]
    if len(found) > 1:
        found = [each for each in found if each.get("ground_truth")]
        if len(found) != 1:
            raise ValueError("it has several annotations; mark one of them as ground truth")
    return list(found[0]["result"]) if found else None


def _image_name(task: Mapping[str, Any]) -> str:
    """The path in the address of the task's image; a local file's is behind "?d="."""
    names = []
    for value in task["data"].values():
        if isinstance(value, str):
            address = urlsplit(value)
            local = parse_qs(address.query).get("d")
            names.append(local[0] if local else unquote(address.path))
    images = [name for name in names if name.lower().endswith(IMAGE_SUFFIXES)]
    if len(images) != 1:
        raise ValueError(f"its data name {len(images)} images, and one is needed")
    return images[0]


def _regions(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    kind, value = result["type"], result["value"] if result["type"] != "relation" else {}
    if kind in NOT_REGIONS:
        return []
    if kind not in READERS:
        raise ValueError(f"a region is '{kind}', and those read are {', '.join(READERS)}")
    width, height = result["original_width"], result["original_height"]
    if not (type(width) is int and type(height) is int and 0 < width * height <= MAX_PIXELS and width > 0):
        raise ValueError(f"a region gives its image {width} x {height} pixels")
    if result.get("image_rotation") or value.get("rotation"):
        raise ValueError("an image or a rectangle is rotated; rotate the image file, or draw a polygon")
    labels = value[kind]
    if len(labels) != 1 or not isinstance(labels[0], str):
        raise ValueError(f"a region has {len(labels)} labels, and one is needed")
    return [{"label": labels[0], "size": (width, height), **READERS[kind](value, width, height)}]


def _polygon(value: Mapping[str, object], width: int, height: int) -> dict[str, object]:
    points = np.asarray(value["points"], np.float64)
    if points.ndim != 2 or points.shape[1] != 2:
        raise ValueError("a polygon's points are not pairs")
    points = points * (width / 100, height / 100)
    x, y = points[:, 0], points[:, 1]
    area = abs(float(np.dot(x, np.roll(y, 1)) - np.dot(y, np.roll(x, 1)))) / 2
    box = [float(x.min()), float(y.min()), float(np.ptp(x)), float(np.ptp(y))]
    return {"segmentation": [points.ravel().tolist()], "bbox": box, "area": area}


def _rectangle(value: Mapping[str, Any], width: int, height: int) -> dict[str, object]:
    sides = (width, height, width, height)
    box = [value[key] * side / 100 for key, side in zip(("x", "y", "width", "height"), sides, strict=True)]
    return {"segmentation": [], "bbox": box, "area": box[2] * box[3]}


def _brush(value: Mapping[str, Any], width: int, height: int) -> dict[str, object]:
    from pycocotools import mask as coco_mask

    pixels = decode_rle(value["rle"], 4 * width * height).reshape(height, width, 4)[..., 3] > 0
    code = coco_mask.encode(np.asfortranarray(pixels.astype(np.uint8)))
    box, area = coco_mask.toBbox(code).tolist(), int(coco_mask.area(code))
    return {"segmentation": {"size": [height, width], "counts": code["counts"].decode()}, "bbox": box, "area": area}


READERS = {"polygonlabels": _polygon, "rectanglelabels": _rectangle, "brushlabels": _brush}


def decode_rle(code: list[int], count: int) -> np.ndarray:
    """The bytes [count] of a run-length code.

    A stream of bits, the highest of each byte first: 32 bits with the number of values, 5 with their bits less 1, four
    times 4 with the bits of a length less 1. Then chunks: one bit, two bits that choose among the four, a length less
    1, and one value for all of it where the bit is set, otherwise that many values.

    Raises:
        ValueError: the code ends too early, or is not of `count` values.
    """
    bits = "".join(f"{byte:08b}" for byte in bytes(code))
    at = 0

    def read(size: int) -> int:
        nonlocal at
        at += size
        if at > len(bits):
            raise ValueError("a brush region ends too early")
        return int(bits[at - size : at], 2)

    if read(32) != count:
        raise ValueError(f"a brush region is not of {count // 4} pixels")
    word = read(5) + 1
    sizes = [read(4) + 1 for _ in range(4)]
    values = np.zeros(count, np.uint8)
    done = 0
    while done < count:
        repeated, size = read(1), sizes[read(2)]
        end = done + read(size) + 1
        if end > count or word > 8:
            raise ValueError("a brush region holds more than its pixels")
        values[done:end] = read(word) if repeated else [read(word) for _ in range(done, end)]
        done = end
    return values
