"""The table of sizes counts right, and says what has changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import size

MODULE = '''"""Two lines
of a docstring."""

from pathlib import Path; from typing import Any

LIMIT, _hidden = 3, 4  # pixels
table: dict[str, str] = {}
table["# none"] = "also a name that is not defined here"


# A comment of its own.
def read() -> str:
    """One line."""
    inner = """not a docstring # and no comment"""
    return inner


class Reader: ...


def _private(value: Any, *others: list[Any]) -> None: ...
'''
KERNEL = """// A comment
/* of two
   lines */
const char* address = "http://none";

int x;  // pixels
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {
        "fp4deploy/top.py": "x = 1\n",
        "fp4deploy/room/module.py": MODULE,
        "fp4deploy/room/cuda/kernel.cu": KERNEL,
        "fp4deploy/room/notes.md": "not counted\n",
        "native/build/made.c": "int not_counted;\n",
        "tests/room/test_module.py": "def test() -> None: ...\n",
        "tools/size.json": "{}",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_counts(tree: Path) -> None:
    rooms = size.measure(tree)
    assert list(rooms) == ["fp4deploy", "fp4deploy/room", "tests", "total"]
    assert size.public_names(MODULE) == {"LIMIT", "table", "read", "Reader"}
    assert size.python_comments(MODULE) == {1, 2, 6, 11, 13}
    assert size.cuda_comments(KERNEL) == {1, 2, 3, 6}
    assert rooms["fp4deploy/room"] == {"files": 2, "python": 13, "cuda": 5, "comments": 50, "any": 154, "names": 4}
    assert rooms["tests"] == {"files": 1, "python": 1, "cuda": 0, "comments": 0, "any": 0, "names": 0}
    assert rooms["total"] == {"files": 4, "python": 15, "cuda": 5, "comments": 45, "any": 133, "names": 5}


def test_differences_to_what_was_recorded(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size.main(tree, record=True)
    assert json.loads((tree / "tools" / "size.json").read_text()) == size.measure(tree)
    (tree / "fp4deploy" / "room" / "module.py").unlink()
    (tree / "fp4deploy" / "top.py").unlink()
    capsys.readouterr()
    size.main(tree, record=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines if line.startswith("fp4deploy/room")] == [
        ["fp4deploy/room", "1", "(-1)", "0", "(-13)", "5", "80", "(+30)", "0", "(-154)", "0", "(-4)"]
    ]
    assert lines[-1] == "gone: fp4deploy"
