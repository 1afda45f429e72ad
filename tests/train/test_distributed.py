"""Two processes train one model: one set of files, the same result in both, validation counted once."""

from __future__ import annotations

import json
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fp4deploy.data import EvalTransform, eval_loader, generate_shapes, open_dataset
from fp4deploy.data.loader import Batch, Key, TransformedDataset
from fp4deploy.errors import Interrupted
from fp4deploy.metrics import SegmentationScore
from fp4deploy.models import build_unet, load_weights, name_model
from fp4deploy.runs import Run, create_run
from fp4deploy.train import load_config, train_models
from fp4deploy.train.logging.running_statistics import RunningStatistics
from fp4deploy.train.loop import Trainer
from fp4deploy.train.state import read_progress
from tests.train.launch import assert_same, run_ranks
from tests.train.small_network import SPEC


def train_and_note_scores(data: Path, out: Path) -> None:
    """In one of two processes: train both models, and write down the scores."""
    settings = ["model.scale=0.125", "data.height=32", "data.width=32", "train.batch_size=2"]
    settings += ["train.epochs=1", "train.finetune_epochs=1", f"data.root={data}"]
    trained = train_models(load_config(None, settings), Run(out))
    scores = {model: result.best_score for model, result in trained.items()}
    (out / f"rank{dist.get_rank()}").write_text(json.dumps(scores))


def train_and_compare_amaxes(data: Path, out: Path) -> None:
    """In one of two processes: train, and write down after every batch whether each amax is that of both."""
    from fp4deploy.qat import quantized_layers

    original = Trainer.step

    def observed(self: Trainer, *batch: torch.Tensor) -> None:
        layers, own = quantized_layers(self.bare), dict[str, float]()
        assert all(layer.is_delayed for layer in layers.values())
        before = {
            name: layer.input_amax.fill_(1e-3 * (1 + at)).clone() for at, (name, layer) in enumerate(layers.items())
        }
        hooks = [
            layer.register_forward_pre_hook(lambda _, args, name=name: own.update({name: args[0].abs().max().item()}))
            for name, layer in layers.items()
        ]
        original(self, *batch)
        for hook in hooks:
            hook.remove()
        ranks: list[Any] = [None, None]
        dist.all_gather_object(ranks, own)
        right = all(
            layer.input_amax == max(*(torch.tensor(rank[name]) for rank in ranks), before[name] * 0.99)
            for name, layer in layers.items()
        )
        line = json.dumps({"right": right, "only_in_1": sum(ranks[1][name] > ranks[0][name] for name in own)})
        with (out / f"rank{dist.get_rank()}").open("a") as file:
            file.write(line + "\n")

    Trainer.step = observed  # type: ignore[method-assign]
    settings = ["model.scale=0.125", "data.height=32", "data.width=32", "train.batch_size=2", "train.from_scratch=true"]
    settings += ["train.epochs=1", "recipe=nvfp4_qat_delayed", "train.accumulate=2", f"data.root={data}"]
    train_models(load_config(None, settings), Run(out), ("nvfp4",))


def train_until_a_signal(data: Path, out: Path) -> None:
    """In one of two processes: train; the second alone receives SIGTERM, after its third step, and ends soon after."""
    original = Trainer.step

    def signalled(self: Trainer, *batch: torch.Tensor) -> None:
        original(self, *batch)
        if dist.get_rank() == 1 and self.progress.step == 3:
            signal.alarm(30)  # where the first trains on, the second waits for it and would do so for ever
            os.kill(os.getpid(), signal.SIGTERM)

    Trainer.step = signalled  # type: ignore[method-assign]
    settings = ["model.scale=0.125", "data.height=32", "data.width=32", "train.batch_size=2", "train.epochs=2"]
    with pytest.raises(Interrupted) as caught:
        train_models(load_config(None, [*settings, f"data.root={data}"]), Run(out), ("fp16",))
    assert caught.value.number == signal.SIGTERM


def train_and_note_order(data: Path, out: Path, stop: int | None, sets: list[str]) -> None:
    """In one of two processes: train on, to step `stop` or to the end; write down the samples and losses."""
    step, load, add_loss = Trainer.step, TransformedDataset.__getitem__, RunningStatistics.add_loss
    notes: dict[str, list[Any]] = {"samples": [], "losses": []}

    def loaded(self: TransformedDataset, key: Key) -> Batch:
        if len(self) == 16:  # not of the validation
            notes["samples"].append(key)
        return load(self, key)

    def signalled(self: Trainer, *batch: torch.Tensor) -> None:
        step(self, *batch)
        if self.progress.step == stop:
            os.kill(os.getpid(), signal.SIGTERM)

    def noted(self: RunningStatistics, loss: torch.Tensor) -> None:
        notes["losses"].append(loss.item())
        add_loss(self, loss)

    TransformedDataset.__getitem__ = loaded  # type: ignore[method-assign]
    Trainer.step = signalled  # type: ignore[method-assign]
    RunningStatistics.add_loss = noted  # type: ignore[method-assign]
    name_model(SPEC)
    config = load_config(None, [f"data.root={data}", *sets])
    with pytest.raises(Interrupted) if stop is not None else nullcontext():
        train_models(config, Run(out), ("nvfp4",), resume=True)
    (out / f"{'rest' if stop is None else 'begun'}{dist.get_rank()}.json").write_text(json.dumps(notes))


