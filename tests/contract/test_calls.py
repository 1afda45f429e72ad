"""Folders ask of each other what they asked before; else, on purpose: python -m tests.contract.record calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.contract import calls, frozen
from tests.fixtures import made_once

RECORDED = frozen.recorded("calls")
FOLDERS = sorted({name.rpartition("/")[0] or "fp4deploy" for name in RECORDED["calls"]})


@pytest.fixture(scope="session")
def now(tmp_path_factory: pytest.TempPathFactory) -> Any:
    def make(folder: Path) -> None:
        calls.run(folder / "calls.json")

    return json.loads((made_once(tmp_path_factory, "calls", make) / "calls.json").read_text())


@pytest.mark.parametrize("folder", FOLDERS)
def test_functions_of_a_folder_are_called_and_answer_as_before(now: Any, folder: str) -> None:
    for name, before in RECORDED["calls"].items():
        if (name.rpartition("/")[0] or "fp4deploy") == folder:
            other = now["calls"].get(name, [])
            assert calls.lost(list(map(json.loads, before)), other) == [], (
                f"{name} is called so now: {json.dumps(other)[:2000]}"
            )


@pytest.mark.parametrize("line", calls.LINES)
def test_lines_print_what_they_printed(now: Any, line: str) -> None:
    before, other = json.loads(RECORDED["printed"][line]), now["printed"][line]
    assert calls.alike(before, other), f"{json.dumps(before)}\n{json.dumps(other)}"


def test_what_lines_wrote_names_what_they_read(now: Any) -> None:
    assert calls.alike(RECORDED["inputs"], now["inputs"])


def test_a_call_is_told_from_another() -> None:
    call = [{"x": ["float32[2, 3]", 1.5], "size": 7}, {"n": calls.ANYTHING}]
    assert not calls.lost([call], [[{"x": ["float32[2, 3]", 1.51], "size": 7, "new": 1}, {"n": "8 s"}]])
    for other in ({"size": 8}, {"x": ["float32[3, 2]", 1.5]}, {"x": ["float32[2, 3]", 1.6]}):
        assert calls.lost([call], [[{**call[0], **other}, {"n": 1}]]) == [call]
