"""Accuracy of engines: what torch computes of a lowered graph, and drops over seeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.engine_accuracy import FILE, TRAINED, classes_of, engine, gather, text
from fp4deploy.bench.evidence import PixelCounts, write_pixels
from fp4deploy.bench.gate.bootstrap import mean_drop, paired_drop, value
from fp4deploy.export import export_graph
from fp4deploy.export.lowering.emulation import emulated_engine
from fp4deploy.export.onnx.session import portable_session
from fp4deploy.qat import calibrate, prepare

CLASSES = ("a", "b")


@pytest.fixture(scope="module")
def canonical() -> Any:
    torch.manual_seed(0)
    up = nn.ConvTranspose2d(16, 32, 2, 2)
    layers = (nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), up, nn.ReLU(), nn.Conv2d(32, 16, 3, 1, 1), nn.Conv2d(16, 4, 1))
    model = prepare(nn.Sequential(*layers))
    calibrate(model, [torch.randn(4, 3, 16, 16)])
    return export_graph(model.eval(), (3, 16, 16))


@pytest.mark.parametrize("conv", ["plugin", "auto", "gemm"])
def test_torch_computes_of_a_lowered_graph_what_onnx_runtime_does(canonical: Any, conv: str) -> None:
    images = torch.randn(3, 3, 16, 16)
    session = portable_session(emulated_engine(canonical, conv))
    (expected,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    with torch.inference_mode():
        found = engine(canonical, conv, "cpu")(images).numpy()
    assert np.mean(np.abs(found - expected) > 2e-3 * np.abs(expected).max()) < 0.01  # steps at ties of the last bit


def test_a_network_that_answers_nan_has_no_classes() -> None:
    batches = [(torch.full((1, 3, 2, 2), torch.inf), torch.zeros(1, 2, 2, dtype=torch.long))]
    assert classes_of(nn.Conv2d(3, 2, 1), batches) is None


def counts(right: list[int]) -> PixelCounts:
    """Ten pixels of class a and ten of b an image, of which so many of a are right."""
    cells = [[[hit, 10, hit], [10, 10, 20 - hit]] for hit in right]
    return PixelCounts([str(number) for number in range(len(right))], CLASSES, np.array(cells))


def test_a_mean_drop_of_one_pair_is_the_gates_and_of_several_shares_the_images() -> None:
    baseline, other, third = counts([10, 9, 10, 8]), counts([8, 8, 9, 2]), counts([9, 9, 10, 8])
    assert mean_drop([(baseline, other)]) == paired_drop(baseline, other).metric
    both = mean_drop([(baseline, other), (other, baseline)])
    assert (both.drop, both.low, both.high) == pytest.approx((0, 0, 0))
    assert mean_drop([(baseline, other), (baseline, third)]).drop == pytest.approx(
        np.mean([paired_drop(baseline, each).metric.drop for each in (other, third)])
    )


def sweep(folder: Path, seed: str, forms: dict[str, dict[str, PixelCounts | None]]) -> Path:
    """Files of a sweep of one seed: of each variant and form its counts; None where it answers NaN."""
    rows = {}
    for name, found in forms.items():
        run = {"status": "done", "path": f"{name}/seed{seed}", "epochs": 1, "best_epoch": 1, "best": 0.5, "last": 0.5}
        rows[name] = {"model": "m", "settings": [], "note": "", "runs": {seed: run}}
        rows[name]["against"] = None if name == "control" else "control"
        scored = {
            form: {"error": "answers NaN or Inf"}
            if each is None
            else {"value": value(each), "evidence": write_pixels(each).model_dump(mode="json")}
            for form, each in found.items()
        }
        about = {"commit": "c", "date": "d", "machine": {"gpu": "g"}, "split": "test", "rest": "fp16"}
        path = folder / run["path"] / "m"
        path.mkdir(parents=True)
        (path / FILE).write_text(json.dumps({**about, "forms": scored}))
    rows["other"] = {**rows["control"], "runs": {seed: {"status": "failed", "path": "other", "error": "no memory"}}}
    (folder / "sweep.json").write_text(json.dumps({"file": "f.yaml", "settings": ["data.workers=1"], "variants": rows}))
    return folder


def test_seeds_of_several_folders_become_one_table(tmp_path: Path) -> None:
    fine, worse = counts([10, 9, 10, 8]), counts([8, 8, 9, 2])
    folders = [
        sweep(tmp_path / "0", "0", {"control": {TRAINED: fine}, "qat": {TRAINED: fine, "auto": worse}}),
        sweep(tmp_path / "1", "1", {"control": {TRAINED: fine}, "qat": {TRAINED: None, "auto": fine}}),
    ]
    found = gather(folders)
    rows = {(row["variant"], row["form"]): row for row in found["rows"]}
    drop = 100 * paired_drop(fine, worse).metric.drop
    auto = rows["qat", "auto"]
    assert [each["drop"] for each in auto["drop"]["by_seed"].values()] == pytest.approx([drop, 0], abs=1e-3)
    assert auto["drop"]["mean"] == pytest.approx(drop / 2, abs=1e-3)
    assert list(auto["drop_of_form"]["by_seed"]) == ["0"]
    assert "changed" not in auto
    assert found["variants"]["qat"]["runs"]["0"]["status"] == "done"
    assert found["variants"]["control"]["test"] == pytest.approx({"mean": value(fine), "sd": 0})
    assert "gap_test" not in found["variants"]["qat"]  # one seed has no interval
    assert rows["qat", TRAINED]["score"] == {"0": value(fine), "1": None}
    assert (found["images"], found["metric"], found["settings"]) == (4, "mIoU", [])
    said = text(found)
    assert said.index("auto") < said.index(TRAINED)
    assert "NaN" in said
    assert "other seed 1 failed: no memory" in said


def test_a_gap_is_a_drop_with_the_other_sign(tmp_path: Path) -> None:
    fine, worse = counts([10, 9, 10, 8]), counts([8, 8, 9, 2])
    folders = [
        sweep(tmp_path / seed, seed, {"control": {TRAINED: fine}, "qat": {TRAINED: each}})
        for seed, each in (("0", worse), ("1", fine))
    ]
    found = gather(folders)
    drop, gap = found["rows"][1]["drop"], found["variants"]["qat"]["gap_test"]
    assert gap["mean"] < 0
    assert (gap["mean"], gap["low"], gap["high"]) == (-drop["mean"], -drop["high"], -drop["low"])
    assert gap["by_seed"] == {seed: -each["drop"] for seed, each in drop["by_seed"].items()}
