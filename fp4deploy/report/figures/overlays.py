"""Sample overlays: image, truth, FP16, NVFP4, and the pixels where the two models differ.

Of up to sixteen validation images, evenly spaced, the three with the most classes are shown and then the one on which
the models differ most, so that the report never hides the worst. Of a volume the window of the network's size in its
middle is predicted, and one axial slice of it shown.
"""

from __future__ import annotations

import base64
import io
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fp4deploy.bench.runtimes.pytorch import TorchRuntime
from fp4deploy.data import IGNORE, validation_set
from fp4deploy.data.palette import Palette, colours, tinted
from fp4deploy.data.sample import spread
from fp4deploy.tasks import task_of

CANDIDATES = 16
SHOWN = 4
SLICE = 320  # pixels of the longer side of a slice of a volume, as an integer multiple of its voxels
MAX_RUNS = 4  # of a comparison: columns of predictions and of heatmaps that stay legible
DIFFERENCE = (214, 51, 108)
PAIR = "FP16 | NVFP4"
SVG = "http://www.w3.org/2000/svg"

Pixels = NDArray[np.uint8]
T = TypeVar("T")


@dataclass(frozen=True)
class PictureRow:
    """One image or statistic of several runs: caption, and (title, data URI) of its pictures."""

    caption: str
    pictures: list[tuple[str, str]]


@dataclass(frozen=True)
class Overlay:
    """One validation image and what both models predict; every picture is a PNG data URI.

    differing: share of the pixels, or of the boxes (`counted`), in which the models differ.
    legend: (name, colour) of the classes in the annotation or a prediction of this image, where colours stand for them.
    """

    name: str
    pictures: dict[str, str]
    differing: float
    worst: bool
    legend: list[tuple[str, tuple[int, int, int]]] = field(default_factory=list)
    counted: str = "pixels"

    @property
    def pair(self) -> tuple[str, str] | None:
        """The pictures of FP16 and NVFP4, which a page lays over one another; None where they are not there."""
        return (self.pictures["FP16"], self.pictures["NVFP4"]) if {"FP16", "NVFP4"} <= self.pictures.keys() else None

    @property
    def columns(self) -> list[str]:
        """Headings of the pictures of a page, the pair in one."""
        if self.pair is None:
            return list(self.pictures)
        return [PAIR if title == "FP16" else title for title in self.pictures if title != "NVFP4"]


def draw_overlays(fp16: Path, nvfp4: Path, data: Path) -> list[Overlay]:
    """Overlays of two checkpoints of one run on the validation split of `data`."""
    models = TorchRuntime(fp16), TorchRuntime(nvfp4)
    card = models[0].card
    dataset = validation_set(card, data)
    transform = task_of(card).transform(card.size, card.mean, card.std)
    palette = colours(card.class_names, card.background)
    mean, std = (np.array(values, dtype=np.float32)[:, None, None] for values in (card.mean, card.std))
    found: list[_Prediction] = []
    for index in spread(len(dataset), CANDIDATES):
        sample = dataset.load(index)
        tensor, mask = transform(sample)
        normalised = tensor.numpy()
        first, second = (model.infer(normalised[None])[0].argmax(0).astype(np.uint8) for model in models)
        truth = mask.numpy().astype(np.uint8)
        if card.volume is not None:
            found.append(_slice(sample.name, normalised[0], truth, first, second))
            continue
        image = ((normalised * std + mean).clip(0, 1) * 255).round().astype(np.uint8).transpose(1, 2, 0)
        found.append(_Prediction(sample.name, image, truth, first, second))
    *rich, worst = most_telling(found, lambda each: each.differing, lambda each: each.classes)
    return [each.draw(palette, each is worst, card.class_names) for each in (*rich, worst)]


def most_telling(
    found: Sequence[T], differing: Callable[[T], float], richness: Callable[[T], float], shown: int = SHOWN
) -> list[T]:
    """The richest of some images, and last the one on which the models differ most."""
    worst = max(found, key=differing)
    return [*sorted((each for each in found if each is not worst), key=richness, reverse=True)[: shown - 1], worst]


