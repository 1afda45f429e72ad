"""Sets of NIfTI volumes: orientation, spacing, intensities, splits, and every defect that `data check` lists."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fp4deploy.data import check_dataset, open_dataset, open_instances, summarise
from fp4deploy.data.part import part_of
from fp4deploy.data.volumes.dataset import VolumeDataset, normalised
from fp4deploy.data.volumes.nifti import VolumeError, read_labels, read_volume, write_labels
from fp4deploy.data.volumes.plan import _spacing
from fp4deploy.data.volumes.resample import most_likely, resample_image, resample_labels, size_at
from fp4deploy.errors import InputError
from fp4deploy.models.volumes import Intensity
from tests.volumes import nibabel, write, write_set

AXES = ["".join(each) for codes in itertools.permutations(("RL", "AP", "SI")) for each in itertools.product(*codes)]


def test_any_orientation_is_turned_and_turned_back(tmp_path: Path) -> None:
    """Every file of the 48 orientations shows the same anatomy, and a mask lands on the voxels that it was made of."""
    anatomy = np.arange(3 * 4 * 5, dtype=np.uint8).reshape(3, 4, 5)  # inferior, posterior, left first
    spacing = {"S": 3.0, "A": 2.0, "R": 1.0}
    for axes in AXES:
        steps = [spacing[{"L": "R", "P": "A", "I": "S"}.get(axis, axis)] for axis in axes]
        to = nibabel.orientations.ornt_transform(*map(nibabel.orientations.axcodes2ornt, ("RAS", axes)))
        stored = nibabel.orientations.apply_orientation(anatomy.transpose(2, 1, 0), to)
        path = tmp_path / "volume.nii.gz"
        write(path, np.ascontiguousarray(stored), axes, steps)
        voxels, grid = read_volume(path)
        assert np.array_equal(voxels, anatomy), axes
        assert (grid.size, grid.spacing) == ((3, 4, 5), (3.0, 2.0, 1.0))
        write_labels(tmp_path / "mask.nii.gz", anatomy, grid)
        written = nibabel.load(tmp_path / "mask.nii.gz")
        assert np.array_equal(np.asarray(written.dataobj), stored), axes
        assert np.array_equal(written.affine, nibabel.load(path).affine)


def test_header_of_the_image_goes_with_the_mask(tmp_path: Path) -> None:
    image = nibabel.Nifti1Image(np.ones((3, 4, 5), np.int16), np.diag([1, 2, 3, 1.0]))
    image.header["descrip"], image.header["cal_max"] = b"scanner 7", 900
    image.set_qform(image.affine, 1)
    image.header.set_slope_inter(0.5, -3)
    nibabel.save(image, tmp_path / "scan.nii")
    voxels, grid = read_volume(tmp_path / "scan.nii")
    write_labels(tmp_path / "mask.nii", np.full((5, 4, 3), 2, np.uint8), grid)
    written = nibabel.load(tmp_path / "mask.nii").header
    assert (bytes(written["descrip"])[:9], int(written["qform_code"]), float(written["cal_max"])) == (
        b"scanner 7",
        1,
        0,
    )
    assert written.get_data_dtype() == np.uint8
    values, _ = read_labels(tmp_path / "mask.nii")
    assert (values == 2).all(), "the scale of the image must not be applied to its mask"
    assert voxels.dtype == np.float32


@pytest.mark.parametrize("size", [(3, 3, 7), (3, 6, 7), (12, 3, 14)])
def test_labels_are_resampled_as_the_most_likely_of_their_scores(size: tuple[int, int, int]) -> None:
    """Halved sides have voxels in which shares are equal: the smaller label wins, as of a network's scores."""
    values = np.array([0, 2, 5, 255], np.uint8)
    labels = values[np.random.default_rng(0).integers(0, 4, (6, 6, 7))]
    scores = (labels == values[:, None, None, None]).astype(np.float32)
    np.testing.assert_array_equal(resample_labels(labels, size), values[most_likely(scores, size)])


