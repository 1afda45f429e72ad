"""Batches that workers begin before they are asked for are those of the epoch that is asked for."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch

from fp4deploy.data import EpochLoader, generate_shapes, open_dataset
from fp4deploy.data.augmentation.transforms import TrainTransform
from fp4deploy.data.loader import train_loader


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shapes") / "data"
    generate_shapes(folder, train=12, val=2, size=32, seed=0)
    return folder


def loader(folder: Path, workers: int) -> EpochLoader:
    return train_loader(open_dataset(folder, "train"), TrainTransform(32, 32, seed=3), 2, workers, seed=5)


def batches(from_: EpochLoader, epoch: int) -> list[torch.Tensor]:
    from_.set_epoch(epoch)
    return [part for batch in from_ for part in batch]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_begun_early_has_its_own_batches(folder: Path, workers: int) -> None:
    plain, early = loader(folder, 0), loader(folder, workers)
    for epoch in range(3):
        assert same(batches(early, epoch), batches(plain, epoch)), epoch
        early.start(epoch + 1)
    assert not same(batches(plain, 0), batches(plain, 1))


def test_an_epoch_begun_early_and_not_wanted_is_dropped(folder: Path) -> None:
    plain, early = loader(folder, 0), loader(folder, 2)
    batches(early, 0)
    early.start(1)
    assert same(batches(early, 4), batches(plain, 4))
    early.start(5)
    early.set_epoch(5)
    next(iter(early))  # left in the middle
    assert same(batches(early, 5), batches(plain, 5))


def test_workers_begin_at_once(folder: Path) -> None:
    early = loader(folder, 2)
    early.start(0)
    assert early._iterator is not None
    assert early._iterator._tasks_outstanding > 0  # type: ignore[attr-defined]


def test_close_leaves_no_worker_and_a_closed_loader_starts_others(folder: Path) -> None:
    plain, early, before = loader(folder, 0), loader(folder, 2), set(multiprocessing.active_children())
    early.close()  # of no worker
    assert same(batches(early, 0), batches(plain, 0))
    early.start(1)
    workers = early._iterator._workers  # type: ignore[union-attr]
    assert len(workers) == 2
    early.close()
    assert not any(worker.is_alive() for worker in workers)
    assert same(batches(early, 1), batches(plain, 1))
    early.close()
    assert set(multiprocessing.active_children()) <= before
