"""One run of a sweep: from its configuration to a trained model, or to the error that stands for it."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path

import torch

from fp4deploy.errors import Fp4DeployError, InputError
from fp4deploy.runs import Run, atomic_write
from fp4deploy.train.config import with_settings
from fp4deploy.train.held_out import score_test
from fp4deploy.train.models import share_of_workers, train_models
from fp4deploy.train.sweep_file import Sweep, Variant
from fp4deploy.train.sweep_results import ERROR_FILE, outcome, run_of

Say = Callable[[str], None]
Started = Callable[[Run], None]


def run_one(
    sweep: Sweep,
    out: Path,
    variant: Variant,
    seed: int,
    say: Say = print,
    started: Started | None = None,
    jobs: int = 1,
) -> None:
    """Train one variant with one seed, go on with it, or leave it where it is done; a failure is written down.

    Args:
        started: called with the run when it begins or goes on.
        jobs: trainings that share this machine's CPU cores.

    Raises:
        KeyboardInterrupt: after Ctrl-C, with the state saved.
    """
    before = outcome(sweep, out, variant, seed)
    title = f"{variant.name}, seed {seed}"
    run = run_of(out, variant, seed)
    if before["status"] == "done":
        say(f"{title}: done, {sweep.metric} {100 * before['best']:.2f}")
        _test(sweep, variant, seed, run, title, say)
        return
    error_file = run.path / ERROR_FILE
    try:
        config = sweep.config(variant, seed)
        if variant.base is not None:
            base = sweep.variant(variant.base)
            if outcome(sweep, out, base, seed)["status"] != "done":
                raise InputError(f"The FP16 model it starts from, {base.name} of seed {seed}, is not there.")
            start = run_of(out, base, seed).checkpoint("fp16")
            config = with_settings(config, [f"train.init_checkpoint={json.dumps(str(start))}"])
        if jobs > 1 and config.data.workers is None and torch.cuda.is_available():
            config = with_settings(config, [f"data.workers={share_of_workers(jobs)}"])
        resume = (run.model_dir(variant.model) / "state").is_dir()
        say(f"{title}: {'continuing' if resume else 'starting'}")
        run.path.mkdir(parents=True, exist_ok=True)
        if started is not None:
            started(run)
        result = train_models(config, run, (variant.model,), resume=resume)[variant.model]
    except Exception as error:  # one bad variant must not cost the others their night
        paragraph = str(error) if isinstance(error, Fp4DeployError) else f"{type(error).__name__}: {error}"
        write_error(out, variant, seed, paragraph)
        say(f"{title}: failed. {paragraph}")
        return
    finally:
        gc.collect()  # the run's loaders have worker processes, its model memory on the GPU
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    error_file.unlink(missing_ok=True)
    say(f"{title}: {result.metric} {100 * result.best_score:.2f}, {result.seconds:.0f} s")
    _test(sweep, variant, seed, run, title, say)


def _test(sweep: Sweep, variant: Variant, seed: int, run: Run, title: str, say: Say) -> None:
    """The test split, where there is one; what it lacks costs its score and nothing else."""
    try:
        scores = score_test(sweep.config(variant, seed), run, variant.model)
    except InputError as error:
        say(f"{title}: not scored on the test split. {error}")
    else:
        if scores is not None:
            say(f"{title}: on the test split {scores}")


def write_error(out: Path, variant: Variant, seed: int, paragraph: str) -> None:
    """Keep why a run failed, where its outcome is looked for."""
    with atomic_write(run_of(out, variant, seed).path / ERROR_FILE) as temporary:
        temporary.write_text(json.dumps({"error": " ".join(paragraph.split())[:2000]}) + "\n")
