"""Which layers of a UNet with digits are quantised, and what quantising its first layer costs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fp4deploy.data import EvalTransform, generate_shapes, open_dataset
from fp4deploy.models import build_unet
from fp4deploy.models.input_encoding import encode_input
from fp4deploy.qat import calibrate, calibrate_percentile, layer_plan, prepare, quantized_layers, restore

FIRST = "encoder.0.conv1"
Split = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def splits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Split]:
    """24 and 8 generated scenes, as (images, masks)."""
    folder = tmp_path_factory.mktemp("shapes") / "data"
    generate_shapes(folder, train=24, val=8, size=64, seed=0)
    found, transform = {}, EvalTransform(64, 64)
    for split in ("train", "val"):
        data = open_dataset(folder, split)
        images, masks = zip(*(transform(data.load(index)) for index in range(len(data))), strict=True)
        found[split] = (torch.stack(images), torch.stack([torch.as_tensor(mask).long() for mask in masks]))
    return found


def test_the_choice_of_layers_is_the_same_and_says_13_channels() -> None:
    plans = {plan.name: plan for plan in layer_plan(build_unet(3, 0.25, digits=True))}
    assert plans[FIRST].precision == "FP16"
    assert plans[FIRST].reason == "first layer: reads the image (13 input channels, a block has 16)"
    assert [plan.precision for plan in plans.values()] == [plan.precision for plan in layer_plan(build_unet(3, 0.25))]
    included = {plan.name: plan for plan in layer_plan(build_unet(3, 0.25, digits=True), include="*")}
    assert included[FIRST].reason == "blocks of 16 along 13 input channels, the last block padded with 3 zeros"


@pytest.mark.parametrize("percentile", [100.0, 99.9, 95.0])
def test_calibration_finds_6(splits: dict[str, Split], percentile: float) -> None:
    """The constant is one channel of 13, so that a percentile above 92.4 is 6 as well."""
    torch.manual_seed(0)
    model = prepare(build_unet(3, 0.125, digits=True), include=["*"])
    calibrate_percentile(model, [splits["train"][0][:4]], percentile)
    assert quantized_layers(model)[FIRST].input_amax == 6


@pytest.mark.parametrize("recipe", ["nvfp4_qat", "nvfp4_qat+dynamic", "nvfp4_4o6_qat", "nvfp4_train", "mx_baseline"])
def test_the_forward_of_every_kind_of_recipe_reads_the_digits(splits: dict[str, Split], recipe: str) -> None:
    torch.manual_seed(0)
    x = splits["val"][0]
    model = prepare(build_unet(3, 0.125, digits=True), recipe, include=["*"])
    calibrate(model, [x])
    layer = quantized_layers(model)[FIRST]
    assert torch.equal(layer.quantized_input(encode_input(x)), encode_input(x))


def first_layer_error(splits: dict[str, Split], seed: int, with_digits: bool) -> float:
    """Train for 20 steps, then quantise the first layer alone: how far the logits move, as a share of their norm."""
    torch.manual_seed(seed)
    x, y, validation = (part[..., :32, :32] for part in (*splits["train"], splits["val"][0]))
    model = build_unet(int(splits["train"][1].remainder(255).max()) + 1, 0.125, digits=with_digits)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(20):
        part = slice(step % 6 * 4, step % 6 * 4 + 4)
        loss = F.cross_entropy(model(x[part]), y[part], ignore_index=255)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    prepare(model.eval(), include=[FIRST])
    calibrate(model, [x[:8]])
    with torch.inference_mode():
        found, expected = model(validation), restore(model)(validation)
    return float((found - expected).norm() / expected.norm())


@pytest.mark.nightly
def test_quantising_a_trained_first_layer_costs_less_with_digits(splits: dict[str, Split]) -> None:
    """What is left is the error of the weights; that of the image is gone."""
    without, with_digits = (
        sum(first_layer_error(splits, seed, choice) for seed in (1, 2, 3)) for choice in (False, True)
    )
    assert with_digits < 0.75 * without
