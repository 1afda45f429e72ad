"""A kernel with something that stands in for it: what to do where it does not compile or launch.

A kernel that does not compile for a GPU is not tried again there. One that was not loaded or launched this time
(`LaunchError`) is: it may have been called first while a CUDA graph was captured, or without memory left.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from weakref import WeakSet

import torch

from fp4deploy.errors import UnavailableError
from fp4deploy.plugins.runtime.availability import available, device_index
from fp4deploy.plugins.runtime.nvcc import LaunchError


class Fallback:
    """The devices on which one kernel was refused or missed; each is said once.

    what: the layers, as the warning names them; instead: what computes them then.
    """

    def __init__(self, what: str, instead: str) -> None:
        self.what, self.instead = what, instead
        self._refused: set[int | None] = set()
        self._missed: dict[int | None, int] = {}  # how often
        _fallbacks.add(self)

    def refused(self, device: torch.device) -> bool:
        """Whether the kernel was refused there for good."""
        return device_index(device) in self._refused

    def runs(self, device: torch.device) -> bool:
        """Whether CUDA kernels run on a device, and this one was not refused there."""
        return device.type == "cuda" and not self.refused(device) and available(device)

    @contextmanager
    def guard(self, device: torch.device) -> Iterator[None]:
        """Go on behind a block that returns the kernel's result, where the kernel is refused or missed."""
        try:
            yield
        except UnavailableError as error:
            self.refuse(device, error)

    def missed(self, device: torch.device) -> int:
        """How often the kernel was not loaded or launched there, without being refused."""
        return self._missed.get(device_index(device), 0)

    def refuse(self, device: torch.device, error: UnavailableError) -> None:
        """Say so once; the kernel is tried again only where it was not loaded or launched this time."""
        index = device_index(device)
        if isinstance(error, LaunchError):
            first = index not in self._missed
            self._missed[index] = self.missed(device) + 1
            text = f"{self.what} fell back to {self.instead} on {device} and are tried again: {error}"
        else:
            first = index not in self._refused
            self._refused.add(index)
            text = f"{self.what} fall back to {self.instead} on {device}: {error}"
        if first:
            warnings.warn(text, stacklevel=4)


class Count(NamedTuple):
    """Kernels in whose place torch computes on a device for good, and how often it has for once."""

    refused: int
    missed: int


_fallbacks: WeakSet[Fallback] = WeakSet()


def in_torch(device: torch.device) -> Count:
    """What torch has computed in the place of kernels so far, in this process."""
    found = [each for each in _fallbacks if each.instead == "torch"]
    return Count(sum(each.refused(device) for each in found), sum(each.missed(device) for each in found))
