"""How long a training will take, from the speed of a few of its steps on this machine.

Measured, for every model, after a warm-up: steps fed by the loader, steps on one batch that stays where it is, the
loader on its own, and evaluation. Estimated from that, for N processes of one GPU each:

    images/s  =  N e r                                        r: steps fed by the loader; e: efficiency of scaling
    hours     =  epochs * images / (images/s)  +  evaluations * validation images / (N * rate of evaluation)

Where r is well below the speed on a resident batch, the loader limits the training, and the result says so: more
workers or faster files would help, a faster GPU would not.

Assumptions, which the result lists: a step costs the same throughout, the batch per GPU stays the same, N GPUs work
at e times N the speed of one (not measured unless N is 1), every process has as many CPU cores for its loader as this
one had, files come as fast as here, and start-up, calibration and saving are not included. A set that is too
small for the steps to measure is read several times over, so that the end of an epoch is not measured at every second
step.
Measuring has a limit in time: what is slow is measured on fewer steps and validation batches, one of each at least.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp4deploy.data import EpochLoader, cache_dataset
from fp4deploy.errors import InputError
from fp4deploy.models.build import network_for
from fp4deploy.qat import prepare_as, set_products
from fp4deploy.system.children import owned_folder
from fp4deploy.train.batches import make_loaders
from fp4deploy.train.config import Config
from fp4deploy.train.loop import Trainer
from fp4deploy.train.models import calibrate_on, model_card, open_splits
from fp4deploy.train.schedule import QUANTIZED_MODELS, TrainingJob, epochs_of
from fp4deploy.train.tasks import make_task
from fp4deploy.train.volumes import sized

WARM_UP = 5
WARM_UP_BATCHES = 2  # of an evaluation
PARTS = 4  # of the measurements of a model: warm-up, steps, steps on one batch, evaluation
SECONDS = 300.0  # that measuring may take
EFFICIENCY = 0.94  # four H200, UNet of scale 1.0, NVFP4, 16 images each, epochs of 20 s (benchmarks/scaling.py)
LOADER_LIMIT = 0.9  # of the speed on a resident batch; below it the loader limits the training


@dataclass(frozen=True)
class Speed:
    """Images a second of one model: training as it is, on a resident batch, and evaluating; the loader on its own."""

    model: str
    training: float
    resident: float
    evaluation: float
    loader: float
    peak_memory_bytes: int | None


@dataclass(frozen=True)
class Estimate:
    """Time of one model's whole schedule; `limit` is what bounds the speed, "steps" or "loader"."""

    model: str
    epochs: int
    images_per_s: float
    limit: str
    training_hours: float
    validation_hours: float

    @property
    def hours(self) -> float:
        """All of it."""
        return self.training_hours + self.validation_hours


class Budget:
    """Seconds that measuring may take, in equal parts; `begin` the next part, which is `over` after its time.

    advance: is called with the parts done and all of them.
    """

    def __init__(self, seconds: float, parts: int, advance: Callable[[int, int], None] | None = None) -> None:
        self.seconds, self.parts, self.advance = seconds / parts, parts, advance
        self.done, self.end = -1, 0.0

    def begin(self) -> None:
        """The part before is done."""
        self.done += 1
        self.end = time.perf_counter() + self.seconds
        if self.advance is not None:
            self.advance(self.done, self.parts)

    def over(self) -> bool:
        """Whether the running part has had its time."""
        return time.perf_counter() >= self.end


