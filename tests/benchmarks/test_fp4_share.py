"""What is in FP4 of a network, counted by hand; and that every row of the whole picture has its configuration."""

from __future__ import annotations

import json

import pytest

from benchmarks.fp4_share import configuration, counted
from docs.tables.picture import WHOLE_PICTURE
from docs.tables.results import RESULTS
from fp4deploy.train import Config, with_settings


@pytest.mark.usefixtures("whole_unets")
def test_shares_are_those_of_the_layers(tiny: Config) -> None:
    found = counted(with_settings(tiny, ["model.scale=0.125"]))
    widths, size, classes = (8, 16, 32, 64, 128), 32, 7
    macs = {"first": 3 * widths[0] * 9 * size**2, "head": widths[0] * classes * size**2}
    rest, weights = 0, 0
    pairs = [(widths[0], widths[0], 0)]
    pairs += [
        pair
        for level in range(1, 5)
        for pair in ((widths[level - 1], widths[level], level), (widths[level],) * 2 + (level,))
    ]
    pairs += [
        pair
        for level in range(4)
        for pair in ((2 * widths[level], widths[level], level), (widths[level],) * 2 + (level,))
    ]
    for inputs, outputs, level in pairs:
        rest += inputs * outputs * 9 * (size >> level) ** 2
        weights += inputs * outputs * 9
    for level in range(4):
        rest += widths[level + 1] * widths[level] * (size >> level) ** 2
        weights += widths[level + 1] * widths[level] * 4
    assert found["layers"] == [21, 23]
    assert found["macs"] == pytest.approx(rest / (rest + sum(macs.values())), abs=1e-4)
    others = 3 * 8 * 9 + 8 * classes + classes + 3 * sum(widths) * 2 + 3 * sum(widths[:4]) * 2 + sum(widths[:4])
    assert found["bytes"] == pytest.approx((4.5 / 16 * weights + others) / (weights + others), abs=1e-4)


def test_every_row_has_been_counted_and_can_be_again() -> None:
    rows = json.loads((RESULTS / "fp4_share_cpu.json").read_text())["rows"]
    assert rows.keys() == {row[0] for row in WHOLE_PICTURE}
    for label, name, _, _, variant in WHOLE_PICTURE:
        _, config = configuration(name, variant)
        assert config.model.digits == ("multi-term" in label)
        inside, every = rows[label]["layers"]
        assert (inside == every) == ("every layer" in label)
