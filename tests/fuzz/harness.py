"""Runs mutated files through a loader and counts: refused in words, accepted, or a defect.

The property: a file that is mutated in any way is refused by an `Fp4DeployError`, or it is accepted and can be used. A
defect is any other exception, more than `MAX_SECONDS`, more than `MAX_BYTES` of memory, or the end of the process.
"""

from __future__ import annotations

import random
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from fp4deploy.errors import Fp4DeployError
from tests.fuzz.mutate import Mutate

MAX_SECONDS = 10
MAX_BYTES = 2 << 30


@dataclass(frozen=True)
class Loader:
    """What reads one kind of file, and uses what it read.

    load: gets the path of the mutated file. seeds: contents that are read without an error.
    file: where the mutated content goes below the folder of the harness; `place` makes the files beside it.
    """

    name: str
    file: str
    seeds: tuple[bytes, ...]
    mutate: Mutate
    load: Callable[[Path], object]


@dataclass
class Outcome:
    """Counts of one loader; `defects` names the case and the exception."""

    loader: str
    cases: int = 0
    refused: int = 0
    accepted: int = 0
    defects: list[str] = field(default_factory=list)

    def row(self) -> str:
        """A line of the table."""
        return f"{self.loader:<12} {self.cases:>7} {self.refused:>8} {self.accepted:>9} {len(self.defects):>8}"


HEAD = f"{'loader':<12} {'cases':>7} {'refused':>8} {'accepted':>9} {'defects':>8}"


class Slow(BaseException):
    """A case took more than `MAX_SECONDS`."""


def case(loader: Loader, number: int) -> bytes:
    """The content of one case, the same on every machine."""
    draw = random.Random(f"{loader.name} {number}")
    return loader.mutate(draw.choice(loader.seeds), draw)


def run_case(loader: Loader, number: int, folder: Path, outcome: Outcome) -> None:
    """Write a case, read it, count it."""
    path = folder / loader.file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(case(loader, number))
    outcome.cases += 1
    start = time.perf_counter()
    previous = signal.signal(signal.SIGALRM, _slow)
    signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loader.load(path)
        outcome.accepted += 1
    except Fp4DeployError as error:
        outcome.refused += 1
        if len(str(error)) > 4000 or "\x1b" in str(error):
            outcome.defects.append(f"case {number}: a message of {len(str(error))} characters, or with escapes")
    except Slow:
        outcome.defects.append(f"case {number}: more than {MAX_SECONDS} s")
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        outcome.defects.append(f"case {number}: {type(error).__name__} at {where}: {str(error)[:120]!r}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    if time.perf_counter() - start > MAX_SECONDS:
        outcome.defects.append(f"case {number}: more than {MAX_SECONDS} s")


def _slow(_number: int, _frame: FrameType | None) -> None:
    raise Slow
