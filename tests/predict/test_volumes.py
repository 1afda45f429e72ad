"""Volumes predicted: masks on the grid of the file, in any orientation and spacing, by memory or by a mapped file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fp4deploy.errors import InputError
from fp4deploy.models import ModelCard
from fp4deploy.models.volumes import Intensity, VolumeInput
from fp4deploy.predict.predictor import Predictor
from fp4deploy.predict.volumes import find_volumes, holds_volumes, predict_volume, predict_volumes
from fp4deploy.predict.write import SCHEMA, describe
from tests.volumes import affine_of, nibabel, scene, write


class Threshold:
    """A runtime whose classes are intensities of its first channel: below 50, below 150, above."""

    name = precision = device = "thresholds"

    def __init__(self, channels: int = 1, spacing: tuple[float, float, float] = (1.0, 1.0, 1.0)) -> None:
        names = tuple(f"T{number}" for number in range(channels))
        raw = Intensity(mean=0.0, std=100.0)
        self.card = ModelCard(
            "fp16", 1.0, ("background", "small", "large"), 16, 8, (0.0,) * channels, (1.0,) * channels, True,
            volume=VolumeInput(8, spacing, names, (raw,) * channels),
        )  # fmt: skip
        self.calls = 0

    def infer(self, tiles: np.ndarray) -> np.ndarray:
        assert tiles.shape[1:] == self.card.input_shape
        self.calls += len(tiles)
        x = tiles[:, 0]
        return np.stack([-np.abs(x - number) for number in range(3)], 1).astype(np.float32)


def volume_of(path: Path, axes: str = "RAS", spacing: tuple[float, ...] = (1.0, 1.0, 1.0)) -> np.ndarray:
    """Write a volume without noise; its labels in the file's axes."""
    _, labels = scene((20, 18, 14), seed=4)
    write(path, (100 * labels).astype(np.int16), axes, spacing)
    return labels


@pytest.mark.parametrize("axes", ["RAS", "PIR", "SLA"])
def test_a_mask_lies_on_the_voxels_of_its_file(tmp_path: Path, axes: str) -> None:
    path = tmp_path / "scan.nii.gz"
    labels, runtime = volume_of(path, axes), Threshold()
    document, failures = predict_volumes(runtime, {}, find_volumes([str(path)], ["T0"]), tmp_path / "out")  # type: ignore[arg-type]
    assert failures == []
    written = nibabel.load(tmp_path / "out" / "scan.nii.gz")
    assert np.array_equal(np.asarray(written.dataobj), labels)
    assert np.array_equal(written.affine, affine_of(axes, (1, 1, 1)))
    (entry,) = json.loads((tmp_path / "out" / "predictions.json").read_text())["images"]
    assert entry == document["images"][0]
    assert {each["name"]: each["voxels"] for each in entry["classes"]} == {
        name: int((labels == value).sum()) for value, name in enumerate(runtime.card.class_names)
    }
    assert sum(each["ml"] for each in entry["classes"]) == pytest.approx(labels.size / 1000)


def test_a_scan_is_never_replaced_by_its_mask(tmp_path: Path) -> None:
    path, runtime, out = tmp_path / "scan.nii.gz", Threshold(), tmp_path / "out"
    volume_of(path)
    scan, sources = path.read_bytes(), find_volumes([str(path)], ["T0"])
    with pytest.raises(InputError, match=r"scan\.nii\.gz is in the way: no prediction wrote it.*--out"):
        predict_volumes(runtime, {}, sources, tmp_path)  # type: ignore[arg-type]
    assert path.read_bytes() == scan
    assert not (tmp_path / "predictions.json").exists()
    for _ in range(2):  # what it wrote itself, it replaces
        predict_volumes(runtime, {"schema": SCHEMA}, sources, out)  # type: ignore[arg-type]
    (out / "predictions.json").write_text("[1]")
    with pytest.raises(InputError, match=r"predictions\.json is in the way"):
        predict_volumes(runtime, {"schema": SCHEMA}, sources, out)  # type: ignore[arg-type]
    assert (out / "predictions.json").read_text() == "[1]"


def test_another_spacing_and_scores_in_a_mapped_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "scan.nii"
    labels, runtime = volume_of(path, "LPS", (1.0, 1.0, 3.0)), Threshold(spacing=(1.5, 1.0, 1.0))
    held, grid = predict_volume(runtime, [path])  # type: ignore[arg-type]
    assert grid.spacing == (3.0, 1.0, 1.0)
    assert (held == labels[::-1, ::-1].transpose(2, 1, 0)).mean() > 0.97
    seen: list[tuple[str, int, int]] = []
    monkeypatch.setattr("fp4deploy.predict.volumes.HELD", 0)
    mapped, _ = predict_volume(runtime, [path], progress=lambda *each: seen.append(each))  # type: ignore[arg-type]
    assert np.array_equal(mapped, held)
    assert seen[-1] == ("slices", 28, 28)


