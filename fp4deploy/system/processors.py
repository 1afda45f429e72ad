"""How many processors this process may use, and whether others use them too.

A container with two of 64 processors (`docker run --cpus 2`, Kubernetes limits) shows all 64: what it may use is a
quota of time, and 64 threads that share two processors wait for each other at the end of every operator. Linux tells
the quota in the files of the control group; Python and torch do not read them.
"""

from __future__ import annotations

import math
import os
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

CONTROL_GROUP = Path("/sys/fs/cgroup")
THREADS, WAITING = "OMP_NUM_THREADS", "OMP_WAIT_POLICY"
BUSY = 1.5  # processes that want to run, for each processor


def cores(group: Path = CONTROL_GROUP) -> int:
    """CPU cores this process may use: those it is bound to, or fewer by the quota of its control group."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(group)
    return bound if quota is None else max(1, min(bound, math.ceil(quota)))


def limit_threads(environ: MutableMapping[str, str], group: Path = CONTROL_GROUP) -> None:
    """Let libraries that are imported later, here and in children, start as many threads as there are cores, and on a
    busy machine let threads that wait for others give their processor away.

    Waiting threads spin by default. Ten processes on two cores (2026-11-29): 2.5 training steps a second of a small
    network, 6 to 9 with passive waiting, 13 with one thread. The number of threads would change sums, and is not
    touched. Nothing is changed where the user has said how, or where no quota makes the cores fewer.
    """
    if THREADS not in environ and cores(group) < (os.cpu_count() or 1):
        environ[THREADS] = str(cores(group))
    if busy():
        environ.setdefault(WAITING, "passive")


def busy() -> str | None:
    """That other processes keep the processors busy, in a sentence; None where they do not, or nobody tells."""
    try:
        load = os.getloadavg()[0]
    except (OSError, AttributeError):  # no such function on Windows
        return None
    count = os.cpu_count() or 1
    if load < BUSY * count:
        return None
    return (
        f"This machine is busy: {load:.0f} processes want its {count} processors, so that times on the CPU are longer "
        f"than on an idle one, those of torch most, whose threads wait for each other ({THREADS}=1 has one)."
    )


def _quota(group: Path) -> float | None:
    """Processors by the quota, of version 2 or 1 of control groups; None where there is none."""
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = (group / "cpu.max").read_text(encoding="ascii").split()
        return None if quota == "max" else int(quota) / int(period)
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = (
            (group / "cpu" / f"cpu.cfs_{name}_us").read_text(encoding="ascii") for name in ("quota", "period")
        )
        return int(quota) / int(period) if int(quota) > 0 else None
    return None
