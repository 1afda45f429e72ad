"""What a resume restores: each part has afterwards what was saved, whatever it held before."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp4deploy
import fp4deploy as fd
from fp4deploy.qat import quantized_layers
from fp4deploy.qat.oscillation import OscillationResets
from fp4deploy.qat.outlier_selection import OutlierSelection
from fp4deploy.train.optimizer import WeightAverage

STEPS = 40


def training(kind: str, seed: int) -> tuple[nn.Module, Any]:
    """A network of other weights for each seed, and the part of its training."""
    torch.manual_seed(seed)
    recipe = {"OutlierSelection": "tetrajet_v2_outcontrol", "OscillationResets": "tetrajet_v2"}.get(kind, "nvfp4_qat")
    model = fd.prepare(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), recipe, include="*")
    layers = quantized_layers(model)
    if kind == "WeightAverage":
        return model, WeightAverage(model, 0.9)
    return model, {"OutlierSelection": OutlierSelection, "OscillationResets": OscillationResets}[kind](layers, STEPS)


def moved(model: nn.Module, part: Any, steps: range) -> None:
    """These steps of a training whose weights change in each."""
    for step in steps:
        part.update(step)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn(parameter.shape)


def copied(part: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in part.state().items()}


KINDS = ("OutlierSelection", "OscillationResets", "WeightAverage")


def test_every_part_is_here() -> None:
    root = Path(fp4deploy.__file__).parent
    texts = [path.read_text() for folder in ("train", "qat") for path in (root / folder).rglob("*.py")]
    holders = {name for text in texts for name, body in re.findall(r"^class (\w+)[^\n]*\n((?: .*\n|\n)*)", text, re.M)
               if "    def load_state(" in body}  # fmt: skip
    assert holders - {"Stateful"} == set(KINDS)  # its protocol


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_has_what_was_saved_whatever_it_held(kind: str) -> None:
    states = []
    for stop in range(0, STEPS + 1, 1):
        model, part = training(kind, 0)
        moved(model, part, range(stop))
        states.append(copied(part))
    inside, outside = max(states, key=len), min(states, key=len)
    _, held = training(kind, 1)
    for state in (inside, outside, states[-1], inside):
        held.load_state(state)
        found = copied(held)
        assert found.keys() == state.keys()
        assert all(torch.equal(found[name], value) for name, value in state.items())