def test_thick_slices_of_a_file_are_not_overshot(tmp_path: Path) -> None:
    step = np.zeros((18, 20, 6), np.int16)
    step[..., 3:] = 100
    write(tmp_path / "scan.nii", step, "RAS", (1.0, 1.0, 5.0))
    runtime, lowest = Threshold(), []
    infer = runtime.infer
    runtime.infer = lambda tiles: (lowest.append(tiles.min()), infer(tiles))[1]  # type: ignore[method-assign]
    labels, grid = predict_volume(runtime, [tmp_path / "scan.nii"])  # type: ignore[arg-type]
    assert grid.spacing == (5.0, 1.0, 1.0)
    assert min(lowest) >= 0, "linear between slices that are five times as thick as the network's"
    assert np.array_equal(labels, step.transpose(2, 1, 0) // 100)


def test_mirrors_ask_eight_times(tmp_path: Path) -> None:
    path = tmp_path / "scan.nii"
    labels, once, mirrored = volume_of(path), Threshold(), Threshold()
    plain, _ = predict_volume(once, [path])  # type: ignore[arg-type]
    averaged, _ = predict_volume(mirrored, [path], mirror=True, batch=2)  # type: ignore[arg-type]
    assert mirrored.calls == 8 * once.calls
    assert np.array_equal(plain, averaged)
    assert np.array_equal(plain, labels.transpose(2, 1, 0))


def test_cases_of_several_channels(tmp_path: Path) -> None:
    for case in ("a", "b"):
        for channel in range(2):
            volume_of(tmp_path / f"{case}_{channel:04d}.nii.gz")
    (found, other) = find_volumes([str(tmp_path)], ["T0", "T1"])
    assert (found.name, [path.name for path in found.files]) == ("a", ["a_0000.nii.gz", "a_0001.nii.gz"])
    assert find_volumes([str(tmp_path / "b_0001.nii.gz")], ["T0", "T1"]) == [other]
    assert holds_volumes([str(tmp_path)])
    assert not holds_volumes([str(tmp_path / "a.png")])
    (tmp_path / "b_0001.nii.gz").unlink()
    write(tmp_path / "a_0001.nii.gz", np.zeros((3, 4, 5), np.int16))
    sources = find_volumes([str(tmp_path)], ["T0", "T1"])
    _, failures = predict_volumes(Threshold(2), {}, sources, tmp_path / "out")  # type: ignore[arg-type]
    assert len(failures) == 2
    assert "a_0001.nii.gz has 5 x 4 x 3 voxels" in failures[0]
    assert "and a_0000.nii.gz has 14 x 18 x 20" in failures[0]
    assert "b_0001.nii.gz does not exist" in failures[1]
    volume_of(tmp_path / "plain.nii.gz")
    with pytest.raises(InputError, match=r"reads 2 channels \(T0, T1\), each of a file of its own: plain_0000.nii.gz"):
        find_volumes([str(tmp_path / "plain.nii.gz")], ["T0", "T1"])


def test_files_that_are_no_case(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"scan.nii does not exist"):
        find_volumes([str(tmp_path / "scan.nii")], ["T0"])
    with pytest.raises(InputError, match=r"empty holds no volume"):
        find_volumes([str(tmp_path / "empty")], ["T0"])
    for folder in ("one", "two"):
        volume_of(tmp_path / folder / "scan.nii.gz")
    with pytest.raises(InputError, match="Two cases are called scan"):
        find_volumes([str(tmp_path / "one"), str(tmp_path / "two")], ["T0"])
    write(tmp_path / "film.nii.gz", np.zeros((4, 4, 4, 2), np.float32))
    _, failures = predict_volumes(
        Threshold(), {}, find_volumes([str(tmp_path / "film.nii.gz")], ["T0"]), tmp_path / "out"
    )  # type: ignore[arg-type]
    assert "has 4 axes" in failures[0]
    predictor = Predictor(Threshold())  # type: ignore[arg-type]
    assert describe(predictor, tmp_path)["input"] == {"depth": 8, "height": 16, "width": 8}
    with pytest.raises(InputError, match="reads volumes, and these are images"):
        predictor.predict(np.zeros((8, 8, 3), np.uint8))
