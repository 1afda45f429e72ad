"""A row of report.json: its fields, its gate, and rows of engines that cannot run."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

import onnx
import pytest
import torch

from fp4deploy.bench.artifact import bench_artifact, bench_or_explain
from fp4deploy.bench.runtimes.emulated import source_of
from fp4deploy.errors import InputError, UnavailableError
from fp4deploy.export.engine.build import open_plan
from fp4deploy.export.ledger.ledger import ledger_path
from fp4deploy.export.lowering.emulation import emulated_engine
from fp4deploy.export.lowering.lower import read_buildable
from fp4deploy.runs import Run

CONTRACT = {
    "path", "model", "backend", "precision", "size_bytes", "sha256", "miou", "latency_ms", "images_per_s", "status",
    "reason",
}  # fmt: skip


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
    entry = bench_artifact(untrained.export_dir / "unet.nvfp4.portable.onnx", None, iterations=3).model_dump(
        mode="json"
    )
    assert entry["miou"] is None
    assert entry["latency_ms"]["p50"] > 0


@pytest.mark.rtx
@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_an_engine_that_cannot_run_is_measured_by_its_arithmetic(
    plan: Path, untrained: Run, shapes: Path, tmp_path: Path
) -> None:
    for path in (plan, ledger_path(plan), untrained.export_dir / "unet.nvfp4.onnx"):
        shutil.copy(path, tmp_path)
    plan = tmp_path / plan.name
    entry = bench_artifact(plan, shapes)
    assert entry.status == "emulated, not run"
    assert [entry.latency_ms, entry.images_per_s, entry.batch] == [None] * 3
    assert entry.backend.startswith("TensorRT-RTX ")
    assert " for SM120; its arithmetic emulated by ONNX Runtime" in entry.backend
    assert entry.precision.endswith(", emulated")
    assert "FP8" in entry.precision
    assert entry.reason is not None
    assert re.search(r"no CUDA GPU.*class unchanged against \S+\.onnx on \d+\.\d\d % of the pixels", entry.reason)
    ledger = open_plan(plan)
    path = plan.with_name("by_hand.onnx")
    onnx.save(emulated_engine(read_buildable(source_of(plan, ledger)), ledger.conv), path)
    by_hand = bench_artifact(path, shapes, iterations=3)
    assert (entry.miou, entry.per_class) == (by_hand.miou, by_hand.per_class)


@pytest.mark.rtx
@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_an_engine_that_cannot_run_has_no_numbers_without_its_source(plan: Path, shapes: Path, tmp_path: Path) -> None:
    alone = tmp_path / plan.name
    for path in (plan, ledger_path(plan)):
        shutil.copy(path, tmp_path)
    with pytest.raises(UnavailableError, match=r"no CUDA GPU.*its source \S+ is not beside it"):
        bench_artifact(alone, shapes)
    with pytest.raises(UnavailableError, match="no CUDA GPU"):
        bench_artifact(plan, None)
    (tmp_path / open_plan(plan).source).write_bytes(b"another")
    entry = bench_or_explain(alone, shapes).model_dump(mode="json")
    assert entry["status"] == "built, not run"
    assert "has changed since, so its arithmetic cannot be emulated" in entry["reason"]
    assert [entry[name] for name in ("miou", "latency_ms", "images_per_s", "batch", "device")] == [None] * 5
    assert entry["model"] == "nvfp4"
    assert entry["precision"].startswith("FP8 "), "named by the shares of its multiply-accumulates"
    assert entry["backend"].startswith("TensorRT-RTX ")
    assert entry["backend"].endswith(" for SM120")
    assert entry["size_bytes"] == plan.stat().st_size


def test_explaining_does_not_hide_broken_files(tmp_path: Path) -> None:
    (tmp_path / "x.onnx").write_text("no")
    with pytest.raises(InputError):
        bench_or_explain(tmp_path / "x.onnx", None)
