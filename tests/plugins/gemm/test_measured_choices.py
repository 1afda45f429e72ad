"""What comments say of fitted numbers is what the files of measurements say."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from fp4deploy.plugins.gemm.convolution import decoded, warpgroup

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def measured(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def test_the_estimate_of_warpgroup_convolutions() -> None:
    ratios = []
    for row in measured("warpgroup_conv_h200")["rows"]:
        found = re.match(r"(\d+) x (\d+) x (\d+), ([\d +]+) to (\d+)", row["case"])
        assert found is not None
        n, h, w, outputs = (int(found[at]) for at in (1, 2, 3, 5))
        sources = [int(count) for count in found[4].split("+")]
        how = dict(row["variant"])
        chosen = warpgroup.Variant(**how | {"taps": tuple(how["taps"])})
        shape = warpgroup.Shape(
            (n, h, w), tuple(c // 64 for c in sources), outputs, chosen.taps, chosen.dilation, *[chosen.transposed] * 2
        )
        assert warpgroup.variant(shape, 132) == chosen
        ratios.append(warpgroup.cycles(chosen, shape, 132) / row["wgmma_us"])
    middle = statistics.median(ratios)
    errors = sorted(abs(ratio / middle - 1) for ratio in ratios)
    assert len(ratios) == 75
    assert middle == pytest.approx(1485, abs=1)
    assert errors[int(0.9 * len(errors))] < 0.085
    assert (min(ratios) / middle, max(ratios) / middle) == pytest.approx((0.87, 1.19), abs=0.005)


def test_plans_without_a_table() -> None:
    slower = []
    for rows in measured("conv_plans_h200")["cases"].values():
        for row in rows.values():
            batch, channels, outputs, h, w, size = row["shape"]
            transposed, depths = size == 2, tuple(8 * -(-c // 16) for c in channels)
            plan = decoded.plan(batch * h * w, outputs, depths, 1 if transposed else size * size, transposed, 132)
            times = {(*each["tile"].values(), each["splits"]): each["us"] for each in row["plans"] if each.get("right")}
            slower.append(times[(*vars(plan.tile).values(), plan.splits)] / min(times.values()))
    slower.sort()
    assert (len(slower), statistics.median(slower)) == (85, 1.0)
    assert slower[int(0.9 * len(slower))] < 1.12
    assert slower[-1] == pytest.approx(1.35, abs=0.005)
