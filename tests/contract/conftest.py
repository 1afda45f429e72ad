"""What the contract tests share: the frozen files written once, and one small run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract import schemas, written


@pytest.fixture(scope="session")
def written_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every file of `written`."""
    return written.write_all(tmp_path_factory.mktemp("written"))


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small run of every stage."""
    return schemas.small_run(tmp_path_factory.mktemp("home"))
