"""What a model predicts for one image, at the image's own size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from fp4deploy.data.regions import encode_ids
from fp4deploy.data.sample import Pixels
from fp4deploy.instances.decode import Instances
from fp4deploy.instances.draw import draw_instances
from fp4deploy.predict.palette import Palette, png_palette, tinted


@dataclass(frozen=True, eq=False)
class Prediction:
    """Classes of all pixels and, of an instance model, the objects.

    mask: uint8 [H, W] of class ids. palette: a colour of each class, None for background.
    instances: None where the model is a semantic one.
    """

    mask: Pixels
    class_names: tuple[str, ...]
    palette: Palette
    instances: Instances | None = None

    def classes(self) -> list[dict[str, Any]]:
        """The classes in this image, the largest first: id, name, pixels, and the share of the image in 0..1."""
        pixels = np.bincount(self.mask.reshape(-1), minlength=len(self.class_names))
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

    def objects(self) -> list[dict[str, Any]]:
        """Objects in the terms of COCO annotations, the highest score first; [] for a semantic model.

        category_id is the class id, bbox is [left, top, width, height] in pixels, the segmentation a compressed RLE.
        """
        if self.instances is None:
            return []
        found = self.instances
        return [
            {
                "category_id": int(found.classes[number - 1]),
                "score": float(found.scores[number - 1]),
                "bbox": _box(found.ids == number),
                "area": int((found.ids == number).sum()),
                "segmentation": {"size": rle["size"], "counts": rle["counts"].decode("ascii")},
                "iscrowd": 0,
            }
            for number, rle in encode_ids(found.ids).items()
        ]

    def mask_image(self) -> Image.Image:
        """The mask as an indexed image: pixel values are class ids, the palette shows them in colour."""
        image = Image.fromarray(self.mask, mode=None)
        image.putpalette(png_palette(self.palette))
        return image

    def overlay(self, image: Pixels) -> Pixels:
        """Classes, or objects, drawn over the image uint8 [H, W, 3] that this was predicted for."""
        if self.instances is not None:
            return draw_instances(image, self.instances.ids)
        return tinted(image, self.mask, self.palette)


def _box(where: np.ndarray) -> list[int]:
    rows, columns = np.flatnonzero(where.any(1)), np.flatnonzero(where.any(0))
    top, left = int(rows[0]), int(columns[0])
    return [left, top, int(columns[-1]) - left + 1, int(rows[-1]) - top + 1]
