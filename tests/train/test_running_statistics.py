"""Losses of a long epoch counted on the device, against a loop over plain numbers."""

from __future__ import annotations

import math
import random

import pytest
import torch

from fp4deploy.train.logging.running_statistics import EpochStatistics, RunningStatistics


def plainly(losses: list[float], norms: list[float], spike: float) -> EpochStatistics:
    """As the module says it: a mean of weight 0.98 from the 50th batch on, of what was no spike."""
    mean, seen, spikes, large = 0.0, 0, 0, 0.0
    finite = [loss for loss in losses if math.isfinite(loss)]
    for loss in finite:
        if seen >= 20 and loss > spike * mean:
            spikes, large = spikes + 1, max(large, loss)
        else:
            weight = min(0.98, seen / (seen + 1))
            mean = weight * mean + (1 - weight) * loss
        seen += 1
    consecutive = next((at for at, norm in enumerate(reversed(norms)) if math.isfinite(norm)), len(norms))
    skipped = sum(not math.isfinite(norm) for norm in norms)
    lost = len(losses) - len(finite)
    return EpochStatistics(sum(finite), len(finite), skipped, consecutive, spikes, large, mean, seen, lost)


@pytest.mark.parametrize("count", [1, 19, 21, 49, 52, 300])
def test_every_number_is_that_of_a_plain_loop(count: int) -> None:
    chance = random.Random(count)
    losses = [2.0 + math.sin(at / 9) + 0.3 * chance.random() for at in range(count)]
    for at in range(7, count, 31):
        losses[at] = chance.choice([math.nan, math.inf, 9.0, 40.0])
    norms = [math.inf if chance.random() < 0.3 else 1.0 for _ in range(count)]
    for spike in (2.0, 4.0):
        statistics = RunningStatistics(torch.device("cpu"), EpochStatistics(), spike)
        for loss, norm in zip(losses, norms, strict=True):
            statistics.add_loss(torch.tensor(loss, dtype=torch.float64))
            statistics.add_step(torch.tensor(norm))
        found, expected = statistics.read(), plainly(losses, norms, spike)
        assert vars(found) == pytest.approx(vars(expected))
        after = found.next_epoch()
        assert (after.running, after.seen, after.consecutive) == (found.running, found.seen, found.consecutive)
        assert (after.loss, after.batches, after.skipped, after.spikes, after.largest, after.lost) == (0,) * 6


def test_a_loss_of_exactly_the_limit_is_no_spike() -> None:
    statistics = RunningStatistics(torch.device("cpu"), EpochStatistics(running=1.0, seen=20), spike=4.0)
    statistics.add_loss(torch.tensor(4.0))
    assert statistics.read().spikes == 0
    statistics = RunningStatistics(torch.device("cpu"), EpochStatistics(running=1.0, seen=19), spike=4.0)
    statistics.add_loss(torch.tensor(9.0))  # before the mean says anything
    assert statistics.read().spikes == 0
    statistics.add_loss(torch.tensor(9.0))
    assert statistics.read().spikes == 1
