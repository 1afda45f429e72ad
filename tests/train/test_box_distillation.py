"""Distillation of detectors: the divergence by its formulas, who may teach, and a student that comes to its teacher."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fp4deploy.errors import InputError
from fp4deploy.models.boxes import DetectionHead
from fp4deploy.runs import create_run
from fp4deploy.train import Config, train_models, with_settings
from fp4deploy.train.loop import Trainer
from fp4deploy.train.losses.boxes import giou
from fp4deploy.train.losses.taught_boxes import BoxDivergence, bernoulli_divergence

METHODS = ("fcos", "fcos_relu", "retinanet")
TINY = ["task=detection", "model.scale=0.125", "detection.width=16", "detection.depth=1", "telemetry.every=0"]


def outputs(head: DetectionHead, seed: int = 0, places: int = 30) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, head.channels, places, generator=generator, dtype=torch.float64)


def test_the_divergence_of_two_probabilities_by_hand() -> None:
    """KL of (0.75, 0.25) against (0.5, 0.5) is 0.75 log 1.5 + 0.25 log 0.5."""
    teacher, student = torch.tensor([3.0]).double().log(), torch.zeros(1).double()
    expected = 0.75 * torch.tensor(1.5).double().log() + 0.25 * torch.tensor(0.5).double().log()
    torch.testing.assert_close(bernoulli_divergence(student, teacher)[0], expected)
    torch.testing.assert_close(bernoulli_divergence(2 * student, 2 * teacher, 2.0)[0], 4 * expected)
    assert bernoulli_divergence(torch.tensor([-200.0]), torch.tensor([200.0])).item() == pytest.approx(200)


@pytest.mark.parametrize("method", METHODS)
def test_against_the_formulas_place_by_place(method: str) -> None:
    head, weights = DetectionHead(method, 3), (0.5, 2.0, 3.0)
    student, teacher = outputs(head), outputs(head, 1)
    scores, found, truth = head.scores(teacher).amax(1), head.distances(student), head.distances(teacher)
    of_class = of_box = of_centre = seen = mass = 0.0
    for image in range(2):
        for place in range(student.shape[2]):
            p, q = (each[image, :3, place].sigmoid() for each in (teacher, student))
            of_class += (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).sum().item()
            seen += p.max().item()
            left, top, right, bottom = truth[image, :, place].tolist()
            if left + right <= 0 or top + bottom <= 0:
                continue
            score = scores[image, place].item()
            pair = (each[image, :, place].reshape(1, 4, 1) for each in (found, truth))
            of_box += score * (1 - giou(*pair).item())
            mass += score
            if head.centred:
                p, q = (head.centredness(each)[image, place].sigmoid() for each in (teacher, student))
                of_centre += score * (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).item()
    expected = 0.5 * of_class / max(seen, 1) + 2 * of_box / max(mass, 1) + 3 * of_centre / max(mass, 1)
    assert BoxDivergence(head, weights)(student, teacher).item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_it_is_nothing_for_equal_outputs_and_its_gradient_is_finite(method: str) -> None:
    head = DetectionHead(method, 2)
    teacher = outputs(head)
    assert BoxDivergence(head)(teacher, teacher).item() == pytest.approx(0, abs=1e-9)
    student = outputs(head, 1).requires_grad_()
    BoxDivergence(head)(student, teacher).backward()
    assert student.grad is not None
    assert student.grad.isfinite().all()


def test_boxes_count_where_the_teacher_sees_an_object() -> None:
    head = DetectionHead("fcos", 1)
    teacher = torch.zeros(1, head.channels, 2)
    teacher[0, 0] = torch.tensor([4.0, -40.0])
    student = teacher.clone()
    student[0, 1:5, 1] += 1.0
    assert BoxDivergence(head)(student, teacher).item() == pytest.approx(0, abs=1e-6)
    student[0, 1:5, 0] += 1.0
    assert BoxDivergence(head)(student, teacher).item() > 0.3


def test_outputs_of_another_shape_are_refused() -> None:
    head = DetectionHead("fcos", 1)
    with pytest.raises(ValueError, match="teacher's outputs"):
        BoxDivergence(head)(outputs(head), outputs(head, places=31))


@pytest.mark.variants
def test_a_detector_comes_to_its_teacher_without_labels(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses: list[float] = []
    original = Trainer.step

    def noted(self: Trainer, *batch: torch.Tensor) -> None:
        before = self.statistics.read().loss
        original(self, *batch)
        if self.job.model == "nvfp4":
            losses.append(self.statistics.read().loss - before)

    monkeypatch.setattr(Trainer, "step", noted)
    settings = ["distill.weight=1", "distill.task=0", "train.epochs=10", "train.from_scratch=true"]
    train_models(with_settings(tiny, [*TINY, *settings]), create_run(tmp_path / "run"), ("fp16", "nvfp4"))
    assert sum(losses[-4:]) < 0.7 * sum(losses[:4])
    assert min(losses) >= 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["task=semantic"], "cannot teach: it is detection, fp16"),
        (["model.spec=torchvision:fcos_resnet50_fpn", "detection.width=128", "detection.depth=2"], "has the head"),
    ],
)
def test_a_detector_teaches_its_own_task_and_layout(
    tiny: Config, tmp_path: Path, settings: list[str], message: str
) -> None:
    if any("torchvision" in each for each in settings):
        pytest.importorskip("torchvision")
    run = create_run(tmp_path / "run")
    train_models(with_settings(tiny, [*TINY, "train.epochs=1"]), run, ("fp16",))
    taught = ["distill.weight=1", f"distill.teacher={run.checkpoint('fp16')}", "train.from_scratch=true"]
    with pytest.raises(InputError, match=message):
        train_models(with_settings(tiny, [*TINY, *taught, *settings]), create_run(tmp_path / "other"), ("nvfp4",))
