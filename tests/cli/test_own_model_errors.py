"""What a network of the user can do wrong: each is one paragraph, with exit code 2 and the place in their code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fp4deploy.models import spec
from tests.cli.command_line import Invoke

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, classes, width=20):
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 18, 3, padding=1)
        self.odd, self.head = Odd(18, 18), nn.Conv2d(18, classes, 1)

    def forward(self, x):
        return self.head(torch.relu(self.odd(torch.relu(self.body(torch.relu(self.stem(x)))))))

class Odd(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(outputs, inputs))

    def forward(self, x):
        return torch.einsum("oi,nihw->nohw", self.weight, x)

class Pooled(Net):
    def forward(self, x):
        return super().forward(x).mean((2, 3))

class Number(Net):
    def forward(self, x):
        return float(super().forward(x).sum())

class Wide(Net):
    def forward(self, x):
        return self.stem(x)

class Failing(Net):
    def forward(self, x):
        return self.head(x)

class Branching(Net):
    def forward(self, x):
        if x.abs().max() > 1e6:
            x = x / 2
        return super().forward(x)

def text(classes):
    return "not a network"
"""
TINY = ("--size", "32x32", "--epochs", "1", "--set", "train.finetune_epochs=1", "--telemetry-every", "0")


@pytest.fixture(autouse=True)
def _nothing_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    for names in (spec._named, spec._expected):
        names.clear()
    yield
    for names in (spec._named, spec._expected):
        names.clear()


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("text", "net.py:text returned str and not a torch.nn.Module; return the network"),
        ("Number", "net.py:Number returns float and no tensor, so that it is no segmentation network"),
        ("Pooled", "and a logits map of this data has [N, "),
        ("Wide", "Let the factory take the number of classes, or name the right output with --set model.output=NAME"),
        ("Failing", "(net.py, line 36): RuntimeError: Given groups=1"),
    ],
)
def test_training_refuses_it_in_one_paragraph(invoke: Invoke, shapes: Path, factory: str, message: str) -> None:
    result = invoke(
        "train", "--data", shapes, "--model", f"net.py:{factory}", "--out", "run", "--models", "fp16", *TINY
    )
    assert result.exit_code == 2, result.stderr
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
    assert "defect of fp4deploy" not in result.stderr
    assert not list(Path("run").glob("*/*.safetensors"))


def test_an_unknown_layer_and_odd_channels_are_planned_with_their_reasons(invoke: Invoke) -> None:
    planned = invoke("check", "net.py:Net")
    assert planned.exit_code == 0, planned.stderr
    text = " ".join(planned.stdout.split())
    assert "Odd is none of Conv1d, Conv2d" in text
    assert "20 input channels, the last block padded with 12 zeros" in text


def test_control_flow_by_values_is_named_at_export(invoke: Invoke, shapes: Path) -> None:
    """It trains; as a graph it cannot be written."""
    model = ("--model", "net.py:Branching")
    trained = invoke("train", "--data", shapes, *model, "--out", "run", "--models", "fp16", *TINY)
    assert trained.exit_code == 0, trained.stderr
    for form in ("onnx", "packed"):
        refused = invoke("export", "run", *model, "--format", form, "--images", 1)
        assert refused.exit_code == 2, refused.stderr
        text = " ".join(refused.stderr.split())
        assert "net.py, line 40" in text
        assert "Write the decision with torch.where" in text