@pytest.mark.parametrize("target", [0.3, 0.7, 0.8, 1.0, 1.3, 2.9])
def test_a_volume_has_the_extent_that_it_had(target: float) -> None:
    """To half a voxel, at any spacing; at its own it keeps its voxels, and comes back to them."""
    for side in range(1, 60):
        for own in (0.3, 0.7, 0.8, 1.1, 2.9):
            (found,) = size_at((side,), (own,), (target,))
            assert abs(found * target - side * own) <= target * 0.501 or found == 1
            assert size_at((side,), (own,), (own,)) == (side,)
            if target < own:
                assert size_at((found,), (target,), (own,)) == (side,)


def test_sizes_follow_the_spacing_and_labels_stay_labels() -> None:
    assert size_at((10, 20, 30), (3.0, 1.0, 1.0), (1.0, 1.0, 2.0)) == (30, 20, 15)
    labels = np.zeros((6, 8, 8), np.uint8)
    labels[2:4, 2:6, 2:6], labels[0, 0, 0] = 255, 7
    finer = resample_labels(labels, (12, 16, 16))
    assert set(np.unique(finer)) <= {0, 7, 255}
    assert (resample_labels(finer, (6, 8, 8)) == labels).mean() > 0.99
    ramp = np.broadcast_to(np.arange(8, dtype=np.float32)[:, None, None], (8, 8, 8)).copy()
    assert np.allclose(resample_image(ramp, (16, 8, 8), (1, 1, 1))[4:-4, 0, 0], np.arange(1.75, 5.5, 0.5), atol=0.02)
    thick = np.zeros((4, 8, 8), np.float32)
    thick[2:] = 1
    assert resample_image(thick, (16, 8, 8), (5, 1, 1)).min() >= 0, "no overshoot between thick slices"


def test_the_spacing_of_a_set_is_its_median_and_along_a_thick_axis_a_fine_one() -> None:
    found = np.array([[float(thick), 1.0, 1.0] for thick in range(4, 15)])
    assert _spacing(found) == (5.0, 1.0, 1.0)  # the 10th percentile of 4 to 14
    assert _spacing(found / [4, 1, 1]) == (2.25, 1.0, 1.0), "less than three times as thick"
    assert _spacing(found[:, [1, 0, 2]] * 2) == (2.0, 10.0, 2.0)


def test_most_likely_class_in_bands_is_that_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    scores = np.random.default_rng(0).normal(size=(3, 5, 6, 7)).astype(np.float32)
    whole = torch.nn.functional.interpolate(torch.from_numpy(scores)[None], (11, 9, 13), mode="trilinear")[0].argmax(0)
    monkeypatch.setattr("fp4deploy.data.volumes.resample.BAND", 3 * 9 * 13 * 2)
    assert (most_likely(scores, (11, 9, 13)) == whole.numpy()).mean() > 0.999
    assert np.array_equal(most_likely(scores, (5, 6, 7)), scores.argmax(0))


def test_a_case_is_read_at_the_spacing_of_the_set(tmp_path: Path) -> None:
    """Thick slices, axes of another order, two channels."""
    write_set(tmp_path, train=6, shape=(10, 24, 20), spacing=(4.0, 1.0, 1.0), axes="SRP", channels=("T1", "T2"))
    data = open_dataset(tmp_path, "train")
    assert isinstance(data, VolumeDataset)
    assert (len(data), data.class_names, data.layout) == (5, ("background", "small", "large"), "volumes")
    assert (data.input.spacing, data.size, data.input.channels) == ((4.0, 1.0, 1.0), (8, 16, 16), ("T1", "T2"))
    sample = data.load(0)
    assert (sample.image.shape, sample.image.dtype, sample.mask.shape) == ((2, 10, 20, 24), np.float32, (10, 20, 24))
    assert abs(sample.image.mean()) < 1e-4
    assert abs(sample.image.std() - 1) < 1e-4
    means = [sample.image[0][sample.mask == value].mean() for value in range(3)]
    assert means == sorted(means), "labels lie on their voxels"
    finer = data.at((2.0, 2.0, 1.0)).load(0)
    assert finer.image.shape == (2, 20, 10, 24)
    assert finer.mask.shape == (20, 10, 24)
    truth, grid = data.truth(0)
    assert (truth.shape, grid.spacing) == ((10, 20, 24), (4.0, 1.0, 1.0))
    assert len(part_of(data, 2)) == 2
    one = open_dataset(tmp_path, "val", ["large"])
    assert one.class_names == ("background", "large")
    assert set(np.unique(one.load(0).mask)) == {0, 1}


