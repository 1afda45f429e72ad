"""What benchmarks measure can be built: the networks of their tables, as `fp4deploy train --model` builds them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from fp4deploy.models.spec import parse_spec

FOLDER = Path(__file__).parents[2] / "benchmarks"


CHILD = """
import fcntl, pathlib, sys, time
folder, number = pathlib.Path(sys.argv[1]), sys.argv[2]
if number == "1":
    sys.exit(3)
if number == "2":
    time.sleep(60)
(folder / f"{number}.ready").touch()
while not (folder / "go").exists():
    time.sleep(0.01)
(folder / f"{number}.json").write_text("{}")
"""


def test_cases_compile_at_once_and_what_is_late_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of four, one ends before its turn and one is not ready in time."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import peers

    commands = [[sys.executable, "-c", CHILD, str(tmp_path), str(number)] for number in range(4)]
    assert peers.at_once(commands, tmp_path, 3.0, 10.0) == [1, 2]
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["0.json", "3.json"]


def test_the_networks_of_the_tables_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import packed_latency
    import peers

    for name in ("packed_latency", "peers", "training_step"):
        monkeypatch.setitem(sys.modules, name, sys.modules.get(name))  # gone afterwards
    assert peers.network("0.125", 5)(torch.zeros(1, 3, 16, 16)).shape == (1, 5, 16, 16)
    for case in packed_latency.NETWORKS:
        spec, _, size = case.rpartition(":")
        assert parse_spec(spec).known
        assert len(size.split("x")) == 3
    made = packed_latency.model("0.125", "fp16", (16, 16))
    assert made(torch.zeros(1, 3, 16, 16)).shape[1] == len(packed_latency.CLASSES)
