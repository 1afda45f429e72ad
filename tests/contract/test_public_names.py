"""Python names, operators and plugins are those that were recorded; `record.py` says how they are recorded."""

from __future__ import annotations

import pytest

from tests.contract import frozen


@pytest.mark.parametrize("module", frozen.MODULES)
def test_public_names_and_signatures(module: str) -> None:
    assert frozen.lost(frozen.recorded("names")[module], frozen.python_names()[module]) == []


def test_schemas_of_the_operators() -> None:
    assert frozen.lost(frozen.recorded("operators"), frozen.operators()) == []


def test_tensorrt_plugins() -> None:
    assert frozen.lost(frozen.recorded("plugins"), frozen.tensorrt_plugins()) == []


def test_the_comparison_finds_what_is_lost() -> None:
    before = {"a": {"positional": ["x", "y"], "value": 1}, "b": "text"}
    assert frozen.lost(before, {**before, "c": 1}) == []
    assert frozen.lost(before, {**before, "a": {"positional": ["x", "y", "z"], "value": 1}}) == []
    assert frozen.lost(before, {"a": before["a"]}) == ["/b is gone"]
    assert len(frozen.lost(before, {**before, "a": {"positional": ["y", "x"], "value": 1}})) == 1
    assert len(frozen.lost(before, {**before, "a": {"positional": ["x", "y"], "value": True}})) == 1
