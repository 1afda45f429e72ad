"""Running a sweep: its variants one after the other as ordinary runs, each seed's FP16 model once.

    OUT/sweep.yaml                 the file as it was first run
    OUT/fp16/seed0/                the FP16 model of a seed, and what every fine-tuned variant of the seed starts from
    OUT/VARIANT/seed0/             a run like any other: config.yaml, the model's folder; error.json where it failed
    OUT/sweep.{json,md,png}        what was found, written after every run

Seeds come first, variants second, so that a sweep that is cut short has whole seeds to compare. Calling it again goes
on: finished runs are read, an interrupted one continues from its saved state, a failed one is tried again. A failure
is written down and the sweep goes on.
"""

from __future__ import annotations

import _thread
import gc
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fp4deploy.errors import Fp4DeployError, InputError
from fp4deploy.runs import Run, atomic_write, processes
from fp4deploy.train.config import with_settings
from fp4deploy.train.models import train_models
from fp4deploy.train.sweep_file import Sweep, Variant
from fp4deploy.train.sweep_results import ERROR_FILE, collect, outcome, run_of, write_results

Say = Callable[[str], None]
FILE = "sweep.yaml"


class TimeIsUp(Exception):
    """The minutes that a sweep was given are over; what runs has been saved."""


def run_sweep(
    sweep: Sweep,
    out: Path,
    only: tuple[str, ...] = (),
    minutes: float | None = None,
    say: Say = print,
    started: Callable[[Run], None] | None = None,
) -> dict[str, Any]:
    """Run what is not finished, and return the results (`sweep_results.collect`).

    Args:
        only: names of variants; the FP16 models they start from are trained as well. Empty for all.
        minutes: stop after so many, inside of a training with its state saved.
        started: called with every run that begins or goes on.

    Raises:
        InputError: an unknown variant, a folder that is no sweep, several processes, a disk that is full.
        KeyboardInterrupt: after Ctrl-C, with the state saved and the results so far written.
    """
    if processes() > 1:
        raise InputError(
            "A sweep runs in one process. To use several GPUs give each a seed of its own in the same --out: "
            "CUDA_VISIBLE_DEVICES=1 fp4deploy sweep FILE --seeds 1"
        )
    chosen = _chosen(sweep, only)
    _open(sweep, out)
    try:
        with _deadline(minutes):
            for seed in sweep.seeds:
                for variant in chosen:
                    _run(sweep, out, variant, seed, say, started)
                    write_results(collect(sweep, out), out)
    except TimeIsUp:
        say(f"{minutes:g} minutes are over. Go on with the same command.")
    finally:
        results = collect(sweep, out)
        write_results(results, out)
    return results


def _chosen(sweep: Sweep, only: tuple[str, ...]) -> list[Variant]:
    if not only:
        return list(sweep.variants)
    wanted = {sweep.variant(name).name for name in only}
    wanted |= {base for name in only if (base := sweep.variant(name).base)}
    return [variant for variant in sweep.variants if variant.name in wanted]


def _open(sweep: Sweep, out: Path) -> None:
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / FILE).is_file())):
        raise InputError(f"{out} exists and is no sweep: it holds no {FILE}. Give another --out.")
    if not (out / FILE).is_file():
        with atomic_write(out / FILE) as temporary:
            temporary.write_text(sweep.file.read_text())


def _run(
    sweep: Sweep, out: Path, variant: Variant, seed: int, say: Say, started: Callable[[Run], None] | None = None
) -> None:
    before = outcome(sweep, out, variant, seed)
    title = f"{variant.name}, seed {seed}"
    if before["status"] == "done":
        say(f"{title}: done, {sweep.metric} {100 * before['best']:.2f}")
        return
    run = run_of(out, variant, seed)
    error_file = run.path / ERROR_FILE
    try:
        config = sweep.config(variant, seed)
        if variant.base is not None:
            base = sweep.variant(variant.base)
            if outcome(sweep, out, base, seed)["status"] != "done":
                raise InputError(f"The FP16 model it starts from, {base.name} of seed {seed}, is not there.")
            start = run_of(out, base, seed).checkpoint("fp16")
            config = with_settings(config, [f"train.init_checkpoint={json.dumps(str(start))}"])
        resume = (run.model_dir(variant.model) / "state").is_dir()
        say(f"{title}: {'continuing' if resume else 'starting'}")
        run.path.mkdir(parents=True, exist_ok=True)
        if started is not None:
            started(run)
        result = train_models(config, run, (variant.model,), resume=resume)[variant.model]
    except Exception as error:  # one bad variant must not cost the others their night
        paragraph = str(error) if isinstance(error, Fp4DeployError) else f"{type(error).__name__}: {error}"
        with atomic_write(error_file) as temporary:
            temporary.write_text(json.dumps({"error": " ".join(paragraph.split())[:2000]}) + "\n")
        say(f"{title}: failed. {paragraph}")
        return
    finally:
        gc.collect()  # the run's loaders have worker processes, its model memory on the GPU
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    error_file.unlink(missing_ok=True)
    say(f"{title}: {result.metric} {100 * result.best_score:.2f}, {result.seconds:.0f} s")


@contextmanager
def _deadline(minutes: float | None) -> Iterator[None]:
    """After so many minutes do as Ctrl-C does, and say `TimeIsUp` instead of KeyboardInterrupt."""
    if minutes is None:
        yield
        return
    end = time.monotonic() + 60 * minutes
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
