"""Workers on a cluster, by Ray: `fp4deploy sweep FILE --address HOST:6379 --jobs 16`.

Every run is a Ray task with one GPU (none where the cluster has none) that is never repeated by itself: a run that
lost its node is marked as failed, and the same command goes on with it. The sweep's folder and the data have to lie on
a file system that all nodes share under the same path, and fp4deploy has to be installed on every node.

Ray is the extra `distributed`, imported here and nowhere else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fp4deploy.errors import InputError, named_cause
from fp4deploy.experiments.sweep.parallel import Task
from fp4deploy.experiments.sweep.spec import Sweep, Variant
from fp4deploy.experiments.sweep.variant import Started, train_logged
from fp4deploy.requirements import RAY


class RayWorker:
    """One place on the cluster; Ray decides for each run on which node."""

    def __init__(self, ray: Any, gpus: int, sweep: Sweep, out: Path, started: Started | None) -> None:
        self._ray, self._arguments = ray, (sweep, out, started)
        self._running: Any = None
        self._train = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(_train)

    def submit(self, task: Task) -> Future[list[str]]:
        """Begin a run."""
        sweep, out, started = self._arguments
        self._running = self._train.remote(str(Path.cwd()), sweep, out.resolve(), *task, started)
        future: Future[list[str]] = self._running.future()
        return future

    def cause(self, error: BaseException) -> str:
        """Why the run was lost, in Ray's words."""
        return named_cause(error)

    def interrupt(self) -> None:
        """Let the running training save its state and end."""
        self._ray.cancel(self._running, force=False)

    def close(self, wait: bool) -> None:
        """Wait for the last run, or end it."""
        if self._running is not None:
            if not wait:
                self._ray.cancel(self._running, force=True)
            self._ray.wait([self._running], timeout=None if wait else 10)


def ray_workers(
    address: str, jobs: int | None, sweep: Sweep, out: Path, started: Started | None = None
) -> list[RayWorker]:
    """Connect to a cluster.

    Args:
        address: of its head node, such as 10.0.0.1:6379, or auto for the one that runs on this machine.
        jobs: runs at a time; None for one a GPU.

    Raises:
        UnavailableError: Ray is not installed.
        InputError: no cluster answers at the address.
    """
    ray = RAY.require("A sweep on a cluster", "leave out --address and use this machine's GPUs by --jobs")
    if not ray.is_initialized():
        try:
            with _in_the_root_folder():
                ray.init(address=address, log_to_driver=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise InputError(
                f"No Ray cluster answers at {address} ({' '.join(str(error).split())[:200]}). Start one with: "
                "ray start --head, and give its address, such as --address 10.0.0.1:6379, or auto on that machine."
            ) from error
    resources = ray.cluster_resources()
    gpus = int(resources.get("GPU", 0))
    places = jobs or gpus or int(resources.get("CPU", 1))
    return [RayWorker(ray, 1 if gpus else 0, sweep, out, started) for _ in range(places)]


@contextmanager
def _in_the_root_folder() -> Iterator[None]:
    """Ray puts the current folder first on its workers' path of modules; nobody puts modules into the root folder."""
    before = Path.cwd()
    os.chdir(before.anchor)
    try:
        yield
    finally:
        os.chdir(before)


def _train(folder: str, sweep: Sweep, out: Path, variant: Variant, seed: int, started: Started | None) -> list[str]:
    """One run on a node; paths in the sweep are relative to the folder in which it was called."""
    os.chdir(folder)
    return train_logged(sweep, out, variant, seed, started)
