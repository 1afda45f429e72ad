"""`fp4deploy data shapes|check|import`: generate scenes; list what a set holds and every defect; collect a set."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fp4deploy.errors import GateError, InputError, counted

from ...console import done, note, print_json, results, shown, table, typed
from ...deferred import deferred
from ...numbers import finite
from ...settings import SHAPES

if TYPE_CHECKING:
    from fp4deploy.data.inspection.summary import SplitSummary

app = typer.Typer(help="Generate a dataset, check one, or make one of annotation files.", no_args_is_help=True)


@deferred(app, "shapes")
def shapes(
    out: Annotated[Path, typer.Argument(help="Folder to create.")],
    train: Annotated[int, typer.Option("--train", min=1, max=1_000_000, help="Training images.")] = SHAPES["train"],
    val: Annotated[int, typer.Option("--val", min=1, max=1_000_000, help="Validation images.")] = SHAPES["val"],
    size: Annotated[int, typer.Option("--size", min=32, max=8192, help="Height and width in pixels.")] = SHAPES["size"],
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed; the same one gives the same pixels.")] = SHAPES[
        "seed"
    ],
) -> None:
    """Write a COCO-format set of generated scenes: textures, occlusion, crowds, polygons and RLE."""
    from fp4deploy.data import generate_shapes
    from fp4deploy.system.progress import progress

    with progress("drawing scenes"):
        generate_shapes(out, train=train, val=val, size=size, seed=seed)
    done(f"{shown(out)}: {train} training and {val} validation scenes of {size} x {size} pixels.", folder=str(out))
    note(f"Train on them with: fp4deploy train --data {typed(out)}")


@deferred(app, "check")
def check(
    folder: Annotated[Path, typer.Argument(help="Dataset folder: COCO, Roboflow, masks, Pascal VOC, volumes.")],
    sheet: Annotated[
        Path | None,
        typer.Option("--sheet", help="Draw images with their labels into this PNG.", show_default="not drawn"),
    ] = None,
    task: Annotated[
        Literal["semantic", "instance", "detection", "classification"],
        typer.Option("--task", help="What it is to be trained for; for detection, boxes alone are enough."),
    ] = "semantic",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of text.")] = False,
) -> None:
    """List splits, classes and sizes, and every defect with its file; exit 1 if there is one."""
    from fp4deploy.data import check_dataset, parse_splits, summarise
    from fp4deploy.data.inspection.check import has_boxes_alone
    from fp4deploy.system.progress import progress
    from fp4deploy.tasks import TASKS

    if sheet is not None and sheet.suffix.lower() != ".png":
        raise InputError(f"--sheet takes the PNG file to write, such as sheet.png, not {sheet}.")
    with progress("reading annotations") as bar:
        parsed = parse_splits(folder)
        bar.phase("sizes of images")
        splits = summarise(folder, parsed, bar.phase)
        boxes_alone = has_boxes_alone(parsed)
        boxes = TASKS[task].boxes
        defects = check_dataset(folder, parsed, bar.phase, boxes=boxes)
    if as_json:
        print_json(
            {
                "folder": str(folder),
                "splits": [dataclasses.asdict(split) for split in splits],
                "defects": [dataclasses.asdict(defect) for defect in defects],
            }
        )
    else:
        _print(splits)
        for defect in defects:
            done(f"{defect.file}: {defect.message} [{defect.kind}]")
    if boxes_alone and not boxes:
        note("Its annotations are boxes without segmentations: train on it with --task detection.")
    if sheet is not None and splits:
        from fp4deploy.report.figures.contact_sheet import draw_contact_sheet

        count = draw_contact_sheet(folder, splits[0].split, sheet, boxes_alone or boxes)
        note(f"Drew {count} images of {splits[0].split} to {shown(sheet)}.")
    if defects:
        masks = any(defect.kind != "no-segmentation" for defect in defects)
        raise GateError(
            f"{folder} has {len(defects)} defect{'s' if len(defects) > 1 else ''}; each is listed on stdout."
            f"{'' if masks else ' None is one for detection, which takes boxes: --task detection'}"
        )
    note(f"{folder} has no defect.")


def _print(splits: list[SplitSummary]) -> None:
    for split in splits:
        named = "width x height x depth" if split.spacings else "width x height"
        kind = "volume" if split.spacings else "image"
        steps = f", voxels of {_sizes(split.spacings)} mm" if split.spacings else ""
        done(f"{split.split}: {counted(split.images, kind)}, {named} {_sizes(split.sizes)}{steps}")
    _print_counts("annotations of class", {each.split: each.annotations for each in splits})
    _print_counts("masks with class", {each.split: each.in_masks for each in splits})
    for split in splits[:1]:
        counts = split.annotations if split.annotations is not None else split.in_masks or {}
        if absent := [name for name, count in counts.items() if not count]:
            more = f" and {len(absent) - 8} more" if len(absent) > 8 else ""
            note(f"No label in {split.split}, so that it cannot be learned: {', '.join(absent[:8])}{more}.")


def _sizes(sizes: Sequence[Sequence[float]]) -> str:
    """The smallest, the median and the largest; one where they are the same."""
    shown = [" x ".join(f"{side:g}" for side in each) for each in sizes]
    if len(set(shown)) < 2:
        return shown[0] if shown else "unknown"
    return ", ".join(f"{name} {text}" for name, text in zip(("min", "median", "max"), shown, strict=True))


def _print_counts(title: str, counts: dict[str, dict[str, int] | None]) -> None:
    """A row for each class, a column for each split that has counts."""
    found = {split: each for split, each in counts.items() if each is not None}
    names = dict.fromkeys(name for each in found.values() for name in each)
    if not names:
        return
    rows = [(name, *(str(each.get(name, "-")) for each in found.values())) for name in names]
    results().print(table((title, *found), rows, right=found))


@deferred(app, "import")
def import_(
    out: Annotated[Path, typer.Option("--out", help="Folder to create.", show_default=False)],
    source: Annotated[
        Path | None,
        typer.Argument(
            help="Folder with images/ beside labels/ or masks/, of YOLO, Cityscapes or nnU-Net.", show_default="none"
        ),
    ] = None,
    train_json: Annotated[
        Path | None, typer.Option("--train-json", help="COCO annotations, or Label Studio's.", show_default="none")
    ] = None,
    images: Annotated[
        list[Path] | None,
        typer.Option("--images", help="Folder of images; of JSON repeatable.", show_default="the file's own"),
    ] = None,
    masks: Annotated[
        Path | None,
        typer.Option("--masks", help="Folder of masks.", show_default="labels/, masks/, ... beside --images"),
    ] = None,
    mask_suffix: Annotated[
        str, typer.Option("--mask-suffix", help="What a mask's name has after its image's: _L of a_L.png for a.jpg.")
    ] = "",
    threshold: Annotated[
        int | None,
        typer.Option("--threshold", min=1, max=255, help="Value from which a mask is class 1.", show_default="none"),
    ] = None,
    classes: Annotated[
        str | None, typer.Option("--classes", help="Names of the masks' classes: a,b,c.", show_default="numbers")
    ] = None,
    val_json: Annotated[
        Path | None, typer.Option("--val-json", help="Annotations to validate on.", show_default="none")
    ] = None,
    test_json: Annotated[
        Path | None, typer.Option("--test-json", help="Annotations to test on.", show_default="none")
    ] = None,
    val_share: Annotated[
        float, typer.Option("--val-share", min=0, max=0.9, callback=finite, help="Share of the images to validate on.")
    ] = 0.0,
    test_share: Annotated[
        float, typer.Option("--test-share", min=0, max=0.9, callback=finite, help="Share of the images to test on.")
    ] = 0.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the division by shares.")] = 0,
) -> None:
    """Make a dataset folder of images and masks, COCO files, Label Studio JSON, YOLO, Cityscapes or nnU-Net."""
    from fp4deploy.data import import_coco, import_folder
    from fp4deploy.system.progress import progress

    named = {"train": train_json, "val": val_json, "test": test_json}
    files = {split: path for split, path in named.items() if path is not None}
    given = [name for name, value in (("a folder", source), ("--train-json", train_json), ("--masks", masks)) if value]
    shares: Any = {"val_share": val_share, "test_share": test_share, "seed": seed}
    if len(given) > 1 or (files and train_json is None):
        raise InputError(
            f"Give one of: a folder, --images with --masks, or --train-json (with --val-json and --test-json); not "
            f"{' and '.join(given) or '--val-json or --test-json alone'}."
        )
    with progress("collecting images") as bar:
        if files:
            folders = images or list(dict.fromkeys(path.parent for path in files.values()))
            imported = import_coco(files, folders, out, **shares)
        else:
            if images is not None and len(images) > 1:
                raise InputError("--images is given twice, and masks lie in one folder. Import each folder by itself.")
            names = tuple(name.strip() for name in (classes or "").split(",") if name.strip())
            shares |= {"suffix": mask_suffix, "classes": names, "threshold": threshold, "say": note}
            imported = import_folder(source, images[0] if images else None, masks, out, progress=bar.phase, **shares)
    for found in imported:
        what = "mask" if (out / "masks").is_dir() else "annotation"
        done(f"{found.split}: {counted(found.images, 'image')}, {counted(found.annotations, what)}", **vars(found))
    note(f"Check it with: fp4deploy data check {typed(out)}; train on it with: fp4deploy train --data {typed(out)}")
