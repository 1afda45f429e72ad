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
from fp4deploy.train.state import Progress, load_state, save_state

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


def in_training(seed: int, layout: torch.memory_format, optimizer: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A network after two steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, (1, 3))).to(memory_format=layout)
    options: dict[str, Any] = {"SGD": {"momentum": 0.9}, "AdamW": {"fused": True}}.get(optimizer, {})
    optimizer_of_it: torch.optim.Optimizer = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1, **options)
    for _ in range(2):
        optimizer_of_it.zero_grad()
        model(torch.randn(2, 3, 8, 8)).square().mean().backward()
        optimizer_of_it.step()
    return model, optimizer_of_it


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "Adagrad"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_tensors_have_the_numbers_types_and_strides_that_they_had(
    layout: torch.memory_format, optimizer: str, tmp_path: Path
) -> None:
    def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[object, torch.Tensor]:
        moments = {(n, name): x for n, each in optimizer.state_dict()["state"].items() for name, x in each.items()}
        return {**model.state_dict(), **moments}

    saved, other = in_training(0, layout, optimizer), in_training(1, layout, optimizer)
    save_state(tmp_path / "state.safetensors", *saved, None, Progress())
    load_state(tmp_path / "state.safetensors", *other, None)
    before, after = tensors(*saved), tensors(*other)
    assert before.keys() == after.keys()
    for name, x in before.items():
        assert torch.equal(x, after[name])
        assert (x.dtype, x.stride()) == (after[name].dtype, after[name].stride())