def test_intensities_of_ct_are_those_of_the_labelled_voxels(tmp_path: Path) -> None:
    data = open_dataset(write_set(tmp_path, channels=("CT",)), "train")
    assert isinstance(data, VolumeDataset)
    (found,) = data.input.intensities
    assert found.low is not None
    assert found.high is not None
    assert 20 < found.low < 100 < (found.mean or 0) < 200 < found.high < 280
    voxels = np.array([-1000.0, 150.0, 3000.0], np.float32)
    expected = (np.clip(voxels, found.low, found.high) - found.mean) / found.std
    assert np.allclose(normalised(voxels, found), expected)
    assert np.array_equal(normalised(np.full(4, 7, np.float32), Intensity()), np.zeros(4, np.float32))


def test_splits_of_a_file_and_an_ignored_label(tmp_path: Path) -> None:
    write_set(tmp_path, train=4)
    (tmp_path / "splits_final.json").write_text(json.dumps([{"train": ["case_000"], "val": ["case_003", "case_001"]}]))
    description = json.loads((tmp_path / "dataset.json").read_text())
    description["labels"] = {"background": 0, "small": 1, "ignore": 2}
    (tmp_path / "dataset.json").write_text(json.dumps(description))
    data = open_dataset(tmp_path, "val")
    assert isinstance(data, VolumeDataset)
    assert [case.name for case in data.cases] == ["case_001", "case_003"]
    assert set(np.unique(data.load(0).mask)) == {0, 1, 255}
    (tmp_path / "splits_final.json").write_text(json.dumps([{"train": ["case_009"], "val": []}]))
    with pytest.raises(InputError, match="lists the case case_009"):
        open_dataset(tmp_path, "train")


def four_axes(root: Path) -> None:
    write(root / "imagesTr" / "case_000_0000.nii.gz", np.zeros((4, 4, 4, 3), np.float32))


def missing_channel(root: Path) -> None:
    (root / "imagesTr" / "case_000_0001.nii.gz").unlink()


def other_affine(root: Path) -> None:
    path = root / "labelsTr" / "case_000.nii.gz"
    write(path, np.asarray(nibabel.load(path).dataobj), spacing=(1.0, 1.0, 2.0))


def other_shape(root: Path) -> None:
    write(root / "labelsTr" / "case_000.nii.gz", np.zeros((4, 4, 4), np.uint8))


def unknown_value(root: Path) -> None:
    write(root / "labelsTr" / "case_000.nii.gz", np.where(np.arange(8).reshape(2, 2, 2) > 3, 255, 0).astype(np.uint8))
    for channel in range(2):
        write(root / "imagesTr" / f"case_000_{channel:04d}.nii.gz", np.zeros((2, 2, 2), np.float32))


def truncated(root: Path) -> None:
    path = root / "imagesTr" / "case_000_0000.nii.gz"
    path.write_bytes(path.read_bytes()[:-2000])


def not_nifti(root: Path) -> None:
    (root / "imagesTr" / "case_000_0000.nii.gz").write_bytes(b"hello" * 100)


def nan(root: Path) -> None:
    write(root / "imagesTr" / "case_000_0001.nii.gz", np.full((20, 22, 18), np.nan, np.float32))


def no_mask(root: Path) -> None:
    (root / "labelsTr" / "case_000.nii.gz").unlink()


