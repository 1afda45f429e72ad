"""On two GPUs: a training of two processes replayed from CUDA graphs has the bits of the launched one."""

from __future__ import annotations

import json
import os
import signal
from contextlib import nullcontext, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from fp4deploy.data import generate_shapes
from fp4deploy.errors import Interrupted
from fp4deploy.models import name_model
from fp4deploy.runs import Run, create_run
from fp4deploy.train import load_config, train_models
from fp4deploy.train.cuda_graph import LAUNCHED_FIRST_OF_SEVERAL, CapturedStep
from fp4deploy.train.distributed import join
from fp4deploy.train.loop import Trainer
from tests.train.launch import assert_same, run_ranks
from tests.train.small_network import SPEC

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")]

STEPS = 52
LAUNCHED, GRAPH = "train.cuda_graph=false", "train.cuda_graph=true"
SAMPLED = 4  # 0, 17, 34 and 51
RANDOM = ("random.cuda",)  # a graph counts its random numbers by itself


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """13 epochs of 4 steps, two images a GPU."""
    folder = tmp_path_factory.mktemp("data") / "shapes"
    generate_shapes(folder, train=16, val=4, size=64, seed=0)
    return folder


def train(data: Path, runs: dict[Path, list[str]], model: str, stop: int | None, fails: str | None) -> None:
    """In one of two processes: train into each of the runs with its settings, and note why batches are not replayed.

    Args:
        stop: the step after which the trainings are ended by a signal.
        fails: what goes wrong in the second process alone: "room" before the capture, "backward" in the middle of it.
    """
    name_model(SPEC)
    torch.backends.cudnn.deterministic = True
    settings = ["model.scale=0.25", "data.height=64", "data.width=64", "train.batch_size=2", "data.workers=0"]
    settings += ["train.epochs=13", "train.evaluate_every=6", "train.from_scratch=true", "telemetry.every=17"]
    seen: list[str | None] = []
    replay, step, rank = CapturedStep._replay, Trainer.step, join().process_index

    def noted(self: CapturedStep, *batch: torch.Tensor) -> None:
        replay(self, *batch)
        seen.append(self.refusal)

    def signalled(self: Trainer, *batch: torch.Tensor) -> None:
        step(self, *batch)
        if self.progress.step == stop:
            os.kill(os.getpid(), signal.SIGTERM)

    CapturedStep._replay, Trainer.step = noted, signalled  # type: ignore[method-assign]
    if fails == "room" and rank == 1:
        CapturedStep._no_room = lambda self: "no room"  # type: ignore[method-assign]
    if fails == "backward" and rank == 1:
        fail_when_captured()
    for out, sets in runs.items():
        config = load_config(None, [f"data.root={data}", *settings, *sets])
        seen.clear()
        said = StringIO()
        with redirect_stderr(said), pytest.raises(Interrupted) if stop is not None else nullcontext():
            train_models(config, Run(out), (model,), resume=True)
        (out / f"rank{rank}.json").write_text(json.dumps(seen))
        (out / f"rank{rank}.txt").write_text(said.getvalue())


def fail_when_captured() -> None:
    """The gradient of the first parameter waits for the GPU, while a graph is captured only."""
    original = Trainer.__init__

    def hooked(self: Trainer, *arguments: Any) -> None:
        original(self, *arguments)

        def wait(gradient: torch.Tensor) -> None:
            if torch.cuda.is_current_stream_capturing():
                gradient.sum().item()

        next(self.bare.parameters()).register_hook(wait)

    Trainer.__init__ = hooked  # type: ignore[method-assign]


def replays(run: Run) -> list[str | None]:
    """For each batch that a graph may take, why it is launched, or None; the same in both processes."""
    first, second = (json.loads((run.path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    return list(first)


def trained(
    data: Path, folder: Path, model: str, *sets: str, fails: str | None = None
) -> tuple[Run, Run, list[str | None]]:
    """(A run without graphs, one with graphs, `replays` of that), by the same two processes."""
    plain, graph = create_run(folder / "plain"), create_run(folder / "graph")
    run_ranks(2, train, data, {plain.path: [*sets, LAUNCHED], graph.path: [*sets, GRAPH]}, model, None, fails)
    assert replays(plain) == []
    return plain, graph, replays(graph)


@pytest.mark.parametrize(
    ("model", "changed"),
    [
        ("fp16", ()),
        ("nvfp4", ()),
        ("nvfp4", ("recipe=nvfp4_qat_delayed", "train.ema=0.9")),
        ("nvfp4", ("recipe=nvfp4_train", "quant.start=0.3")),
        ("nvfp4", ("task=detection",)),
    ],
)
def test_replayed_has_the_bits_of_launched(data: Path, tmp_path: Path, model: str, changed: tuple[str, ...]) -> None:
    """Losses, weights and the state of the optimiser, with evaluations and samples of telemetry in between."""
    plain, graph, reasons = trained(data, tmp_path, model, *changed)
    assert set(reasons) == {None}
    captures = 2 if "quant.start=0.3" in changed else 1  # with another step where quantisation begins
    assert len(reasons) >= STEPS - SAMPLED - captures * LAUNCHED_FIRST_OF_SEVERAL
    assert_same(graph, plain, (model,), RANDOM)


def test_a_resumed_training_has_the_bits_of_an_uninterrupted_one(data: Path, tmp_path: Path) -> None:
    plain, run = create_run(tmp_path / "plain"), create_run(tmp_path / "run")
    run_ranks(2, train, data, {run.path: [GRAPH]}, "nvfp4", 30, None)
    before = replays(run)
    run_ranks(2, train, data, {run.path: [GRAPH], plain.path: [LAUNCHED]}, "nvfp4", None, None)
    after = replays(run)
    assert before
    assert after
    assert {*before, *after} == {None}
    assert_same(run, plain, ("nvfp4",), RANDOM)


@pytest.mark.parametrize("fails", ["room", "backward"])
def test_where_one_process_cannot_capture_both_launch(data: Path, tmp_path: Path, fails: str) -> None:
    plain, run, reasons = trained(data, tmp_path, "fp16", fails=fails)
    (reason,) = reasons
    assert reason is not None
    assert reason.startswith("process 1: ")
    said = "".join((run.path / f"rank{rank}.txt").read_text() for rank in (0, 1))
    assert said.count("no CUDA graph of the step, since process 1: ") == 1
    assert_same(run, plain, ("fp16",), RANDOM)