def measure(
    config: Config,
    models: tuple[str, ...],
    steps: int = 30,
    seconds: float = SECONDS,
    advance: Callable[[int, int], None] | None = None,
) -> list[Speed]:
    """Train each model for a few steps from random weights, and keep nothing of it.

    seconds: about as long may it take in all; at the end of its part, a measurement ends with what it has.
    advance: is called with the measurements done and all of them.

    Raises:
        InputError: no data, or fewer than one step.
    """
    if steps < 1:
        raise InputError(f"At least one step has to be measured, not {steps}.")
    train, val = open_splits(config)
    config = sized(config, train)
    cache = int(config.data.cache_gib * 2**30)
    least = config.train.batch_size * (WARM_UP + 2 * steps + 2)
    times = max(config.data.repeat, -(-least // len(train)))
    config = config.model_copy(update={"data": config.data.model_copy(update={"repeat": times})})
    loaders = make_loaders(config, cache_dataset(train, cache), cache_dataset(val, cache))
    budget = Budget(seconds, 1 + PARTS * len(models), advance)
    with closing(loaders[0]), closing(loaders[1]), owned_folder() as folder:
        fed = loader_speed(loaders[0], steps, budget)
        return [_speed(config, model, loaders, val, steps, fed, folder, budget) for model in models]


def estimate(
    config: Config,
    speeds: list[Speed],
    images: int,
    val_images: int,
    gpus: int = 1,
    efficiency: float = EFFICIENCY,
) -> list[Estimate]:
    """Time of every measured model's schedule on `gpus` processes.

    Args:
        images, val_images: how many a whole epoch and a whole validation have.
        efficiency: of scaling to several GPUs, in (0, 1]; 1 is taken for one.

    Raises:
        InputError: a number is out of range.
    """
    if images < 1 or val_images < 0 or gpus < 1 or not 0 < efficiency <= 1:
        raise InputError("An estimate needs at least one image and one GPU, and an efficiency above 0 and up to 1.")
    found = []
    for speed in speeds:
        epochs = epochs_of(config, speed.model)
        rate = speed.training * gpus * (efficiency if gpus > 1 else 1.0)
        validations = math.ceil(epochs / config.train.evaluate_every)
        found.append(
            Estimate(
                speed.model,
                epochs,
                rate,
                "loader" if speed.training < LOADER_LIMIT * speed.resident else "steps",
                epochs * images / rate / 3600,
                validations * val_images / (speed.evaluation * gpus) / 3600,
            )
        )
    return found


def assumptions(gpus: int, efficiency: float) -> list[str]:
    """The assumptions of an estimate, in sentences."""
    scaling = f"{gpus} GPUs work at {efficiency:g} x {gpus} the speed of one (assumed, not measured here)"
    return [
        "a step costs the same from the first to the last, at the measured batch a GPU",
        scaling if gpus > 1 else "one GPU, as measured",
        "each process has as many loader workers and as fast files as this one had",
        "start-up, calibration, saving and a teacher's forward pass are left out",
    ]


def estimate_training(
    config: Config,
    models: tuple[str, ...],
    gpus: int = 1,
    images: int | None = None,
    val_images: int | None = None,
    efficiency: float | None = None,
    steps: int = 30,
    seconds: float = SECONDS,
    advance: Callable[[int, int], None] | None = None,
) -> dict[str, object]:
    """Measure some steps of each model and estimate its whole schedule, as JSON (`as_json`).

    Args:
        images, val_images: of a whole epoch and a whole validation; None for those of the data.
        efficiency: of scaling to several GPUs; None for `EFFICIENCY`.
        seconds, advance: as of `measure`.

    Raises:
        InputError: the data cannot be read, a model has nothing to train, or a number is out of range.
    """
    if "nvfp4_ptq" in models:
        raise InputError("nvfp4_ptq is not trained, so there is nothing to estimate; leave it out of --models.")
    if config.data.root is None:
        raise InputError(
            "An estimate needs data to read. Give --data DIR, or make some with: fp4deploy data shapes DIR"
        )
    share = EFFICIENCY if efficiency is None else efficiency
    train, val = (len(split) for split in open_splits(config))
    train, val = images or train * config.data.repeat, val if val_images is None else val_images
    speeds = measure(config, models, steps, seconds, advance)
    return as_json(config, speeds, estimate(config, speeds, train, val, gpus, share), train, val, gpus, share)


def as_json(
    config: Config,
    speeds: list[Speed],
    estimates: list[Estimate],
    images: int,
    val_images: int,
    gpus: int,
    share: float,
) -> dict[str, object]:
    """Everything measured, assumed and estimated."""
    on_gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "torch": torch.__version__,
        "batch_size": config.train.batch_size,
        "height": config.data.height,
        "width": config.data.width,
        "network": config.model.spec,
        "scale": config.model.scale,
        "digits": config.model.digits,
        "measured": [asdict(speed) for speed in speeds],
        "for": {"images": images, "val_images": val_images, "gpus": gpus, "efficiency": share if gpus > 1 else 1.0},
        "assumptions": assumptions(gpus, share),
        "estimated": [{**asdict(found), "hours": found.hours} for found in estimates],
    }


def _speed(
    config: Config,
    model: str,
    loaders: tuple[EpochLoader, EpochLoader],
    data: Any,
    steps: int,
    fed: float,
    folder: Path,
    budget: Budget,
) -> Speed:
    torch.manual_seed(config.seed)
    card = model_card(config, model, data)
    network: nn.Module = network_for(card, "The configuration")
    if model in QUANTIZED_MODELS:
        set_products(prepare_as(network, card), config.train.products)
        calibrate_on(network, loaders[0], config, card.rest)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    job = TrainingJob(model, 1, config.train.lr, folder / model)
    trainer = Trainer(job, network, card, config.train, loaders, make_task(config, card, data))
    trainer.progress.batches = steps * 10**6  # one group of accumulated batches after the other, without an end
    trainer.model.train()
    batches = trainer._on_device(_endless(loaders[0]))
    _timed(trainer, batches, WARM_UP, budget)
    training = _timed(trainer, batches, steps, budget)
    resident = _timed(trainer, itertools.repeat(next(batches)), steps, budget)
    evaluation = _evaluation_speed(trainer, budget)
    memory = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    trainer.accelerator.free_memory()
    return Speed(model, training, resident, evaluation, fed, memory)


def _endless(loader: EpochLoader) -> Iterator[Any]:
    for epoch in itertools.count():
        loader.set_epoch(epoch)
        yield from loader


def _timed(trainer: Trainer, batches: Iterator[Any], steps: int, budget: Budget) -> float:
    """Images a second over so many batches, or as many as the budget allows."""
    budget.begin()
    trainer.statistics.read()  # waits for the device
    start, seen = time.perf_counter(), 0
    for images, masks in itertools.islice(batches, steps):
        trainer.step(images, masks)
        seen += len(images)
        if budget.over():
            break
    trainer.statistics.read()
    return seen / (time.perf_counter() - start)


class _Enough(Exception):
    """Ends an evaluation."""


def _evaluation_speed(trainer: Trainer, budget: Budget) -> float:
    """Images a second of a validation, scores included where the budget allows all of it."""
    budget.begin()
    loader = trainer.val_batches
    whole, batch = len(loader.dataset), -(-len(loader.dataset) // len(loader))

    def run(enough: Callable[[int], bool]) -> int:
        """How many images were evaluated."""
        done = 0

        def validated(batches: int, of: int) -> None:
            nonlocal done
            done = min(whole, batches * batch)
            if batches < of and enough(batches):
                raise _Enough

        try:
            trainer.evaluate(validated)
        except _Enough:
            trainer.model.train()
        return done

    run(lambda batches: batches >= WARM_UP_BATCHES)  # the first one compiles and starts workers
    start = time.perf_counter()
    return run(lambda batches: budget.over()) / (time.perf_counter() - start)


def loader_speed(loader: EpochLoader, steps: int, budget: Budget | None = None) -> float:
    """Images a second of the loader alone, its workers warm."""
    if budget is not None:
        budget.begin()
    batches = _endless(loader)
    for _ in itertools.islice(batches, WARM_UP):
        pass
    start, seen = time.perf_counter(), 0
    for images, _ in itertools.islice(batches, steps):
        seen += len(images)
        if budget is not None and budget.over():
            break
    return seen / (time.perf_counter() - start)
