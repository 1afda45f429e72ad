"""Command lines print what they printed; else, on purpose: python -m tests.contract.record lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.contract import frozen, lines
from tests.fixtures import made_once

RECORDED = frozen.recorded("lines")


@pytest.fixture(scope="session")
def now(tmp_path_factory: pytest.TempPathFactory) -> Any:
    def make(folder: Path) -> None:
        lines.run(folder / "lines.json")

    return json.loads((made_once(tmp_path_factory, "lines", make) / "lines.json").read_text())


@pytest.mark.parametrize("line", lines.LINES)
def test_lines_print_what_they_printed(now: Any, line: str) -> None:
    before, other = json.loads(RECORDED["printed"][line]), now["printed"][line]
    assert lines.alike(before, other), f"{json.dumps(before)}\n{json.dumps(other)}"


def test_what_lines_wrote_names_what_they_read(now: Any) -> None:
    assert lines.alike(RECORDED["inputs"], now["inputs"])


def test_an_output_is_told_from_another() -> None:
    output = [0, {"layers": [1.5, 7], "took": lines.ANYTHING}]
    assert lines.alike(output, [0, {"layers": [1.51, 7], "took": "8 s", "new": 1}])
    for other in (
        [1, output[1]],
        [0, {"layers": [1.6, 7], "took": 1}],
        [0, {"layers": [1.5, 8], "took": 1}],
        [False, output[1]],
    ):
        assert not lines.alike(output, other)
