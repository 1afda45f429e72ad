"""The table of networks of transformers and diffusers in its small form."""

from __future__ import annotations

import pytest

from benchmarks.transformers_table import HEADINGS, NETWORKS, cells, measure


def test_rows_say_what_was_refused_and_what_was_not_measured() -> None:
    row = {"model": "x", "prepare": {"fp4_layers": 1, "layers": 2, "fp4_share": 0.5}, "export": {"error": "why"}}
    assert cells(row) == ["x", "1 of 2, 50%", "", "refused", "", "", "not measured"]
    assert len(cells(row)) == len(HEADINGS)
    assert len(NETWORKS) == 13


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_a_row_of_a_network(name: str) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    row = measure(name)
    assert not [stage for stage, found in row.items() if isinstance(found, dict) and "error" in found]
    assert row["prepare"]["fp4_share"] > 0.8
    assert row["train"]["finite"]
    assert row["train"]["with_gradient"] == 1.0
    assert row["export"]["passed"]
    assert row["packed"]["passed"]
    assert max(row["runtime"]["distance"], row["packed"]["distance"]) < 1e-3
