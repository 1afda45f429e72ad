"""Sample overlays: image, truth, FP16, NVFP4, and where the two models differ.

Of up to sixteen validation images, evenly spaced, the three with the most classes or objects are shown and then the one
on which the models differ most, so that the report never hides the worst. Of a volume the window of the network's size
in its middle is predicted, and one axial slice of it shown.
"""

from __future__ import annotations

import base64
import io
import struct
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from fp4deploy.bench.runtimes.pytorch import TorchRuntime
from fp4deploy.data.palette import colours
from fp4deploy.data.sample import Pixels, spread
from fp4deploy.models import ModelCard
from fp4deploy.report.figures.task_pictures import PICTURES, ClassPictures, Seen, most_telling
from fp4deploy.tasks import task_of

CANDIDATES = 16
SHOWN = 4
MAX_RUNS = 4  # of a comparison: columns of predictions and of heatmaps that stay legible
PAIR = "FP16 | NVFP4"
SVG = "http://www.w3.org/2000/svg"


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
    kind, dataset = PICTURES[card.task], task_of(card).for_card(card, data, labelled=True)
    seen = [kind.see(card, dataset.load(index), models) for index in spread(len(dataset), CANDIDATES)]
    *rich, worst = most_telling(kind, seen, SHOWN)
    return [_overlay(kind, card, *pair, pair is worst) for pair in (*rich, worst)]


def _overlay(kind: ClassPictures, card: ModelCard, seen: Seen, differing: float, worst: bool) -> Overlay:
    first, second = seen.predictions
    labels = {"truth": seen.truth, "FP16": first, "NVFP4": second}
    drawn = {title: kind.named(seen.image, each, card) for title, each in labels.items()}
    difference = kind.difference(seen.image, first, second, card)
    pictures = {"image": kind.shown(seen.image), **drawn, "difference": difference}
    present = set(np.unique(np.stack([*labels.values()])).tolist()) if kind.legend else set()
    palette = enumerate(zip(card.class_names, colours(card.class_names, card.background), strict=True))
    legend = [(name, colour) for number, (name, colour) in palette if colour and number in present]
    uris = {title: png_uri(pixels) for title, pixels in pictures.items()}
    return Overlay(seen.name, uris, differing, worst, legend, kind.unit)


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
