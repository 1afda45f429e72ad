"""Draw the picture of docs/nnunet.md: python docs/images/make_nnunet.py WALK

WALK is the folder of `benchmarks.nnunet_walk`. Of each volume the axial slice in which FP16 and NVFP4 differ most.
"""

from __future__ import annotations

import sys
from pathlib import Path

from make_volumes import draw  # beside this file

from fp4deploy.data.palette import colours, tinted
from fp4deploy.data.volumes.nifti import read_labels, read_volume
from fp4deploy.report.figures.task_pictures import PICTURES, Seen, most_telling, slice_of
from tests.interop.nnunet_walk import RAW

TARGET = Path(__file__).parent / "nnunet.png"
CLASSES = ("background", "anterior", "posterior")
SHOWN = 4


def main(walk: str) -> None:
    """Four volumes, the one in which the two differ most last."""
    folder, kind = Path(walk), PICTURES["semantic"]
    seen = [seen_of(folder, path) for path in sorted((folder / RAW / "labelsTs").iterdir())]
    rows = []
    for each, differing in most_telling(kind, seen, SHOWN):
        masks = {"label": each.truth, "FP16": each.predictions[0], "NVFP4": each.predictions[1]}
        drawn = {title: tinted(each.image, mask, colours(CLASSES, True)) for title, mask in masks.items()}
        grey = kind.difference(each.image, *each.predictions, None)  # type: ignore[arg-type]
        rows.append((each.name, differing, {"image": each.image, **drawn, "difference": grey}))
    draw(rows, TARGET)


def seen_of(folder: Path, label: Path) -> Seen:
    """The slice of one volume."""
    case = label.name.removesuffix(".nii.gz")
    image, _ = read_volume(folder / RAW / "imagesTs" / f"{case}_0000.nii.gz")
    truth, *found = (
        read_labels(path)[0].astype("uint8")
        for path in (label, folder / "fp16" / label.name, folder / "nvfp4" / label.name)
    )
    return slice_of(Seen(case, image, truth, found))


if __name__ == "__main__":
    main(*sys.argv[1:])
