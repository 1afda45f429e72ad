"""Workers on this machine: processes that stay, each with a GPU and a `concurrent.futures` executor of its own.

One executor for all workers would not do: when one of its processes is killed, it ends the others, too. Each process
is spawned (one that has touched CUDA cannot be forked), sees one GPU, and has its share of the CPU cores. The output of
a training goes to `train.log` of its run. Ctrl-C reaches the sweep alone, because a worker has a process group of its
own; `interrupt` passes it on. A worker whose sweep was killed ends at once; the same command continues from the states
that were saved (`fp4deploy.system.children`).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch

from fp4deploy.experiments.sweep.parallel import Task
from fp4deploy.experiments.sweep.spec import Sweep
from fp4deploy.experiments.sweep.variant import Started, train_logged
from fp4deploy.system.children import end_with_parent, isolated_start
from fp4deploy.system.processors import cores
from fp4deploy.train.interrupt import SIGNALS

VISIBLE = "CUDA_VISIBLE_DEVICES"
REAPED_SECONDS = 10

_stop: Event | None = None  # of this process, where it is a worker


class PoolWorker:
    """A process that trains one run after the other; a new one takes the place of one that died."""

    def __init__(self, number: int, jobs: int, sweep: Sweep, out: Path, started: Started | None) -> None:
        """Worker `number` of `jobs`; the process starts with the first run."""
        self.number, self.jobs = number, jobs
        self._arguments = (sweep, out, started)
        self._context = multiprocessing.get_context("spawn")
        self._executor: ProcessPoolExecutor | None = None
        self._process: Any = None

    def submit(self, task: Task) -> Future[list[str]]:
        """Begin a run."""
        sweep, out, started = self._arguments
        arguments = (sweep, out, *task, started, self.jobs)
        if self._executor is not None and self._process.is_alive():
            return self._executor.submit(_train, *arguments)
        with isolated_start(), one_gpu(self.number), _blocked_signals():
            self._stop = self._context.Event()
            initial = (multiprocessing.get_start_method(), max(1, cores() // self.jobs), self._stop)
            self._executor = ProcessPoolExecutor(1, self._context, _initialize, initial)
            before = multiprocessing.active_children()
            future = self._executor.submit(_train, *arguments)
        (self._process,) = (child for child in multiprocessing.active_children() if child not in before)
        return future

    def cause(self, error: BaseException) -> str:
        """Why the process died."""
        if not isinstance(error, BrokenProcessPool):
            return f"{type(error).__name__}: {error}"
        until = time.monotonic() + REAPED_SECONDS
        while self._process.exitcode is None and time.monotonic() < until:  # the pool's thread waits for it, too
            time.sleep(0.01)
        code = self._process.exitcode or 0
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def interrupt(self) -> None:
        """Let the running training save its state and end."""
        if self._process is not None and self._process.is_alive():
            self._stop.set()
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGINT)

    def close(self, wait: bool) -> None:
        """End the process, after its run, or at once without `wait`."""
        if self._executor is not None:
            if not wait:
                self._process.kill()
            self._executor.shutdown(wait=wait, cancel_futures=True)


@contextmanager
def one_gpu(number: int) -> Iterator[None]:
    """A process started inside sees one GPU alone, of those that this process sees: number modulo their count."""
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


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """A process started inside gets signals when it has handlers for them, and not while it imports."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _initialize(start_method: str, threads: int, stop: Event) -> None:
    """The first that happens in a worker."""
    global _stop
    _stop = stop
    multiprocessing.set_start_method(start_method, force=True)  # else a loader's workers import torch anew, too
    end_with_parent(group=True)
    _answer_signals(_ignore)  # also where the sweep ignores them, as behind nohup
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # `PoolWorker.submit` blocked them
    torch.set_num_threads(threads)


def _answer_signals(handler: Any) -> None:
    """A batch system signals every process, the sweep passes Ctrl-C on: both save."""
    for number in SIGNALS:
        signal.signal(number, handler)


def _ignore(*_: object) -> None:
    """Between two runs there is nothing to interrupt."""


def _train(sweep: Sweep, out: Path, variant: Any, seed: int, started: Started | None, jobs: int) -> list[str]:
    """One run in a worker; what is to be said about it. An interrupted run says nothing: its state is saved."""
    try:
        _answer_signals(signal.default_int_handler)
        if _stop is not None and _stop.is_set():
            return []
        return train_logged(sweep, out, variant, seed, started, jobs)
    except KeyboardInterrupt:
        asked = _stop is None or _stop.is_set()
        return [] if asked else [f"{variant.name}, seed {seed}: ended by a signal; its state is saved."]
    finally:
        _answer_signals(_ignore)
