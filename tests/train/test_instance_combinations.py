"""The instance task with what else a training can do: averaged weights, class weights, PTQ, sweeps, telemetry."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fp4deploy.errors import InputError
from fp4deploy.experiments.sweep.results import markdown
from fp4deploy.experiments.sweep.run import run_sweep
from fp4deploy.experiments.sweep.spec import load_sweep
from fp4deploy.models import read_card
from fp4deploy.qat import load_model, quantized_layers
from fp4deploy.runs import create_run
from fp4deploy.train import Config, load_config, train_models, with_settings
from fp4deploy.train.batches import make_loaders
from fp4deploy.train.estimate import estimate, measure
from fp4deploy.train.losses.centres import CentreLoss
from fp4deploy.train.losses.segmentation import SegmentationLoss
from fp4deploy.train.models import model_card, open_splits
from fp4deploy.train.state import _progress
from fp4deploy.train.tasks import make_task
from tests.samples import sample


@pytest.fixture
def objects(tiny: Config) -> Config:
    return with_settings(tiny, ["task=instance", "instance.threshold=0.02", "data.workers=0"])


def lines(folder: Path) -> list[dict]:
    return [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("method", sample(["centres", "set"], every=2))
def test_everything_at_once(objects: Config, tmp_path: Path, method: str) -> None:
    """Trained, averaged, balanced, damped, quantised after and during training; looked at on the way."""
    run = create_run(tmp_path / "run")
    config = with_settings(
        objects,
        [
            f"instance.method={method}",
            "train.ema=0.9",
            "train.label_smoothing=0.1",
            "train.class_balance=median_frequency",
            "train.upside_down=true",
            "augment.rotate=30",
            "augment.aspect=1.5",
            "quant.damping=0.001",
            "telemetry.every=1",
        ],
    )
    trained = train_models(config, run, ("fp16", "nvfp4", "nvfp4_ptq"))
    for model, result in trained.items():
        written = lines(run.model_dir(model))
        assert result.metric == "AP"
        assert all("ap" in line and "miou" not in line for line in written)
        assert result.best_score == max(line["ap"] for line in written)
        card = read_card(run.checkpoint(model))
        assert (card.task, card.head.method) == ("instance", method)
        if model != "nvfp4_ptq":
            seen = [json.loads(text) for text in (run.model_dir(model) / "telemetry.jsonl").read_text().splitlines()]
            assert [entry["values"]["ap"] for entry in seen if entry["kind"] == "epoch"] == pytest.approx(
                [line["ap"] for line in written]
            )
    assert len(quantized_layers(load_model(run.checkpoint("nvfp4_ptq"))[0])) == 11
    again = train_models(config, run, ("fp16", "nvfp4", "nvfp4_ptq"), resume=True)
    assert {name: result.best_score for name, result in again.items()} == {
        name: result.best_score for name, result in trained.items()
    }


@pytest.mark.parametrize("task", ["semantic", "instance"])
def test_weights_of_classes_reach_the_loss_of_every_task(tiny: Config, task: str) -> None:
    config = with_settings(
        tiny, [f"task={task}", "train.class_weights={circle: 3}", "train.label_smoothing=0.2", "train.dice=0.5"]
    )
    _, val = open_splits(config)
    made = make_task(config, model_card(config, "fp16", val), val, balance={"circle": 0.5, "background": 2.0})
    assert isinstance(made.loss, CentreLoss if task == "instance" else SegmentationLoss)
    semantic = made.loss.semantic if task == "instance" else made.loss
    place = val.class_names.index("circle")
    assert (semantic.label_smoothing, semantic.dice) == (0.2, 0.5)
    assert semantic.class_weights[place] == 3
    assert semantic.class_weights.sum() == len(val.class_names) + 2
    assert (semantic.balance[place], semantic.balance[0], semantic.balance[-1]) == (0.5, 2.0, 1.0)


def test_the_loader_hands_over_bytes_and_numbers(objects: Config) -> None:
    train, val = open_splits(objects)
    loaders = make_loaders(objects, train, val)
    images, labels = next(iter(loaders[0]))
    assert (images.dtype, labels.dtype) == (torch.uint8, torch.int32)
    assert labels.shape == (4, 2, 32, 32)
    assert labels[:, 1].max() > 0
    images, indices = next(iter(loaders[1]))
    assert images.dtype == torch.uint8
    assert indices.tolist() == [0, 1, 2, 3]


def test_distillation_of_objects_is_refused_before_anything_is_trained(tiny: Config, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"not valid: distill.weight = 0.5: .*task=semantic\.$"):
        load_config(None, ["task=instance", "distill.weight=0.5"])
    with pytest.raises(InputError, match="not all of classes"):
        with_settings(with_settings(tiny, ["distill.weight=1"]), ["task=instance"])
    file = tmp_path / "s.yaml"
    file.write_text("set: {task: instance}\nvariants: {a: {set: {distill.weight: 1}}, b: {}}\n")
    with pytest.raises(InputError, match="a: The configuration is not valid: distill.weight"):
        load_sweep(file)


def test_an_instance_model_cannot_teach_classes(objects: Config, tiny: Config, tmp_path: Path) -> None:
    run = create_run(tmp_path / "run")
    train_models(with_settings(objects, ["train.epochs=1"]), run, ("fp16",))
    config = with_settings(
        tiny,
        ["distill.weight=1", f"distill.teacher={run.checkpoint('fp16')}", "train.from_scratch=true", "train.epochs=1"],
    )
    with pytest.raises(InputError, match="cannot teach: it is instance, fp16"):
        train_models(config, create_run(tmp_path / "other"), ("nvfp4",))


def test_a_sweep_of_instance_models_compares_ap(tiny_data: Path, tmp_path: Path) -> None:
    file = tmp_path / "objects.yaml"
    common = "model.scale: 0.125, data.height: 32, data.width: 32, train.epochs: 1, train.finetune_epochs: 1"
    file.write_text(
        f"set: {{task: instance, {common}, instance.threshold: 0.02, data.root: {json.dumps(str(tiny_data))}}}\n"
        "against: control\n"
        "variants:\n"
        "  control: {model: fp16_control}\n"
        "  ptq: {model: nvfp4_ptq}\n"
        "  few: {model: nvfp4, set: {instance.method: set}}\n"
    )
    sweep, said = load_sweep(file), []
    assert [variant.name for variant in sweep.variants][:2] == ["fp16", "fp16-instance.method_set"]
    results = run_sweep(sweep, tmp_path / "out", say=said.append)
    assert results["metric"] == "AP"
    for name, row in results["variants"].items():
        assert row["runs"]["0"]["status"] == "done", (name, row["runs"])
        written = lines(tmp_path / "out" / name / "seed0" / row["model"])
        assert row["runs"]["0"]["best"] == max(line["ap"] for line in written)
    assert "AP best" in markdown(results)
    assert "mIoU" not in markdown(results) + " ".join(said)


def test_a_sweep_has_one_task(tmp_path: Path) -> None:
    file = tmp_path / "both.yaml"
    file.write_text("variants: {a: {}, b: {set: {task: instance}}}\n")
    with pytest.raises(InputError, match="different tasks"):
        load_sweep(file)


def test_an_estimate_measures_the_task_that_is_asked_for(objects: Config) -> None:
    (speed,) = measure(objects, ("nvfp4",), steps=2)
    assert min(speed.training, speed.resident, speed.evaluation, speed.loader) > 0
    assert estimate(objects, [speed], 8, 4)[0].hours > 0


def test_a_state_of_before_there_were_tasks_is_read() -> None:
    assert _progress(Path("state.safetensors"), {"progress": {"epoch": 2, "best_miou": 0.5}}).best_score == 0.5


def test_crowded_images_are_spoken_of(objects: Config, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = with_settings(objects, ["instance.method=set", "instance.channels=1", "train.epochs=1"])
    train_models(config, create_run(tmp_path / "run"), ("fp16",))
    assert "had more objects than the 1 mask channels" in " ".join(capfd.readouterr().err.split())
