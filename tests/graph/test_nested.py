"""Dicts among the arguments of a network are inputs of its files, one a tensor."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

import fp4deploy as fd
from fp4deploy.errors import InputError
from fp4deploy.graph.nested import flat_inputs, taking_flat_inputs


class Conditioned(nn.Module):
    """Tokens, and what is known of their text."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.about, self.last = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor, more: Mapping[str, torch.Tensor], scale: float = 2.0) -> torch.Tensor:
        return self.last(torch.relu(self.first(x) + scale * self.about(more["text"]) * more["weight"]))


def test_a_module_of_nested_arguments_is_exported_and_packed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Conditioned().eval()
    inputs = {"x": torch.randn(3, 16), "more": {"text": torch.randn(3, 16), "weight": torch.randn(3, 1)}}
    fd.prepare(model, example_inputs=inputs, include=["about"])
    fd.calibrate(model, inputs)
    with torch.no_grad():
        expected = model(**inputs)
    assert list(flat_inputs(inputs)) == ["x", "more_text", "more_weight"]
    fd.export_onnx(model, inputs, tmp_path / "net.onnx")
    fd.pack(model, tmp_path / "net.fp4", example_inputs=inputs)
    assert fd.verify(model, tmp_path / "net.onnx", [inputs]).passed
    for name in ("net.onnx", "net.fp4"):
        found = fd.open_runtime(tmp_path / name)(inputs)
        torch.testing.assert_close(torch.as_tensor(found), expected, rtol=0, atol=0.01)
    assert "forward" not in vars(model)


def test_what_has_no_dict_within_is_as_it_was() -> None:
    model, x = nn.Linear(4, 4), torch.zeros(2, 4)
    for inputs in (x, (x,), {"input": x}):
        assert flat_inputs(inputs) is inputs or flat_inputs(inputs) == inputs
        assert taking_flat_inputs(model, inputs) is model
    taken = taking_flat_inputs(Conditioned(), {"x": x, "more": {"text": x}})
    assert list(inspect.signature(taken.forward).parameters) == ["x", "more_text"]
    with pytest.raises(InputError, match="a dict of tensors"):
        fd.export_onnx(model, {"input": {"deeper": {"still": x}}}, "net.onnx")
