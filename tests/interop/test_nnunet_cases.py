"""Files of nnU-Net's cases, which need no nnU-Net to be found."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp4deploy.errors import InputError
from fp4deploy.interop.nnunet.cases import _spaced, find_cases


def test_a_case_has_one_file_for_each_channel(tmp_path: Path) -> None:
    folder = tmp_path / "imagesTr"
    folder.mkdir()
    for name in ("b_0000.nii.gz", "b_0001.nii.gz", "a_b_0001.nii.gz", "a_b_0000.nii.gz", "a.nii.gz", "a_0000.png"):
        (folder / name).touch()
    found = find_cases(tmp_path, ".nii.gz", 2)
    assert {case: [path.name for path in files] for case, files in found.items()} == {
        "a_b": ["a_b_0000.nii.gz", "a_b_0001.nii.gz"], "b": ["b_0000.nii.gz", "b_0001.nii.gz"],
    }  # fmt: skip
    for channels in (1, 3):
        with pytest.raises(InputError, match=f"a_b has 2 files, and this model reads {channels} channels"):
            find_cases(folder, ".nii.gz", channels)
    with pytest.raises(InputError, match="holds no image NAME_0000.tif"):
        find_cases(folder, ".tif", 1)


def test_cases_and_windows_are_evenly_spaced() -> None:
    assert _spaced([*range(10)], 4) == [0, 2, 5, 7]
    assert _spaced([*range(3)], 5) == [0, 1, 2]
