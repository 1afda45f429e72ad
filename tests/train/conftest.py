"""Trainings of these tests may import the small network."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fp4deploy.models import spec
from tests.train.small_network import SPEC


@pytest.fixture(scope="module", autouse=True)
def _small_network_is_named() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spec, "_named", [])
        spec.name_model(SPEC)
        yield
