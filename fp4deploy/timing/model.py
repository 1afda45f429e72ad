"""The formula: what the busiest multiprocessor does, and bytes through two levels of memory.

    cycles   =  sum over kinds of  factor(kind) x cycles(kind)                   `launches`, `library`
    time     =  launch + norm_p( cycles / clock,  moved / bandwidth,  cached / bandwidth of L2 )

`norm_p` lies between the sum (p = 1: nothing overlaps) and the maximum (p large: everything does). Kinds of cycles are
those of tensor cores at the rate that the GPU reaches, of issuing the instructions of the main loop, of waiting in each
of its steps, and of what a thread block does before and after it. Waves need no factor: the busiest multiprocessor has
ceil(programs / multiprocessors) programs, as many at a time as registers and shared memory allow.

Factors belong to a family of kernels and are none of a GPU's. They were fitted to half of the layers in `fitted.json`'s
source; the error bar is that of the other half: nine in ten of its layers lie in it. On a GPU of another architecture
the bar is the same one, and nobody has measured that it holds there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from fp4deploy.peaks import Gpu

L2_BYTES = 64.0  # a cycle of a multiprocessor, before the fitted factor
RESIDENT_SHARE = 0.5  # of the L2 cache that a layer's operands may fill and still be there when they are read again
FITTED = Path(__file__).with_name("fitted.json")


@dataclass(frozen=True)
class Work:
    """What one kernel does.

    family: whose factors; cycles: by kind, of the busiest multiprocessor; moved: bytes that it must read and write,
    each once; cached: bytes that its thread blocks read and write; outside: why the family was not fitted to such a
    layer, empty where it was.
    """

    family: str
    cycles: Mapping[str, float]
    moved: float
    cached: float
    outside: str = ""


@dataclass(frozen=True)
class Time:
    """Milliseconds, and between which nine in ten layers would be measured."""

    ms: float
    low: float
    high: float

    def __add__(self, other: Time) -> Time:
        """Of both, one after the other; errors of one family have one sign, so that bars add up."""
        return Time(self.ms + other.ms, self.low + other.low, self.high + other.high)


NOTHING = Time(0.0, 0.0, 0.0)


@lru_cache
def fitted() -> dict[str, Any]:
    """Families with their factors and error, and what they were fitted to."""
    found: dict[str, Any] = json.loads(FITTED.read_text(encoding="utf-8"))  # noqa: TID251  of this package
    return found


def microseconds(work: Work, factors: Mapping[str, float], gpu: Gpu, warm: bool = True) -> float:
    """The formula with given factors; warm: operands that fit the L2 cache are in it."""
    busy = sum(factors[kind] * value for kind, value in work.cycles.items()) / (1e3 * gpu.clock)
    moved = 0.0 if warm and work.moved < RESIDENT_SHARE * gpu.l2 else work.moved
    memory = factors["memory"] * 1e6 * moved / gpu.bytes_per_second
    cache = factors["cache"] * work.cached / (1e3 * L2_BYTES * gpu.num_sms * gpu.clock)
    power = 1 + factors["power"]
    return float(factors["launch"] + (busy**power + memory**power + cache**power) ** (1 / power))


def error_bar(family: str) -> str:
    """ "0.87 to 1.16 of it, of 120 held-out times on one H200": where nine in ten measured times of a family lie."""
    error = fitted()["families"][family]["held_out"]
    low, high = 1 / error["p95"], 1 / error["p5"]
    return f"{low:.2f} to {high:.2f} of it for nine in ten of {error['times']} held-out times on one {fitted()['gpu']}"


def time_of(work: Work, gpu: Gpu, warm: bool = True) -> Time:
    """The time of a kernel with the error bar of its family."""
    family = fitted()["families"][work.family]
    ms = microseconds(work, family["factors"], gpu, warm) / 1e3
    error = family["held_out"]  # percentiles of predicted over measured
    return Time(ms, ms / error["p95"], ms / error["p5"])
