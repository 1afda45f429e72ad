"""Choices by measurement: which run is the fastest, what is kept for later processes."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from fp4deploy.plugins.runtime import choices

GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP4DEPLOY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())


def test_choices_are_remembered_and_damaged_ones_are_not(tmp_path: Path) -> None:
    name, valid = "a" * 40, ("program", "kernels")
    assert choices.remembered(name, valid) is None
    for choice in valid:
        choices.remember(name, choice)
        assert choices.remembered(name, valid) == choice
    assert choices.remembered(name, ("program",)) is None  # of another version, with other ways
    (entry,) = (tmp_path / "cache" / "programs").iterdir()
    entry.write_bytes(entry.read_bytes()[:-1])
    assert choices.remembered(name, valid) is None


def test_the_fastest_is_kept_and_the_first_of_equals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "milliseconds", lambda run: run())
    runs = {"torch": lambda: 2.0, "kernel": lambda: 1.0, "another": lambda: 1.0}
    assert choices.fastest("b" * 40, runs, GPU) == "kernel"
    assert choices.remembered("b" * 40, runs) == "kernel"
    assert choices.fastest("c" * 40, {"torch": lambda: 1.0, "kernel": lambda: 1.0}, GPU) == "torch"
