"""Of data: samples, tiles, regions, augmentation, labels, scenes."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import numpy as np

from fp4deploy.data import palette, sample, tiles
from fp4deploy.data.augmentation import letterbox, transforms, volumes
from fp4deploy.data.coco import boxes as coco_boxes
from fp4deploy.data.coco import regions
from fp4deploy.data.generated.scenes import draw_scene
from fp4deploy.data.importing import splits, yolo
from fp4deploy.data.inspection import balance, labels
from fp4deploy.data.volumes import dataset as volume_set
from fp4deploy.data.volumes import resample
from fp4deploy.models.volumes import Intensity
from tests.contract.results.arguments import (
    _random,
    augmented,
    classes,
    objects,
    picture,
    scene,
    volume,
)
from tests.contract.results.plain import Answer, each

MORE = {"seed": 3, "zoom": (0.5, 0.9), "jitter": 0.0, "flip": 1.0, "rotate": 40.0, "aspect": 3.0, "hue": 0.4,
        "upside_down": True, "mean": (0.1, 0.5, 0.9), "std": (0.3, 0.2, 0.1)}  # fmt: skip


def histogram(**values: int) -> Any:
    found = np.zeros(256, np.int64)
    for name, count in values.items():
        found[int(name[1:])] = count
    return found


GREY = np.bincount(np.r_[np.full(900, 3), np.full(700, 250), np.arange(40, 120)], minlength=256)
HISTOGRAMS = [histogram(), histogram(v0=5, v1=3), histogram(v0=7, v255=3), histogram(v255=4), histogram(v2=9), GREY,
              histogram(v0=9, v128=5), histogram(v0=9, v7=1, v40=1, v255=2), np.ones(256, np.int64)]  # fmt: skip


RESULTS: dict[str, Answer] = {
    "evenly": each(sample.evenly, (0, 1, 7, 100), (1, 3, 7, 200)),
    "spread": each(sample.spread, (0, 1, 7, 100), (1, 3, 7, 200)),
    "background": each(sample.background_class, (("background", "a"), ("a", "background"), ("a", "b")), (True, False)),
    "class types": each(lambda count: np.dtype(sample.class_type(count)).name, (2, 255, 256, 257, 70_000)),
    "colours": each(palette.colours, (("a", "b", "road"), ("background", "x")), (True, False)),
    "indexed palettes": each(lambda count, clear: palette.png_palette(palette.colours([f"c{n}" for n in range(count)], clear)),
                             (1, 3, 254, 255, 256), (True, False)),
    "tinted": lambda: palette.tinted(picture(), classes(21, 34).numpy(), palette.colours("abcd", True)),
    "tile starts": each(tiles.starts, (5, 16, 17, 100), (8, 16), (0, 3)),
    "ramp": each(tiles.ramp, (5, 8), (0, 3)),
    "gaussian": each(tiles.gaussian, (4, 7)),
    "polygons": each(lambda shape: (region := regions.encode(regions.parse_segmentation(shape), 12, 17)) and (
        region, regions.box(region), regions.pixel_count(region), regions.pixels_of(region)),
        ([[1, 1, 9.5, 2, 6, 11]], [[0, 0, 3, 0, 3, 3], [20, 4, 5, -4, 5, 6]], {"size": [12, 17], "counts": [30, 7, 167]},
         {"size": [12, 17], "counts": [0, 204]}, [], [[-5, -5, -1, -5, -1, -1]], [[1, 2, 3]])),
    "objects encoded": lambda: regions.encode_ids(objects()),
    "boxes checked": each(coco_boxes.checked_box, ([1, 2, 3, 4], [1, 2, 0, 4], [1, 2, -3, 4], [1, 2, 3], "x", None)),
    "normalised": each(volume_set.normalised, (volume().image,), (
        Intensity(), Intensity(-0.5, 1.0), Intensity(-1.0, 1.0, 0.2, 2.0), Intensity(0.3, 0.3))),
    "sizes at": each(resample.size_at, ((9, 14, 11),), ((3.0, 1.0, 0.5),), ((1.0, 1.0, 1.0), (2.0, 0.7, 4.0))),
    "volume resampled": each(resample.resample_image, (volume().image[0],), ((9, 14, 11), (4, 20, 6)), (
        (3.0, 1.0, 0.5), (1.0, 1.0, 1.0))),
    "labels resampled": each(resample.resample_labels, (volume().mask,), ((9, 14, 11), (4, 20, 6))),
    "letterbox": each(letterbox.letterbox, ((21, 34), (90, 30)), ((16, 24), (48, 32))),
    "box moves": lambda: [getattr(letterbox.letterbox((21, 34), (64, 48)), name)(cast(Any, scene().boxes)[:, 1:])
                          for name in ("to_input", "to_image")],
    "visible": each(letterbox.visible, (cast(Any, scene().boxes) * np.float32(1.5) - 4,), ((20, 30),), (True, False)),
    "images": augmented(transforms.TrainTransform, dataclasses.replace(scene(), boxes=None), (24, 16), **MORE),
    "box images": augmented(letterbox.BoxTrainTransform, scene(), (24, 16), **{
        name: value for name, value in MORE.items() if name != "rotate"}),
    "mosaics": augmented(letterbox.BoxTrainTransform, dataclasses.replace(scene(), others=tuple(map(scene, (1, 2, 3)))),
                         (24, 16), mosaic=1.0, zoom=(0.5, 0.9), aspect=3.0),
    "volumes": augmented(lambda *size, **options: volumes.VolumeTrainTransform(size, **options), volume(), (4, 8, 6),
                         seed=3, jitter=0.0, flip=1.0, foreground=1.0),
    "evaluated": each(lambda kind: kind(16, 24)(scene(), 0, 3), (transforms.EvalTransform, transforms.LabelEvalTransform,
                      transforms.NumberedEvalTransform, letterbox.LetterboxTransform)),
    "recoloured": each(transforms.recolour, (picture(),), (1, 0.6), (1, 1.4), (1, 0.5), (0, 0.3)),
    "value defects": each(labels.value_defect, HISTOGRAMS, (2, 9, 255), (True, False)),
    "mask defects": each(lambda one, other: [(d.file, d.kind) for d in labels.mask_defects({"train": one, "val": other}, 2, True)],
                         HISTOGRAMS[:5], HISTOGRAMS[:5]),
    "class balance": each(balance.class_balance, (balance.ClassCounts(("a", "b", "c"), 9, (100, 5, 0), (9, 2, 0), (900, 180, 0)),),
                          balance.METHODS, (1.0, 0.5)),
    "class balance at its bounds": each(balance.class_balance, (
        balance.ClassCounts(("a", "b", "c"), 900, (10**6, 60, 1), (900, 3, 1), (10**6, 10**5, 10**5)),), balance.METHODS, (0.5, 2.0)),
    "scenes": lambda: [draw_scene(_random(seed), 48) for seed in (1, 2)],
    "yolo boxes": each(yolo._box, ([0.5, 0.4, 0.2, 0.3], [0.05, 0.9, 0.3, 0.3]), (30,), (20,)),
    "yolo polygons": each(yolo._polygon, ([0.1, 0.2, 0.9, 0.25, 0.4, 0.8],), (30,), (20,)),
    "flat names": each(splits.flat_names, (["a/b.png", "a_b.png", "c.png", "d/c.jpg"],)),
    "shares": each(splits.require_shares, ({"train"}, {"train", "val"}, set()), (0.0, 0.2, 1.0), (0.0, 0.3), ("x",)),
}  # fmt: skip
