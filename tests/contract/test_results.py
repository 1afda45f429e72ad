"""Functions answer what they answered before; else, on purpose: python -m tests.contract.record results."""

from __future__ import annotations

import json

import pytest

from tests.contract import frozen
from tests.contract.results import RESULTS, answers
from tests.contract.results.plain import close

RECORDED = frozen.recorded("results")


@pytest.mark.parametrize("name", RESULTS)
def test_answers_are_those_that_were_recorded(name: str) -> None:
    before, now = list(map(json.loads, RECORDED[name])), answers(name)
    assert len(before) == len(now)
    for number, (one, other) in enumerate(zip(before, now, strict=True)):
        assert close(one, other), f"combination {number}\n{one}\n{other}"
