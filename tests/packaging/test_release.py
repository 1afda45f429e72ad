"""What a release is refused for, and that archives of the same files are the same bytes."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

import pytest

from fp4deploy import __version__
from tools import release

COMPLETE = {
    "CHANGELOG.md": f"# Changelog\n\n## {__version__} (2026-11-29)\n",
    f"benchmarks/logs/gpu-tests-{__version__}.log": "commit\n1960 passed in 900 s\n",
}


@pytest.mark.parametrize(
    ("changes", "tag", "problem"),
    [
        ({}, f"v{__version__}", ""),
        ({"CHANGELOG.md": f"## {__version__} (unreleased)\n"}, f"v{__version__}", "CHANGELOG.md has no heading"),
        ({f"benchmarks/logs/gpu-tests-{__version__}.log": None}, f"v{__version__}", "make gpu-log"),
        *(
            ({f"benchmarks/logs/gpu-tests-{__version__}.log": text}, f"v{__version__}", "does not end with tests that")
            for text in (
                "2 failed, 9 passed",
                "9 passed, 2 errors in 3 s",
                "no tests ran in 1 s",
                "",
                "9 passed\nKilled",
            )
        ),
        ({}, "", f"no tag v{__version__}"),
    ],
)
def test_a_release_is_refused_until_everything_fits(
    changes: dict[str, str | None], tag: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (COMPLETE | changes).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text is not None:
            path.write_text(text)
    monkeypatch.setattr(release, "ROOT", tmp_path)
    monkeypatch.setattr(release, "git", lambda *_: tag)
    problems = release.unfit()
    assert [problem in each for each in problems] == ([True] if problem else [])


def test_an_archive_of_the_same_files_is_the_same(tmp_path: Path) -> None:
    archives = []
    for number, names in enumerate((("b.py", "a.py", "run.sh"), ("run.sh", "a.py", "b.py"))):
        folder = tmp_path / str(number) / "fp4deploy-1"
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).write_text(name)
            os.utime(folder / name, (1e9 + number, 1e9 + number))
        (folder / "run.sh").chmod(0o777 if number else 0o755)
        archive = tmp_path / str(number) / "fp4deploy-1.tar.gz"
        with tarfile.open(archive, "w:gz") as tar:
            for name in names:
                tar.add(folder / name, f"fp4deploy-1/{name}")
        release.normalize(archive, 1_700_000_000)
        archives.append(archive)
    assert release.digest(archives[0]) == release.digest(archives[1])
    with tarfile.open(archives[0]) as tar:
        assert [(each.name, each.mode, each.mtime) for each in tar] == [
            ("fp4deploy-1/a.py", 0o644, 1_700_000_000),
            ("fp4deploy-1/b.py", 0o644, 1_700_000_000),
            ("fp4deploy-1/run.sh", 0o755, 1_700_000_000),
        ]


def test_an_sbom_says_which_version_it_is_of(tmp_path: Path) -> None:
    target = tmp_path / "sbom.json"
    component = {"name": "fp4deploy", "type": "application"}
    target.write_text(json.dumps({"metadata": {"component": component}, "components": []}))
    release.name_version(target)
    named = {"version": __version__, "purl": f"pkg:pypi/fp4deploy@{__version__}"}
    assert json.loads(target.read_text()) == {"metadata": {"component": component | named}, "components": []}
