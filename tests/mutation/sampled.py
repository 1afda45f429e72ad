"""Mutation testing of the code that decides bytes and verdicts: python -m tests.mutation.sampled [ROOM ...] [--count N]

mutmut's operators change one operator, constant or call at a time in a copy of the checkout; a mutant that no test of
its room notices survives. Of each room `--count` mutants are drawn with a fixed seed, or all where there are fewer.
Prints the score of each room and the survivors. Needs the extra `mutation`; a machine without it runs what
`--draw FILE` wrote on another with `--drawn FILE`.

`tests/mutation/seeded.py` has the faults that are known by name.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mutation.copies import Outcome, Trial, run_trials
from tests.mutation.drawn import Mutant, draw_mutants, read_mutants, write_mutants

SECONDS = 600  # for the tests of a room
HEAD = f"{'room':<10} {'mutants':>8} {'drawn':>6} {'killed':>7} {'survived':>9} {'score':>6} {'seconds':>8}"


@dataclass(frozen=True)
class Room:
    """files: whose functions are mutated; tests: pytest arguments that have to notice, the fastest first."""

    files: tuple[str, ...]
    tests: tuple[str, ...]


ROOMS = {
    "formats": Room(
        tuple(f"fp4deploy/formats/{name}.py" for name in ("blocks", "e2m1", "mxfp4", "nvfp4", "scales")),
        tuple(
            f"tests/formats/test_{name}.py"
            for name in ("contract", "e2m1", "global_scale", "golden", "nvfp4", "layouts")
        ),
    ),
    "gemms": Room(
        ("fp4deploy/qat/operators/gemms.py", "fp4deploy/qat/operators/backward_gemms.py"),
        ("tests/qat/test_gemms.py", "tests/qat/test_gradients.py", "tests/qat/test_spatial_axes.py"),
    ),
    "export": Room(
        ("fp4deploy/export/onnx/qdq.py", "fp4deploy/export/onnx/layer_constants.py"),
        tuple(f"tests/export/onnx/test_{name}.py" for name in ("graph", "layer_forms", "image_size")),
    ),
    "lowering": Room(
        ("fp4deploy/export/lowering/gemm.py",),
        tuple(f"tests/export/lowering/test_{name}.py" for name in ("lowering_gemm", "interface")),
    ),
    "ledger": Room(
        ("fp4deploy/export/ledger/actual.py", "fp4deploy/export/ledger/ledger.py"), ("tests/export/ledger",)
    ),
    "metrics": Room(("fp4deploy/metrics.py",), ("tests/test_metrics.py",)),
    "gate": Room(
        tuple(f"fp4deploy/bench/gate/{name}.py" for name in ("baseline", "bootstrap", "decision")),
        ("tests/bench/test_gate.py",),
    ),
    "packed": Room(
        ("fp4deploy/packed/check.py", "fp4deploy/packed/shapes.py"),
        tuple(f"tests/packed/test_{name}.py" for name in ("packed_check", "mutations", "memory", "shapes")),
    ),
}  # fmt: skip


def draw(rooms: list[str], count: int, seed: int) -> tuple[dict[str, int], list[Mutant]]:
    """How many mutants each room has, and those that are tested."""
    found = {name: draw_mutants(name, ROOMS[name].files, count, seed) for name in rooms}
    return {name: every for name, (every, _) in found.items()}, [each for _, drawn in found.values() for each in drawn]


def run_mutants(mutants: list[Mutant], jobs: int) -> dict[int, Outcome]:
    """The outcome of each mutant; ends the command where the tests of a room fail without a change."""
    rooms = sorted({mutant.room for mutant in mutants})
    for number, outcome in run_trials([Trial(ROOMS[room].tests) for room in rooms], jobs, SECONDS):
        print(f"{rooms[number]}: tests of {outcome.seconds:.0f} s", file=sys.stderr, flush=True)
        if outcome.status != 0:
            raise SystemExit(f"{rooms[number]}: its tests fail without a change:\n{outcome.output[-2000:]}")
    trials = [Trial(ROOMS[mutant.room].tests, mutant.file, mutant.text) for mutant in mutants]
    found = {}
    for number, outcome in run_trials(trials, jobs, SECONDS):
        found[number] = outcome
        verdict = "killed" if outcome.failed else "survived"
        print(f"{outcome.seconds:5.0f} s {verdict:<8} {mutants[number].difference()}", file=sys.stderr, flush=True)
    return found


def row_of(room: str, every: int, outcomes: list[tuple[Mutant, Outcome]]) -> dict[str, Any]:
    """Counts and survivors of one room; prints them."""
    survivors = [mutant.difference() for mutant, outcome in outcomes if not outcome.failed]
    drawn, seconds = len(outcomes), sum(outcome.seconds for _, outcome in outcomes)
    killed = drawn - len(survivors)
    share = f"{killed / drawn:.0%}"
    print(f"{room:<10} {every:>8} {drawn:>6} {killed:>7} {len(survivors):>9} {share:>6} {seconds:>8.0f}", flush=True)
    for place, *lines in survivors:
        print("\n      ".join((f"  {place}", *lines)))
    numbers = {"mutants": every, "drawn": drawn, "killed": killed, "survived": len(survivors)}
    return {
        "room": room,
        "files": list(ROOMS[room].files),
        **numbers,
        "seconds": round(seconds),
        "survivors": survivors,
    }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rooms", nargs="*", help=f"of {', '.join(ROOMS)}; all by default")
    parser.add_argument("--count", type=int, default=30, help="mutants of a room")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time, each in a copy of the checkout")
    parser.add_argument("--json", type=Path, help="write the table as JSON; rooms that are in it already are replaced")
    parser.add_argument("--draw", type=Path, help="write the mutants to a file, and test none")
    parser.add_argument("--drawn", type=Path, help="test the mutants of such a file")
    chosen = parser.parse_args()
    rooms = chosen.rooms or list(ROOMS)
    counts, mutants = read_mutants(chosen.drawn) if chosen.drawn else draw(rooms, chosen.count, chosen.seed)
    if chosen.draw:
        write_mutants(chosen.draw, counts, mutants)
        return 0
    mutants = [mutant for mutant in mutants if mutant.room in rooms]
    outcomes = run_mutants(mutants, chosen.jobs)
    print(HEAD)
    for room in [name for name in ROOMS if name in rooms]:
        of_room = [(mutant, outcomes[number]) for number, mutant in enumerate(mutants) if mutant.room == room]
        row = row_of(room, counts[room], of_room)
        if chosen.json:
            _keep(
                chosen.json, f"python -m tests.mutation.sampled {room} --count {chosen.count} --seed {chosen.seed}", row
            )
    return 0


def _keep(path: Path, command: str, row: dict[str, Any]) -> None:
    """Put the row of a room into a file, with the command and the machine that made it; other rows stay."""
    from fp4deploy.bench.environment import environment

    machine = environment()
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []
    made = {"command": command, "cpu": machine["cpu"], "cores": machine["cores"]}
    found = {each["room"]: each for each in rows} | {row["room"]: {**row, **made}}
    ordered = [found[name] for name in ROOMS if name in found]
    path.write_text(json.dumps({"command": command, "machine": machine, "rows": ordered}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
