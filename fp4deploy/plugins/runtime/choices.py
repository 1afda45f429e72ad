"""The fastest of several ways to compute the same: measured once on the GPU at hand, and kept for later processes.

    name = fastest(key(["conv 1", shapes, gpu, versions]), {"torch": run, "kernel": other}, device)

A choice is a file of the cache (`cache`): later processes take the same way, so that they give the same bits. Its key
has everything that the times depend on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch

from fp4deploy.plugins.runtime.cache import cache_folder, keep_entry, read_entry

MEASURED = 21  # runs, of which the median counts
QUEUED = 200_000  # cycles, some 0.1 ms, that a GPU is kept busy while launches queue up: longer ones are timed with it
Run = Callable[[], object]


def remembered(name: str, valid: Collection[str]) -> str | None:
    """The choice that was kept under a key, one of `valid`; None where there is none yet."""
    content = read_entry(cache_folder() / "programs" / f"{name}.choice")
    choice = content.decode(errors="replace") if content else ""
    return choice if choice in valid else None


def remember(name: str, choice: str) -> None:
    """Keep a choice; a cache that cannot be written is a warning."""
    keep_entry(cache_folder() / "programs" / f"{name}.choice", choice.encode())


def fastest(name: str, runs: Mapping[str, Run], device: torch.device) -> str:
    """Measure `runs` and keep the name of the fastest, the first of equals.

    Each must have run before: compiling would be timed.
    """
    with torch.cuda.device(device):
        times = {each: milliseconds(run) for each, run in runs.items()}
    choice = min(times, key=times.__getitem__)
    remember(name, choice)
    return choice


def milliseconds(run: Run) -> float:
    """Median of a run on the current GPU, by CUDA events."""
    times = []
    for _ in range(MEASURED):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(QUEUED)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[MEASURED // 2]
