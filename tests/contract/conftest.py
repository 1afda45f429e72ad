"""What the contract tests share: the frozen files, written once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract import written
from tests.shallow import levels


@pytest.fixture(scope="session")
def written_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every file of `written`."""
    with levels(5):
        return written.write_all(tmp_path_factory.mktemp("written"))


@pytest.fixture(scope="module", autouse=True)
def _as_recorded() -> Iterator[None]:
    """Answers are recorded of whole UNets."""
    with levels(5):
        yield
