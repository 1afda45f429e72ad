"""A kernel with something that stands in for it: what to do where it does not compile or launch."""

from __future__ import annotations

import warnings

import torch

from fp4deploy.errors import UnavailableError


class Fallback:
    """The devices on which one kernel was refused; each is said once.

    what: the layers, as the warning names them; instead: what computes them then.
    """

    def __init__(self, what: str, instead: str) -> None:
        self.what, self.instead = what, instead
        self._refused: set[torch.device] = set()

    def refused(self, device: torch.device) -> bool:
        """Whether the kernel was refused there."""
        return device in self._refused

    def refuse(self, device: torch.device, error: UnavailableError) -> None:
        """Say so once, and do not try again."""
        if device in self._refused:
            return
        self._refused.add(device)
        warnings.warn(f"{self.what} fall back to {self.instead} on {device}: {error}", stacklevel=3)
