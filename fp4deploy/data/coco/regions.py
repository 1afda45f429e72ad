"""COCO segmentations, checked and run-length encoded.

A segmentation comes in three forms, all on a height x width pixel grid:

| form | JSON |
|---|---|
| polygons | `[[x0, y0, x1, y1, ...], ...]`, their union |
| uncompressed RLE | `{"size": [h, w], "counts": [n0, n1, ...]}`: lengths of runs of 0, 1, 0, ... down the columns |
| compressed RLE | the same, `counts` a string: 5 bits a character, runs from the fourth on minus the run two before |

pycocotools rasterises and decodes, but trusts its input: runs that add up to less than h*w leave the rest of the mask
uninitialised, four-number polygons are taken for boxes, and infinite coordinates are undefined. So everything is
checked here first. Source: cocoapi, common/maskApi.c.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from pycocotools import mask as coco_mask

from fp4deploy.data.sample import Pixels

Rle = dict[str, Any]
Polygons = list[NDArray[np.float64]]
MIN_COORDINATES = 6  # three points


class RegionError(ValueError):
    """A segmentation that cannot be drawn; the message is the end of a sentence."""


def parse_segmentation(segmentation: object) -> Polygons | Rle:
    """Check the form of a segmentation from a JSON file and make polygons compact arrays.

    Raises:
        RegionError: it is neither polygons nor RLE.
    """
    if segmentation is None:
        return []
    if isinstance(segmentation, list):
        if segmentation and all(type(each) in (int, float) for each in segmentation):
            return [_parse_polygon(segmentation)]  # one polygon, without the list of polygons around it
        polygons = [_parse_polygon(polygon) for polygon in segmentation]
        return [points for points in polygons if points.size]  # [[]] draws nothing: a box alone
    if isinstance(segmentation, dict):
        counts, size = segmentation.get("counts"), segmentation.get("size")
        if isinstance(counts, (str, list)) and isinstance(size, list) and len(size) == 2:
            return {"size": size, "counts": counts}
        raise RegionError("has an RLE without the keys 'size' ([height, width]) and 'counts'")
    raise RegionError("has a segmentation that is neither a list of polygons nor RLE")


def _parse_polygon(polygon: object) -> NDArray[np.float64]:
    try:
        points = np.array(polygon, dtype=np.float64)
    except (TypeError, ValueError):
        points = np.array(np.nan)
    if points.ndim != 1 or not np.isfinite(points).all():
        raise RegionError("has a polygon that is not a flat list of finite numbers")
    return points


def region_key(segmentation: Polygons | Rle) -> bytes:
    """The same for two segmentations that are written alike."""
    if isinstance(segmentation, dict):
        return f"{segmentation['size']} {segmentation['counts']}".encode()
    return b"/".join(points.tobytes() for points in segmentation)


def encode(segmentation: Polygons | Rle, height: int, width: int) -> Rle | None:
    """Compressed RLE of a parsed segmentation, or None where it draws nothing (no polygon of three points).

    Raises:
        RegionError: RLE of another size, undecodable RLE, coordinates far outside the image.
    """
    if isinstance(segmentation, dict):
        return _encode_rle(segmentation, height, width)
    polygons = [points for points in segmentation if points.size >= MIN_COORDINATES]
    if not polygons:
        return None
    reach = 16 * max(height, width)  # the rasteriser's memory grows with the length of an edge
    if any(np.abs(points).max() > reach for points in polygons):
        raise RegionError(f"has a polygon far outside its image of {width}x{height} pixels")
    merged: Rle = coco_mask.merge(coco_mask.frPyObjects(polygons, height, width))
    return merged


def _encode_rle(rle: Rle, height: int, width: int) -> Rle:
    if list(rle["size"]) != [height, width]:
        raise RegionError(f"has an RLE of size {rle['size']}, but its image is [{height}, {width}] ([height, width])")
    compressed = isinstance(rle["counts"], str)
    runs = _decompress(rle["counts"]) if compressed else _integers(rle["counts"])
    if runs.size == 0 or (runs < 0).any() or (runs > height * width).any() or runs.sum() != height * width:
        raise RegionError(f"has an RLE whose runs do not add up to {height}x{width} pixels")
    if compressed:
        return {"size": [height, width], "counts": rle["counts"].encode("ascii")}
    encoded: Rle = coco_mask.frPyObjects({"size": [height, width], "counts": runs.tolist()}, height, width)
    return encoded


def _integers(counts: list[object]) -> NDArray[np.int64]:
    try:
        runs = np.array(counts)
    except ValueError:
        runs = np.array(["ragged"])
    if runs.size and (runs.ndim != 1 or runs.dtype.kind not in "iu"):
        raise RegionError("has an RLE whose counts are not whole numbers")
    return runs.astype(np.int64)


def _decompress(text: str) -> NDArray[np.int64]:
    """Run lengths of a compressed RLE string."""
    try:
        codes = np.frombuffer(text.encode("ascii"), dtype=np.uint8).astype(np.int64) - 48
    except UnicodeEncodeError:
        codes = np.array([-1])
    if codes.size == 0 or (codes < 0).any() or (codes > 63).any() or codes[-1] & 32:
        raise RegionError("has a compressed RLE that cannot be decoded")
    ends = np.flatnonzero((codes & 32) == 0)
    starts = np.concatenate(([0], ends[:-1] + 1))
    lengths = ends - starts + 1
    if lengths.max() > 8:
        raise RegionError("has a compressed RLE that cannot be decoded")
    position = np.arange(codes.size) - np.repeat(starts, lengths)
    runs = np.add.reduceat((codes & 31) << (5 * position), starts)
    runs = np.where(codes[ends] & 16, runs - (np.int64(1) << (5 * lengths)), runs)
    # The difference to the run two before starts with the fourth run: runs 1, 3, 5, ... chain, and so do 2, 4, 6, ...
    runs[1::2] = np.cumsum(runs[1::2])
    runs[2::2] = np.cumsum(runs[2::2])
    return runs


def pixels_of(rle: Rle) -> NDArray[np.int64]:
    """Positions of the pixels that an encoded segmentation covers, counted down the columns, ascending.

    Takes time with the covered area, where `decode` takes it with the area of the image.
    """
    runs = _decompress(rle["counts"].decode("ascii"))
    ends = np.cumsum(runs)
    starts, lengths = (ends - runs)[1::2], runs[1::2]
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))


def decode(rle: Rle) -> NDArray[np.bool_]:
    """Boolean mask [H, W] of an encoded segmentation."""
    decoded: Pixels = coco_mask.decode(rle)
    return decoded.astype(np.bool_)


def pixel_count(rle: Rle) -> int:
    """Number of pixels an encoded segmentation covers."""
    return int(coco_mask.area(rle))


def box(rle: Rle) -> list[float]:
    """[x, y, width, height] in pixels of the smallest box around an encoded segmentation; zeros where it is empty."""
    return [float(value) for value in coco_mask.toBbox(rle)]


def encode_ids(ids: NDArray[np.int32]) -> dict[int, Rle]:
    """Compressed RLE of every object of a map [H, W] of their numbers (0: none), in one pass over the pixels.

    Returns:
        RLE by number, ascending; `counts` is bytes.
    """
    height, width = ids.shape
    column_major = ids.T.reshape(-1)
    starts = np.flatnonzero(np.concatenate(([True], column_major[1:] != column_major[:-1])))
    ends = np.concatenate((starts[1:], [column_major.size]))
    numbers = column_major[starts]
    order = np.argsort(numbers, kind="stable")
    order = order[np.searchsorted(numbers[order], 1) :]
    found: dict[int, Rle] = {}
    if not order.size:
        return found
    first = np.flatnonzero(np.concatenate(([True], np.diff(numbers[order]) > 0)))
    for runs in np.split(order, first[1:]):
        edges = np.stack((starts[runs], ends[runs]), axis=1).reshape(-1)
        counts = np.diff(np.concatenate(([0], edges, [column_major.size])))
        rle = {"size": [height, width], "counts": counts.tolist()}
        found[int(numbers[runs[0]])] = coco_mask.frPyObjects(rle, height, width)
    return found
