"""NIfTI files as arrays of anatomical axes, and masks back into files of the same geometry.

A file's axes may run in any of 48 ways. `read_volume` turns them to the closest anatomical axes, [D, H, W] from
inferior to superior, posterior to anterior and left to right (`models.volumes`), by permuting and mirroring alone: no
voxel is computed. `write_labels` turns a mask back and gives it the header and the affine of the file that was read. An
oblique volume keeps its grid, whose spacing is that of the affine.

nibabel, of the extra `medical`, reads and writes the files.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4deploy.data.sample import Pixels
from fp4deploy.requirements import NIBABEL
from fp4deploy.system.files import atomic_write

SUFFIXES = (".nii.gz", ".nii")
MAX_VOXELS = 1 << 31
MASKS = "fp4deploy"  # intent_name of what `write_labels` writes
Voxels = NDArray[np.float32]
Spacing = tuple[float, float, float]  # millimetres along depth, height and width
_DAMAGED = (OSError, EOFError, ValueError, zlib.error, OverflowError, MemoryError)
_TOLERANCE = 1e-3  # of an affine, in millimetres


class VolumeError(ValueError):
    """A file that cannot be used; the message is the end of a sentence that starts with the file's name."""


@dataclass(frozen=True, eq=False)
class Grid:
    """Where the voxels of a file lie: what its header says, without the voxels.

    size: [D, H, W]; spacing: millimetres along them. orientation: nibabel's, from the file's axes to R, A, S.
    header, affine: the file's own.
    """

    size: tuple[int, int, int]
    spacing: Spacing
    orientation: NDArray[np.float64]
    header: Any
    affine: NDArray[np.float64]

    def differs(self, other: Grid, name: str) -> str | None:
        """How the grid of a file `name` differs, as the end of a sentence; None for the same voxels in space."""
        if self.size != other.size:
            return f"has {_sides(self.size)} voxels (depth x height x width), and {name} has {_sides(other.size)}."
        apart = float(np.abs(self.affine - other.affine).max())
        if apart > _TOLERANCE:
            return f"lies elsewhere than {name}: their affines differ by up to {apart:.3g} mm."
        return None


def name_of(path: Path) -> str:
    """The name of a file without the suffix, which may be two.

    >>> name_of(Path("case_0000.nii.gz"))
    'case_0000'
    """
    return next((path.name.removesuffix(end) for end in SUFFIXES if path.name.endswith(end)), path.stem)


def is_volume(path: Path) -> bool:
    """Whether a file is a NIfTI file by its name."""
    return path.name.lower().endswith(SUFFIXES)


def read_grid(path: Path) -> Grid:
    """The grid of a file, by its header alone.

    Raises:
        VolumeError: it is missing, no NIfTI file, or of other than three axes.
        UnavailableError: nibabel is not installed.
    """
    return _opened(path)[1]


def read_volume(path: Path) -> tuple[Voxels, Grid]:
    """Voxels float32 [D, H, W] in the file's units (its scale applied), and their grid.

    Raises:
        VolumeError: as `read_grid`; the file is truncated, or holds NaN or Inf.
    """
    return _read(path, np.float32)


def read_labels(path: Path) -> tuple[NDArray[np.int64], Grid]:
    """Integer values [D, H, W] of a mask, and their grid; files of floating point hold whole numbers.

    Raises:
        VolumeError: as `read_volume`, or a value is no whole number.
    """
    values, grid = _read(path, np.float64)
    whole = values.astype(np.int64)
    if (values != whole).any():
        raise VolumeError(f"holds {values[values != whole][0]:g}, and a mask holds whole numbers.")
    return whole, grid


