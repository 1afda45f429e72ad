"""Every result says where it comes from, and the tool finds what has changed since."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tools import results

FILES = sorted(results.RESULTS.glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_result_says_where_it_comes_from(path: Path) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    assert results.missing(document) == [], f"run: python tools/results.py --stamp {path} --command TEXT"
    assert results.measured(results.origin_of(document).command), "add the script to MEASURED in tools/results.py"


def test_the_history_has_the_commit_that_a_result_names() -> None:
    if results.commits_since("HEAD", ()) is None or (results.ROOT / ".git" / "shallow").exists():
        pytest.skip("the history is not here")
    origins = {path.stem: results.origin_of(json.loads(path.read_text(encoding="utf-8"))) for path in FILES}
    lost = [name for name, origin in origins.items() if results.commits_since(origin.commit, ("README.md",)) is None]
    assert lost == []


def test_what_was_measured_comes_before_what_it_was_recorded_in() -> None:
    machine: dict[str, Any] = {"commit": "a" * 40, "date": "2026-11-28T01:02:03+00:00"}
    found = results.origin_of(
        {"command": "c", "machine": machine, "recorded_in": {"commit": "b", "date": "2026-11-29"}}
    )
    assert str(found) == "2026-11-28 (aaaaaaaa)"
    assert results.missing({"machine": {"commit": "unknown"}}) == ["commit", "date", "command"]


def test_a_new_file_is_stamped_and_nothing_else_in_it_changes(tmp_path: Path) -> None:
    for text in ('{\n "command": "c",\n "rows": [ 1 ]\n}\n', '{"command": "c", "rows": [ 1 ]}'):
        path = tmp_path / "new.json"
        path.write_text(text)
        results.stamp(path, "c" * 40, "2026-11-29", None)
        assert str(results.origin_of(json.loads(path.read_text()))) == "2026-11-29 (recorded in cccccccc)"
        assert results.missing(json.loads(path.read_text())) == []
        assert path.read_text().endswith(text[1:])


def test_commits_that_change_what_was_measured_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> str:
        own = ["-c", "user.name=n", "-c", "user.email=e"]
        return subprocess.run(
            ["git", *own, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout

    git("init")
    for name in ("a", "b", "a"):
        with (tmp_path / name).open("a") as file:
            file.write("line\n")
        git("add", name)
        git("commit", "-m", name)
    monkeypatch.setattr(results, "ROOT", tmp_path)
    first = git("rev-list", "--reverse", "HEAD").split()[0]
    assert [results.commits_since(first, (name,)) for name in ("a", "b", "c")] == [1, 1, 0]
    assert results.commits_since("d" * 40, ("a",)) is None
