"""A network in a file of the user's, from training to ONNX Runtime by the commands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fp4deploy.models import read_card, spec
from tests.cli.command_line import Invoke

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, classes, width=16):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.body = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1))
        self.unused = nn.Conv2d(width, width, 3)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x):
        x = torch.relu(self.norm(self.stem(x)))
        return {"features": x, "out": self.head(torch.relu(self.body(x)))}
"""
TINY = ("--set", "data.height=36", "--set", "data.width=36", "--set", "train.epochs=1", "--set", "data.workers=0")
TINY += ("--set", "train.finetune_epochs=1", "--telemetry-every", "0", "--set", "model.args.width=32")


@pytest.fixture(autouse=True)
def _nothing_named() -> Iterator[None]:
    spec._named.clear()
    spec._expected.clear()
    yield
    spec._named.clear()
    spec._expected.clear()


def test_every_stage_takes_a_network_of_the_users_own(invoke: Invoke, tmp_path: Path, shapes: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    model, run = "net.py:Net", tmp_path / "run"
    planned = invoke("check", model, "--set", "model.args.width=32")
    assert planned.exit_code == 0, planned.stderr
    assert "body.0  Conv2d" in planned.stdout
    fixed = (
        "from torch import nn\ndef make():\n    return nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1), nn.Conv2d(16, 2, 1))\n"
    )
    (tmp_path / "fixed.py").write_text(fixed)
    assert "are not known" not in invoke("check", "fixed.py:make").stdout, "two classes, whatever a data set has"
    assert "are not known" in invoke("check", "fixed.py:make", "--classes", 3).stdout
    trained = invoke("train", "--data", shapes, "--model", model, "--out", run, *TINY)
    assert trained.exit_code == 0, trained.stderr
    assert "Export them with: fp4deploy export run --format onnx --model net.py:Net\n" in trained.stderr
    card = read_card(run / "nvfp4" / "best.safetensors")
    assert (card.architecture, card.arguments, card.height) == (model, {"width": 32}, 36)
    spec._named.clear()  # a new process knows no names
    refused = invoke("export", run / "nvfp4" / "best.safetensors", "--format", "onnx")
    assert refused.exit_code == 2
    assert "a file never makes code run" in refused.stderr
    assert "--model net.py:Net" in refused.stderr
    refused = invoke("predict", shapes / "val2017", "--model", run / "nvfp4" / "best.safetensors")
    assert "name it again: --network net.py:Net" in refused.stderr, "there --model is the file"
    both = invoke("export", run, "--format", "onnx")
    assert both.stderr.count("a file never makes code run") == 1, "said once for both checkpoints"
    assert "The same is true of run/nvfp4/best.safetensors." in both.stderr.replace(f"{tmp_path}/", "")
    other = invoke("export", run, "--model", "unet", "--format", "onnx")
    assert other.exit_code == 2
    assert "is a net.py:Net, and the model named for it is unet" in other.stderr
    exported = invoke("export", run, "--model", model, "--images", 2, "--dynamic-size")
    assert exported.exit_code == 0, exported.stderr
    assert "without 1 layers that the network never calls (first unused)" in " ".join(exported.stdout.split())
    measured = invoke("bench", "--engine", run / "export" / "net.nvfp4.onnx", "--iterations", 1)
    assert measured.exit_code == 0, measured.stderr
    measured = invoke("bench", "--engine", run / "nvfp4" / "best.safetensors", "--model", model, "--iterations", 1)
    assert measured.exit_code == 0, measured.stderr
    spec._named.clear()
    spec._expected.clear()
    whole = invoke("bench", run, "--iterations", 1, "--limit", 1)
    assert whole.exit_code == 0, whole.stderr
    assert "name it again: --model net.py:Net" in whole.stdout, "and the other artefacts are measured"
    assert "needs --model" in " ".join(whole.stdout.split())
    spec._named.clear()
    spec._expected.clear()
    resumed = invoke("train", "--resume", "--out", run)
    assert resumed.exit_code == 2
    assert "a file never makes code run" in resumed.stderr
