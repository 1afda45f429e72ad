"""A layer whose input is all zeros has been calibrated: zeros are exact in FP4, whatever the scale."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fp4deploy.errors import InputError
from fp4deploy.export import export_onnx
from fp4deploy.export.to_packed import pack
from fp4deploy.formats import ZEROS_AMAX
from fp4deploy.models import ModelCard, save_checkpoint
from fp4deploy.models.build import network_for
from fp4deploy.ptq import quantize
from fp4deploy.qat import calibrate, calibrate_percentile, load_model, prepare, prepare_as, quantized_layers
from fp4deploy.qat.fusion.operators import track

OWN = """
import torch
from torch import nn
class Branch(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 32, 1), nn.Conv2d(32, 32, 1)
        self.z, self.z2 = nn.Conv2d(32, 32, 1), nn.Conv2d(32, 32, 1)
        self.head = nn.Conv2d(32, classes, 1)
        nn.init.zeros_(self.z.weight)
        nn.init.zeros_(self.z.bias)
    def forward(self, x):
        h = self.b(self.a(x).relu()).relu()
        return self.head(h + self.z2(self.z(h).relu()))
"""
CARD = {"precision": "nvfp4", "scale": 1.0, "class_names": ("a", "b"), "height": 8, "width": 8, "mean": (0.5,) * 3}
CARD |= {"std": (0.2,) * 3, "background": False, "recipe": "nvfp4_qat"}


def network(folder: Path) -> tuple[nn.Module, ModelCard]:
    (folder / "own.py").write_text(OWN)
    card = ModelCard(architecture=f"{folder}/own.py:Branch", **CARD)  # type: ignore[arg-type]
    torch.manual_seed(0)
    return network_for(card, "test", card.architecture), card


@pytest.mark.parametrize(
    "recipe", ["nvfp4_qat", "nvfp4_qat_delayed", "nvfp4_qat+learned", "nvfp4_4o6_qat", "fp8_qat", "nvfp4_fp8_qat"]
)
def test_training_and_evaluation_are_finite_and_the_branch_starts(tmp_path: Path, recipe: str) -> None:
    model, _ = network(tmp_path)
    x = torch.rand(2, 3, 8, 8)
    prepare(model, recipe)
    if "learned" in recipe:
        calibrate(model, x)
        assert model.z2.input_amax == 1
    for _ in range(2):
        model.train()(x).square().mean().backward()
    assert all(each.grad is None or each.grad.isfinite().all() for each in model.parameters())
    assert model.eval()(x).isfinite().all()
    nn.init.ones_(model.z.bias)
    if "learned" not in recipe:
        model.train()(x)
        assert model.z2.input_amax >= 1, "the first values after the zeros are followed at once"


@pytest.mark.parametrize("percentile", [100, 99.0])
def test_zeros_are_not_never(tmp_path: Path, percentile: float) -> None:
    model, card = network(tmp_path)
    prepare_as(model, card)
    layer = quantized_layers(model)["z2"]
    assert layer.input_amax == 0
    with pytest.raises(InputError, match="never calibrated"):
        model.eval()(torch.rand(2, 3, 8, 8))
    calibrate_percentile(model, torch.rand(2, 3, 8, 8), percentile)
    assert layer.input_amax == ZEROS_AMAX
    layer.input_amax.zero_()
    layer.track(torch.empty(0, 32, 8, 8))
    assert layer.input_amax == 0, "no value was seen"


@pytest.mark.parametrize("amax", [float("nan"), float("inf"), -1.0, 0.0])
def test_what_is_no_amax_gives_an_error_and_no_numbers(amax: float, tmp_path: Path) -> None:
    """Of the module, of an ONNX file and of a packed one, by the layer's name."""
    model = prepare(nn.Sequential(nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 4, 1))).eval()
    x = torch.rand(2, 3, 8, 8)
    calibrate(model, x)
    assert model(x).isfinite().all()
    model[1].input_amax.fill_(amax)
    for action in (
        lambda: model(x),
        lambda: export_onnx(model, x, str(tmp_path / "m.onnx"), verify=False),
        lambda: pack(model, tmp_path / "m.fp4", example_inputs=x, verify=False),
    ):
        with pytest.raises(InputError, match=r"\b1\b"):
            action()
    assert not any(tmp_path.iterdir())


def test_a_checkpoint_is_loaded_and_exported_and_one_that_saw_nothing_is_refused(tmp_path: Path) -> None:
    model, card = network(tmp_path)
    prepare_as(model, card)
    calibrate(model, torch.rand(2, 3, 8, 8))
    save_checkpoint(tmp_path / "c.safetensors", model, card)
    loaded, _ = load_model(tmp_path / "c.safetensors", model=card.architecture)
    x = torch.rand(2, 3, 8, 8)
    assert torch.allclose(loaded(x), model.eval()(x), atol=1e-2)
    export_onnx(loaded, x, str(tmp_path / "m.onnx"))
    model.z2.input_amax.zero_()
    save_checkpoint(tmp_path / "never.safetensors", model, card)
    with pytest.raises(InputError, match="never calibrated"):
        load_model(tmp_path / "never.safetensors", model=card.architecture)


@pytest.mark.parametrize("method", ["amax", "mse", "gptq", "faar"])
def test_methods_without_training_take_zeros(tmp_path: Path, method: str) -> None:
    model, _ = network(tmp_path)
    x = torch.rand(2, 3, 8, 8)
    expected = model.eval()(x)
    quantize(model, x, method, iterations=2)
    assert (model(x) - expected).norm() < 0.3 * expected.norm()


@pytest.mark.parametrize("delayed", [False, True])
def test_the_traced_form_follows_likewise(delayed: bool) -> None:
    used, moved = track(torch.tensor(0.0), torch.tensor(0.0), 0.99, delayed)
    assert used == moved == ZEROS_AMAX
    used, moved = track(torch.tensor(2.0), moved, 0.99, delayed)
    assert used == moved == 2


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_batches_that_are_no_numbers_calibrate_nothing(bad: float) -> None:
    model = prepare(nn.Sequential(nn.Linear(32, 32)), include=["0"])
    good, broken = torch.randn(4, 32), torch.randn(4, 32)
    broken[2, 3] = bad
    for batches in (
        [good, broken],
        [(good, torch.zeros(4)), (broken, torch.zeros(4))],
        [{"input": good}, {"input": broken}],
    ):
        for run in (calibrate, lambda *given: calibrate_percentile(*given, 99.0)):
            with pytest.raises(InputError, match="Batch 2 of the calibration holds NaN or Inf"):
                run(model, batches)
    calibrate(model, [(good, torch.full((4,), torch.nan))])  # a label is not looked at
    assert model[0].input_amax == good.abs().max()


def test_a_mask_beside_an_image_may_hold_minus_infinity() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return (self.layer(x) + mask).softmax(-1)

    model, x, mask = prepare(Masked(), include=["layer"]), torch.randn(4, 32), torch.zeros(32)
    mask[3:] = -torch.inf
    calibrate(model, [{"x": x, "mask": mask}])
    assert model.layer.input_amax == x.abs().max()
    for bad in (torch.nan, torch.inf):
        with pytest.raises(InputError, match="Batch 1 of the calibration holds NaN or Inf"):
            calibrate(model, [{"x": x, "mask": mask.nan_to_num(neginf=bad)}])
