"""Running statistics of an epoch: loss, spikes of the loss, skipped steps, counted on the device.

Reading a GPU tensor makes the CPU wait until the GPU has caught up, so a loop that prints the loss of every step
starves the GPU. The statistics stay on the device and are read all at once, every few steps.

A spike is a finite loss of more than `spike` times the running mean (of weight 0.98 a batch, from the 20th batch on).
Spikes do not enter the running mean, so that a long plateau after a jump is counted batch by batch.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import ClassVar

import torch
from pydantic import ConfigDict

from fp4deploy.errors import counted
from fp4deploy.system.schema import Count

LOSS, BATCHES, SKIPPED, CONSECUTIVE, SPIKES, LARGEST, RUNNING, SEEN, LOST = range(9)
KEPT = 0.98  # of the running mean, a batch
WARM = 20  # batches before the running mean says anything


@dataclass(frozen=True)
class EpochStatistics:
    """Sum of the finite losses and how many those are; steps skipped in all, and consecutively up to now.

    spikes, largest: batches whose loss was a spike, and the largest such loss; running, seen: the running mean, and
    the finite losses since the training began; lost: batches whose loss was NaN or Inf. `next_epoch` keeps what does
    not belong to one epoch.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    loss: float = 0.0
    batches: Count = 0
    skipped: Count = 0
    consecutive: Count = 0
    spikes: Count = 0
    largest: float = 0.0
    running: float = 0.0
    seen: Count = 0
    lost: Count = 0

    @property
    def mean_loss(self) -> float | None:
        """Mean of the finite losses; None where there was none."""
        return self.loss / self.batches if self.batches else None

    def next_epoch(self) -> EpochStatistics:
        """The statistics that the next epoch starts with."""
        return EpochStatistics(consecutive=self.consecutive, running=self.running, seen=self.seen)

    def warning(self) -> str | None:
        """What was unusual in the epoch, in a sentence; None where nothing was."""
        parts = []
        if self.skipped:
            parts.append(f"skipped {counted(self.skipped, 'step')} with non-finite gradients")
        if self.lost:
            number = f"{self.lost} batch{'' if self.lost == 1 else 'es'}"
            parts.append(
                f"NaN or Inf as the loss of {number}: lower train.lr or, where FP16 overflows, train.precision=bf16"
            )
        if self.spikes:
            parts.append(f"{counted(self.spikes, 'loss spike')}, largest {self.largest:.4g}")
        if self.mean_loss == 0:
            parts.append("the loss was 0 in every step, so nothing was learned: fp4deploy data check")
        return "; ".join(parts) or None


class RunningStatistics:
    """The statistics of the running epoch, on the device."""

    def __init__(self, device: torch.device, start: EpochStatistics, spike: float = 4.0) -> None:
        self.values = torch.tensor(astuple(start), dtype=torch.float64, device=device)
        self.spike = spike

    def start(self, statistics: EpochStatistics) -> None:
        """Go on from these, in the same memory: a CUDA graph writes there."""
        self.values.copy_(torch.tensor(astuple(statistics), dtype=torch.float64))

    @torch.no_grad()
    def add_loss(self, loss: torch.Tensor) -> None:
        """Count the loss of one batch; NaN and Inf add nothing."""
        values, loss = self.values, loss.double()
        finite = torch.isfinite(loss)
        counted = torch.where(finite, loss, 0.0)
        spike = finite & (values[SEEN] >= WARM) & (counted > self.spike * values[RUNNING])
        kept = (values[SEEN] / (values[SEEN] + 1)).clamp(max=KEPT)  # the plain mean of the first ones
        moved = kept * values[RUNNING] + (1 - kept) * counted
        values[RUNNING] = torch.where(finite & ~spike, moved, values[RUNNING])
        values[LOSS] += counted
        values[BATCHES] += finite
        values[LOST] += ~finite
        values[SEEN] += finite
        values[SPIKES] += spike
        values[LARGEST] = torch.where(spike, torch.maximum(values[LARGEST], counted), values[LARGEST])

    @torch.no_grad()
    def add_step(self, norm: torch.Tensor) -> None:
        """Count one step by the norm of its gradients; it is skipped where that is NaN or Inf."""
        bad = ~torch.isfinite(norm)
        self.values[SKIPPED] += bad
        self.values[CONSECUTIVE] = torch.where(bad, self.values[CONSECUTIVE] + 1, 0.0)

    def read(self) -> EpochStatistics:
        """Read the statistics; waits for the device."""
        loss, batches, skipped, consecutive, spikes, largest, running, seen, lost = self.values.tolist()
        return EpochStatistics(
            loss, int(batches), int(skipped), int(consecutive), int(spikes), largest, running, int(seen), int(lost)
        )
