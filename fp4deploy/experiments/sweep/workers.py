"""Several runs of a sweep at a time, each in a process of its own.

This process hands out runs: the first in the list whose FP16 model has been trained. A process keeps its GPU and takes
one run after the other; what a training says goes to `train.log` of its run. Ctrl-C, or the end of the sweep's time, is
passed on, and waited for while states are saved. A process that dies costs the run it had, which counts as failed: each
has a pipe of its own, because a queue that all write to stays locked when one is killed while it writes.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext
from pathlib import Path

import torch

from fp4deploy.experiments.sweep.results import collect, run_of, write_results
from fp4deploy.experiments.sweep.spec import Sweep, Variant
from fp4deploy.experiments.sweep.variant import Say, Started, run_one, write_error
from fp4deploy.plugins.runtime.availability import cores

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
    waiting, running = list(tasks), dict[int, Task]()
    crew: dict[int, _Process] = {}
    try:
        while waiting or running:
            for number in range(jobs):
                task = None if number in running else _ready(waiting, list(running.values()))
                if task is not None:
                    waiting.remove(task)
                    running[number] = task
                    if number not in crew or not crew[number].process.is_alive():
                        crew[number] = _Process(context, number, jobs, sweep, out, started)
                    crew[number].give(task)
            for number, text in _heard(crew):
                if text is not None:
                    say(text)
                else:
                    del running[number]
                    write_results(collect(sweep, out), out)
            for number in [number for number in running if crew[number].is_dead()]:
                _bury(out, running.pop(number), crew.pop(number), say)
    finally:
        _end(crew, running)


def _ready(waiting: list[Task], running: list[Task]) -> Task | None:
    """The first that starts from nothing that is still to be trained."""
    unfinished = {(variant.name, seed) for variant, seed in (*waiting, *running)}
    return next((task for task in waiting if (task[0].base, task[1]) not in unfinished), None)


def _heard(crew: dict[int, _Process]) -> Iterator[tuple[int, str | None]]:
    """(process, what it says, or None when its run is over), of those that say something now or within a while."""
    ready = wait([member.line for member in crew.values() if not member.line.closed], POLL)
    for number, member in crew.items():
        if member.line in ready:
            try:
                text: str | None = member.line.recv()
            except (EOFError, OSError):  # it has ended, or was killed within a word
                member.line.close()
            else:
                yield number, text


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
                member.give(None)
        for member in crew.values():
            member.process.join()
    except KeyboardInterrupt:  # a second time: do not wait for them
        for member in crew.values():
            member.process.terminate()
        raise


class _Process:
    """A process, and the line by which it is given runs and says what it does."""

    def __init__(
        self, context: SpawnContext, number: int, jobs: int, sweep: Sweep, out: Path, started: Started | None
    ) -> None:
        self.line, its_end = context.Pipe()
        arguments = (multiprocessing.get_start_method(), number, jobs, its_end, sweep, out, started)
        self.process = context.Process(target=_work, args=arguments, name=f"sweep {number}")
        with _gpu(number):
            self.process.start()
        its_end.close()

    def give(self, task: Task | None) -> None:
        """A run, or None to let it go; one that has died meanwhile is found so later."""
        with suppress(OSError):
            self.line.send(task)

    def is_dead(self) -> bool:
        """It does not run, and nothing is left that it has said."""
        return not self.process.is_alive() and (self.line.closed or not self.line.poll())


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
    line: Connection,
    sweep: Sweep,
    out: Path,
    started: Started | None,
) -> None:
    """The life of a process."""
    multiprocessing.set_start_method(start_method, force=True)  # else a loader's workers import torch anew, too
    os.setpgrp()  # Ctrl-C reaches the first process alone, which passes it on once
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where that one ignores it, as behind nohup
    torch.set_num_threads(max(1, cores() // jobs))

    def say(text: str | None) -> None:
        with suppress(ConnectionError):  # the sweep has died; its trainings end as they would
            line.send(text)

    try:
        while (task := _next(line)) is not None:
            variant, seed = task
            with _into(run_of(out, variant, seed).path / LOG):
                run_one(sweep, out, variant, seed, say, started, jobs)
            say(None)
    except KeyboardInterrupt:
        return


def _next(line: Connection) -> Task | None:
    """The next run; None where there is none any more, or the sweep has died."""
    try:
        task: Task | None = line.recv()
    except (EOFError, ConnectionError):
        return None
    return task


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
