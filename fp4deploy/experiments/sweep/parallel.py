"""Several runs of a sweep at a time: which run goes to which worker, and what happens when a worker dies.

A worker takes one run after the other: the first in the list whose FP16 model and teacher have been trained, so that
all variants of a seed share one FP16 training. `pool` has workers on this machine, `cluster` workers of Ray; both give
a `concurrent.futures.Future` for a run, and this module alone decides. A worker that dies costs the run it had, which
is marked as failed, and the others go on. Ctrl-C, or the end of the sweep's time, is passed on to the workers and
waited for while they save their states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Protocol

from fp4deploy.experiments.sweep.results import collect, run_of, write_results
from fp4deploy.experiments.sweep.spec import Sweep, Variant
from fp4deploy.experiments.sweep.variant import LOG, Say, is_complete, opening, write_error

POLL = 1.0  # seconds; waiting without a limit would not notice Ctrl-C
Task = tuple[Variant, int]  # and its seed


class Worker(Protocol):
    """Trains one run at a time."""

    def submit(self, task: Task) -> Future[list[str]]:
        """Begin a run; the future gives what is to be said about it, or raises where the worker died."""

    def cause(self, error: BaseException) -> str:
        """Why a future raised `error`, in a few words."""

    def interrupt(self) -> None:
        """Let the running training save its state and end."""

    def close(self, wait: bool) -> None:
        """No run will follow; without `wait` a running one is killed."""


def run_parallel(
    sweep: Sweep,
    out: Path,
    tasks: Sequence[Task],
    workers: Sequence[Worker],
    say: Say,
    advance: Callable[[int, int], None] = lambda done, of: None,
) -> None:
    """Run all `tasks`, one at a time on each worker; results are written after each.

    advance: is called with the runs that have ended, and all runs.

    Raises:
        KeyboardInterrupt: after Ctrl-C, when every worker has saved its state.
    """
    waiting, running = list(tasks), dict[Future[list[str]], tuple[Worker, Task]]()
    try:
        while waiting or running:
            busy = [worker for worker, _ in running.values()]
            for worker in workers:
                taken = [task for _, task in running.values()]
                if worker not in busy and (task := _next(sweep, out, waiting, taken, say)):
                    running[worker.submit(task)] = worker, task
            advance(len(tasks) - len(waiting) - len(running), len(tasks))
            for future in wait(running, timeout=POLL, return_when=FIRST_COMPLETED).done:
                _report(out, *running.pop(future), future, say)
                write_results(collect(sweep, out), out)
        _close(workers, [])
    except BaseException:
        _close(workers, [worker for worker, _ in running.values()])
        raise


def _next(sweep: Sweep, out: Path, waiting: list[Task], running: Sequence[Task], say: Say) -> Task | None:
    """Take the next run that has something to do out of `waiting`."""
    while (task := first_ready(waiting, running)) is not None:
        waiting.remove(task)
        say(opening(sweep, out, *task))
        if not is_complete(sweep, out, *task):
            return task
    return None


def first_ready(waiting: Sequence[Task], running: Sequence[Task]) -> Task | None:
    """The first that starts from nothing that is still to be trained."""
    unfinished = {(variant.name, seed) for variant, seed in (*waiting, *running)}
    return next(
        ((variant, seed) for variant, seed in waiting if unfinished.isdisjoint((name, seed) for name in variant.needs)),
        None,
    )


def _report(out: Path, worker: Worker, task: Task, future: Future[list[str]], say: Say) -> None:
    """Say what became of a run; mark it as failed where its worker died."""
    variant, seed = task
    try:
        texts = future.result()
    except Exception as error:
        log = run_of(out, variant, seed).path / LOG
        paragraph = f"Its process died ({worker.cause(error)}); its output is in {log}."
        write_error(out, variant, seed, paragraph)
        texts = [f"{variant.name}, seed {seed}: failed. {paragraph}"]
    for text in texts:
        say(text)


def _close(workers: Sequence[Worker], busy: Sequence[Worker]) -> None:
    """Let busy workers save and end, and idle ones end."""
    try:
        for worker in busy:
            worker.interrupt()
        for worker in workers:
            worker.close(wait=True)
    except KeyboardInterrupt:  # a second Ctrl-C: do not wait for them
        for worker in workers:
            worker.close(wait=False)
        raise
