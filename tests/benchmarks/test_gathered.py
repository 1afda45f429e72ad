"""Results put together from several files: PTQ over seeds, a sweep with AP50."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ptq, sweep_result


def measured(drop: float, *more: dict[str, Any], images: int = 10) -> dict[str, Any]:
    """What `ptq` writes for one seed."""
    row = {"placement": "all", "method": "gptq", "correction": "norm", "drop": drop, "low": drop - 1, "high": drop + 1}
    environment = {"gpus": [{"name": "a GPU"}], "packages": {"torch": "2.11"}}
    about = {"command": "c", "split": "test", "images": images, "calibration_images": 8, "scale": 1.0}
    return {**about, "environment": environment, "fp16_miou": 0.6, "fp16_encoded_miou": 0.6, "rows": [row, *more]}


def test_drops_over_seeds_have_the_interval_of_their_mean() -> None:
    failed = {"placement": "all", "method": "mse", "correction": "none", "error": "no memory"}
    late = {"placement": "rgb", "method": "mse", "drop": 5.0, "low": 4.0, "high": 6.0}
    found = ptq.gather([measured(1.0, failed, late), measured(2.0), measured(3.0)])
    row, once = found["rows"]
    assert row["by_seed"] == [1.0, 2.0, 3.0]
    assert row["over_images"] == [[0.0, 2.0], [1.0, 3.0], [2.0, 4.0]]
    assert (row["mean"], row["low"], row["high"]) == pytest.approx((2.0, 2 - 2.484, 2 + 2.484), abs=1e-3)
    assert (once["by_seed"], once["mean"], once["low"]) == ([5.0, None, None], 5.0, None)
    assert found["incomplete"] == ["all:mse:none", "rgb:mse:none"]
    assert found["machine"] == {"gpu": "a GPU", "torch": "2.11"}


def test_seeds_of_different_images_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in one of: split, images"):
        ptq.gather([measured(1.0), measured(1.0, images=11)])


def test_a_sweep_gets_ap50_of_the_best_epoch(tmp_path: Path) -> None:
    runs = {}
    for seed, ap50 in (("0", 0.8), ("1", 0.9)):
        path = f"qat/seed{seed}"
        lines = [{"epoch": 1, "ap": None}, {"epoch": 2, "ap": 0.5, "ap50": ap50, "ap75": 0.4}]
        (tmp_path / path / "nvfp4").mkdir(parents=True)
        (tmp_path / path / "nvfp4" / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
        runs[seed] = {"status": "done", "path": path, "best_epoch": 2, "seconds": 3.0, "best": 0.5}
    runs["2"] = {"status": "unfinished", "path": "qat/seed2", "seconds": 1.0}
    settings = ["data.root=/data", "data.workers=2", "train.epochs=3"]
    content = {"settings": settings, "variants": {"qat": {"model": "nvfp4", "runs": runs}}}
    (tmp_path / "sweep.json").write_text(json.dumps(content))
    found = sweep_result.gather(tmp_path)
    assert found["settings"] == ["train.epochs=3"]
    row = found["variants"]["qat"]
    assert row["ap50"] == pytest.approx({"mean": 0.85, "sd": 0.0707107})
    assert row["runs"]["0"] == {
        "status": "done",
        "path": "qat/seed0",
        "best_epoch": 2,
        "best": 0.5,
        "ap50": 0.8,
        "ap75": 0.4,
    }
    assert row["runs"]["2"] == {"status": "unfinished", "path": "qat/seed2"}
