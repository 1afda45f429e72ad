"""The batches that a model is trained and scored on, and how many processes load them."""

from __future__ import annotations

import torch

from fp4deploy.data import (
    EpochLoader,
    SegmentationDataset,
    eval_loader,
    repeated,
    train_loader,
)
from fp4deploy.system.processors import cores
from fp4deploy.tasks import TASKS
from fp4deploy.train.config import Config
from fp4deploy.train.distributed import join

MAX_WORKERS = 12


def make_loaders(
    config: Config, train: SegmentationDataset, val: SegmentationDataset
) -> tuple[EpochLoader, EpochLoader]:
    """Batches to train and to validate on, augmented and sized as the configuration says."""
    augment = TASKS[config.task].augmentation(
        config.data.size,
        config.seed,
        zoom=config.train.zoom,
        jitter=config.train.jitter,
        upside_down=config.train.upside_down,
        **config.augment.model_dump(),
    )
    batch, workers = config.train.batch_size, _workers(config.data.workers)
    train = repeated(train, config.data.repeat)
    return train_loader(train, augment, batch, workers, config.seed, compact=True), validation_loader(config, val)


def validation_loader(config: Config, data: SegmentationDataset) -> EpochLoader:
    """Batches of a whole split to score a model on, sized as the configuration says."""
    plain = TASKS[config.task].transform(config.data.size, whole=True)
    batch = config.train.batch_size if config.data.depth is None else 1  # whole volumes differ in size
    return eval_loader(data, plain, batch, _workers(config.data.workers), compact=True)


def _workers(given: int | None) -> int:
    """Loader processes: as given; else none on a CPU, which training needs itself, and enough to feed a GPU."""
    if given is not None:
        return given
    processes = join().num_processes
    return share_of_workers(processes) if torch.cuda.is_available() else 0


def share_of_workers(trainings: int) -> int:
    """Loader processes that feed a GPU, where so many trainings share the CPU cores."""
    return min(MAX_WORKERS, cores() // trainings)
