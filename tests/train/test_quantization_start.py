"""quant.start: plain steps first, then quantised ones; scored quantised throughout, resumed exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fp4deploy.data import generate_shapes
from fp4deploy.errors import InputError
from fp4deploy.qat import prepare, quantized_layers
from fp4deploy.runs import Run, create_run
from fp4deploy.train import Config, load_config, train_models, with_settings
from fp4deploy.train.loop import Trainer
from tests.train.small_network import SPEC

STEPS = 4  # two epochs of two batches
SETTINGS = [
    f"model.spec={SPEC}",
    "data.height=32",
    "data.width=32",
    "train.epochs=1",
    "train.finetune_epochs=2",
    "train.batch_size=4",
    "telemetry.every=0",
]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("shapes") / "data"
    generate_shapes(folder, train=8, val=4, size=32, seed=0)
    return load_config(None, [f"data.root={folder}", *SETTINGS])


@pytest.fixture(scope="module")
def base(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = create_run(tmp_path_factory.mktemp("runs") / "base")
    train_models(config, run, ("fp16", "fp16_control", "nvfp4"))
    return run


def tune(config: Config, base: Run, folder: Path, *sets: str) -> Run:
    run = create_run(folder)
    train_models(late(config, base, *sets), run, ("nvfp4",))
    return run


def late(config: Config, base: Run, *sets: str) -> Config:
    return with_settings(config, [f"train.init_checkpoint={base.checkpoint('fp16')}", *sets])


def trained(run: Run, model: str) -> dict[str, torch.Tensor]:
    state = load_file(run.model_dir(model) / "state" / "last.safetensors")
    return {name: value for name, value in state.items() if name.endswith(("weight", "bias"))}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_steps_before_the_start_are_those_of_the_control(config: Config, base: Run, tmp_path: Path) -> None:
    never = trained(tune(config, base, tmp_path / "never", "quant.start=0.99"), "nvfp4")
    control = trained(base, "fp16_control")
    assert never
    assert same(never, control)
    assert not same(trained(base, "nvfp4"), control)
    half = trained(tune(config, base, tmp_path / "half", "quant.start=0.5"), "nvfp4")
    assert not same(half, control)
    assert not same(half, trained(base, "nvfp4"))


def test_quantisers_are_on_from_the_step_of_the_share_and_in_every_validation(
    config: Config, base: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int, bool]] = []
    step, load = Trainer._compute, Trainer._averaged

    def computed(self: Trainer, *batch: torch.Tensor) -> None:
        seen.append(("step", self.progress.step, all(layer.quantizing for layer in self.layers)))
        step(self, *batch)

    def averaged(self: Trainer):  # type: ignore[no-untyped-def]
        if not self.model.training:  # and where a checkpoint is written
            seen.append(("validation", self.progress.step, all(layer.quantizing for layer in self.layers)))
        return load(self)

    monkeypatch.setattr(Trainer, "_compute", computed)
    monkeypatch.setattr(Trainer, "_averaged", averaged)
    tune(config, base, tmp_path / "run", "quant.start=0.75", "train.ema=0.5")
    assert [row for row in seen if row[0] == "step"] == [("step", at, at >= 3) for at in range(STEPS)]
    validations = [row for row in seen if row[0] == "validation"]
    assert len(validations) == 2
    assert all(on for _, _, on in validations)


def test_before_the_start_a_layer_is_plain_and_its_amax_follows() -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Conv2d(16, 16, 3))
    x = torch.randn(2, 16, 8, 8)
    plain = layer(x)
    prepare(layer, "nvfp4_qat", include=["0"]).train()
    conv = quantized_layers(layer)["0"]
    conv.quantizing = False
    assert torch.equal(layer(x), plain)
    assert conv.input_amax == x.abs().max()
    layer(x / 2)
    assert conv.input_amax == x.abs().max() * conv.recipe.amax_decay
    conv.quantizing = True
    assert not torch.equal(layer(x), plain)


@pytest.mark.parametrize("step", [1, 3])
def test_an_interrupted_training_resumes_exactly(
    config: Config, base: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    straight = tune(config, base, tmp_path / "straight", "quant.start=0.5")
    run, original = create_run(tmp_path / "run"), Trainer.step
    settings = late(config, base, "quant.start=0.5")

    def interrupted(self: Trainer, *batch: torch.Tensor) -> None:
        if self.progress.step == step:
            raise KeyboardInterrupt
        original(self, *batch)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train_models(settings, run, ("nvfp4",), resume=True)
    train_models(settings, run, ("nvfp4",), resume=True)
    first, second = (load_file(each.model_dir("nvfp4") / "state" / "last.safetensors") for each in (straight, run))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_recipes_that_quantise_gradients_start_late_as_well(config: Config, base: Run, tmp_path: Path) -> None:
    run = tune(config, base, tmp_path / "run", "recipe=nvfp4_train", "quant.start=0.99")
    assert same(trained(run, "nvfp4"), trained(base, "fp16_control"))


def test_a_learned_amax_cannot_wait() -> None:
    with pytest.raises(InputError, match=r"quant\.start = 0\.5: a learned amax has no gradient"):
        load_config(None, ["recipe=nvfp4_qat+learned", "quant.start=0.5"])
