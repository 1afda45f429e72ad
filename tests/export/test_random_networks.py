"""Random small networks are exported and packed and agree with torch, or are refused in words (`random_networks`)."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.export.random_networks import outcome


@pytest.mark.timeout(600)
@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 20))
def test_random_networks(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    found = outcome(seed, tmp_path_factory.mktemp("random"))
    assert found == "agrees" or found.startswith(("refused by ", "no network"))


def test_most_random_networks_are_packed(tmp_path: Path) -> None:
    found = [outcome(seed, tmp_path) for seed in range(4)]
    assert found.count("agrees") >= 3, found
