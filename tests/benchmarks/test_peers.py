"""What benchmarks measure can be built: the networks of their tables, as `fp4deploy train --model` builds them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from fp4deploy.models.spec import parse_spec

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_the_networks_of_the_tables_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import packed_latency
    import peers

    for name in ("packed_latency", "peers", "training_step"):
        monkeypatch.setitem(
            sys.modules, name, sys.modules.get(name)
        )  # gone afterwards: their names are not a package's
    assert peers.network("0.125", 5)(torch.zeros(1, 3, 16, 16)).shape == (1, 5, 16, 16)
    for case in packed_latency.NETWORKS:
        spec, _, size = case.rpartition(":")
        assert parse_spec(spec).known
        assert len(size.split("x")) == 3
    made = packed_latency.model("0.125", "fp16", (16, 16))
    assert made(torch.zeros(1, 3, 16, 16)).shape[1] == len(packed_latency.CLASSES)
