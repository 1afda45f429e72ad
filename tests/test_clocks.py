"""Times and speeds by a clock that shows a second more at each look: units, what is timed, what is divided by what."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fp4deploy.bench.latency import MIN_RUNS, time_cpu
from fp4deploy.data import generate_shapes
from fp4deploy.models import read_card
from fp4deploy.models.spec import name_model
from fp4deploy.predict.predictor import load
from fp4deploy.predict.timing import STAGES, stage_times
from fp4deploy.ptq import quantize
from fp4deploy.runs import Run, create_run
from fp4deploy.train import load_config, train_models
from fp4deploy.train.estimate import WARM_UP, Budget, loader_speed
from tests.train.small_network import SPEC


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("perf_counter", "monotonic"):
        monkeypatch.setattr(time, name, itertools.count(1000.0).__next__)


def test_calls_on_a_cpu_are_timed_in_milliseconds(ticking: None) -> None:
    assert time_cpu(lambda: None, warmup=2, iterations=4, max_seconds=1e9) == [1000.0] * 4
    assert len(time_cpu(lambda: None, 0, iterations=99, max_seconds=0.0)) == MIN_RUNS
    # After the first ones each run looks three times: whether there is time, when it begins, and when it ends.
    assert len(time_cpu(lambda: None, 0, 99, max_seconds=2 * MIN_RUNS + 3 * 7)) == MIN_RUNS + 7


def test_stages_of_a_prediction_add_up(untrained: Run, tmp_path: Path, ticking: None) -> None:
    paths = [tmp_path / f"{number}.png" for number in range(2)]
    for path in paths:
        Image.fromarray(np.full((40, 56, 3), 7, np.uint8)).save(path)
    found, decoders = stage_times(load(untrained.checkpoint("fp16")), paths)
    assert sum(decoders.values()) == 2
    # Copied in and prepared are two parts; classes, copied out and made into a prediction three.
    assert {row.stage: row.p50 for row in found} == dict(zip(STAGES, (1e3, 2e3, 1e3, 3e3, 7e3), strict=True))
    assert all(row.p50 == row.p90 == row.p99 for row in found)


def test_parts_of_a_pipeline_are_medians_of_all_passes_but_the_first(untrained: Run, ticking: None) -> None:
    pipeline = load(untrained.checkpoint("fp16")).pipeline
    assert pipeline is not None
    frames = torch.zeros(2, *read_card(untrained.checkpoint("fp16")).size, 3, dtype=torch.uint8)
    slow = iter([9, 3, 1, 5])
    timed = pipeline.timed

    def slower(*given: torch.Tensor) -> object:
        row, answer = timed(*given)
        factor = next(slow)
        return {part: factor * value for part, value in row.items()}, answer

    pipeline.timed = slower  # type: ignore[method-assign, assignment]
    found = pipeline.times(frames, repeats=3)
    assert set(found.parts.values()) == {3000.0}
    assert (found.overlapped, found.batch) == (None, 2)


class Batches:
    """A loader of three batches of four images that notes its epochs."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> itertools.repeat:  # type: ignore[type-arg]
        return itertools.repeat((torch.zeros(4, 3, 8, 8), torch.zeros(4, 8, 8)), 3)


def test_a_loader_is_timed_without_its_first_batches_over_several_epochs(ticking: None) -> None:
    loader = Batches()
    assert loader_speed(loader, steps=5) == 5 * 4  # type: ignore[arg-type]
    assert loader.epochs == list(range(-(-(WARM_UP + 5) // 3)))


def test_a_budget_gives_each_part_as_many_seconds(ticking: None) -> None:
    advanced = list[tuple[int, int]]()
    budget = Budget(8.0, 2, lambda *parts: advanced.append(parts))
    # It begins at t and ends at t + 4; the start is looked at once, then whether it is over after each batch.
    assert loader_speed(Batches(), steps=99, budget=budget) == pytest.approx(4 * 3 / 4)  # type: ignore[arg-type]
    budget.begin()
    assert [budget.over() for _ in range(5)] == [False, False, False, True, True]
    assert advanced == [(0, 2), (1, 2)]


def test_epochs_of_a_training_take_what_their_steps_and_validations_take(tmp_path: Path, ticking: None) -> None:
    name_model(SPEC)
    generate_shapes(tmp_path / "data", train=8, val=4, size=32, seed=0)
    small = ["data.height=32", "data.width=32", "train.batch_size=4", "telemetry.every=0", "data.workers=0"]
    settings = [f"model.spec={SPEC}", f"data.root={tmp_path / 'data'}", "train.epochs=2", "train.evaluate_every=2"]
    run = create_run(tmp_path / "run")
    train_models(load_config(None, [*settings, *small]), run, ("fp16",))
    lines = [json.loads(line) for line in (run.model_dir("fp16") / "metrics.jsonl").read_text().splitlines()]
    assert [line["seconds"] for line in lines] == [4.0, 4.0]
    assert [line["images_per_s"] for line in lines] == [2.0, 2.0]


def test_a_quantisation_says_how_long_it_took(ticking: None) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.Conv2d(16, 16, 3), torch.nn.Conv2d(16, 4, 1))
    result = quantize(model, [torch.ones(1, 3, 8, 8)], "mse")
    assert result.seconds == 1.0
