"""Loss and skipped steps, counted on the device.

Reading a GPU tensor makes the CPU wait until the GPU has caught up, so a loop that prints the loss of every step
starves the GPU. The counts stay on the device, and whoever wants them reads them all at once, every few steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LOSS, BATCHES, SKIPPED, ROW = range(4)


@dataclass(frozen=True)
class Counts:
    """Sum of the finite losses and how many those are; steps skipped in all, and in a row up to now."""

    loss: float = 0.0
    batches: int = 0
    skipped: int = 0
    row: int = 0

    @property
    def mean_loss(self) -> float | None:
        """Mean of the finite losses; None where there was none."""
        return self.loss / self.batches if self.batches else None


class Tally:
    """Counts of the running epoch."""

    def __init__(self, device: torch.device, start: Counts) -> None:
        values = [start.loss, start.batches, start.skipped, start.row]
        self.values = torch.tensor(values, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add_loss(self, loss: torch.Tensor) -> None:
        """Count the loss of one batch; NaN and Inf add nothing."""
        finite = torch.isfinite(loss)
        self.values[LOSS] += torch.where(finite, loss, 0.0)
        self.values[BATCHES] += finite

    @torch.no_grad()
    def add_step(self, norm: torch.Tensor) -> None:
        """Count one step by the norm of its gradients; it is skipped where that is NaN or Inf."""
        bad = ~torch.isfinite(norm)
        self.values[SKIPPED] += bad
        self.values[ROW] = torch.where(bad, self.values[ROW] + 1, 0.0)

    def read(self) -> Counts:
        """Fetch the counts; waits for the device."""
        loss, batches, skipped, row = self.values.tolist()
        return Counts(loss, int(batches), int(skipped), int(row))
