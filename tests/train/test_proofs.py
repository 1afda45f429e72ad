"""What has to be the same number: killed and resumed, two processes and one, accumulated and large, checkpointed."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks import kill_resume
from fp4deploy.data import generate_shapes
from fp4deploy.runs import Run, create_run
from fp4deploy.train import Config, SegmentationLoss, load_config, train_models, with_settings
from fp4deploy.train.logging.running_statistics import RunningStatistics
from fp4deploy.train.loop import Trainer
from tests.train.launch import run_ranks, start
from tests.train.small_network import SPEC


def losses_of(config: Config, folder: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The loss of every batch."""
    losses: list[float] = []
    original = RunningStatistics.add_loss

    def noted(self: RunningStatistics, loss: torch.Tensor) -> None:
        losses.append(loss.item())
        original(self, loss)

    with monkeypatch.context() as patch:
        patch.setattr(RunningStatistics, "add_loss", noted)
        train_models(config, create_run(folder), (model,))
    return losses


def kill_and_resume(report: Path, recipe: str) -> None:
    """In a process of its own: the script with a few short epochs; what it prints goes into a file."""
    sys.argv = ["kill_resume.py", "--steps", "3", "--within", "6", "--images", "28", "--recipe", recipe]
    with report.open("w") as file, redirect_stdout(file):
        kill_resume.main()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["nvfp4_train"])
def test_killed_at_a_random_step_the_following_losses_are_the_same_bits(recipe: str, tmp_path: Path) -> None:
    """SIGKILL, stochastic rounding, averaged weights, accumulated gradients; the script does 50 steps by default."""
    process = start(kill_and_resume, tmp_path / "report.json", recipe)
    process.join(240)
    assert process.exitcode == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["different"] == 0
    assert report["batches_compared"] == 6
    assert report["resumed_after_batches"] <= report["killed_after_batches"]


def train_and_note_losses(data: Path, out: Path, sets: list[str]) -> None:
    """In one of several processes: train FP16 and write down the loss of every batch."""
    losses: list[float] = []
    original = RunningStatistics.add_loss

    def noted(self: RunningStatistics, loss: torch.Tensor) -> None:
        losses.append(loss.item())
        original(self, loss)

    RunningStatistics.add_loss = noted  # type: ignore[method-assign]
    train_models(load_config(None, [f"data.root={data}", *sets]), Run(out), ("fp16",))
    (out / f"losses{dist.get_rank()}.json").write_text(json.dumps(losses))


