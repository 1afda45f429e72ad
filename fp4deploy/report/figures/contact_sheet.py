"""A contact sheet: images of a dataset with their labels drawn over them, to see what a training will see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageOps

from fp4deploy.data import open_boxes, open_dataset
from fp4deploy.data.palette import colours, tinted
from fp4deploy.data.sample import IGNORE, Boxes, Sample, spread
from fp4deploy.report.figures.task_pictures import grey_slice
from fp4deploy.system.files import atomic_write

COLUMNS, ROWS = 4, 3
SIDE = 320  # pixels of a cell
LINE = 18  # pixels of a line of text
PAPER, INK, CROWD = (255, 255, 255), (30, 30, 30), (150, 150, 150)


def draw_contact_sheet(root: Path, split: str, out: Path, boxes: bool = False) -> int:
    """Write up to `COLUMNS` x `ROWS` evenly spaced images of a split as one PNG; how many they are.

    boxes: draw the boxes of objects, of a dataset for detection; otherwise masks.

    Raises:
        InputError: the data cannot be read, or the file cannot be written.
    """
    dataset = open_boxes(root, split) if boxes else open_dataset(root, split)
    chosen = spread(len(dataset), COLUMNS * ROWS)
    palette = colours(dataset.class_names, dataset.background)
    present: set[int] = set()
    cells = []
    for index in chosen:
        sample = _flat(dataset.load(index))
        image = Image.fromarray(sample.image if boxes else tinted(sample.image, sample.mask, palette))
        image.thumbnail((SIDE - 8, SIDE - 8))  # at once: twelve whole photos may be gigabytes
        times = max(1, (SIDE - 8) // max(image.size))  # small images: whole pixels, enlarged
        image = ImageOps.scale(image, times, Image.Resampling.NEAREST)
        if sample.boxes is None:
            present |= set(np.unique(sample.mask).tolist())
        else:
            present |= _draw_boxes(image, sample.boxes, image.width / sample.image.shape[1], palette)
        cells.append((sample.name, image))
    legend = enumerate(zip(dataset.class_names, palette, strict=True))
    shown = [(name, colour) for number, (name, colour) in legend if colour is not None and number in present]
    rows = -(-len(cells) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * SIDE, rows * (SIDE + LINE) + _legend_height(shown)), PAPER)
    pen = ImageDraw.Draw(sheet)
    for place, (name, image) in enumerate(cells):
        x, y = place % COLUMNS * SIDE, place // COLUMNS * (SIDE + LINE)
        sheet.paste(image, (x + 4, y + 4))
        pen.text((x + 4, y + SIDE - 2), name[-48:].encode("ascii", "replace").decode(), fill=INK)
    _draw_legend(pen, shown, rows * (SIDE + LINE))
    with atomic_write(out) as temporary:
        sheet.save(temporary, format="PNG")
    return len(cells)


def _flat(sample: Sample) -> Sample:
    """An image as it is; of a volume the axial slice with most labelled voxels, in grey, anterior up."""
    if sample.mask.ndim == 2:
        return sample
    labelled = ((sample.mask > 0) & (sample.mask != IGNORE)).sum((1, 2))
    at = int(labelled.argmax())
    image, mask = grey_slice(sample.image[0], at), sample.mask[at, ::-1]
    return replace(sample, image=image, mask=mask, name=f"{sample.name}, slice {at}")


def _draw_boxes(
    image: Image.Image, boxes: Boxes, factor: float, palette: Sequence[tuple[int, int, int] | None]
) -> set[int]:
    """Outline boxes [M, 5], crowds in grey; the classes that are among them."""
    pen = ImageDraw.Draw(image)
    for number, left, top, right, bottom in boxes.tolist():
        colour = CROWD if number == IGNORE else palette[int(number)]
        edges = (factor * left, factor * top)
        far = tuple(max(near, factor * edge - 1) for near, edge in zip(edges, (right, bottom), strict=True))
        pen.rectangle((*edges, *far), outline=colour, width=2)
    return {int(number) for number in boxes[:, 0]}


def _legend_height(legend: list[tuple[str, tuple[int, int, int]]]) -> int:
    return (-(-len(legend) // COLUMNS)) * LINE + 8


def _draw_legend(pen: ImageDraw.ImageDraw, legend: list[tuple[str, tuple[int, int, int]]], top: int) -> None:
    for place, (name, colour) in enumerate(legend):
        x, y = place % COLUMNS * SIDE + 4, top + place // COLUMNS * LINE + 4
        pen.rectangle((x, y, x + 12, y + 12), fill=colour)
        pen.text((x + 18, y), name[:44].encode("ascii", "replace").decode(), fill=INK)
