"""The study of layers on a small model: errors by operand against those computed here, channels, files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fp4deploy.data import IMAGE_MEAN, IMAGE_STD
from fp4deploy.errors import InputError
from fp4deploy.experiments.sensitivity.layer_files import render_layers, save_layers
from fp4deploy.experiments.sensitivity.layers import LayerStudy, study_layers
from fp4deploy.formats import fake_quantize_nvfp4
from fp4deploy.models import ModelCard, build_unet, load_weights, save_checkpoint
from tests.shallow import levels

LAYER, HOT = "decoder.3.conv2", 5
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A UNet one of whose channels is read with large weights."""
    torch.manual_seed(0)
    with levels(5):
        model = build_unet(4, 0.25)
    with torch.no_grad():
        model.get_submodule(LAYER).weight[:, HOT] *= 16
    path = tmp_path_factory.mktemp("layers") / "run" / "fp16" / "best.safetensors"
    path.parent.mkdir(parents=True)
    save_checkpoint(path, model, ModelCard("fp16", 0.25, ("a", "b", "c", "d"), 32, 32, IMAGE_MEAN, IMAGE_STD, True))
    return path


@pytest.fixture(scope="module")
def study(checkpoint: Path) -> LayerStudy:
    with levels(5):
        return study_layers(checkpoint, [IMAGES])


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).square().sum().sqrt() / expected.square().sum().sqrt())


@pytest.mark.usefixtures("whole_unets")
def test_errors_are_those_of_each_operand(study: LayerStudy, checkpoint: Path) -> None:
    model = build_unet(4, 0.25).eval()
    load_weights(model, checkpoint)
    layer, seen = model.get_submodule(LAYER), []
    layer.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0], output)))
    with torch.no_grad():
        logits = model(IMAGES)
        (x, output), weight = seen[0], layer.weight.clone()
        rounded, codes = fake_quantize_nvfp4(x, (1,), x.abs().amax())[0], fake_quantize_nvfp4(weight, (1,))[0]
        row = next(row for row in study.layers if row.layer == LAYER)
        assert row.inside["input"] == pytest.approx(relative(layer(rounded), output), rel=1e-3)
        layer.weight.copy_(codes)
        assert row.inside["weight"] == pytest.approx(relative(layer(x), output), rel=1e-3)
        error = layer(rounded) - output
        assert row.inside["both"] == pytest.approx(relative(layer(rounded), output), rel=1e-3)
        shift = error.mean((0, 2, 3)).square().sum() / error.square().mean((0, 2, 3)).sum()
        assert row.shift == pytest.approx(float(shift), rel=1e-2)  # the rest is FP16 there
        assert row.at_end["weight"] == pytest.approx(relative(model(IMAGES), logits), rel=1e-3)
    assert row.channels[0][0] == HOT
    assert row.channels[0][1] > 0.5
    assert row.half == pytest.approx(1 / 16, rel=1e-3)


def test_every_quantised_layer_is_there_and_all_lose_more_together(study: LayerStudy) -> None:
    assert (study.recipe, study.images, len(study.layers)) == ("nvfp4_qat", 2, 21)
    assert sum(row.macs for row in study.layers) == pytest.approx(1, rel=1e-3)
    for row in study.layers:
        assert all(0 < error < 1 for error in (*row.inside.values(), *row.at_end.values())), row
        assert row.inside["both"] > max(row.inside["input"], row.inside["weight"])
        assert 0 <= row.scales["input"] < 0.5
        assert sum(share for _, share in row.channels) <= 1
    assert study.together["both"] > max(row.at_end["both"] for row in study.layers)


def test_files_hold_what_was_found(study: LayerStudy, tmp_path: Path) -> None:
    files = save_layers(study, tmp_path)
    assert [file.name for file in files] == ["layers.json", "layers.md", "layers.png"]
    assert json.loads(files[0].read_text())["layers"][0]["layer"] == study.layers[0].layer
    lines = [line for line in render_layers(study).splitlines() if line.startswith(("| encoder", "| decoder", "| up"))]
    worst = max(study.layers, key=lambda row: row.at_end["both"])
    assert len(lines) == 21
    assert lines[0].startswith(f"| {worst.layer} |")
    assert files[2].read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("whole_unets")
def test_what_it_cannot_study_is_refused(checkpoint: Path) -> None:
    with pytest.raises(InputError, match="--data DIR"):
        study_layers(checkpoint, [])
    with pytest.raises(InputError, match="--recipe nvfp4_qat"):
        study_layers(checkpoint, [IMAGES], "nvfp4_train")