@pytest.mark.parametrize(
    "more",
    [
        ["train.ema=0.9", "train.class_balance=median_frequency", "train.label_smoothing=0.1"],
        ["task=instance"],
        ["task=instance", "instance.method=set", "instance.channels=4"],
    ],
    ids=["classes", "centres", "set"],
)
def test_two_processes_have_the_losses_of_one(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    """At the same global batch, although each sees other classes and another number of labelled pixels."""
    data = tmp_path / "data"
    generate_shapes(data, train=12, val=4, size=32, seed=0)
    common = ["model.scale=0.125", "data.height=32", "data.width=32", "train.epochs=4", "train.zoom=[0.5,2]", *more]
    one = with_settings(tiny, [f"data.root={data}", *common, "train.batch_size=4"])
    alone = losses_of(one, tmp_path / "one", "fp16", monkeypatch)
    run = create_run(tmp_path / "two")
    run_ranks(2, train_and_note_losses, data, run.path, [*common, "train.batch_size=2"])
    ranks = [json.loads((run.path / f"losses{rank}.json").read_text()) for rank in (0, 1)]
    assert ranks[0] == ranks[1]
    assert len(alone) == len(ranks[0]) == 12
    assert ranks[0][0] == pytest.approx(alone[0], rel=1e-6)
    assert ranks[0] == pytest.approx(alone, rel=1e-3)
    means = [
        json.loads((folder / "fp16" / "metrics.jsonl").open().readline()) for folder in (tmp_path / "one", run.path)
    ]
    assert means[0]["loss"] == pytest.approx(means[1]["loss"], rel=1e-4)


def test_accumulated_cross_entropy_is_that_of_the_large_batch(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where every pixel is labelled; Dice is no sum over images and is that of each part (docs/training.md)."""
    gradients: dict[str, dict[str, torch.Tensor]] = {}
    original = Trainer._update

    def noted(self: Trainer) -> None:
        if self.progress.step == 0:
            gradients[str(self.job.folder.parent.name)] = {n: p.grad.clone() for n, p in self.bare.named_parameters()}
        original(self)

    monkeypatch.setattr(Trainer, "_update", noted)
    plain = SegmentationLoss.of
    monkeypatch.setattr(SegmentationLoss, "of", lambda self, z, y: plain(self, z, y.where(y != 255, 0)))
    for name, batch, accumulate in (("large", 8, 1), ("small", 2, 4)):
        settings = [f"train.batch_size={batch}", f"train.accumulate={accumulate}", "train.dice=0", "train.epochs=1"]
        train_models(with_settings(tiny, [*settings, "train.zoom=[1,2]"]), create_run(tmp_path / name), ("fp16",))
    for name, large in gradients["large"].items():
        small = gradients["small"][name]
        torch.testing.assert_close(small, large, rtol=1e-3, atol=1e-5 * large.abs().max().item() + 1e-7)


@pytest.mark.parametrize(
    ("model", "recipe"),
    [
        pytest.param("fp16", "nvfp4_qat", marks=pytest.mark.variants),
        ("nvfp4", "nvfp4_qat"),
        ("nvfp4", "nvfp4_qat+learned"),
    ],
)
def test_checkpointed_losses_are_the_same_bits(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, recipe: str
) -> None:
    common = ["train.from_scratch=true", f"recipe={recipe}", "train.epochs=2"]
    plain = losses_of(with_settings(tiny, common), tmp_path / "plain", model, monkeypatch)
    settings = with_settings(tiny, [*common, "train.checkpointing=true"])
    again = losses_of(settings, tmp_path / "again", model, monkeypatch)
    assert len(plain) == 4
    assert plain == again


def test_checkpointing_keeps_less(tiny: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that autograd saves for the backward pass, by shape of what it packs."""
    from fp4deploy.models import build_unet
    from fp4deploy.train.checkpointing import checkpoint_blocks

    kept = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = build_unet(3, 0.125).train()
        if checkpointed:
            assert checkpoint_blocks(model) == 5
        seen = [0]

        def pack(tensor: torch.Tensor, seen: list[int] = seen) -> torch.Tensor:
            seen[0] += tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(torch.randn(1, 3, 64, 64))
        kept.append(seen[0])
    assert kept[1] < 0.5 * kept[0]


def test_a_spike_is_survived_and_reported(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    original = Trainer.step

    def spiked(self: Trainer, *batch: torch.Tensor) -> None:
        loss = self.loss
        if self.progress.step == 25:
            self.loss = lambda logits, target: 100 * loss(logits, target)  # type: ignore[assignment]
        original(self, *batch)
        self.loss = loss

    monkeypatch.setattr(Trainer, "step", spiked)
    run = create_run(tmp_path / "run")
    train_models(with_settings(tiny, [f"model.spec={SPEC}", "train.epochs=20"]), run, ("fp16",))
    lines = [json.loads(line) for line in (run.model_dir("fp16") / "metrics.jsonl").open()]
    assert [line["epoch"] for line in lines if line["loss_spikes"]] == [13]
    assert lines[12]["loss_spikes"] == 1
    assert lines[12]["largest_spike"] > 100
    assert lines[11]["largest_spike"] is None
    assert lines[-1]["loss"] < lines[11]["loss"]
    assert "epoch 13: 1 loss spike, largest" in capfd.readouterr().err
