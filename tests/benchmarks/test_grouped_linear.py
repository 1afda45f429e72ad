"""The rows of the grouped GEMM's benchmark, of a few tokens on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="torch 2.10 brings grouped_mm")
def test_a_row_of_each_choice_of_block_scales_and_of_each_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    from benchmarks.grouped_linear import CHOICES, PEERS, measure

    rows = measure(40, 2, 32, 16, "cpu")
    assert [row["what"] for row in rows] == [*PEERS, *CHOICES]
    for row in rows:
        assert row["forward_ms"] > 0 < row["backward_ms"]
        assert all(0.05 < error < 0.3 if row["what"] in CHOICES else error < 0.01 for error in row["error"].values())
    assert rows[2]["cached_ms"] > 0
