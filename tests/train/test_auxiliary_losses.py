"""Distillation and damping: the formulas, who is taught by whom, and what they do to a training."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from fp4deploy.errors import InputError
from fp4deploy.models import build_unet
from fp4deploy.qat import prepare, quantized_layers
from fp4deploy.runs import Run, create_run
from fp4deploy.train import Config, train_models, with_settings
from fp4deploy.train.loop import Trainer
from fp4deploy.train.losses.auxiliary import AuxiliaryLosses, damping_loss, distillation_loss
from fp4deploy.train.losses.features import Features
from fp4deploy.train.sections import DistillSection
from tests.train.small_network import SPEC, Small


def test_the_divergence_is_that_of_the_tempered_softmaxes() -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 2, 4, 3, 5, generator=generator)
    temperature = 2.5
    p, q = ((x.double() / temperature).softmax(1) for x in (teacher, student))
    expected = temperature**2 * (p * (p / q).log()).sum(1).mean()
    assert distillation_loss(student, teacher, temperature).item() == pytest.approx(expected.item(), rel=1e-5)
    assert distillation_loss(student, student).item() == pytest.approx(0, abs=1e-7)
    with pytest.raises(ValueError, match="teacher's logits"):
        distillation_loss(student, teacher[:, :3])


def test_the_gradient_keeps_its_size_with_the_temperature() -> None:
    generator = torch.Generator().manual_seed(0)
    teacher = torch.randn(1, 5, 4, 4, generator=generator) * 0.1
    sizes = []
    for temperature in (2.0, 8.0):
        student = torch.zeros_like(teacher, requires_grad=True)
        distillation_loss(student, teacher, temperature).backward()
        sizes.append(student.grad.norm().item())
    assert sizes[1] == pytest.approx(sizes[0], rel=0.1)


def test_damping_pulls_weights_to_their_codes() -> None:
    torch.manual_seed(0)
    model = prepare(build_unet(3, 0.125), "nvfp4_qat")
    layers = tuple(quantized_layers(model).values())
    loss = damping_loss(layers)
    by_hand = sum((layer.weight - layer.quantized_weight()).double().square().sum() for layer in layers)
    assert loss.item() == pytest.approx(by_hand.item(), rel=1e-5)
    loss.backward()
    for layer in layers:
        expected = 2 * (layer.weight - layer.quantized_weight()).detach()
        torch.testing.assert_close(layer.weight.grad, expected)
    with torch.no_grad():
        for layer in layers:
            layer.weight -= 0.25 * layer.weight.grad
    assert damping_loss(layers) < 0.5 * loss


def test_damping_rises_from_its_start_to_the_end() -> None:
    model = prepare(build_unet(3, 0.125), "nvfp4_qat")
    layers = tuple(quantized_layers(model).values())
    auxiliary, pull = AuxiliaryLosses(damping=2.0, damping_start=0.5), damping_loss(layers).item()
    logits = torch.zeros(1, 3, 4, 4)
    for done, strength in ((0.0, 0.0), (0.5, 0.0), (0.75, 1.0), (1.0, 2.0)):
        total = auxiliary(torch.tensor(3.0), logits, logits, layers, done, torch.no_grad)
        assert total.item() == pytest.approx(3.0 + strength * pull, rel=1e-5)


def test_the_teacher_is_frozen_and_weighs_as_it_is_told() -> None:
    teacher = nn.Conv2d(3, 4, 1)
    settings = DistillSection(weight=0.5, task=0.25, temperature=2.0)
    auxiliary = AuxiliaryLosses(teacher, settings)
    auxiliary.placed(nn.Identity(), torch.device("cpu"), torch.contiguous_format, fused=False)
    images, logits = torch.randn(2, 3, 4, 4), torch.randn(2, 4, 4, 4, requires_grad=True)
    total = auxiliary(torch.tensor(8.0), images, logits, (), 0.0, torch.no_grad)
    expected = 0.25 * 8 + 0.5 * distillation_loss(logits, teacher(images), 2.0)
    assert total.item() == pytest.approx(expected.item(), rel=1e-6)
    total.backward()
    assert logits.grad.any()
    assert not teacher.training
    assert all(not p.requires_grad and p.grad is None for p in teacher.parameters())


@pytest.mark.parametrize(("control", "taught"), [(True, ["fp16_control", "nvfp4"]), (False, ["nvfp4"])])
def test_the_control_is_distilled_as_well_unless_switched_off(
    tiny: Config, tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, control: bool, taught: list[str]
) -> None:
    seen: dict[str, AuxiliaryLosses | None] = {}

    def noted(self: Trainer, resume: bool) -> object:
        seen[self.job.model] = copy.copy(self.auxiliary)
        return self.progress

    monkeypatch.setattr(Trainer, "run", noted)
    run, distilled = create_run(tmp_path / "run"), ["distill.weight=1", f"distill.control={str(control).lower()}"]
    start = f"train.init_checkpoint={tiny_run.checkpoint('fp16')}"
    train_models(with_settings(tiny, [*distilled, start]), run, ("fp16", "fp16_control", "nvfp4"))
    assert seen["fp16"] is None
    assert [model for model, auxiliary in seen.items() if auxiliary is not None] == taught
    from safetensors.torch import load_file

    weights = load_file(tiny_run.checkpoint("fp16"))
    teacher = seen["nvfp4"].teacher  # type: ignore[union-attr]
    assert all(torch.equal(value, weights[name]) for name, value in teacher.state_dict().items())


def test_distillation_alone_brings_the_student_to_its_teacher(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no labels at all in the loss, the divergence falls over the epochs."""
    losses: list[float] = []
    original = Trainer.step

    def noted(self: Trainer, *batch: torch.Tensor) -> None:
        before = self.statistics.read().loss
        original(self, *batch)
        if self.job.model == "nvfp4":
            losses.append(self.statistics.read().loss - before)

    monkeypatch.setattr(Trainer, "step", noted)
    settings = [
        f"model.spec={SPEC}",
        "distill.weight=1",
        "distill.task=0",
        "train.epochs=10",
        "train.from_scratch=true",
    ]
    train_models(with_settings(tiny, settings), create_run(tmp_path / "run"))
    assert len(losses) == 20
    assert sum(losses[-4:]) < 0.7 * sum(losses[:4])
    assert min(losses) >= 0


