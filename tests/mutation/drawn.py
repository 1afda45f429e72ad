"""Mutants of a file: mutmut's operators, one place at a time, each as the whole text of the changed file.

mutmut itself calls mutants through a decorator in the code under test; here the file is as it would be if somebody had
made the mistake.
"""

from __future__ import annotations

import difflib
import json
import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.mutation.copies import ROOT


@dataclass(frozen=True)
class Mutant:
    """file: relative to the checkout; text: its content with the change."""

    room: str
    file: str
    text: str

    def difference(self) -> list[str]:
        """The lines that differ, as a diff with the number of the first."""
        before = (ROOT / self.file).read_text(encoding="utf-8").splitlines()
        lines = list(difflib.unified_diff(before, self.text.splitlines(), n=0, lineterm=""))[2:]
        place = lines[0].split()[1].lstrip("-").partition(",")[0]
        return [f"{self.file}:{place}", *[" ".join((line[0], line[1:].strip())) for line in lines if line[0] in "+-"]]


def draw_mutants(room: str, files: Iterable[str], count: int, seed: int) -> tuple[int, list[Mutant]]:
    """How many mutants the functions of some files have, and `count` of them, or all where there are fewer."""
    from libcst import FunctionDef
    from mutmut.mutation.file_mutation import create_mutations

    every = []
    for file in files:
        module, mutations, _, _ = create_mutations(file, (ROOT / file).read_text(encoding="utf-8"))
        inside = [each for each in mutations if isinstance(each.contained_by_top_level_function, FunctionDef)]
        every += [(file, module, each) for each in inside]
    drawn = random.Random(seed).sample(range(len(every)), min(count, len(every)))
    found = []
    for number in sorted(drawn):
        file, module, each = every[number]
        changed = module.deep_replace(each.original_node, each.mutated_node)
        found.append(Mutant(room, file, changed.code))
    return len(every), found


def write_mutants(path: Path, counts: dict[str, int], mutants: list[Mutant]) -> None:
    """Write mutants for a machine without mutmut."""
    path.write_text(json.dumps({"counts": counts, "mutants": [asdict(each) for each in mutants]}), encoding="utf-8")


def read_mutants(path: Path) -> tuple[dict[str, int], list[Mutant]]:
    """How many mutants each room has, and those that were drawn."""
    found = json.loads(path.read_text(encoding="utf-8"))
    return found["counts"], [Mutant(**each) for each in found["mutants"]]