def write_labels(path: Path, labels: Pixels, grid: Grid) -> None:
    """Write class ids [D, H, W] as a file of the geometry and header of `grid`.

    Raises:
        InputError: it cannot be written.
    """
    nibabel = _nibabel()
    ras = nibabel.orientations.axcodes2ornt("RAS")
    back = nibabel.orientations.ornt_transform(ras, grid.orientation)
    values = np.ascontiguousarray(nibabel.orientations.apply_orientation(labels.transpose(2, 1, 0), back))
    header = grid.header.copy()
    header.set_data_dtype(values.dtype)
    header["cal_min"], header["cal_max"] = 0, 0  # what a viewer showed of the image
    header.set_intent("label", name=MASKS)
    image = (type(grid.header).__module__.endswith("nifti2") and nibabel.Nifti2Image) or nibabel.Nifti1Image
    made = image(values, grid.affine, header)
    with atomic_write(path) as temporary:
        content = made.to_bytes()
        temporary.write_bytes(_compressed(content) if path.name.endswith(".gz") else content)


def is_mask(path: Path) -> bool:
    """Whether `write_labels` wrote a file."""
    try:
        return bool(_opened(path)[0].header.get_intent()[2] == MASKS)
    except VolumeError:
        return False


def _compressed(content: bytes) -> bytes:
    import gzip

    return gzip.compress(content, 6, mtime=0)  # equal masks are equal files


def _opened(path: Path) -> tuple[Any, Grid]:
    nibabel = _nibabel()
    if not path.is_file():
        raise VolumeError("does not exist." if not path.exists() else "is no file.")
    if not is_volume(path):
        raise VolumeError(f"is no NIfTI file by its name, which ends in {' or '.join(SUFFIXES)}.")
    try:
        image = nibabel.load(path)
        shape, affine = image.shape, np.asarray(image.affine, np.float64)
    except nibabel.filebasedimages.ImageFileError as error:
        raise VolumeError(f"is no NIfTI file ({' '.join(str(error).split())[:200]}).") from error
    except _DAMAGED as error:
        raise VolumeError(_damage(error)) from error
    while len(shape) > 3 and shape[-1] == 1:  # time and channels of one
        shape = shape[:-1]
    if len(shape) != 3:
        raise VolumeError(
            f"has {len(shape)} axes, {_sides(shape)}, and a volume has three. Write the channels or time steps of a "
            "4-D file into files of their own: CASE_0000.nii.gz, CASE_0001.nii.gz, ..."
        )
    if min(shape) < 1 or np.prod(shape, dtype=np.float64) > MAX_VOXELS:
        raise VolumeError(f"has {_sides(shape)} voxels; 1 to {MAX_VOXELS:,} are valid.")
    sizes = nibabel.affines.voxel_sizes(affine)
    if not (np.isfinite(affine).all() and (sizes > 1e-4).all() and (sizes < 1e4).all()):
        raise VolumeError(f"has voxels of {' x '.join(f'{each:g}' for each in sizes)} mm: its affine is damaged.")
    orientation = nibabel.io_orientation(affine)
    order = np.argsort(orientation[:, 0])[::-1]  # the file's axes that become depth, height and width
    size, spacing = (tuple(kind(values[axis]) for axis in order) for kind, values in ((int, shape), (float, sizes)))
    return image, Grid(size, spacing, orientation, image.header, affine)  # type: ignore[arg-type]


def _read(path: Path, dtype: Any) -> tuple[NDArray[Any], Grid]:
    image, grid = _opened(path)
    if image.get_data_dtype().kind not in "iuf":
        raise VolumeError(f"holds values of the type {image.get_data_dtype()}, and not one number a voxel.")
    try:
        values = np.asarray(image.dataobj, dtype).reshape(image.shape[:3])
    except _DAMAGED as error:
        raise VolumeError(_damage(error)) from error
    if not np.isfinite(values).all():
        raise VolumeError(f"holds {int((~np.isfinite(values)).sum())} values that are NaN or Inf. Write numbers there.")
    turned = _nibabel().orientations.apply_orientation(values, grid.orientation)
    return np.ascontiguousarray(turned.transpose(2, 1, 0)), grid


def _damage(error: BaseException) -> str:
    cause = " ".join(str(error).split())[:200] or type(error).__name__
    return f"cannot be read to its end ({cause}); it may be truncated: copy it again."


def _sides(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _nibabel() -> Any:
    return NIBABEL.require("A set of NIfTI files")
