"""What a model predicts for one image, at the image's own size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fp4deploy.data.coco.regions import box, encode_ids, pixel_count
from fp4deploy.data.palette import Palette, png_palette, tinted
from fp4deploy.data.sample import ClassIds, Pixels
from fp4deploy.detection import Detections
from fp4deploy.detection.draw import draw_boxes
from fp4deploy.instances.decode import Instances
from fp4deploy.instances.draw import draw_instances, label_objects
from fp4deploy.models.boxes import SHOWN

MAX_LABELS = 5  # classes of an image that a classifier is asked for
MAX_TEXTS = 20  # objects of an image, the surest ones, that carry class and score


@dataclass(frozen=True, eq=False)
class Prediction:
    """Classes of all pixels and, of an instance model or a detector, the objects.

    mask: [H, W] of class ids, uint8, or uint16 of more than 255 classes. palette: a colour of each class, None for
        background.
    instances: of an instance model. detections: of a detector, whose mask is empty. scores: of a classifier, of each
        class in 0..1; its mask has the likeliest everywhere.
    """

    mask: ClassIds
    class_names: tuple[str, ...]
    palette: Palette
    instances: Instances | None = None
    detections: Detections | None = None
    scores: NDArray[np.float32] | None = None

    def __repr__(self) -> str:
        height, width = self.mask.shape
        named = ", ".join(f"{each['name']} {self._figure(each)}" for each in self.classes()[:8])
        return f"Prediction({height} x {width} pixels: {named or 'nothing found'})"

    @staticmethod
    def _figure(found: dict[str, object]) -> str:
        return f"{found['score']:.2f}" if "score" in found else str(found.get("objects", found.get("pixels")))

    @property
    def counts_objects(self) -> bool:
        """Whether objects were looked for."""
        return self.instances is not None or self.detections is not None

    @property
    def has_mask(self) -> bool:
        """Whether pixels have classes of their own: not of boxes, or of a class of the whole image."""
        return self.detections is None and self.scores is None

    def classes(self) -> list[dict[str, Any]]:
        """The classes in this image, the largest first: id, name, pixels, and the share of the image in 0..1.

        Of a detector those of its boxes, the most frequent first: id, name, and how many objects. Of a classifier the
        `MAX_LABELS` likeliest ones: id, name and score.
        """
        if self.scores is not None:
            likeliest = np.argsort(-self.scores, kind="stable")[:MAX_LABELS].tolist()
            return [{"id": at, "name": self.class_names[at], "score": float(self.scores[at])} for at in likeliest]
        if self.detections is not None:
            numbers, counts = np.unique(self.detections.classes, return_counts=True)
            order = np.argsort(-counts, kind="stable")
            return [
                {"id": int(numbers[at]), "name": self.class_names[numbers[at]], "objects": int(counts[at])}
                for at in order
            ]
        pixels = np.zeros(max(256, len(self.class_names)), np.int64)
        for row in self.mask:  # numpy widens what it counts
            pixels += np.bincount(row, minlength=len(pixels))
        found = sorted(np.flatnonzero(pixels).tolist(), key=lambda number: -pixels[number])
        return [
            {
                "id": number,
                "name": self.class_names[number],
                "pixels": int(pixels[number]),
                "share": float(pixels[number] / self.mask.size),
            }
            for number in found
        ]

    def objects(self) -> list[dict[str, object]]:
        """Objects in the terms of COCO annotations, the highest score first; [] for a semantic model.

        category_id is the class id, bbox is [left, top, width, height] in pixels, the segmentation a compressed RLE;
        boxes have none.
        """
        if self.detections is not None:
            return self._boxes(self.detections)
        if self.instances is None:
            return []
        found = self.instances
        return [
            {
                "category_id": int(found.classes[number - 1]),
                "score": float(found.scores[number - 1]),
                "bbox": [int(value) for value in box(rle)],
                "area": pixel_count(rle),
                "segmentation": {"size": rle["size"], "counts": rle["counts"].decode("ascii")},
                "iscrowd": 0,
            }
            for number, rle in encode_ids(found.ids).items()
        ]

    def to_json(self) -> dict[str, object]:
        """`classes`, and `objects` where they were looked for."""
        return {"classes": self.classes(), **({"objects": self.objects()} if self.counts_objects else {})}

    @staticmethod
    def _boxes(found: Detections) -> list[dict[str, object]]:
        sides = found.boxes[:, 2:] - found.boxes[:, :2]
        return [
            {
                "category_id": int(number),
                "score": float(score),
                "bbox": [float(value) for value in (*box[:2], *side)],
                "area": float(side[0] * side[1]),
                "iscrowd": 0,
            }
            for box, side, number, score in zip(found.boxes, sides, found.classes, found.scores, strict=True)
        ]

    def mask_image(self) -> Image.Image:
        """The mask as an indexed image: pixel values are class ids, the palette shows them in colour.

        Of more than 255 classes a greyscale image of 16 bits.
        """
        image = Image.fromarray(self.mask, mode=None)
        if palette := png_palette(self.palette):
            image.putpalette(palette)
        return image

    def overlay(self, image: Pixels) -> Pixels:
        """Classes, or objects with class and score, drawn over the image uint8 [H, W, 3] of this prediction."""
        if self.scores is not None:
            height, width = self.mask.shape
            likeliest = np.array([self.scores.argmax()])
            whole = Detections(np.array([[0, 0, width, height]], np.float32), likeliest, self.scores[likeliest])
            return draw_boxes(image, whole, self.class_names)
        if self.detections is not None:
            return draw_boxes(image, self.detections.above(SHOWN), self.class_names)
        if self.instances is not None:
            found = zip(self.instances.classes, self.instances.scores, strict=True)
            texts = [f"{self.class_names[int(number)]} {score:.2f}" for number, score in found if score >= SHOWN]
            return label_objects(draw_instances(image, self.instances.ids), self.instances.ids, texts[:MAX_TEXTS])
        return tinted(image, self.mask, self.palette)
