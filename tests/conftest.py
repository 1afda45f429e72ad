"""Fixtures and markers shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder with the reference vectors and real images that lies beside the checkout."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not (folder / "vectors").is_dir():
        pytest.skip("the folder ../shared (reference vectors, real images) is not beside this checkout")
    return folder