def test_features_are_compared_layer_by_layer_relative_to_the_teacher() -> None:
    torch.manual_seed(0)
    student, teacher = (Small(4) for _ in range(2))
    features, images = Features(student.train(), teacher.eval()), torch.randn(2, 3, 8, 8)
    for _ in range(2):  # the second step does not see the first
        student.eval()(images)  # nor an evaluation
        student.train()(images)
        with torch.no_grad():
            teacher(images)
        loss = features.loss()
    expected, x, y = [], images, images
    for name in ("stem", "body", "head"):
        x, y = student.get_submodule(name)(x), teacher.get_submodule(name)(y)
        expected.append(((x - y) ** 2).sum() / (y**2).sum())
        x, y = x.relu(), y.relu()
    torch.testing.assert_close(loss, torch.stack(expected).mean())
    loss.backward()
    assert all(parameter.grad is not None for parameter in student.parameters())
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_a_teacher_of_another_network_teaches_what_both_have_or_is_refused() -> None:
    def loss(teacher: nn.Module) -> torch.Tensor:
        torch.manual_seed(0)
        student, images = Small(4).train(), torch.randn(2, 3, 8, 8)
        features = Features(student, teacher)
        student(images)
        with torch.no_grad():
            teacher(images)
        return features.loss()

    wider = Small(4)
    wider.body, wider.head = nn.Conv2d(wider.stem.out_channels, 5, 1), nn.Conv2d(5, 4, 1)
    assert loss(wider) > 0
    with pytest.raises(InputError, match="name and the shape"):
        loss(nn.Sequential(nn.Conv2d(3, 4, 1)))


def test_features_alone_bring_the_student_to_its_teacher(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses: list[float] = []
    original = Features.loss

    def noted(self: Features) -> torch.Tensor:
        losses.append((found := original(self)).item())
        return found

    monkeypatch.setattr(Features, "loss", noted)
    settings = [f"model.spec={SPEC}", "distill.features=1", "distill.task=0", "train.from_scratch=true"]
    train_models(with_settings(tiny, [*settings, "train.epochs=10"]), create_run(tmp_path / "run"))
    assert len(losses) == 20
    assert 0 < sum(losses[-4:]) < 0.7 * sum(losses[:4])


@pytest.mark.parametrize("setting", ["train.compile=true", "train.checkpointing=true"])
def test_features_of_layers_that_nobody_calls_are_refused(tiny: Config, setting: str) -> None:
    with pytest.raises(InputError, match=r"distill\.features compares"):
        with_settings(tiny, ["distill.features=1", setting])


def test_a_teacher_of_other_classes_or_of_fp4_is_refused(tiny: Config, tiny_run: Run, tmp_path: Path) -> None:
    run = tiny_run
    for model, settings in (("nvfp4", []), ("fp16", ["data.classes=[circle, square]"])):
        teacher = [f"distill.teacher={run.checkpoint(model)}", "distill.weight=1", "train.from_scratch=true", *settings]
        with pytest.raises(InputError, match=r"cannot teach.*distill\.teacher=FILE"):
            train_models(with_settings(tiny, teacher), create_run(tmp_path / f"other{model}"), ("nvfp4",))
    with pytest.raises(InputError, match="there is none at"):
        train_models(
            with_settings(tiny, ["distill.weight=1", "train.from_scratch=true"]), create_run(tmp_path / "x"), ("nvfp4",)
        )