def faded(image: Pixels) -> Pixels:
    """An image in light grey, on which colours are seen."""
    return np.repeat(image.mean(axis=2, keepdims=True) * 0.5 + 110, 3, axis=2).astype(np.uint8)


@dataclass(frozen=True, eq=False)
class _Prediction:
    """What both models predict for one image [H, W, 3]; masks [H, W] of class ids."""

    name: str
    image: Pixels
    truth: Pixels
    first: Pixels
    second: Pixels

    @property
    def classes(self) -> int:
        present = np.unique(self.truth)
        return int((present != IGNORE).sum())

    @property
    def differing(self) -> float:
        return float((self.first != self.second).mean())

    def draw(self, palette: Palette, worst: bool, names: Sequence[str]) -> Overlay:
        grey = faded(self.image)
        grey[self.first != self.second] = DIFFERENCE
        pictures = {
            "image": self.image,
            "truth": tinted(self.image, self.truth, palette),
            "FP16": tinted(self.image, self.first, palette),
            "NVFP4": tinted(self.image, self.second, palette),
            "difference": grey,
        }
        uris = {title: png_uri(pixels) for title, pixels in pictures.items()}
        present = set(np.unique(np.stack([self.truth, self.first, self.second])).tolist()) - {IGNORE}
        legend = [
            (name, colour)
            for number, (name, colour) in enumerate(zip(names, palette, strict=True))
            if colour and number in present
        ]
        return Overlay(self.name, uris, self.differing, worst, legend)


def grey_slice(voxels: NDArray[np.floating], at: int) -> Pixels:
    """An axial slice of [D, H, W] as uint8 [H, W, 3], between the 0.5 and 99.5 percentiles of all; anterior is up."""
    low, high = np.percentile(voxels, (0.5, 99.5))
    grey = ((voxels[at, ::-1] - low) / max(high - low, 1e-6) * 255).clip(0, 255).astype(np.uint8)
    return np.repeat(grey[..., None], 3, -1)


def _slice(name: str, voxels: NDArray[np.float32], truth: Pixels, first: Pixels, second: Pixels) -> _Prediction:
    """The axial slice of a window [D, H, W] in which the models differ most, of several the one with most classes."""
    differing = (first != second).sum((1, 2))
    labelled = ((truth > 0) & (truth != IGNORE)).sum((1, 2))
    at = int(np.lexsort((labelled, differing))[-1])
    grey = grey_slice(voxels, at)[::-1, :, 0]
    times = max(1, SLICE // max(grey.shape))
    shown = [
        np.kron(each[::-1], np.ones((times, times), np.uint8)) for each in (grey, truth[at], first[at], second[at])
    ]
    image, *masks = shown  # anterior is up
    return _Prediction(f"{name}, slice {at}", np.repeat(image[..., None], 3, -1), *masks)


def png_uri(pixels: Pixels, largest: int | None = None) -> str:
    """PNG as a data URI, made smaller where a side has more than `largest` pixels."""
    image = Image.fromarray(pixels)
    if largest is not None:
        image.thumbnail((largest, largest), Image.Resampling.LANCZOS)
    target = io.BytesIO()
    image.save(target, format="PNG")
    return data_uri("png", target.getvalue())


def themed_uri(light: bytes, dark: bytes) -> str:
    """Two PNG pictures of one size as one image, which shows the one that suits the colour scheme where it stands."""
    width, height = struct.unpack(">II", light[16:24])  # of the header
    both = "".join(
        f'<image class="{name}" width="{width}" height="{height}" href="{data_uri("png", content)}"/>'
        for name, content in (("light", light), ("dark", dark))
    )
    style = ".dark{display:none}@media(prefers-color-scheme:dark){.dark{display:inline}.light{display:none}}"
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return data_uri("svg+xml", f'<svg xmlns="{SVG}" {size}><style>{style}</style>{both}</svg>'.encode())


def data_uri(kind: str, content: bytes) -> str:
    """An image inside a page; `kind`: "png" or "svg+xml"."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
