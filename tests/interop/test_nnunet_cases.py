"""Files of nnU-Net's cases, which need no nnU-Net to be found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fp4deploy.errors import InputError
from fp4deploy.interop.nnunet.cases import _spaced, check_cases, find_cases


def test_a_case_has_one_file_for_each_channel(tmp_path: Path) -> None:
    folder = tmp_path / "imagesTr"
    folder.mkdir()
    for name in ("b_0000.nii.gz", "b_0001.nii.gz", "a_b_0001.nii.gz", "a_b_0000.nii.gz", "a.nii.gz", "a_0000.png"):
        (folder / name).touch()
    found = find_cases(tmp_path, ".nii.gz", 2)
    assert {case: [path.name for path in files] for case, files in found.items()} == {
        "a_b": ["a_b_0000.nii.gz", "a_b_0001.nii.gz"], "b": ["b_0000.nii.gz", "b_0001.nii.gz"],
    }  # fmt: skip
    for channels, told in ((1, "1 channel of a case: a_b_0000.nii.gz."), (3, "3 channels of a case: .*a_b_0002")):
        with pytest.raises(InputError, match=f"holds a_b_0000.nii.gz, a_b_0001.nii.gz, and this model reads {told}"):
            find_cases(folder, ".nii.gz", channels)
    (folder / "a_b_0000.nii.gz").unlink()
    with pytest.raises(InputError, match=r"holds a_b_0001.nii.gz, and this model reads 1 channel "):
        find_cases(folder, ".nii.gz", 1)  # as many files as channels, and not the first channel
    with pytest.raises(InputError, match="holds no image NAME_0000.tif"):
        find_cases(folder, ".tif", 1)


def test_cases_and_windows_are_evenly_spaced() -> None:
    assert _spaced([*range(10)], 4) == [0, 2, 5, 7]
    assert _spaced([*range(3)], 5) == [0, 1, 2]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("four axes", r"a_0001\.nii\.gz has 4 axes, 8 x 10 x 12 x 2"),
        ("truncated", r"a_0001\.nii\.gz cannot be read to its end"),
        ("affine", r"a_0001\.nii\.gz lies elsewhere than a_0000\.nii\.gz: their affines differ by up to 3 mm"),
        ("", None),
    ],
)
def test_files_are_read_before_anything_is_segmented(damage: str, message: str | None, tmp_path: Path) -> None:
    nibabel = pytest.importorskip("nibabel")
    voxels = np.random.default_rng(0).random((8, 10, 12), np.float32)
    for name in ("a_0000", "a_0001", "b_0000", "b_0001"):
        odd = name == "a_0001" or (name == "b_0001" and damage == "truncated")
        place = np.eye(4)
        place[0, 3] = 3.0 * (odd and damage == "affine")
        values = np.stack([voxels, voxels], -1) if odd and damage == "four axes" else voxels
        path = tmp_path / f"{name}.nii.gz"
        nibabel.save(nibabel.Nifti1Image(values, place), path)
        if odd and damage == "truncated":
            path.write_bytes(path.read_bytes()[:-60])
    cases = find_cases(tmp_path, ".nii.gz", 2)
    if message is None:
        check_cases(cases)
        return
    with pytest.raises(InputError, match=message) as error:
        check_cases(cases)
    assert ("1 more of these files" in str(error.value)) == (damage == "truncated")
