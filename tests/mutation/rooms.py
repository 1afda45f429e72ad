"""Where and of which kind mistakes survive: python -m tests.mutation.rooms [ROOM ...] [--count N] [--seed S]

`operators` makes mistakes in all code but kernels that need a GPU; `--count` of them are drawn, each room as often as
its share of the lines. The tests that are `nearest` run, and of those that run over every room (`FAMILIES`) the ones
that call the function. Prints shares by room and by kind with 95 % intervals (Wilson).
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import math
import random
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from tests.mutation.copies import ROOT, Trial, run_trials
from tests.mutation.drawn import Mutant
from tests.mutation.nearest import FAMILIES, nearest
from tests.mutation.operators import Mistake, apply, mistakes
from tests.mutation.seeded import LASTING

SECONDS = 240
LEFT_OUT = ("plugins/", "selftest/", "qat/fused_unet", "qat/fp4_gemms", "qat/fusion/", "native/", "bench/runtimes/tensorrt",
            "bench/runtimes/ort_rtx", "train/cuda_graph", "export/engine", "train/distributed", "sweep/cluster")  # fmt: skip


def draw(rooms: list[str], count: int, seed: int) -> list[tuple[str, Mistake]]:
    """File and mistake; the same for the same code."""
    found = []
    for path in sorted([*(ROOT / "fp4deploy").rglob("*.py"), *(ROOT / "cli").rglob("*.py")]):
        file = path.relative_to(ROOT).as_posix()
        if not any(each in file for each in LEFT_OUT) and (not rooms or room_of(file) in rooms):
            found += [(file, each) for each in mistakes(path.read_text(encoding="utf-8"))]
    random.Random(seed).shuffle(found)
    return list(itertools.islice(filter(_compiles, found), count))


def room_of(file: str) -> str:
    """The package of a file."""
    parts = Path(file).parts
    return "cli" if parts[0] == "cli" else parts[1].removesuffix(".py")


def _compiles(drawn: tuple[str, Mistake]) -> bool:
    file, mistake = drawn
    try:
        ast.parse(apply((ROOT / file).read_text(encoding="utf-8"), mistake))
    except SyntaxError:
        return False
    return True


class Reached:
    """A plugin of pytest: which functions of the project each test calls."""

    def __init__(self) -> None:
        self.tests: dict[str, list[str]] = {}
        self._codes: set[CodeType] = set()

    def _call(self, frame: FrameType, event: str, argument: Any) -> None:
        self._codes.add(frame.f_code)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        self._codes = set()
        sys.settrace(self._call)  # type: ignore[arg-type]
        try:
            yield
        finally:
            sys.settrace(None)
            for code in self._codes:
                path = Path(code.co_filename)
                if path.is_relative_to(ROOT) and not path.is_relative_to(ROOT / ".venv"):
                    key = f"{path.relative_to(ROOT).as_posix()} {code.co_name}"
                    self.tests.setdefault(key, []).append(item.nodeid)


def reached(cache: Path | None) -> dict[str, list[str]]:
    """File and function -> the tests of every room that call it; `cache`: a file that keeps them."""
    if cache is not None and cache.is_file():
        return dict(json.loads(cache.read_text()))
    plugin = Reached()
    pytest.main(["-q", "-p", "no:cacheprovider", *FAMILIES[:-1]], plugins=[plugin])
    if cache is not None:
        cache.write_text(json.dumps(plugin.tests))
    return plugin.tests


def interval(hits: int, of: int) -> tuple[float, float]:
    """Wilson's interval of a share at 95 %."""
    z, share = 1.96, hits / of
    middle, half = share + z * z / (2 * of), z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    return (middle - half) / (1 + z * z / of), (middle + half) / (1 + z * z / of)


def shares(title: str, rows: list[tuple[str, bool]]) -> None:
    """Print the share of each group."""
    every, noticed = Counter(group for group, _ in rows), Counter(group for group, seen in rows if seen)
    print(f"\n{title:<24} {'drawn':>5} {'noticed':>8} {'share':>6}  95 % interval")
    for group, count in sorted(every.items(), key=lambda item: -item[1]):
        low, high = interval(noticed[group], count)
        print(f"{group:<24} {count:>5} {noticed[group]:>8} {noticed[group] / count:>6.0%}  {low:.0%} to {high:.0%}")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rooms", nargs="*")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only-families", action="store_true", help="without the nearest tests")
    parser.add_argument("--reached", type=Path, help="keep there which test calls what, until tests change")
    chosen = parser.parse_args()
    drawn = draw(chosen.rooms, chosen.count, chosen.seed)
    families, trials, mutants = reached(chosen.reached), [], []
    for file, mistake in drawn:
        text = apply((ROOT / file).read_text(encoding="utf-8"), mistake)
        near = () if chosen.only_families else tuple(each for each in nearest(file) if each not in FAMILIES)
        tests = (*families.get(f"{file} {mistake.function}", ()), *near, FAMILIES[-1])  # that in a process of its own
        mutants.append(Mutant(room_of(file), file, text))
        trials.append(Trial((*tests, "-m", LASTING), file, text))
    rows = []
    for number, outcome in run_trials(trials, chosen.jobs, SECONDS):
        file, mistake = drawn[number]
        if outcome.status in (4, 5):
            raise SystemExit(f"The tests of {file} did not run:\n{outcome.output[-1000:]}")
        seen = outcome.failed and outcome.status is not None
        rows.append((room_of(file), mistake.kind, seen))
        verdict = "noticed" if seen else "SURVIVED"
        print(f"{outcome.seconds:4.0f} s {verdict:<8} {mistake.kind}: {mutants[number].difference()}", flush=True)
    for title, place in (("room", 0), ("kind", 1)):
        shares(title, [(row[place], row[2]) for row in rows])
    shares("all", [("all", row[2]) for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
