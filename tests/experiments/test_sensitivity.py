"""The study of tails on a small model: numbers against scipy, damage that is there, files that hold them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fp4deploy.data import IMAGE_MEAN, IMAGE_STD, generate_shapes, open_dataset
from fp4deploy.errors import InputError
from fp4deploy.experiments.sensitivity.files import group_of, render_study, save_study
from fp4deploy.experiments.sensitivity.study import Study, study_images, study_kurtosis
from fp4deploy.models import ModelCard, build_unet, load_weights, save_checkpoint
from fp4deploy.qat import calibrate, prepare


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study") / "data"
    generate_shapes(folder, train=4, val=6, size=32, seed=0)
    return folder


@pytest.fixture(scope="module")
def checkpoint(data: Path) -> Path:
    """An NVFP4 checkpoint whose normalisations vary a little around 1, as trained ones do."""
    torch.manual_seed(0)
    names = open_dataset(data, "val").class_names
    model = prepare(build_unet(len(names), 0.125))
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                value.add_(0.01 * torch.randn_like(value))
            elif "norm" in name:
                value.add_(0.05 * torch.randn_like(value))
    calibrate(model, [torch.randn(2, 3, 32, 32)])
    path = data.parent / "best.safetensors"
    save_checkpoint(path, model, ModelCard("nvfp4", 0.125, names, 32, 32, IMAGE_MEAN, IMAGE_STD, True, "nvfp4_qat"))
    return path


@pytest.fixture(scope="module")
def study(checkpoint: Path, data: Path) -> Study:
    return study_kurtosis(checkpoint, study_images(checkpoint, data, 4))


def test_tails_are_those_of_scipy(study: Study, checkpoint: Path) -> None:
    from scipy import stats

    rows = {(row.layer, row.tensor): row for row in study.tensors}
    assert len(rows) == 23 * 3
    model = build_unet(7, 0.125)
    load_weights(model, checkpoint)
    for layer in ("encoder.0.conv1", "decoder.0.conv1", "up.1", "encoder.2.norm2", "head"):
        for tensor in ("weight", "bias"):
            value = getattr(model.get_submodule(layer), tensor).detach().half().double().flatten().numpy()
            row = rows[layer, tensor]
            assert row.elements == value.size
            assert row.kurtosis == pytest.approx(stats.kurtosis(value, fisher=False), rel=1e-2)
            assert row.peak == pytest.approx(abs(value).max() / value.std(), rel=1e-2)
    assert rows["up.1", "input"].elements > 1000
    assert rows["encoder.2.conv1", "weight"].sqnr_db == pytest.approx(20, abs=3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_finds_the_same(study: Study, checkpoint: Path, data: Path) -> None:
    found = study_kurtosis(checkpoint, study_images(checkpoint, data, 4), on_gpu=True)
    for here, there in zip(study.tensors, found.tensors, strict=True):
        assert (here.layer, here.tensor) == (there.layer, there.tensor)
        if here.tensor != "input":  # weights are the same, activations differ by TF32
            assert there.kurtosis == pytest.approx(here.kurtosis, rel=1e-4)
    for one, other in zip(study.damage, found.damage, strict=True):
        assert (one.layer, one.what) == (other.layer, other.what)
        assert other.logit_error == pytest.approx(one.logit_error, rel=0.3)


def test_every_layer_is_quantised_alone(study: Study) -> None:
    assert study.images == 4
    assert study.precision == "nvfp4"
    kinds = {kind: [row for row in study.damage if group_of(row.kept, row.what) == kind] for kind in (
        "GEMMs in FP4", "first layer", "output layer", "normalisation, parameters", "normalisation, input"
    )}  # fmt: skip
    assert [len(rows) for rows in kinds.values()] == [11, 1, 1, 10, 10]
    for row in study.damage:
        assert 0 < row.logit_error < 1, row
        assert 0 <= row.changed < 1
    products = [row for row in study.damage if row.kind != "GroupNorm"]
    assert sum(row.macs for row in products) == pytest.approx(1)
    assert sum(row.parameters for row in study.damage if row.what != "input") == pytest.approx(1)


def test_multiply_accumulates_are_those_of_the_products(study: Study) -> None:
    macs = {row.layer: row.macs for row in study.damage}
    widths, size = (8, 16, 32, 64, 128), 32
    expected = {
        "encoder.0.conv1": 3 * widths[0] * 9 * size**2,
        "encoder.2.conv2": widths[2] ** 2 * 9 * (size // 4) ** 2,
        "up.0": widths[4] * widths[3] * 4 * (size // 16) ** 2,
        "head": widths[0] * 7 * size**2,
    }
    unit = macs["head"] / expected["head"]
    for layer, count in expected.items():
        assert macs[layer] == pytest.approx(unit * count), layer


def test_what_training_taught_a_normalisation_does_not_survive(study: Study) -> None:
    """Its weights lie within a hundredth of 1, and NVFP4's step there is a sixth."""
    for row in study.tensors:
        if row.kind == "GroupNorm" and row.tensor == "weight":
            assert row.sqnr_db is None or row.sqnr_db > 25
            assert row.lost is not None
            assert row.lost > 0.5, row
        elif row.tensor == "weight":
            assert row.lost is not None
            assert row.lost < 0.03, row


def test_an_fp16_checkpoint_is_studied_alike(checkpoint: Path, data: Path, study: Study, tmp_path: Path) -> None:
    names = open_dataset(data, "val").class_names
    model = build_unet(len(names), 0.125)
    load_weights(model, checkpoint)
    path = tmp_path / "fp16.safetensors"
    save_checkpoint(path, model, ModelCard("fp16", 0.125, names, 32, 32, IMAGE_MEAN, IMAGE_STD, True))
    other = study_kurtosis(path, study_images(path, data, 4))
    assert [row.layer for row in other.tensors] == [row.layer for row in study.tensors]
    ours = {(row.layer, row.what): row.kept for row in study.damage}
    assert {(row.layer, row.what): row.kept for row in other.damage} == ours
    first, second = ({(row.layer, row.what): row.logit_error for row in found.damage} for found in (study, other))
    for key, value in first.items():  # FP16's masters of quantised layers are rounded, NVFP4's are not
        assert second[key] == pytest.approx(value, rel=0.5), key


def test_files_hold_the_study(study: Study, tmp_path: Path) -> None:
    files = save_study(study, tmp_path / "kurtosis")
    assert [path.name for path in files] == ["kurtosis.json", "kurtosis.md", "kurtosis.png"]
    loaded = json.loads(files[0].read_text())
    assert len(loaded["tensors"]) == len(study.tensors)
    assert loaded["damage"][0]["logit_error"] == study.damage[0].logit_error
    text = files[1].read_text()
    assert text == render_study(study)
    assert "| output layer | 1 |" in text
    assert "| head | weight and input |" in text
    assert files[2].stat().st_size > 20_000


def test_no_images_and_no_checkpoint(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="needs images"):
        study_kurtosis(checkpoint, [])
    with pytest.raises(InputError, match="no checkpoint"):
        study_kurtosis(tmp_path / "none.safetensors", [torch.zeros(1, 3, 32, 32)])
    assert sum(len(batch) for batch in study_images(checkpoint, data, 100)) == 6
    assert [len(batch) for batch in study_images(checkpoint, data, 5, batch=2)] == [2, 2, 1]