DEFECTS: list[tuple[Callable[[Path], None], str, str]] = [
    (four_axes, "unreadable-volume", "has 4 axes, 4 x 4 x 4 x 3, and a volume has three"),
    (missing_channel, "missing-channel", "does not exist: channel 1, T2"),
    (other_affine, "grids-differ", "affines differ by up to 1 mm"),
    (
        other_shape,
        "grids-differ",
        r"18 x 22 x 20 voxels \(depth x height x width\), and its mask case_000.nii.gz has 4 x",
    ),
    (unknown_value, "unknown-label", "holds 255; dataset.json lists 0 background, 1 small, 2 large"),
    (truncated, "unreadable-volume", "it may be truncated"),
    (not_nifti, "unreadable-volume", "no NIfTI file|cannot be read"),
    (nan, "unreadable-volume", "7920 values that are NaN"),
    (no_mask, "missing-mask", "does not exist"),
]


@pytest.mark.parametrize(("damage", "kind", "message"), DEFECTS, ids=[each[0].__name__ for each in DEFECTS])
def test_defects(tmp_path: Path, damage: Callable[[Path], None], kind: str, message: str) -> None:
    """One defect each for `data check`, and one error that names the file where it is loaded."""
    write_set(tmp_path, test=0, channels=("T1", "T2"))
    assert check_dataset(tmp_path) == []
    damage(tmp_path)
    found = check_dataset(tmp_path)
    assert {defect.kind for defect in found} == {kind}
    assert all("case_000" in defect.file for defect in found)
    import re

    assert re.search(message, found[0].message), found[0].message
    with pytest.raises(InputError, match=r"case_000.*fp4deploy data check"):
        open_dataset(tmp_path, "train").load(0)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"labels": {"background": 0, "a": 2}}, "must number the background 0"),
        ({"labels": {"background": 0, "whole": [1, 2]}}, "is a region of several values"),
        ({"channel_names": None}, "must have channel_names"),
        ({"channel_names": {"1": "T1"}}, "must number 1 to"),
        ({"file_ending": ".mha"}, r"files of .nii.gz or .nii are read"),
    ],
)
def test_descriptions_that_are_refused(tmp_path: Path, changed: dict[str, object], message: str) -> None:
    write_set(tmp_path, test=0)
    path = tmp_path / "dataset.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    with pytest.raises(InputError, match=message):
        open_dataset(tmp_path, "train")


def test_summary_and_a_volume_of_two_splits(tmp_path: Path) -> None:
    write_set(tmp_path, shape=(20, 22, 10), spacing=(1.0, 1.0, 3.0))
    train, val, test = summarise(tmp_path)
    assert (train.images, val.images, test.images) == (4, 1, 1)
    assert (train.sizes[0], train.spacings[0]) == ((20, 22, 10), (1.0, 1.0, 3.0))
    assert train.in_masks == {"background": 4, "small": 4, "large": 4}
    (tmp_path / "imagesTs" / "case_000_0000.nii.gz").write_bytes(
        (tmp_path / "imagesTr" / "case_002_0000.nii.gz").read_bytes()
    )
    assert [defect.kind for defect in check_dataset(tmp_path)] == ["shared-image"]
    with pytest.raises(InputError, match="do not tell one object from the next"):
        open_instances(tmp_path, "train")


def test_a_file_that_is_no_volume(tmp_path: Path) -> None:
    with pytest.raises(VolumeError, match=r"does not exist"):
        read_volume(tmp_path / "scan.nii.gz")
    (tmp_path / "scan.dcm").write_bytes(b"")
    with pytest.raises(VolumeError, match=r"ends in .nii.gz or .nii"):
        read_volume(tmp_path / "scan.dcm")
    write(tmp_path / "mask.nii", np.full((2, 2, 2), 0.5, np.float32))
    with pytest.raises(VolumeError, match=r"holds 0.5, and a mask holds whole numbers"):
        read_labels(tmp_path / "mask.nii")
