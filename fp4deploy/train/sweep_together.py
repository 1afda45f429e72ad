"""Several runs of a sweep at a time, each in a process of its own.

This process hands out runs: the first in the list whose FP16 model has been trained. A process keeps its GPU and takes
one run after the other; what a training says goes to `train.log` of its run. Ctrl-C, or the end of the sweep's time, is
passed on, and waited for while states are saved. A process that dies costs the run it had, which counts as failed.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any

import torch

from fp4deploy.plugins.availability import cores
from fp4deploy.train.sweep_file import Sweep, Variant
from fp4deploy.train.sweep_one import Say, Started, run_one, write_error
from fp4deploy.train.sweep_results import collect, run_of, write_results

LOG = "train.log"
POLL = 1.0  # seconds
VISIBLE = "CUDA_VISIBLE_DEVICES"
Task = tuple[Variant, int]


def run_together(
    sweep: Sweep, out: Path, tasks: list[Task], jobs: int, say: Say, started: Started | None = None
) -> None:
    """Run all `tasks`, at most `jobs` at a time; results are written after each.

    Raises:
        KeyboardInterrupt: after Ctrl-C, when every process has saved its state.
    """
    context = multiprocessing.get_context("spawn")  # a process that has touched CUDA cannot be forked
    said: Any = context.Queue()
    waiting, running = list(tasks), dict[int, Task]()
    crew: dict[int, _Process] = {}
    try:
        while waiting or running:
            for number in range(jobs):
                task = None if number in running else _ready(waiting, list(running.values()))
                if task is not None:
                    waiting.remove(task)
                    running[number] = task
                    if number not in crew:
                        crew[number] = _Process(context, number, jobs, said, sweep, out, started)
                    crew[number].tasks.put(task)
            speaker, text = _heard(said)
            if text is not None:
                say(text)
            elif speaker is not None:
                del running[speaker]
                write_results(collect(sweep, out), out)
            else:
                for number in _dead(crew, running):
                    _bury(out, running.pop(number), crew.pop(number), say)
    finally:
        _end(crew, running)


def _ready(waiting: list[Task], running: list[Task]) -> Task | None:
    """The first that starts from nothing that is still to be trained."""
    unfinished = {(variant.name, seed) for variant, seed in (*waiting, *running)}
    return next((task for task in waiting if (task[0].base, task[1]) not in unfinished), None)


def _heard(said: Any) -> tuple[int | None, str | None]:
    """(process, what it says, or None when its run is over); two None where nobody said anything for a while."""
    try:
        heard: tuple[int, str | None] = said.get(timeout=POLL)
        return heard
    except queue.Empty:
        return None, None


def _dead(crew: dict[int, _Process], running: dict[int, Task]) -> list[int]:
    return [number for number in running if not crew[number].process.is_alive()]


def _bury(out: Path, task: Task, dead: _Process, say: Say) -> None:
    variant, seed = task
    code = dead.process.exitcode or 0
    cause = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    paragraph = f"Its process died ({cause}); what it said is in {run_of(out, variant, seed).path / LOG}."
    write_error(out, variant, seed, paragraph)
    say(f"{variant.name}, seed {seed}: failed. {paragraph}")


def _end(crew: dict[int, _Process], running: dict[int, Task]) -> None:
    """Let idle processes go, and busy ones save."""
    try:
        for number, member in crew.items():
            if number in running and member.process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(member.process.pid, signal.SIGINT)
            else:
                member.tasks.put(None)
        for member in crew.values():
            member.process.join()
    except KeyboardInterrupt:  # a second time: do not wait for them
        for member in crew.values():
            member.process.terminate()
        raise


class _Process:
    """A process, and the queue that it takes its runs from."""

    def __init__(
        self, context: SpawnContext, number: int, jobs: int, said: Any, sweep: Sweep, out: Path, started: Started | None
    ) -> None:
        self.tasks: Any = context.Queue()
        arguments = (multiprocessing.get_start_method(), number, jobs, self.tasks, said, sweep, out, started)
        self.process = context.Process(target=_work, args=arguments, name=f"sweep {number}")
        with _gpu(number):
            self.process.start()


@contextmanager
def _gpu(number: int) -> Iterator[None]:
    """What is started within sees one GPU alone: of those that this process sees, the one that is its turn."""
    before = os.environ.get(VISIBLE)
    seen = [name for name in (before or "").split(",") if name] or [str(i) for i in range(torch.cuda.device_count())]
    try:
        if seen:
            os.environ[VISIBLE] = seen[number % len(seen)]
        yield
    finally:
        if before is not None:
            os.environ[VISIBLE] = before
        elif seen:
            del os.environ[VISIBLE]


def _work(
    start_method: str,
    number: int,
    jobs: int,
    tasks: Any,
    said: Any,
    sweep: Sweep,
    out: Path,
    started: Started | None,
) -> None:
    """The life of a process."""
    multiprocessing.set_start_method(start_method, force=True)  # else a loader's workers import torch anew, too
    os.setpgrp()  # Ctrl-C reaches the first process alone, which passes it on once
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where that one ignores it, as behind nohup
    torch.set_num_threads(max(1, cores() // jobs))
    parent = os.getppid()
    try:
        while os.getppid() == parent:
            with suppress(queue.Empty):
                task: Task | None = tasks.get(timeout=POLL)
                if task is None:
                    return
                variant, seed = task
                with _into(run_of(out, variant, seed).path / LOG):
                    run_one(sweep, out, variant, seed, lambda text: said.put((number, text)), started, jobs)
                said.put((number, None))
    except KeyboardInterrupt:
        return


@contextmanager
def _into(log: Path) -> Iterator[None]:
    """Both outputs of this process, and of those that it starts, into a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    kept = [os.dup(stream) for stream in (1, 2)]
    try:
        with log.open("ab") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
        yield
    finally:
        for stream, old in zip((1, 2), kept, strict=True):
            os.dup2(old, stream)
            os.close(old)
