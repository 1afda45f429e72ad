"""What functions answer to fixed, awkward arguments: every combination of options, in every room.

`recorded/results.json` holds it. Whatever a change of the code does to one of these answers is seen, whether a formula,
a threshold, an option that is no longer read, or the order of two arguments. Where a formula has an independent
implementation, other tests compare with that; here the answers are those of the day that they were recorded on.

Arguments are not square, not in order, have ties, voids, empty classes and images, and more than one of everything.
An array is recorded as its shape and four sums, so that a single element and the order count.
"""

from __future__ import annotations

import json
from typing import Any

from tests.contract.results import (
    of_commands,
    of_data,
    of_files,
    of_models,
    of_networks,
    of_pages,
    of_scores,
    of_training,
)
from tests.contract.results.plain import Answer, plain

RESULTS: dict[str, Answer] = {}
for _room in (of_commands, of_data, of_files, of_scores, of_models, of_training, of_networks, of_pages):
    assert not RESULTS.keys() & _room.RESULTS.keys()
    RESULTS |= _room.RESULTS


def answers(name: str) -> list[Any]:
    """What a function answers to each combination."""
    found = plain(RESULTS[name]())
    return found if isinstance(found, list) else [found]


def results() -> dict[str, list[str]]:
    """Name -> answers, each as JSON."""
    return {name: list(map(json.dumps, answers(name))) for name in RESULTS}
