"""Random small networks are exported and packed and agree with torch (`random_networks`, which runs thousands)."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp4deploy.rest import rest_of
from tests.export.random_networks import outcome
from tests.samples import sample

# Of the first 400 those that have most kinds of blocks, layers, axes, inputs and outputs between them: 57 of 82, when
# volumes had no blocks of their own.
MANY_KINDS = (84, 0, 30, 102, 136, 193)
VOLUME = 53  # transposed, two sources of one convolution, poolings and a norm over three axes
SHORT = 1  # of them in `make test`, the others in `make nightly`


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "seed",
    [*MANY_KINDS[:SHORT], VOLUME, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in MANY_KINDS[SHORT:])],
)
def test_random_networks(seed: int, tmp_path: Path) -> None:
    assert outcome(seed, tmp_path) == "agrees"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("seed", "rest"), sample([2, 30], ["bf16", "fp32"], every=3))
def test_with_another_rest(seed: int, rest: str, tmp_path: Path) -> None:
    assert outcome(seed, tmp_path, rest_of(rest)) == "agrees"
