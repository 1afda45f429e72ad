"""Every stage of a run: train, export, build, bench, report, each by the same functions as its own command.

An engine that this machine cannot build is left out, and the report says why; a stage that fails stops the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fp4deploy.bench.artifact import bench_or_explain
from fp4deploy.bench.environment import environment
from fp4deploy.bench.records import Machine
from fp4deploy.bench.tables import duration
from fp4deploy.errors import UnavailableError
from fp4deploy.export import export_checkpoint
from fp4deploy.export.engine.build import build_engine, check_arch
from fp4deploy.export.to_packed import pack
from fp4deploy.report.collect import now
from fp4deploy.report.model import Measurement, StageTime
from fp4deploy.report.telemetry_page import draw_trained
from fp4deploy.report.write import Report, write_report
from fp4deploy.runs import Run
from fp4deploy.system.progress import progress

if TYPE_CHECKING:
    from fp4deploy.train import Config

Say = Callable[[str], None]
STAGES = 5


def run_chain(
    config: Config,
    run: Run,
    data: Path,
    models: Sequence[str],
    *,
    from_scratch: bool = False,
    resume: bool = False,
    arch: str = "sm120",
    say: Say = print,
    commands: Sequence[str] = (),
) -> Report:
    """Take every model from training to its line in the report.

    resume: go on with a training that was interrupted; what follows it is made again.
    commands: what repeats this run, for the report.

    Raises:
        InputError, GateError: from the stage that failed; finished stages keep their files.
    """
    from fp4deploy.train import train_models

    measurement = Measurement(artifacts=[], commands=list(commands), data=str(data))
    with stage(1, "train", say, measurement):
        train_models(config, run, models, from_scratch=from_scratch, resume=resume)
        with progress("drawing") as bar:
            draw_trained(run, models, config.telemetry, bar.phase)
    with stage(2, "export and verify", say, measurement):
        for model in models:
            _export(run, model, data, say)
    with stage(3, "build engines", say, measurement):
        for model in models:
            _build(run, model, arch, say, measurement)
    with stage(4, "bench", say, measurement):
        for model in models:
            for path in _artifacts(run, model, say):
                with progress("images", then="scores and latency") as bar:
                    entry = bench_or_explain(path, data, model=model, progress=bar.advance)
                measurement.artifacts.append(entry.model_copy(update={"path": path.relative_to(run.path).as_posix()}))
    with stage(5, "report", say, measurement):
        measurement.created, measurement.environment = now(), Machine.model_validate(environment())
        with progress("drawing the page"):
            return write_report(run, measurement, data)


@contextmanager
def stage(number: int, title: str, say: Say, measurement: Measurement) -> Iterator[None]:
    """Print a stage's heading and its time, and note both for the report."""
    say(f"[{number}/{STAGES}] {title}")
    start = time.perf_counter()
    yield
    seconds = time.perf_counter() - start
    measurement.stages.append(StageTime(stage=title, seconds=round(seconds, 2)))
    say(f"      {title}: {duration(seconds)}")


def _export(run: Run, model: str, data: Path, say: Say) -> None:
    target = run.exported(model)
    with progress(f"{target.name}: tracing and comparing with torch"):
        result = export_checkpoint(run.checkpoint(model), target, portable=True, data=data)
    agreed = f": {result.verification.sentence()}" if result.verification else ""
    say(f"      {target.name}{agreed}")
    with progress(f"{target.stem}.fp4: packing and comparing with torch"):
        packed = pack(run.checkpoint(model), target.with_suffix(".fp4"), data=data)
    agreed = f": {packed.verification.sentence()}" if packed.verification else ""
    say(f"      {packed.file.path.name}{agreed}")


def _build(run: Run, model: str, arch: str, say: Say, measurement: Measurement) -> None:
    target = run.engine(model, check_arch(arch))
    try:
        with progress("lowering") as bar:
            result = build_engine(run.exported(model), target, arch=arch, progress=bar.phase)
    except UnavailableError as error:
        measurement.remarks.append(f"{target.name} was not built: {error}")
        say(f"      {target.name} was not built: {error}")
        return
    say(f"      {result.plan.name}: {result.ledger.summary()}")


def _artifacts(run: Run, model: str, say: Say) -> Iterator[Path]:
    made = (run.checkpoint(model), run.exported(model), run.exported(model, ".fp4"), *run.engines(model))
    for path in made:
        if path.is_file():
            say(f"      {path.relative_to(run.path)}")
            yield path
