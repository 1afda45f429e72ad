"""Scores and differences of the hippocampus, by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.nnunet_hippocampus import scored, summary
from docs.tables.networks import nnunet_hippocampus

nibabel = pytest.importorskip("nibabel")


def write(folder: Path, *masks: np.ndarray) -> Path:
    folder.mkdir(parents=True)
    for number, mask in enumerate(masks):
        nibabel.save(nibabel.Nifti1Image(mask, np.diag([2.0, 1.0, 1.0, 1.0])), folder / f"case_{number}.nii.gz")
    return folder


def test_dice_and_what_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two volumes whose second class NVFP4 finds one slice less of: Dice 1 and 2 * 1 / (1 + 2)."""
    truth = np.zeros((6, 4, 4), np.uint8)
    truth[0], truth[2:4] = 1, 2
    less = truth.copy()
    less[3] = 0
    (tmp_path / "dataset.json").write_text(json.dumps({"labels": {"background": 0, "front": 1, "back": 2}}))
    labels = write(tmp_path / "labelsTs", truth, truth)
    perfect, worse = (
        scored(write(tmp_path / name, *masks), labels)
        for name, masks in (("control", (truth, truth)), ("nvfp4", (less, truth)))
    )
    assert perfect["value"] == 1
    assert worse["value"] == pytest.approx((1 + (1 + 2 / 3) / 2) / 2)
    assert worse["dice"] == pytest.approx([(1 + 2 / 3) / 2, 1], abs=1e-4)
    assert worse["hd95_mm"] == pytest.approx(2 / 4)  # a slice of 2 mm, in one class of one volume
    rows = {"control": {"0": perfect, "1": perfect}, "nvfp4": {"0": worse, "1": worse}}
    found = {name: summary(rows, name) for name in rows}
    lost = found["nvfp4"]["drop_from_control"]
    assert lost["mean"] == pytest.approx(100 / 12, abs=1e-3)
    assert lost["low"] == pytest.approx(lost["high"])  # of seeds that are alike
    assert (lost["over_images"]["low"], lost["over_images"]["high"]) == pytest.approx((0, 100 / 6), abs=1e-3)
    (tmp_path / "made.json").write_text(json.dumps({"forms": found, "commit": "a" * 40, "date": "2026-01-01"}))
    monkeypatch.setattr("docs.tables.results.RESULTS", tmp_path)
    monkeypatch.setattr("docs.tables.networks.RESULTS", tmp_path)
    (row,) = (line for line in nnunet_hippocampus("made").splitlines() if line.startswith("| NVFP4, trained on |"))
    assert row == (
        "| NVFP4, trained on | 91.67 ± 0.00 | 0.50 | **\N{MINUS SIGN}8.33 [\N{MINUS SIGN}8.33, \N{MINUS SIGN}8.33]** "
        "| \N{MINUS SIGN}8.33 [\N{MINUS SIGN}16.67, 0.00] |"
    )
    assert nnunet_hippocampus("absent").count("not measured") == 6 * 4
