"""Mutation testing of the code that decides bytes and verdicts: python -m tests.mutation.sampled [ROOM ...] [--count N]

mutmut changes one operator, constant or call at a time in a copy of the checkout; a mutant that no test of its room
notices survives. Of each room `--count` mutants are drawn with a fixed seed, or all where there are fewer. Prints the
score of each room and the survivors. Needs the extra `mutation`.

`tests/mutation/seeded.py` has the faults that are known by name.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp4deploy.bench.environment import environment
from tests.mutation.copies import copy_to, run_python

SECONDS = 3600  # for one room
KILLED = ("killed", "timeout")  # other verdicts: survived, no tests, not checked, suspicious
HEAD = f"{'room':<10} {'mutants':>8} {'drawn':>6} {'killed':>7} {'survived':>9} {'score':>6}"


@dataclass(frozen=True)
class Room:
    """files: whose functions are mutated; tests: pytest arguments that have to notice."""

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
        ("fp4deploy/qat/gemms.py", "fp4deploy/qat/backward_gemms.py"),
        ("tests/qat/test_gemms.py", "tests/qat/test_gradients.py", "tests/qat/test_spatial_axes.py"),
    ),
    "export": Room(
        ("fp4deploy/export/onnx/qdq.py", "fp4deploy/export/onnx/layer_constants.py"),
        ("tests/export/onnx/test_graph.py", "tests/export/onnx/test_layer_forms.py"),
    ),
    "lowering": Room(("fp4deploy/export/lowering/gemm.py",), ("tests/export/lowering/test_lowering_gemm.py",)),
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
        ("tests/packed/test_packed_check.py", "tests/packed/test_mutations.py"),
    ),
}  # fmt: skip

SETTINGS = """[mutmut]
source_paths=fp4deploy
only_mutate=
    {files}
pytest_add_cli_args_test_selection=
    {tests}
pytest_add_cli_args=
    -p
    no:cacheprovider
    -x
also_copy=
    cli
    benchmarks
    configs
    examples
use_git_change_detection=false
track_dependencies=false
process_isolation=fork
timeout_multiplier=10
"""


def names_of(folder: Path) -> list[str]:
    """All mutants that mutmut has made in a copy, in order."""
    found: list[str] = []
    for path in sorted((folder / "mutants" / "fp4deploy").rglob("*.py")):
        module = ".".join(path.relative_to(folder / "mutants").with_suffix("").parts)
        found += [
            f"{module}.{name}" for name in re.findall(r"^def (x\w*__mutmut_\d+)\(", path.read_text(), re.MULTILINE)
        ]
        found += [
            f"{module}.{name}" for name in re.findall(r"^    def (x\w*__mutmut_\d+)\(", path.read_text(), re.MULTILINE)
        ]
    return found


def mutate(name: str, count: int, seed: int) -> dict[str, Any]:
    """Mutate one room; prints its row and its survivors, and returns the row."""
    room = ROOMS[name]
    with tempfile.TemporaryDirectory() as base:
        folder, output = copy_to(Path(base) / "copy"), Path(base) / "output.txt"
        settings = SETTINGS.format(files="\n    ".join(room.files), tests="\n    ".join(room.tests))
        (folder / "setup.cfg").write_text(settings, encoding="utf-8")
        run_python(folder, "-m", "mutmut", "run", "no.such.mutant", seconds=SECONDS, output=output)  # makes them all
        every = names_of(folder)
        if not every:
            raise SystemExit(f"{name}: mutmut made no mutants:\n{output.read_text(encoding='utf-8')[-2000:]}")
        drawn = sorted(random.Random(seed).sample(every, min(count, len(every))))
        run_python(folder, "-m", "mutmut", "run", "--max-children", "1", *drawn, seconds=SECONDS, output=output)
        text = _results(folder)
        verdicts = {mutant: text.get(mutant, "not run") for mutant in drawn}
        survivors = [mutant for mutant, verdict in verdicts.items() if verdict not in KILLED]
        killed = len(drawn) - len(survivors)
        share = f"{killed / len(drawn):.0%}"
        print(f"{name:<10} {len(every):>8} {len(drawn):>6} {killed:>7} {len(survivors):>9} {share:>6}", flush=True)
        for mutant in survivors:
            print(f"  {verdicts[mutant]}: {mutant}")
            for line in _difference(folder, mutant):
                print(f"      {line}")
    numbers = {"mutants": len(every), "drawn": len(drawn), "killed": killed, "survived": len(survivors)}
    return {"room": name, "files": list(room.files), **numbers, "survivors": survivors}


def _results(folder: Path) -> dict[str, str]:
    output = folder / "results.txt"
    run_python(folder, "-m", "mutmut", "results", "--all", "true", seconds=300, output=output)
    found = re.findall(r"^\s*(\S+__mutmut_\d+): (.+)$", output.read_text(encoding="utf-8"), re.MULTILINE)
    return dict(found)


def _difference(folder: Path, mutant: str) -> list[str]:
    output = folder / "difference.txt"
    with contextlib.suppress(subprocess.SubprocessError):
        run_python(folder, "-m", "mutmut", "show", mutant, seconds=120, output=output)
    lines = output.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if re.match(r"[+-](?![+-])", line)]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rooms", nargs="*", help=f"of {', '.join(ROOMS)}; all by default")
    parser.add_argument("--count", type=int, default=60, help="mutants of a room")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the table as JSON; rooms that are in it already are replaced")
    chosen = parser.parse_args()
    print(HEAD, flush=True)
    for name in chosen.rooms or ROOMS:
        row = mutate(name, chosen.count, chosen.seed)
        if chosen.json:
            _keep(chosen.json, f"python -m tests.mutation.sampled --count {chosen.count} --seed {chosen.seed}", row)
    return 0


def _keep(path: Path, command: str, row: dict[str, Any]) -> None:
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []
    rows = [each for each in rows if each["room"] != row["room"]] + [row]
    path.write_text(json.dumps({"command": command, "machine": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
