"""A runtime whose output depends on one pixel alone, so that what a whole image gives is known without a network."""

from __future__ import annotations

import numpy as np

from fp4deploy.bench.runtimes.protocol import Array
from fp4deploy.models import InstanceHead, ModelCard

NAMES = ("background", "red", "green", "blue")


def card(height: int = 32, width: int = 48, head: InstanceHead | None = None) -> ModelCard:
    """A model that is fed with RGB in [0, 1]."""
    return ModelCard(
        "fp16",
        1.0,
        NAMES,
        height,
        width,
        (0.0,) * 3,
        (1.0,) * 3,
        True,
        task="instance" if head else "semantic",
        head=head,
    )


class Pointwise:
    """Class 1, 2 or 3 where red, green or blue is the largest colour and above 1/2, else background."""

    name, device, precision = "pointwise", "CPU", "FP32"

    def __init__(self, model_card: ModelCard) -> None:
        self.card = model_card
        self.batches: list[tuple[int, ...]] = []

    def infer(self, images: Array) -> Array:
        """Logits [N, 4, H, W]."""
        self.batches.append(images.shape)
        return np.concatenate([np.full_like(images[:, :1], 0.5), images], axis=1)

    def time(self, images: Array, warmup: int, iterations: int, max_seconds: float) -> list[float]:
        """Nothing is timed."""
        raise NotImplementedError


def photo(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Rectangles of the three colours on black, uint8 [H, W, 3]."""
    random = np.random.default_rng(seed)
    image = np.zeros((height, width, 3), np.uint8)
    for _ in range(12):
        top, left = random.integers(0, height), random.integers(0, width)
        image[top : top + height // 3, left : left + width // 3] = 0
        image[top : top + height // 3, left : left + width // 3, random.integers(3)] = random.integers(150, 255)
    return image


def classes_of(image: np.ndarray) -> np.ndarray:
    """What `Pointwise` answers for pixels that are not resized."""
    scaled = image.astype(np.float32) * np.float32(1 / 255)
    return np.concatenate([np.full((*image.shape[:2], 1), 0.5, np.float32), scaled], axis=2).argmax(2).astype(np.uint8)
