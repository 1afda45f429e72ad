"""Fuzzing at length: python -m tests.fuzz [--cases N] [--only NAME ...] [--json FILE]

Each loader runs in a process of its own with `MAX_BYTES` of memory more than it begins with, so that a crash or a
hunger for memory is a defect of one case. Prints the table of outcomes and every defect; exits 1 if there is one. It
may be run in pieces. `--jobs` processes run at a time: each takes a part of the cases of one loader.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

from fp4deploy.bench.environment import environment
from tests.fuzz.harness import HEAD, MAX_BYTES, Outcome, run_case
from tests.fuzz.loaders import loaders
from tests.fuzz.test_fuzz import NAMES

SLOW = {
    "packed": 10,
    "onnx": 10,
    "checkpoint": 5,
    "annotations": 5,
    "report": 5,
    "sweep": 5,
    "served": 10,
    "boxes": 5,
    "roboflow": 10,
    "imported": 5,
    "listing": 5,
    "colours": 5,
    "counts": 5,
    "predicted": 5,
}  # share of the cases
PART = 50  # cases that are worth a process


def work(name: str, first: int, last: int, folder: str, result: str) -> None:
    """Run the cases [first, last) of one loader; `result` holds the counts after each."""
    home = Path(folder)
    loader = loaders(home / "seeds")[name]
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + MAX_BYTES, used + MAX_BYTES))
    outcome = Outcome(name)
    for number in range(first, last):
        run_case(loader, number, home / "work", outcome)
        if number % 50 == 0 or number == last - 1 or outcome.defects:
            Path(result).write_text(json.dumps(vars(outcome)))


def fuzz(name: str, first: int, last: int) -> Outcome:
    """The cases [first, last) of one loader; where its process ends, that is a defect, and another goes on later."""
    total = Outcome(name)
    context = multiprocessing.get_context("forkserver")
    while first < last:
        with tempfile.TemporaryDirectory() as folder:
            result = f"{folder}/result.json"
            child = context.Process(target=work, args=(name, first, last, folder, result))
            child.start()
            child.join()
            found = json.loads(Path(result).read_text()) if Path(result).is_file() else {"cases": 0}
        for key in ("cases", "refused", "accepted"):
            setattr(total, key, getattr(total, key) + found.get(key, 0))
        total.defects += found.get("defects", [])
        if child.exitcode == 0 or first + found["cases"] == last:  # a fork server may lose a status
            break
        first += found["cases"] + 50
        total.defects.append(f"its process ended with {child.exitcode} in the 50 cases before {first}")
    return total


def fuzz_in_parts(name: str, cases: int, pool: ThreadPoolExecutor, jobs: int) -> list[Future[Outcome]]:
    """All cases of one loader, in parts of equal size: as many as run at a time, of at least `PART` cases."""
    parts = min(jobs, max(1, cases // PART))
    edges = [cases * part // parts for part in range(parts + 1)]
    return [pool.submit(fuzz, name, first, last) for first, last in pairwise(edges)]


def total_of(parts: list[Outcome]) -> Outcome:
    """The outcome of one loader."""
    defects = [each for part in parts for each in part.defects]
    counts = [sum(getattr(part, key) for part in parts) for key in ("cases", "refused", "accepted")]
    return Outcome(parts[0].loader, *counts, defects)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=4000)
    parser.add_argument("--only", nargs="*", choices=NAMES, default=NAMES)
    parser.add_argument("--json", type=Path, help="write the table as JSON; loaders that are in it are replaced")
    parser.add_argument("--whole", action="store_true", help="as many cases of slow loaders as of the others")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    chosen = parser.parse_args()
    counts = {name: max(50, chosen.cases // (1 if chosen.whole else SLOW.get(name, 1))) for name in chosen.only}
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.fuzz.loaders"])  # importing torch is slow
    print(HEAD, flush=True)
    defects: list[str] = []
    with ThreadPoolExecutor(chosen.jobs) as pool:
        running = {name: fuzz_in_parts(name, cases, pool, chosen.jobs) for name, cases in counts.items()}
        for name, parts in running.items():
            outcome = total_of([part.result() for part in parts])
            print(outcome.row(), flush=True)
            if chosen.json:
                command = f"python -m tests.fuzz --cases {chosen.cases}" + " --whole" * chosen.whole
                keep(chosen.json, command, {**vars(outcome), "defects": len(outcome.defects)})
            defects += [f"{name}, {each}" for each in outcome.defects]
    for each in defects:
        print(each)
    return 1 if defects else 0


def keep(path: Path, command: str, row: dict[str, object]) -> None:
    """Put the row of a loader into a file, with the command and the machine that make it; other rows stay."""
    before = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []
    machine = environment()
    made = {"command": f"{command} --only {row['loader']}", "cpu": machine["cpu"], "cores": machine["cores"]}
    rows = {each["loader"]: each for each in before} | {row["loader"]: {**row, **made}}
    ordered = [rows[name] for name in NAMES if name in rows]
    text = json.dumps({"command": command, "machine": machine, "rows": ordered}, indent=1) + "\n"
    path.write_text(text, encoding="utf-8")
