"""Networks written as people write them are exported and packed and agree with torch (`written_networks`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.export.written_networks import outcome

SEEDS = (14, 28, 0, 16, 5, 38, 10, 30, 22, 4, 39, 29, 44)  # nearly every kind of block and head
SHORT = 1  # of them in `make test`, the others in `make nightly`


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "seed", [*SEEDS[:SHORT], *(pytest.param(seed, marks=pytest.mark.nightly) for seed in SEEDS[SHORT:])]
)
def test_written_networks(seed: int, tmp_path: Path) -> None:
    found = outcome(seed, tmp_path)
    assert found == "agrees" or found.startswith("refused by")
