"""Exports leave no folder of torch.compile in the temporary folder, and do not move its cache there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CAPTURE = "from fp4deploy.graph.capture import capture; capture(model, images)"
EXPORT = """
from fp4deploy.export.onnx.graph import export_graph
from fp4deploy.models import ModelCard
card = ModelCard("fp16", 0.125, ("a", "b", "c", "d"), 32, 32, (0.5,) * 3, (0.5,) * 3, True)
export_graph(model, (3, 32, 32), card)
"""
CALIBRATE = """
import fp4deploy as fd
fd.calibrate(fd.prepare(model), images)
"""
TRAIN = "from fp4deploy.train.optimizer import make_optimizer; make_optimizer(model, 1e-3, 0)"
CODE = """
import os, sys, torch
from fp4deploy.models import build_unet
model, images = build_unet(4, 0.125).eval(), torch.zeros(1, 3, 32, 32)
exec(sys.argv[1])
assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == (sys.argv[2] or None)
"""


@pytest.mark.parametrize(
    ("trace", "chosen"),
    [(CAPTURE, "chosen"), (EXPORT, ""), (TRAIN, ""), (CALIBRATE, "")],
    ids=["capture", "export", "train", "calibrate"],
)
def test_a_trace_makes_no_folder_for_compiled_code(tmp_path: Path, trace: str, chosen: str) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    if chosen:
        chosen = environment["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / chosen)
    command = [sys.executable, "-c", CODE, trace, chosen]
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert list(tmp_path.iterdir()) == []
