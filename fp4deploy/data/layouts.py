"""Where a dataset's files lie, in the layouts that annotation tools and public sets have.

| layout | annotations or masks of a split | its images |
|---|---|---|
| COCO | annotations/instances_{split}2017.json | {split}2017/ |
| COCO without the year; CVAT ("COCO 1.0") | annotations/instances_{split}.json | {split}/, or images/{split}/ |
| Roboflow ("COCO Segmentation") | {split}/_annotations.coco.json | {split}/ |
| semantic masks | masks/{split}/NAME.png | {split}/, or images/{split}/ |
| volumes, the raw layout of nnU-Net | labelsTr/CASE.nii.gz | imagesTr/CASE_0000.nii.gz; see `data.volumes.layout` |
| Pascal VOC; CVAT ("Mask") | SegmentationClass/NAME.png | JPEGImages/, by ImageSets/Segmentation/{split}.txt |

The validation split may also be called valid or validation. A folder that has masks and annotations is read by its
masks. A tool that writes one file for all images (Label Studio, one CVAT task) has no splits: `data.importing` makes
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fp4deploy.data.images import IMAGE_SUFFIXES
from fp4deploy.data.sample import ALL_SPLITS, VAL
from fp4deploy.errors import InputError
from fp4deploy.system.schema import MAX_BYTES, briefly, lines_of, text_of

LAYOUTS = (
    "annotations/instances_{train,val}2017.json with {train,val}2017/ (COCO), {train,valid}/_annotations.coco.json "
    "(Roboflow), masks/{train,val}/*.png with {train,val}/ (semantic masks), SegmentationClass/*.png with "
    "JPEGImages/ and ImageSets/Segmentation/{train,val}.txt (Pascal VOC), or dataset.json with imagesTr/ and labelsTr/ "
    "(volumes, nnU-Net)"
)
ALIASES = {VAL: (VAL, "valid", "validation")}
LONGEST_STEM = 240  # bytes; file systems take 255 with the suffix
MASKS = "masks"
VOC_MASKS, VOC_IMAGES, VOC_LISTS = "SegmentationClass", "JPEGImages", Path("ImageSets") / "Segmentation"


def find_annotations(root: Path, split: str) -> Path | None:
    """Path of the split's COCO annotation file, if there is one."""
    for name in _names(split):
        for path in (
            root / "annotations" / f"instances_{name}2017.json",
            root / "annotations" / f"instances_{name}.json",
            root / name / "_annotations.coco.json",
        ):
            if path.is_file():
                return path
    return None


def find_images(root: Path, split: str) -> Path | None:
    """Folder of the split's images, if there is one."""
    for name in _names(split):
        for folder in (root / f"{name}2017", root / name, root / "images" / f"{name}2017", root / "images" / name):
            if folder.is_dir():
                return folder
    return root / VOC_IMAGES if (root / VOC_IMAGES).is_dir() else None


def has_masks(root: Path) -> bool:
    """Whether a folder has semantic masks, which take priority over COCO annotations."""
    if not any((root / folder).is_dir() for folder in (MASKS, VOC_MASKS)):
        return False
    return any(_mask_folder(root, split) or next(_masks(root, split), None) is not None for split in ALL_SPLITS)


def has_mask_split(root: Path, split: str) -> bool:
    """Whether a folder has a split of masks."""
    return _mask_folder(root, split) is not None or _voc_list(root, split) is not None


def mask_files(root: Path, split: str) -> dict[str, Path]:
    """Masks of a split by their stem, sorted."""
    return {path.stem: path for path in sorted(_masks(root, split))}


def image_files(folder: Path) -> dict[str, Path]:
    """Images of a folder by their stem, sorted."""
    return {path.stem: path for path in sorted(folder.iterdir()) if path.suffix.lower() in IMAGE_SUFFIXES}


def split_images(root: Path, split: str) -> dict[str, Path]:
    """Images of a split with masks, by their stem; of Pascal VOC, whose splits share a folder, those on its list."""
    folder = find_images(root, split)
    found = image_files(folder) if folder is not None else {}
    if _mask_folder(root, split) is not None or not (root / VOC_MASKS).is_dir():
        return found
    listing = _voc_list(root, split)
    return {} if listing is None else {stem: found[stem] for stem in _stems(listing) if stem in found}


def _names(split: str) -> tuple[str, ...]:
    return ALIASES.get(split, (split,))


def _mask_folder(root: Path, split: str) -> Path | None:
    return next((folder for name in _names(split) if (folder := root / MASKS / name).is_dir()), None)


def _voc_list(root: Path, split: str) -> Path | None:
    if not (root / VOC_MASKS).is_dir():
        return None
    return next((path for name in _names(split) if (path := root / VOC_LISTS / f"{name}.txt").is_file()), None)


def _masks(root: Path, split: str) -> Iterator[Path]:
    folder, listing = _mask_folder(root, split), _voc_list(root, split)
    if folder is not None:
        yield from folder.glob("*.png")
    elif listing is not None:
        yield from (root / VOC_MASKS / f"{stem}.png" for stem in _stems(listing))


def _stems(listing: Path) -> list[str]:
    """The names on a list of Pascal VOC, without folders: nothing outside the dataset is named.

    Raises:
        InputError: a name is longer than a file's can be.
    """
    lines = (line.strip() for line in text_of(b"\n".join(lines_of(listing, MAX_BYTES))).splitlines())
    stems = list(dict.fromkeys(Path(line.split()[0]).name for line in lines if line))
    for stem in stems:
        if len(stem.encode()) > LONGEST_STEM or "\0" in stem:
            raise InputError(f"{listing} names a file {briefly(stem)}: at most {LONGEST_STEM} bytes are valid.")
    return stems
