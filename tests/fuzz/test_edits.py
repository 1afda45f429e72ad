"""Readers make of edited files what they made before; else, on purpose: python -m tests.contract.record edits."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract import frozen
from tests.fuzz.edits import Read, outcomes, readers
from tests.fuzz.loaders import loaders

RECORDED = frozen.recorded("edits")


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Read]]:
    folder = tmp_path_factory.mktemp("edited")
    return readers(loaders(folder / "seeds"), folder)


def test_every_reader_is_recorded(every: dict[str, tuple[Any, Read]]) -> None:
    assert every.keys() == RECORDED.keys()


@pytest.mark.parametrize("name", RECORDED)
def test_no_field_is_read_otherwise(every: dict[str, tuple[Any, Read]], name: str) -> None:
    assert frozen.lost(RECORDED[name], outcomes(*every[name]), name) == []
