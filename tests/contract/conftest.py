"""What the contract tests share: the frozen files, written once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract import written


@pytest.fixture(scope="session")
def written_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every file of `written`."""
    return written.write_all(tmp_path_factory.mktemp("written"))
