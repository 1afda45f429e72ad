"""`fp4deploy data shapes|check`: generate a COCO-format set of scenes; list every defect of a set."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from fp4deploy.errors import GateError

from ..console import done, note, print_json, shown
from ..settings import SHAPES

app = typer.Typer(help="Generate a COCO-format dataset, or check one.", no_args_is_help=True)


@app.command("shapes")
def shapes(
    out: Annotated[Path, typer.Argument(help="Folder to create.")],
    train: Annotated[int, typer.Option("--train", min=1, help="Training images.")] = SHAPES["train"],
    val: Annotated[int, typer.Option("--val", min=1, help="Validation images.")] = SHAPES["val"],
    size: Annotated[int, typer.Option("--size", min=32, help="Height and width in pixels.")] = SHAPES["size"],
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed; the same one gives the same pixels.")] = SHAPES[
        "seed"
    ],
) -> None:
    """Write a COCO-format set of generated scenes: textures, occlusion, crowds, polygons and RLE."""
    from fp4deploy.data import generate_shapes

    generate_shapes(out, train=train, val=val, size=size, seed=seed)
    done(f"{shown(out)}: {train} training and {val} validation scenes of {size} x {size} pixels.")
    note(f"Train on them with: fp4deploy train --data {shown(out)}")


@app.command("check")
def check(
    folder: Annotated[Path, typer.Argument(help="Dataset folder: COCO annotations or PNG masks.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of text.")] = False,
) -> None:
    """List every defect of a dataset, with file and annotation id; exit 1 if there is one."""
    from fp4deploy.data import check_dataset

    defects = check_dataset(folder)
    if as_json:
        print_json({"folder": str(folder), "defects": [dataclasses.asdict(defect) for defect in defects]})
    else:
        for defect in defects:
            where = defect.file if defect.annotation_id is None else f"{defect.file}, annotation {defect.annotation_id}"
            done(f"{where}: {defect.message} [{defect.kind}]")
    if defects:
        raise GateError(
            f"{folder} has {len(defects)} defect{'s' if len(defects) > 1 else ''}; each is listed on stdout."
        )
    note(f"{folder} has no defect.")
