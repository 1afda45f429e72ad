"""What share of mistakes the tests notice: python -m tests.mutation.rooms REACHED [--count N] [--seed S] [--json FILE]

`operators` makes mistakes in all code but what needs a GPU. Of every room as many are drawn as its weight says: most where
a user relies on an answer that nobody sees made; there each kind is as likely as another. Of each mistake the tests run that execute its lines (REACHED is what
`python -m tests.mutation.reached REACHED` wrote), those of its room and recorded answers first, the fast ones before the slow ones, for
`--budget` seconds as they took then; then the others of their files, whose caches may hide a line. Where none executes it
in the process of the tests, the files that are `nearest` run. A test that fails without the mistake as well does not count.

Prints shares by room and by kind with 95 % intervals (Wilson). In the file, a survivor that changes no answer, or code for a
GPU or a library that the machine lacks, is marked by hand with the reason, as "left_out"; `--read FILE` prints the shares without.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import random
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mutation.copies import ROOT, Outcome, Trial, run_trials
from tests.mutation.nearest import FAMILIES, nearest
from tests.mutation.operators import Mistake, apply, mistakes
from tests.mutation.reached import LASTING, Reached

SECONDS = 300
WEIGHTS = {
    "audit": 3, "bench": 3, "bench/gate": 3, "cli": 2, "data": 6, "detection": 1, "experiments": 2, "export": 4,
    "export/ledger": 2, "export/lowering": 3, "export/onnx": 3, "export/verify": 4, "formats": 5, "fusion": 1, "graph": 3,
    "instances": 2, "interop": 5, "metrics": 3, "models": 2, "packed": 6, "predict": 4, "ptq": 4, "qat": 5, "report": 2,
    "serving": 1, "system": 1, "tasks": 1, "train": 8,
}  # fmt: skip
LEFT_OUT = ("plugins/", "selftest/", "qat/fused_unet", "qat/fp4_gemms", "qat/fusion/", "native/", "bench/runtimes/tensorrt",
            "bench/runtimes/ort_rtx", "train/cuda_graph", "export/engine", "train/distributed", "sweep/cluster")  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """kind: of the mistake; text: the file with it; lines: which a test executes to meet it."""

    room: str
    file: str
    kind: str
    text: str
    lines: range

    def difference(self) -> list[str]:
        """The lines that differ, as a diff with the number of the first."""
        before = (ROOT / self.file).read_text(encoding="utf-8").splitlines()
        lines = list(difflib.unified_diff(before, self.text.splitlines(), n=0, lineterm=""))[2:]
        place = lines[0].split()[1].lstrip("-").partition(",")[0]
        return [f"{self.file}:{place}", *[" ".join((line[0], line[1:].strip())) for line in lines if line[0] in "+-"]]


def room_of(file: str) -> str:
    """The longest of the rooms that a file lies in, nothing where it is in none."""
    place = file.removeprefix("fp4deploy/").removesuffix(".py") + "/"
    return max((room for room in WEIGHTS if place.startswith(f"{room}/")), key=len, default="")


def draw(rooms: Iterable[str], count: int, seed: int) -> tuple[dict[str, int], list[Mutant]]:
    """How many mistakes each room has, and `count` that were drawn; the same for the same code."""
    found = defaultdict[str, list[tuple[str, str, Mistake]]](list)
    for path in sorted([*(ROOT / "fp4deploy").rglob("*.py"), *(ROOT / "cli").rglob("*.py")]):
        file = path.relative_to(ROOT).as_posix()
        room = room_of(file)
        if room and (not rooms or room in rooms) and not any(each in file for each in LEFT_OUT):
            text = path.read_text(encoding="utf-8")
            found[room] += [(file, text, each) for each in mistakes(text)]
    counts = {room: len(every) for room, every in found.items()}
    chance, drawn = random.Random(seed), list[Mutant]()
    total, due = sum(WEIGHTS[room] for room in found), 0.0
    for room, every in found.items():
        chance.shuffle(every)
        kinds = sorted({each.kind for _, _, each in every})
        due += count * WEIGHTS[room] / total
        while len(drawn) < round(due):
            kind = chance.choice(kinds)
            place = next((place for place, (_, _, each) in enumerate(every) if each.kind == kind), None)
            if place is None:
                continue
            file, text, each = every.pop(place)
            if _compiles(changed := apply(text, each)) and changed.splitlines() != text.splitlines():
                drawn.append(Mutant(room, file, each.kind, changed, each.lines))
    chance.shuffle(drawn)  # so that a run that is stopped has an even sample, too
    return counts, drawn


def _compiles(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def tests_of(mutant: Mutant, reached: Reached, budget: float) -> tuple[str, ...]:
    """Node ids, in the order to run them in; nothing where no test executes a line of the mutant."""
    home = f"tests/{mutant.room.partition('/')[0]}/", "tests/contract/"  # recorded answers are of every room

    def affordable(tests: Iterable[str], seconds: float) -> list[str]:
        found = list[str]()
        for test in sorted(tests, key=lambda test: (not test.startswith(home), reached.seconds[test])):
            seconds -= reached.seconds[test]
            if seconds < 0 and found:
                break
            found.append(test)
        return found

    direct = affordable(reached.tests(mutant.file, mutant.lines), budget)
    files = {test.partition("::")[0] for test in direct}
    beside = [test for test in reached.seconds if test.partition("::")[0] in files and test not in direct]
    return (*direct, *affordable(beside, budget / 2)) if direct else ()


def trial_of(mutant: Mutant, reached: Reached, budget: float, without: set[str]) -> Trial:
    """Its tests with the mutant in place."""
    tests = tuple(test for test in tests_of(mutant, reached, budget) if test not in without)
    near = tuple(each for each in nearest(mutant.file) if each not in FAMILIES)
    files = tuple(dict.fromkeys(test.partition("::")[0] for test in tests)) or near
    return Trial((*files, "-m", LASTING), mutant.file, mutant.text, tests)


def failures(outcome: Outcome) -> list[str]:
    """Node ids of the tests that failed, as pytest prints them."""
    return re.findall(r"^(?:FAILED|ERROR) ([^\s\[]+(?:\[.*?\](?= - |$))?)", outcome.output, re.MULTILINE)


def run_mutants(
    mutants: list[Mutant], reached: Reached, budget: float, jobs: int, keep: Callable[[list[dict[str, Any]]], None]
) -> list[dict[str, Any]]:
    """A row for each mutant; prints them as they come, and `keep` is given all so far."""
    rows: dict[int, dict[str, Any]] = {}
    waiting, without = list(range(len(mutants))), set[str]()
    while waiting:
        trials = [trial_of(mutants[number], reached, budget, without) for number in waiting]
        noticed = dict[int, list[str]]()
        for index, outcome in run_trials(trials, jobs, SECONDS):
            number, mutant = waiting[index], mutants[waiting[index]]
            if outcome.status in (4, 5):
                raise SystemExit(f"The tests of {mutant.file} did not run:\n{outcome.output[-2000:]}")
            seen = outcome.failed
            rows[number] = {
                "room": mutant.room, "kind": mutant.kind, "noticed": seen, "difference": mutant.difference(),
                "tests": len(trials[index].only), "seconds": round(outcome.seconds),
                "by": (failures(outcome) or ["what did not end"])[0] if seen else "",
            }  # fmt: skip
            if seen:
                noticed[number] = failures(outcome)
            verdict = f"noticed by {rows[number]['by']}" if seen else f"SURVIVED {len(trials[index].only)} tests"
            print(f"{number:3} {outcome.seconds:4.0f} s {mutant.kind}: {mutant.difference()} {verdict}", flush=True)
            keep([rows[number] for number in sorted(rows)])
        names = tuple({name for each in noticed.values() for name in each[:1]})
        files = tuple({name.partition("::")[0] for name in names})
        wrong = set[str]()  # what fails without a mistake as well
        for _, outcome in run_trials(
            [Trial((*files, "-m", LASTING), only=names, first=False)] if names else [], 1, 3600
        ):
            wrong = set(failures(outcome))
        without |= wrong
        waiting = [number for number, each in noticed.items() if wrong & set(each[:1])]
        for name in wrong:
            print(f"fails without a mistake: {name}", flush=True)
    return [rows[number] for number in sorted(rows)]


def print_shares(rows: list[dict[str, Any]]) -> None:
    """Shares of each room, each kind and all."""
    from docs.tables.results import wilson  # imports the package, which a process that is forked must not have

    same = [row for row in rows if "left_out" in row]
    counted = [{**row, "all": "all"} for row in rows if "left_out" not in row]
    for title in ("room", "kind", "all"):
        every = Counter(row[title] for row in counted)
        noticed = Counter(row[title] for row in counted if row["noticed"])
        print(f"\n{title:<24} {'drawn':>5} {'noticed':>8} {'share':>6}  95 % interval")
        for group, count in sorted(every.items(), key=lambda item: (-item[1], item[0])):
            low, high = wilson(noticed[group], count)
            print(f"{group:<24} {count:>5} {noticed[group]:>8} {noticed[group] / count:>6.0%}  {low:.0%} to {high:.0%}")
    print(f"\n{len(same)} more are left out, for their reasons")


def _about(chosen: argparse.Namespace) -> dict[str, Any]:
    """The command, and the commit of what was changed and of the tests."""
    named = f" --rooms {' '.join(chosen.rooms)}" if chosen.rooms else ""
    command = f"python -m tests.mutation.rooms --count {chosen.count} --seed {chosen.seed} --budget {chosen.budget:g}"
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    return {"command": command + named, "commit": head.stdout.strip()}


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reached", type=Path, nargs="?", default=Path("build/reached"))
    parser.add_argument("--rooms", nargs="*", default=())
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=float, default=15.0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, help="add every row to such a file")
    parser.add_argument("--read", type=Path, help="print the shares of such a file")
    chosen = parser.parse_args()
    if chosen.read:
        for each in json.loads(chosen.read.read_text(encoding="utf-8"))["runs"]:
            print(f"\n{each['command']}")
            print_shares(each["rows"])
        return 0
    counts, mutants = draw(chosen.rooms, chosen.count, chosen.seed)
    known = json.loads(chosen.json.read_text(encoding="utf-8"))["runs"] if chosen.json and chosen.json.is_file() else []
    about = _about(chosen) | {"mistakes": counts, "drawn": len(mutants)}

    def keep(rows: list[dict[str, Any]]) -> None:
        if chosen.json:
            content = json.dumps({"runs": [*known, about | {"rows": rows}]}, indent=1)
            chosen.json.write_text(content + "\n", encoding="utf-8")

    rows = run_mutants(mutants, Reached(chosen.reached), chosen.budget, chosen.jobs, keep)
    print_shares(rows)
    from fp4deploy.bench.environment import environment  # what is forked before has not imported the package

    about["machine"] = environment()
    keep(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