@pytest.mark.parametrize("stop", [4, 5], ids=["between epochs", "within an epoch"])
def test_two_processes_resume_with_the_order_and_the_bits_of_an_uninterrupted_training(
    tmp_path: Path, stop: int
) -> None:
    """Four steps an epoch, three epochs; stochastic rounding, whose random state is resumed, too."""
    data = tmp_path / "data"
    generate_shapes(data, train=16, val=2, size=32, seed=0)
    sets = [f"model.spec={SPEC}", "data.height=32", "data.width=32", "train.batch_size=2", "train.epochs=3"]
    sets += ["recipe=nvfp4_train", "train.from_scratch=true", "telemetry.every=0"]
    whole, parts = create_run(tmp_path / "whole"), create_run(tmp_path / "parts")
    run_ranks(2, train_and_note_order, data, whole.path, None, sets)
    run_ranks(2, train_and_note_order, data, parts.path, stop, sets)
    assert read_progress(parts.model_dir("nvfp4") / "state" / "last.safetensors").step == stop
    run_ranks(2, train_and_note_order, data, parts.path, None, sets)
    for rank in (0, 1):
        expected, begun, rest = (
            json.loads((run.path / f"{name}{rank}.json").read_text())
            for run, name in ((whole, "rest"), (parts, "begun"), (parts, "rest"))
        )
        assert [epoch for epoch, _ in expected["samples"]] == [epoch for epoch in range(3) for _ in range(8)]
        assert rest["samples"] == expected["samples"][2 * stop :]
        assert begun["losses"] + rest["losses"] == expected["losses"]
    assert_same(parts, whole, ("nvfp4",))


def test_two_processes_train_one_model(tmp_path: Path) -> None:
    data, run = tmp_path / "data", create_run(tmp_path / "run")
    generate_shapes(data, train=8, val=5, size=32, seed=0)  # 5: the last batch is not full
    run_ranks(2, train_and_note_scores, data, run.path)
    assert (run.path / "rank0").read_text() == (run.path / "rank1").read_text()
    for model in ("fp16", "nvfp4"):
        lines = (run.model_dir(model) / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [2]  # 8 images, 2 a process
    assert json.loads((run.model_dir("fp16") / "metrics.jsonl").read_text())["miou"] == pytest.approx(
        miou_alone(data, run.checkpoint("fp16")), abs=1e-6
    )


def test_the_tracked_amax_is_that_of_both_processes(tmp_path: Path) -> None:
    """After every batch, in both, also where only the second process saw the largest value."""
    data, run = tmp_path / "data", create_run(tmp_path / "run")
    generate_shapes(data, train=8, val=4, size=32, seed=0)
    run_ranks(2, train_and_compare_amaxes, data, run.path)
    ranks = [[json.loads(line) for line in (run.path / f"rank{rank}").read_text().splitlines()] for rank in (0, 1)]
    assert ranks[0] == ranks[1]
    assert [line["right"] for line in ranks[0]] == [True, True]
    assert all(line["only_in_1"] for line in ranks[0])


def test_a_signal_to_one_process_stops_both_after_the_same_step(tmp_path: Path) -> None:
    data, run = tmp_path / "data", create_run(tmp_path / "run")
    generate_shapes(data, train=16, val=2, size=32, seed=0)  # 4 steps an epoch
    run_ranks(2, train_until_a_signal, data, run.path)
    progress = read_progress(run.model_dir("fp16") / "state" / "last.safetensors")
    assert (progress.epoch, progress.step) == (0, 3)


def miou_alone(data: Path, checkpoint: Path) -> float:
    """The same validation in this one process."""
    dataset = open_dataset(data, "val")
    model = build_unet(len(dataset.class_names), 0.125).eval()
    load_weights(model, checkpoint)
    score = SegmentationScore(len(dataset.class_names), dataset.class_names)
    with torch.inference_mode():
        for images, masks in eval_loader(dataset, EvalTransform(32, 32), batch_size=2):
            score.update(model(images).argmax(1), masks)
    return score.compute().miou
