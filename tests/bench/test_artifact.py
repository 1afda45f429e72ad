"""A row of report.json: its fields, its gate, and rows of engines that cannot run."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from fp4deploy.bench.artifact import Baseline, bench_artifact, bench_or_explain, find_baseline, gate_drop
from fp4deploy.bench.records import ArtifactEntry
from fp4deploy.errors import GateError, InputError, UnavailableError
from fp4deploy.runs import Run

CONTRACT = {
    "path", "model", "backend", "precision", "size_bytes", "sha256", "miou", "latency_ms", "images_per_s", "status",
    "reason",
}  # fmt: skip


def row(miou: float | None, name: str = "unet.onnx") -> ArtifactEntry:
    return ArtifactEntry(path=name, model="nvfp4", status="ok", miou=miou)


def test_fields_of_the_contract(untrained: Run, shapes: Path) -> None:
    path = untrained.checkpoint("fp16")
    entry = bench_artifact(path, shapes, iterations=3).model_dump(mode="json")
    assert entry.keys() >= CONTRACT
    assert entry["latency_ms"].keys() == {"p50", "p90", "p99"}
    assert entry["latency_ms"]["p50"] <= entry["latency_ms"]["p90"] <= entry["latency_ms"]["p99"]
    assert entry["images_per_s"] == pytest.approx(1000 / entry["latency_ms"]["p50"])
    assert entry["size_bytes"] == path.stat().st_size
    assert entry["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (entry["model"], entry["status"], entry["reason"], entry["timed_runs"]) == ("fp16", "ok", None, 3)
    assert 0 <= entry["miou"] <= 1
    assert set(entry["per_class"]) == {"background", "circle", "square", "triangle", "star", "ring", "cross"}
    json.dumps(entry, allow_nan=False)


def test_without_data_there_is_latency_and_no_accuracy(untrained: Run) -> None:
    entry = bench_artifact(untrained.export_dir / "unet.portable.onnx", None, iterations=3).model_dump(mode="json")
    assert entry["miou"] is None
    assert entry["latency_ms"]["p50"] > 0


@pytest.mark.rtx
@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_an_engine_that_cannot_run_has_no_numbers(plan: Path, shapes: Path) -> None:
    with pytest.raises(UnavailableError):
        bench_artifact(plan, shapes)
    entry = bench_or_explain(plan, shapes).model_dump(mode="json")
    assert entry["status"] == "built, not run"
    assert "no CUDA GPU" in entry["reason"]
    assert [entry[name] for name in ("miou", "latency_ms", "images_per_s", "batch", "device")] == [None] * 5
    assert (entry["model"], entry["precision"]) == ("nvfp4", "NVFP4")
    assert entry["backend"].startswith("TensorRT-RTX ")
    assert entry["backend"].endswith(" for SM120")
    assert entry["size_bytes"] == plan.stat().st_size


def test_explaining_does_not_hide_broken_files(tmp_path: Path) -> None:
    (tmp_path / "x.onnx").write_text("no")
    with pytest.raises(InputError):
        bench_or_explain(tmp_path / "x.onnx", None)


def test_gate_is_in_points() -> None:
    gate_drop([row(0.796), row(0.80)], Baseline("mIoU", 0.80), max_drop=0.5)
    with pytest.raises(GateError, match=r"worst.onnx has 79.40 mIoU, 0.60 points below the baseline's 80.00"):
        gate_drop([row(0.794, "worst.onnx"), row(0.80)], Baseline("mIoU", 0.80), max_drop=0.5)


def test_gate_without_a_measurement_fails() -> None:
    with pytest.raises(GateError, match="no artefact gave an mIoU"):
        gate_drop([row(None)], Baseline("mIoU", 0.8), max_drop=0.5)


def test_a_drop_of_exactly_the_limit_passes() -> None:
    gate_drop([row(0.5)], Baseline("mIoU", 0.75), max_drop=25)
    with pytest.raises(GateError, match=r"25\.00 points below"):
        gate_drop([row(0.5)], Baseline("mIoU", 0.75), max_drop=24.999)


def test_an_artefact_that_ran_and_has_no_score_fails_the_gate() -> None:
    with pytest.raises(GateError, match=r"broken\.onnx has no mIoU: the data holds nothing that can be scored"):
        gate_drop([row(0.80), row(None, "broken.onnx")], Baseline("mIoU", 0.80), max_drop=0.5)
    waiting = row(None, "unet.plan").model_copy(update={"status": "built, not run"})
    gate_drop([row(0.80), waiting], Baseline("mIoU", 0.80), max_drop=0.5)


def test_the_first_artefact_with_an_accuracy_is_the_baseline(tmp_path: Path) -> None:
    path = tmp_path / "base.json"
    entries = [row(None), row(0.75, "first.onnx"), row(0.5, "second.onnx")]
    path.write_text(json.dumps({"artifacts": [entry.model_dump(mode="json") for entry in entries]}))
    assert find_baseline(path, None) == Baseline("mIoU", 0.75)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999", "75", "-0.1", '"0.75"', "true"])
def test_a_baseline_that_is_no_share_is_refused(tmp_path: Path, value: str) -> None:
    path = tmp_path / "base.json"
    path.write_text(f'{{"artifacts": [{{"miou": {value}}}]}}')
    with pytest.raises(InputError, match=r"base\.json"):
        find_baseline(path, None)


def test_baseline_from_json(tmp_path: Path) -> None:
    path = tmp_path / "base.json"
    path.write_text(json.dumps({"artifacts": [row(None).model_dump(mode="json"), row(0.75).model_dump(mode="json")]}))
    assert find_baseline(path, None) == Baseline("mIoU", 0.75)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"artifacts": [{}]}', '{"artifacts": [{"miou": null}]}'])
def test_a_json_without_accuracy_is_no_baseline(tmp_path: Path, content: str) -> None:
    path = tmp_path / "base.json"
    path.write_text(content)
    with pytest.raises(InputError, match=r"baseline .*base\.json"):
        find_baseline(path, None)


def test_baseline_from_an_artefact(untrained: Run, shapes: Path) -> None:
    path = untrained.checkpoint("fp16")
    assert find_baseline(path, shapes).value == bench_artifact(path, shapes, iterations=1).miou
