"""A baseline that finds everything: what `bench --json` wrote, with the truth as its predictions."""

from __future__ import annotations

import copy
from typing import Any


def perfect(document: dict[str, Any]) -> dict[str, Any]:
    """The document with the first artefact alone, its counts and its accuracy those of the truth."""
    found = copy.deepcopy(document)
    found["artifacts"], found["evidence"] = found["artifacts"][:1], found["evidence"][:1]
    entry, evidence = found["artifacts"][0], found["evidence"][0]
    if evidence["kind"] == "pixels":
        evidence["lines"] = [" ".join(map(_word, line.split())) for line in evidence["lines"]]
        entry["miou"] = 1.0
    else:
        evidence["lines"] = [_line(line) for line in evidence["lines"]]
        entry["ap"] = 1.0
    return found


def _word(word: str) -> str:
    truth = "0" if word == "-" else word.split("/")[1]
    return "-" if truth == "0" else f"{truth}/{truth}/{truth}"


def _line(line: str) -> str:
    objects = line.partition("|")[0].split()
    words = [f"{number}:0.9:3ff:0" for number, count in enumerate(objects) for _ in range(int(count))]
    return " ".join([*objects, "|", *words])
