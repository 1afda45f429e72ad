"""Loaders of the records of a run: what was made of what, what bench and a search measured, times of layers, counts."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import numpy as np

from fp4deploy.bench.kept import kept
from fp4deploy.data import cached_counts, class_balance, open_dataset
from fp4deploy.data.inspection.balance import METHODS
from fp4deploy.experiments.search.costs import LayerCost, measured_layers, with_measured
from fp4deploy.experiments.search.run import _bounds, sqnr
from fp4deploy.experiments.search.study import Record
from fp4deploy.provenance import outdated, verify_run
from fp4deploy.report.run_folder import read_run
from fp4deploy.runs import Run
from tests.fuzz.harness import Loader
from tests.fuzz.mutate import of_json, of_lines

IDENTITY = {"checkpoint": "0" * 64, "data": "1" * 64, "method": "amax", "images": 4}


def run_loaders(shapes: Path, bench: bytes) -> list[Loader]:
    """bench: what `bench --json` writes; shapes: a folder of generated scenes."""
    return [
        Loader("provenance", "run/provenance.jsonl", (_provenance(),), of_lines, _use_provenance),
        Loader("measured", "run/bench.jsonl", (_kept(bench),), of_lines, _use_kept),
        Loader("search", "search/measured.jsonl", (_search(),), of_lines, _use_search),
        Loader("timed", "layers.json", (_timed(),), of_json, _use_timed),
        Loader("counts", "counts.json", (_counts(shapes),), of_json, lambda path: _use_counts(shapes, path)),
    ]


def _provenance() -> bytes:
    own = hashlib.sha256(b"weights").hexdigest()
    head = {"stage": "train", "path": "fp16/best.safetensors", "sha256": own, "at": "2026-01-01T00:00:00+00:00"}
    data = {"path": "data", "sha256": "0" * 64}
    export = {**head, "stage": "export", "path": "export/unet.onnx", "inputs": [{"path": head["path"], "sha256": own}]}
    return b"".join(json.dumps(line).encode() + b"\n" for line in ({**head, "inputs": [data]}, export))


def _use_provenance(path: Path) -> object:
    checkpoint = path.parent / "fp16" / "best.safetensors"
    for folder in ("fp16", "data", "export"):
        (path.parent / folder).mkdir(exist_ok=True)
    checkpoint.write_bytes(b"weights")
    (path.parent / "data" / "a.json").write_bytes(b"{}")
    (path.parent / "config.yaml").write_text("seed: 1\n", encoding="utf-8")
    return [vars(found) for found in verify_run(Run(path.parent))], outdated(checkpoint)


def _kept(bench: bytes) -> bytes:
    document = json.loads(bench)
    line = {"at": "now", "data": "data", "entry": document["artifacts"][0], "environment": document["environment"]}
    return json.dumps(line).encode() + b"\n" + json.dumps({**line, "at": "later"}).encode() + b"\n"


def _use_kept(path: Path) -> object:
    (path.parent / "config.yaml").write_text("seed: 1\n", encoding="utf-8")
    (path.parent / "report.json").unlink(missing_ok=True)
    return kept(Run(path.parent)), read_run(Run(path.parent)).model_dump_json()


def _search() -> bytes:
    lines = [{"identity": IDENTITY}, {"of": "error a", "value": 0.5}, {"of": "error b", "value": 1e-6},
             {"of": "miou fp16", "value": 0.25}]  # fmt: skip
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def _use_search(path: Path) -> object:
    record = Record(path, IDENTITY)
    errors = {(name, "FP4"): record.measure(f"error {name}", lambda: 0.5) for name in ("a", "b")}
    record.measure("miou fp16", lambda: 0.25)
    assert all(math.isfinite(bound) for bound in _bounds(errors))
    assert Record(path, IDENTITY).values == record.values  # what was measured again was kept
    return [sqnr(error) for error in errors.values()]


def _timed() -> bytes:
    rows = [{"layer": name, "precision": "FP16", "ms": ms} for name, ms in (("a", 2.0), ("b", 0.5))]
    four = [{"layer": "b", "precision": "FP4, weight decoded at load", "ms": 0.25}]
    networks = [{"device": "GPU", "batch": batch, "layers": layers} for batch, layers in ((1, rows), (4, four))]
    return json.dumps({"layers": networks}).encode()


def _use_timed(path: Path) -> object:
    found = with_measured(
        dict.fromkeys("ab", LayerCost({"FP4": 1, "FP16": 4}, {"FP4": 0.1, "FP16": 0.2})), measured_layers(path)[0]
    )
    assert all(math.isfinite(cost.of(each, "ms")) for cost in found.values() for each in ("FP16", *cost.precisions))
    return found


def _counts(shapes: Path) -> bytes:
    path = shapes.parent / "counts.json"
    path.unlink(missing_ok=True)
    cached_counts(open_dataset(shapes, "train"), path, "data")
    return path.read_bytes()


def _use_counts(shapes: Path, path: Path) -> object:
    counts = cached_counts(open_dataset(shapes, "train"), path, "data")
    weights = [class_balance(counts, method) for method in METHODS]
    assert all(np.isfinite(list(each.values())).all() for each in weights)
    return weights
