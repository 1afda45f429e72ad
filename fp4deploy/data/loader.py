"""Batches for training and evaluation.

Every item is requested by (epoch, index), so that any worker process draws the same random numbers for it.
Shuffling is a function of (seed, epoch).

An InputError in a worker process (a truncated JPEG) would reach the user inside two tracebacks: torch sends the
formatted traceback and calls the exception's type with it. `WorkerInputError` extracts the message.
"""

from __future__ import annotations

import copy
import itertools
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from fp4deploy.data.augmentation.letterbox import PAD
from fp4deploy.data.augmentation.transforms import Transform
from fp4deploy.data.sample import SegmentationDataset
from fp4deploy.errors import InputError
from fp4deploy.system.children import isolated_start

Batch = tuple[Tensor, Tensor]
Key = tuple[int, int]  # epoch, index
_GRACE = 30.0  # seconds
_SHUFFLE = 2  # keeps this random stream apart from those that augment


def _leave_signals_to_the_parent(worker: int) -> None:
    """Let a worker outlive a signal that a batch system sends to every process: the main process saves first.

    A main process whose worker dies raises an error in the middle of a step. SIGTERM, by which torch ends workers that
    do not answer, takes effect after some seconds.
    """

    def end_later(*_: object) -> None:
        timer = threading.Timer(_GRACE, os._exit, (0,))
        timer.daemon = True
        timer.start()

    signal.signal(signal.SIGTERM, end_later)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


class WorkerInputError(InputError):
    """InputError that keeps its message on the way out of a DataLoader's worker process."""

    def __init__(self, message: str) -> None:
        super().__init__(message.rpartition(f"{type(self).__name__}: ")[2].strip())


class EpochSampler(Sampler[Key]):
    """Yields (epoch, index) for every sample, shuffled by (seed, epoch) or in order."""

    def __init__(self, length: int, seed: int | None = None) -> None:
        """`seed` None: in order."""
        self._length, self._seed = length, seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration yields."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Key]:
        order = np.arange(self._length)
        if self._seed is not None:
            order = np.random.default_rng((_SHUFFLE, self._seed, self.epoch)).permutation(self._length)
        return iter([(self.epoch, int(index)) for index in order])


def collate(samples: list[Batch]) -> Batch:
    """Stack a batch; boxes [M, 5] are padded with rows of the class `PAD` to the largest M."""
    labels = [label for _, label in samples]
    if labels[0].is_floating_point() and labels[0].ndim == 2:
        most = max(len(label) for label in labels)
        padded = [functional.pad(label, (0, 0, 0, most - len(label)), value=PAD) for label in labels]
        samples = [(image, label) for (image, _), label in zip(samples, padded, strict=True)]
    stacked: Batch = tuple(default_collate(samples))
    return stacked


class TransformedDataset(Dataset[Batch]):
    """Dataset and transform as a torch `Dataset`."""

    def __init__(self, dataset: SegmentationDataset, transform: Transform, compact: bool = False) -> None:
        self.source, self._others = dataset, transform.others
        self._transform = transform.compact if compact else transform

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, key: Key) -> Batch:
        epoch, index = key
        try:
            sample = self.source.load(index)
            others = tuple(map(self.source.load, self._others(epoch, index, len(self))))
        except InputError as error:
            raise WorkerInputError(str(error)) from None
        return self._transform(replace(sample, others=others) if others else sample, epoch, index)


class EpochLoader(DataLoader[Batch]):
    """DataLoader yielding (images float32 [N, 3, H, W], labels int64, as the transform gives them), or compact.

    Between two epochs torch's workers are idle until the next iteration begins, and then the first batch takes as long
    as one worker needs for all its images. `start` begins the next epoch early.

    The workers live until `close`. Left to the end of the interpreter, they get SIGTERM, which takes them `_GRACE`.
    """

    _started: tuple[int, Iterator[Any]] | None = None

    def start(self, epoch: int) -> None:
        """Let the workers prepare the first batches of `epoch`; the next iteration uses them if it is of that epoch."""
        if self.num_workers:
            self.set_epoch(epoch)
            self._started = (epoch, self._start_workers())

    def __iter__(self) -> Any:
        started, self._started = self._started, None
        if started is not None and isinstance(self.sampler, EpochSampler) and self.sampler.epoch == started[0]:
            return started[1]
        return self._start_workers() if self.num_workers else super().__iter__()

    def _start_workers(self) -> Any:
        """Start the workers, or tell those there are that an epoch begins."""
        with isolated_start():
            return super().__iter__()

    def first(self, count: int) -> Iterator[Batch]:
        """The first batches of epoch 0, loaded in this process; an iteration that is running goes on."""
        sampler, size = copy.copy(self.sampler), int(self.batch_size or 1)
        if isinstance(sampler, EpochSampler):
            sampler.set_epoch(0)
        keys = list(itertools.islice(sampler, min(count, len(self)) * size))
        for start in range(0, len(keys), size):
            yield self.collate_fn([self.dataset[key] for key in keys[start : start + size]])

    def close(self) -> None:
        """End the workers; a later iteration starts new ones."""
        self._started = None
        end_workers(self)

    @property
    def source(self) -> SegmentationDataset:
        """The samples before augmentation."""
        if not isinstance(self.dataset, TransformedDataset):
            raise TypeError("the dataset of an EpochLoader is a TransformedDataset")
        return self.dataset.source

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order and augmentation the next iteration has."""
        if not isinstance(self.sampler, EpochSampler):
            raise TypeError("the sampler of an EpochLoader is an EpochSampler")
        self.sampler.set_epoch(epoch)


def end_workers(loader: Any) -> None:
    """End the workers of a DataLoader, also of one that accelerate has wrapped; those that do not answer are killed.

    torch has no public name for this: it relies on the end of the iterator, to which a traceback may still refer.
    """
    loader = getattr(loader, "base_dataloader", loader)
    iterator, loader._iterator = loader._iterator, None
    if iterator is None:
        return
    iterator._shutdown_workers()
    for worker in iterator._workers:
        if worker.is_alive():
            worker.kill()
        worker.join()


def train_loader(
    dataset: SegmentationDataset,
    transform: Transform,
    batch_size: int,
    workers: int = 0,
    seed: int = 0,
    compact: bool = False,
) -> EpochLoader:
    """Shuffled batches; a last batch that is not full is left out unless it is the only one.

    Call `set_epoch` before every epoch. The batches are a function of (seed, epoch), whatever `workers` is.
    """
    return _loader(dataset, transform, batch_size, workers, seed, len(dataset) > batch_size, compact)


def eval_loader(
    dataset: SegmentationDataset, transform: Transform, batch_size: int, workers: int = 0, compact: bool = False
) -> EpochLoader:
    """Batches of the whole dataset in its order."""
    return _loader(dataset, transform, batch_size, workers, None, False, compact)


def _loader(
    dataset: SegmentationDataset,
    transform: Transform,
    batch_size: int,
    workers: int,
    seed: int | None,
    drop_last: bool,
    compact: bool,
) -> EpochLoader:
    return EpochLoader(
        TransformedDataset(dataset, transform, compact),
        batch_size=batch_size,
        sampler=EpochSampler(len(dataset), seed),
        num_workers=workers,
        drop_last=drop_last,
        persistent_workers=workers > 0,
        pin_memory=torch.cuda.is_available(),
        worker_init_fn=_leave_signals_to_the_parent if workers else None,
        collate_fn=collate,
        generator=torch.Generator(),  # workers' seeds are drawn here, so the caller's random state is left alone
    )
