"""Running a sweep: variants as ordinary runs, one after the other or in parallel, each seed's FP16 model once.

    OUT/sweep.yaml                 the file as it was first run
    OUT/fp16/seed0/                the FP16 model of a seed, and what every fine-tuned variant of the seed starts from
    OUT/VARIANT/seed0/             a run like any other: config.yaml, the model's folder; error.json where it failed
    OUT/sweep.{json,md,png}        what was found, written after every run

Runs are ordered by seed, then by variant, so that a sweep that is stopped early has complete seeds to compare. The same
command continues it: finished runs are read, an interrupted one continues from its saved state, a failed one is tried
again. A failed run is reported, and the others go on.
"""

from __future__ import annotations

import _thread
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fp4deploy.errors import InputError
from fp4deploy.experiments.sweep.cluster import ray_workers
from fp4deploy.experiments.sweep.parallel import Worker, run_parallel
from fp4deploy.experiments.sweep.pool import PoolWorker
from fp4deploy.experiments.sweep.results import collect, write_results
from fp4deploy.experiments.sweep.spec import Sweep, Variant
from fp4deploy.experiments.sweep.variant import Say, Started, opening, train_variant
from fp4deploy.runs import LOCK, hold, processes
from fp4deploy.system.files import atomic_write
from fp4deploy.system.progress import progress

FILE = "sweep.yaml"


class TimeIsUp(Exception):
    """The minutes that a sweep was given are over; what runs has been saved."""


def run_sweep(
    sweep: Sweep,
    out: Path,
    only: tuple[str, ...] = (),
    minutes: float | None = None,
    say: Say = print,
    started: Started | None = None,
    jobs: int | None = None,
    address: str | None = None,
) -> dict[str, Any]:
    """Run what is not finished, and return the results (`results.collect`).

    Args:
        only: names of variants; the FP16 models they start from are trained as well. Empty for all.
        minutes: stop after so many, inside of a training with its state saved.
        started: called with every run that begins or goes on; with several jobs, a function that has a name.
        jobs: trainings at a time, each in a process and, where there are some, on a GPU of its own. None: one at a
            time in this process, or as many as the cluster has GPUs.
        address: of a Ray cluster, which runs the trainings; None for this machine.

    Raises:
        UnavailableError: Ray is asked for and not installed.
        InputError: an unknown variant, a folder that is no sweep or that another process uses, several processes, a
            disk that is full.
        KeyboardInterrupt: after Ctrl-C, with the state saved and the results so far written.
    """
    if processes() > 1:
        raise InputError(
            "A sweep starts its processes itself: to use several GPUs, fp4deploy sweep FILE --jobs 4, without torchrun."
        )
    chosen = _chosen(sweep, only)
    _check(out)
    with hold(out):
        return _run_held(sweep, out, chosen, minutes, say, started, jobs, address)


def _run_held(
    sweep: Sweep,
    out: Path,
    chosen: list[Variant],
    minutes: float | None,
    say: Say,
    started: Started | None,
    jobs: int | None,
    address: str | None,
) -> dict[str, object]:
    """`run_sweep` in a folder that no other process uses."""
    _check(out)
    if not (out / FILE).is_file():
        with atomic_write(out / FILE) as temporary:
            temporary.write_text(sweep.file.read_text(encoding="utf-8"))
    try:
        with _deadline(minutes):
            tasks = [(variant, seed) for seed in sweep.seeds for variant in chosen]
            workers: list[Worker] = []
            if address is not None:
                workers += ray_workers(address, jobs, sweep, out, started)
            elif jobs is not None and jobs > 1:
                workers += [PoolWorker(number, jobs, sweep, out, started) for number in range(jobs)]
            if workers:
                with progress("runs") as bar:
                    run_parallel(sweep, out, tasks, workers, say, bar.advance)
            else:
                for variant, seed in tasks:
                    say(opening(sweep, out, variant, seed))
                    train_variant(sweep, out, variant, seed, say, started)
                    write_results(collect(sweep, out), out)
    except TimeIsUp:
        say(f"{minutes:g} minutes are over. Continue with the same command.")
    finally:
        results = collect(sweep, out)
        write_results(results, out)
    return results


def _chosen(sweep: Sweep, only: tuple[str, ...]) -> list[Variant]:
    """The variants to run, those with a teacher after the others, which may be their teachers."""
    names = {sweep.variant(name).name for name in only} or {variant.name for variant in sweep.variants}
    while needed := {each for name in names for each in sweep.variant(name).needs} - names:
        names |= needed
    chosen = [variant for variant in sweep.variants if variant.name in names]
    return sorted(chosen, key=lambda variant: variant.teacher is not None)


def _check(out: Path) -> None:
    names = {path.name for path in out.iterdir()} - {LOCK} if out.is_dir() else set()
    if (out.exists() and not out.is_dir()) or (names and FILE not in names):
        raise InputError(f"{out} exists and is no sweep: it holds no {FILE}. Give another --out.")


@contextmanager
def _deadline(minutes: float | None) -> Iterator[None]:
    """After so many minutes do as Ctrl-C does, and say `TimeIsUp` instead of KeyboardInterrupt."""
    if minutes is None:
        yield
        return
    end = time.monotonic() + 60 * minutes
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:  # in the background of a shell; what is ignored cannot be used to stop, either
        signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(60 * minutes, _thread.interrupt_main, (signal.SIGINT,))
    timer.daemon = True
    timer.start()
    try:
        yield
    except KeyboardInterrupt:
        if time.monotonic() < end:
            raise
        raise TimeIsUp from None
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, before)
