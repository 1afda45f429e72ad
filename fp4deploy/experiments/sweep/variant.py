"""One run of a sweep: from its configuration to a trained model, or to the error that stands for it."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from fp4deploy.errors import Fp4DeployError, InputError, Interrupted, printable
from fp4deploy.experiments.sweep.results import ERROR_FILE, outcome, run_of
from fp4deploy.experiments.sweep.spec import Sweep, Variant
from fp4deploy.experiments.sweep.test_split import forget_test, needs_test_score, score_test
from fp4deploy.models.spec import name_model
from fp4deploy.runs import Run
from fp4deploy.system.files import write_whole
from fp4deploy.train.batches import share_of_workers
from fp4deploy.train.config import Config, with_settings
from fp4deploy.train.models import train_models

LOG = "train.log"
Say = Callable[[str], None]
Started = Callable[[Run], None]


def opening(sweep: Sweep, out: Path, variant: Variant, seed: int) -> str:
    """What is said before `train_variant`: that the run starts, continues or is done."""
    before, title = outcome(sweep, out, variant, seed), _title(variant, seed)
    if before["status"] == "done":
        return f"{title}: done, {sweep.metric} {100 * before['best']:.2f}"
    resume = (run_of(out, variant, seed).model_dir(variant.model) / "state").is_dir()
    return f"{title}: {'continuing' if resume else 'starting'}"


def is_complete(sweep: Sweep, out: Path, variant: Variant, seed: int) -> bool:
    """Whether `train_variant` would do nothing: trained, and scored on the test split where there is one."""
    if outcome(sweep, out, variant, seed)["status"] != "done":
        return False
    return not needs_test_score(sweep.config(variant, seed), run_of(out, variant, seed), variant.model)


def train_variant(
    sweep: Sweep,
    out: Path,
    variant: Variant,
    seed: int,
    say: Say = print,
    started: Started | None = None,
    jobs: int = 1,
) -> None:
    """Train one variant with one seed, continue it, or leave it where it is done; a failure is written down.

    Args:
        started: called with the run when it begins or continues.
        jobs: trainings that share this machine's CPU cores.

    Raises:
        KeyboardInterrupt: after Ctrl-C, with the state saved.
    """
    title, run = _title(variant, seed), run_of(out, variant, seed)
    for text in sweep.named:
        name_model(text)
    if outcome(sweep, out, variant, seed)["status"] == "done":
        _test(_shared(sweep.config(variant, seed), jobs), run, variant.model, title, say)
        return
    error_file = run.path / ERROR_FILE
    try:
        config = _shared(sweep.config(variant, seed), jobs)
        given = {"train.init_checkpoint": variant.base, "distill.teacher": variant.teacher}
        config = with_settings(
            config,
            [
                f"{key}={json.dumps(str(_trained(sweep, out, name, seed)))}"
                for key, name in given.items()
                if name is not None
            ],
        )
        resume = (run.model_dir(variant.model) / "state").is_dir()
        run.path.mkdir(parents=True, exist_ok=True)
        if started is not None:
            started(run)
        forget_test(run, variant.model)
        result = train_models(config, run, (variant.model,), resume=resume)[variant.model]
    except Exception as error:  # one bad variant must not cost the others their night
        write_error(out, variant, seed, _paragraph(error))
        say(f"{title}: failed. {_paragraph(error)}")
        return
    finally:
        _tidy()
    error_file.unlink(missing_ok=True)
    say(f"{title}: {result.metric} {result.best_text}, {result.seconds:.0f} s")
    _test(config, run, variant.model, title, say)


def _trained(sweep: Sweep, out: Path, name: str, seed: int) -> Path:
    """The checkpoint of another variant of the same seed."""
    other = sweep.variant(name)
    if outcome(sweep, out, other, seed)["status"] != "done":
        raise InputError(f"The model that it needs, {name} of seed {seed}, is not there.")
    return run_of(out, other, seed).checkpoint(other.model)


def train_logged(
    sweep: Sweep, out: Path, variant: Variant, seed: int, started: Started | None = None, jobs: int = 1
) -> list[str]:
    """`train_variant` in a worker: output goes to `train.log` of the run; returns what is to be said."""
    texts: list[str] = []
    with _output_to(run_of(out, variant, seed).path / LOG):
        try:
            train_variant(sweep, out, variant, seed, texts.append, started, jobs)
        except Interrupted as error:
            print(printable(str(error)), file=sys.stderr)
            raise
    return texts


@contextmanager
def _output_to(log: Path) -> Iterator[None]:
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


def _title(variant: Variant, seed: int) -> str:
    return f"{variant.name}, seed {seed}"


def _test(config: Config, run: Run, model: str, title: str, say: Say) -> None:
    """The test split, where there is one; what goes wrong there costs the score and nothing else."""
    try:
        scores = score_test(config, run, model)
    except Exception as error:
        say(f"{title}: not scored on the test split. {_paragraph(error)}")
    else:
        if scores is not None:
            say(f"{title}: on the test split {scores}")
    finally:
        _tidy()


def _shared(config: Config, jobs: int) -> Config:
    """With as many loader processes as `jobs` trainings at the same time leave it."""
    if jobs > 1 and config.data.workers is None and torch.cuda.is_available():
        return with_settings(config, [f"data.workers={share_of_workers(jobs)}"])
    return config


def _paragraph(error: Exception) -> str:
    return str(error) if isinstance(error, Fp4DeployError) else f"{type(error).__name__}: {error}"


def _tidy() -> None:
    gc.collect()  # loaders have worker processes, models memory on the GPU
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def write_error(out: Path, variant: Variant, seed: int, paragraph: str) -> None:
    """Keep why a run failed, where its outcome is looked for."""
    error = {"error": " ".join(paragraph.split())[:2000]}
    write_whole(run_of(out, variant, seed).path / ERROR_FILE, json.dumps(error) + "\n")
