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
from torch import nn
model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Conv2d(16, 4, 1)).eval()
images = torch.zeros(1, 3, 32, 32)
chosen, folder, *steps = sys.argv[1:]
for step in steps:
    exec(step)
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == (chosen or None), step
    assert os.listdir(folder) == [], step
"""


@pytest.mark.parametrize("chosen", ["", "chosen"])
def test_a_trace_makes_no_folder_for_compiled_code(tmp_path: Path, chosen: str) -> None:
    """Of captures, exports and trainings, one after another in a process."""
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    if chosen:
        chosen = environment["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / chosen)
    command = [sys.executable, "-c", CODE, chosen, str(tmp_path), CAPTURE, EXPORT, TRAIN, CALIBRATE]
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert list(tmp_path.iterdir()) == []
