"""Resets of oscillating weights: the formula in numpy, what is left alone, when, and exact resume within a window."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fp4deploy.errors import InputError
from fp4deploy.formats import quantize_nvfp4
from fp4deploy.qat import RECIPES, QuantSpec, Recipe, prepare, quantized_layers
from fp4deploy.qat.oscillation import OscillationResets
from fp4deploy.qat.recipes import WeightReset
from fp4deploy.train.state import Progress, load_state, save_state

SOON = replace(RECIPES["tetrajet_v2"], name="soon", weight_reset=WeightReset(start=0.2, period=8, window=4, ratio=8.0))
STEPS = 20  # the first window begins after step 4 and resets after step 9, the second one after 12 and 17


def network(recipe: Recipe = SOON) -> nn.Module:
    torch.manual_seed(0)
    return prepare(nn.Sequential(nn.Conv2d(16, 8, 3), nn.Linear(32, 8)), recipe, include=["*"])


def resets_of(model: nn.Module) -> OscillationResets:
    return OscillationResets(quantized_layers(model), STEPS)


def value_of_codes(weight: np.ndarray) -> np.ndarray:
    """Q(w) of a linear layer's weight [O, C], by the format alone."""
    return quantize_nvfp4(torch.from_numpy(weight)).dequantize().numpy()


def test_weights_are_reset_by_the_formula() -> None:
    model = network()
    layer, resets = model[1], resets_of(model)
    rng = np.random.default_rng(1)
    weight = layer.weight.detach().numpy()  # the layer's own memory
    reached = np.abs(weight).max(1, keepdims=True)
    before: list[np.ndarray] = []
    counts = []
    for step in range(STEPS):
        swing = np.where(step % 2, 1e-3, -1e-3) * rng.uniform(0.5, 1.0, weight.shape).astype(np.float32)
        weight += np.where(np.abs(weight) < 0.9 * reached, swing, 0)  # the largest of a block keep its scale
        after = weight.copy()
        resets.update(step)
        before.append(after)
        changed = weight != after
        if step not in (9, 17):
            assert not changed.any()
            continue
        window = before[step - 5 : step]  # w_0 ... w_4; this step's weights are those that are reset
        codes = [value_of_codes(each) for each in window]
        moved = sum(np.abs(b - a) for a, b in itertools.pairwise(window))
        jumped = sum(np.abs(b - a) for a, b in itertools.pairwise(codes))
        ratio = np.divide(jumped, moved, out=np.zeros_like(moved), where=moved > 0)
        expected = np.where(ratio >= 8, value_of_codes(after), after)
        np.testing.assert_array_equal(weight, expected)
        counts.append(int(changed.sum()))
    assert all(0 < count < weight.size / 4 for count in counts)


def test_a_weight_that_travels_or_rests_keeps_its_value() -> None:
    model = network(replace(SOON, weight_reset=WeightReset(start=0.0, period=8, window=4, ratio=3.0)))
    layer, resets = model[1], OscillationResets(quantized_layers(model), STEPS)
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight[:, 0] = 6.0  # amax of every first block: its scale is 1, and the threshold of 2 and 3 is 2.5
        layer.weight[0, 1:5] = torch.tensor([2.49, 2.49, 2.2, 2.1])
    for step in range(6):
        if step:
            with torch.no_grad():
                layer.weight[0, 1] = 2.51 if step % 2 else 2.49  # oscillates: |dQ| = 1 against |dw| = 0.02
                layer.weight[0, 2] += 0.2  # travels: 2.69, 2.89 ...
                layer.weight[0, 4] = 2.49 if step % 2 else 2.51  # after 0.39 on the way there
        resets.update(step)
    assert layer.weight[0, :5].tolist() == pytest.approx([6.0, 3.0, 3.49, 2.2, 2.0])


def test_a_window_is_resumed_exactly(tmp_path: Path) -> None:
    def advance(model: nn.Module, resets: OscillationResets, steps: range) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            with torch.no_grad():
                for layer in quantized_layers(model).values():
                    layer.weight += 2e-3 * torch.randn(layer.weight.shape, generator=generator)
            resets.update(step)

    straight, saved, resumed = network(), network(), network()
    advance(straight, resets_of(straight), range(STEPS))
    parts = {"resets": resets_of(saved)}
    advance(saved, parts["resets"], range(7))  # within the first window
    optimizer: Any = torch.optim.SGD(saved.parameters())
    save_state(tmp_path / "state.safetensors", saved, optimizer, None, Progress(step=7), parts)
    again = {"resets": resets_of(resumed)}
    load_state(tmp_path / "state.safetensors", resumed, optimizer, None, again)
    advance(resumed, again["resets"], range(7, STEPS))
    for one, other in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)
    assert not again["resets"].state()  # 17 was the end of the last window


def test_only_recipes_with_resets_are_followed() -> None:
    assert RECIPES["tetrajet_v2"].weight_reset == WeightReset(0.6, 200, 50, 8.0)
    assert [name for name, recipe in RECIPES.items() if recipe.weight_reset] == [
        "tetrajet_v2",
        "tetrajet_v2_outcontrol",
    ]
    model = network(RECIPES["nvfp4_train"])
    resets = resets_of(model)
    for step in range(STEPS):
        resets.update(step)
    assert not resets.state()
    assert replace(RECIPES["nvfp4_fp8_qat"], weight_reset=WeightReset()).in_format().weight_reset is None


def test_a_reset_without_codes_or_room_is_refused() -> None:
    with pytest.raises(InputError, match="weight_reset goes with a weight that is rounded to nearest"):
        Recipe("none", weight_reset=WeightReset())
    with pytest.raises(InputError, match="window from 1 to period - 2"):
        Recipe("short", weight=QuantSpec(), weight_reset=WeightReset(period=50))
