"""Two processes agree whether the step is captured. The graph is stood in for here, since there is no GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fp4deploy.data import generate_shapes
from fp4deploy.models import name_model
from fp4deploy.runs import Run, create_run
from fp4deploy.train import load_config, train_models
from fp4deploy.train.config import TelemetrySection
from fp4deploy.train.cuda_graph import LAUNCHED_FIRST_OF_SEVERAL, CapturedStep
from fp4deploy.train.distributed import agreed_reason, join
from fp4deploy.train.logging.telemetry import Telemetry
from fp4deploy.train.loop import Trainer
from tests.train.launch import assert_same, run_ranks
from tests.train.small_network import SPEC, Small

SETTINGS = [f"model.spec={SPEC}", "data.height=32", "data.width=32", "train.batch_size=2", "train.from_scratch=true"]
SETTINGS += ["recipe=nvfp4_qat_delayed", "train.epochs=6", "telemetry.every=14"]
STEPS = 24  # sampled: 0, 14 and 23


class Repeated:
    """In place of a graph: a replay calls the step with the graph's batch."""

    def __init__(self, step: Callable[..., None], buffers: tuple[torch.Tensor, ...]) -> None:
        self.step, self.buffers = step, buffers

    def replay(self) -> None:
        self.step(*self.buffers)


def fail_in_the_backward(trainer: Trainer, batch: tuple[torch.Tensor, ...]) -> None:
    """A capture that fails: nothing is computed, some gradients exist, and DistributedDataParallel waits for more."""

    def refuse(gradient: torch.Tensor) -> None:
        raise RuntimeError("an operation that cannot be captured")

    values = trainer.statistics.values.clone()
    hook = trainer.bare.stem.weight.register_hook(refuse)  # the last gradient of the backward
    with pytest.raises(RuntimeError, match="cannot be captured"):
        trainer._compute(*batch)
    hook.remove()
    assert trainer.bare.head.weight.grad is not None
    trainer.statistics.values.copy_(values)


def train_with_a_graph(data: Path, out: Path, model: str, against: str | None) -> None:
    """In one of two processes, of which the second has a reason `against` a graph, or none has."""
    notes: dict[str, Any] = {"launched": 0, "replayed": 0}
    step, rank = Trainer._compute, join().process_index

    def reason(where: str) -> str | None:
        return f"{where} is missing" if rank == 1 and against == where else None

    def watch(self: CapturedStep, *batch: torch.Tensor) -> str | None:
        self._step(*batch)
        return reason("watch")

    def record(self: CapturedStep, *buffers: torch.Tensor) -> tuple[Any, str | None]:
        if against == "record":
            fail_in_the_backward(self._step.__self__, buffers)  # type: ignore[attr-defined]
        return Repeated(self._step, buffers), reason("record")

    def computed(self: Trainer, *batch: torch.Tensor, **named: Any) -> None:
        notes["refusal"] = self.captured.refusal
        notes["replayed" if self.captured._graph is not None and not notes.pop("launch") else "launched"] += 1
        step(self, *batch, **named)

    def called(self: CapturedStep, *batch: torch.Tensor, launch: bool = False) -> None:
        notes["launch"] = launch
        original(self, *batch, launch=launch)

    original = CapturedStep.__call__
    CapturedStep.__call__ = called  # type: ignore[method-assign]
    CapturedStep._watch, CapturedStep._record = watch, record  # type: ignore[method-assign]
    CapturedStep._no_room = lambda self: reason("room")  # type: ignore[method-assign]
    Trainer._no_graph = lambda self: None  # type: ignore[method-assign]
    Trainer._compute = computed  # type: ignore[method-assign]
    train(data, out, model)
    (out / f"notes{rank}.json").write_text(json.dumps(notes))


def train(data: Path, out: Path, model: str, *sets: str) -> None:
    """In one of two processes."""
    name_model(SPEC)
    train_models(load_config(None, [f"data.root={data}", *SETTINGS, *sets]), Run(out), (model,))


def notes_of(run: Run) -> list[dict[str, Any]]:
    return [json.loads((run.path / f"notes{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize(
    ("model", "against"), [("nvfp4", None), ("nvfp4", "watch"), ("nvfp4", "room"), ("fp16", "record")]
)
def test_both_processes_replay_or_none_does(tmp_path: Path, model: str, against: str | None) -> None:
    """With the bits of a training that asks for no graph, telemetry included, which samples in the first process."""
    data = tmp_path / "data"
    generate_shapes(data, train=16, val=2, size=32, seed=0)
    plain, run = create_run(tmp_path / "plain"), create_run(tmp_path / "run")
    run_ranks(2, train, data, plain.path, model)
    run_ranks(2, train_with_a_graph, data, run.path, model, against)
    first, second = notes_of(run)
    assert first == second
    assert first["refusal"] == (f"process 1: {against} is missing" if against else None)
    replayed = STEPS - 3 - LAUNCHED_FIRST_OF_SEVERAL if against is None else 0
    assert first["replayed"] == replayed
    assert first["launched"] >= STEPS - replayed
    assert_same(run, plain, (model,))


def note_reasons(out: Path) -> None:
    """In one of three processes: what they agree on."""
    rank = join().process_index
    given = [(None, None, None), ("a", "a", "a"), (None, "b", "c"), ("a", None, None)]
    (out / f"{rank}.json").write_text(json.dumps([agreed_reason(each[rank]) for each in given]))


def test_the_first_reason_is_that_of_all(tmp_path: Path) -> None:
    run_ranks(3, note_reasons, tmp_path)
    for rank in range(3):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found == [None, "a", "process 1: b", "process 0: a"]


def test_processes_that_sample_nothing_know_what_is_sampled(tmp_path: Path) -> None:
    settings = TelemetrySection(every=4, trackers=["jsonl"])
    first, other = (Telemetry(settings, tmp_path, Small(2), 10, active=active) for active in (True, False))
    assert [step for step in range(10) if first.due(step)] == [0, 4, 8, 9]
    assert [step for step in range(10) if other.sampled(step)] == [0, 4, 8, 9]
    assert not any(map(other.due, range(10)))


def note_gradients(data: Path, out: Path) -> None:
    """In one of two processes: three batches a step; after each whether the other process has the same gradients."""
    compute, update, same = Trainer._compute, Trainer._update, list[bool]()

    def compare(self: Trainer) -> None:
        ranks: list[Any] = [None, None]
        dist.all_gather_object(ranks, self.bare.head.weight.grad)
        same.append(torch.equal(*ranks))

    def computed(self: Trainer, *batch: torch.Tensor, group: int = 1, last: bool = True) -> None:
        compute(self, *batch, group=group, last=last)
        if not last:
            compare(self)

    def updated(self: Trainer) -> None:
        compare(self)
        update(self)

    Trainer._compute, Trainer._update = computed, updated  # type: ignore[method-assign]
    train(data, out, "fp16", "train.accumulate=3", "train.epochs=2", "telemetry.every=0")
    (out / f"same{dist.get_rank()}.json").write_text(json.dumps(same))


def test_gradients_are_averaged_once_a_step(tmp_path: Path) -> None:
    """Of three accumulated batches and of a rest of one, in the second epoch like in the first."""
    data, run = tmp_path / "data", create_run(tmp_path / "run")
    generate_shapes(data, train=16, val=2, size=32, seed=0)
    run_ranks(2, note_gradients, data, run.path)
    for rank in (0, 1):
        assert json.loads((run.path / f"same{rank}.json").read_text()) == 2 * [False, False, True, True]
