"""Every loader on 8 to 25 mutated files; `make fuzz` runs tens of thousands."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4deploy.errors import InputError
from fp4deploy.system.schema import parse_json, parse_yaml
from tests.fuzz.harness import Loader, Outcome, run_case
from tests.fuzz.loaders import loaders

CASES = {"packed": 8, "onnx": 12, "modelopt": 12, "roboflow": 12}  # the others take at most 20 ms a case
OTHERS = 25
OUTCOMES = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "fuzz_cpu.json"
TOLERANT = (
    "metrics",
    "telemetry",
    "report",
    "commands",
    "provenance",
    "measured",
    "counts",
)  # damaged lines are left out, a damaged report.json is a remark
NAMES = (
    "card", "config", "sweep", "checkpoint", "state", "ledger", "baseline", "metrics", "telemetry", "report",
    "commands", "annotations", "image", "results", "kernel", "packed", "weight", "onnx",
    "models", "initial", "account", "classes", "served", "modelopt", "network", "boxes", "roboflow", "imported",
    "listing", "colours", "provenance", "measured", "search", "timed", "counts", "predicted",
)  # fmt: skip


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Loader]:
    return loaders(tmp_path_factory.mktemp("seeds"))


def test_every_loader_is_named(every: dict[str, Loader]) -> None:
    assert tuple(every) == NAMES


def test_the_table_of_outcomes_has_every_loader() -> None:
    rows = json.loads(OUTCOMES.read_text(encoding="utf-8"))["rows"]
    assert tuple(row["loader"] for row in rows) == NAMES
    assert all(row["cases"] == row["refused"] + row["accepted"] for row in rows)  # nothing was a defect


@pytest.mark.parametrize("name", NAMES)
def test_the_seeds_are_read(every: dict[str, Loader], name: str, tmp_path: Path) -> None:
    loader = every[name]
    for seed in loader.seeds:
        path = tmp_path / loader.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(seed)
        if name != "image":  # each is of another size or mode than one of the two readers takes
            loader.load(path)


@pytest.mark.parametrize("name", NAMES)
def test_a_mutated_file_is_refused_in_words_or_usable(every: dict[str, Loader], name: str, tmp_path: Path) -> None:
    outcome = Outcome(name)
    for number in range(CASES.get(name, OTHERS)):
        run_case(every[name], number, tmp_path, outcome)
    assert not outcome.defects, outcome.defects
    assert outcome.refused or name in TOLERANT


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
NUMBERS = st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=60, deadline=None)
@given(JSON)
def test_json_comes_back(value: Any) -> None:
    assert parse_json(json.dumps(value), "f") == value


@settings(max_examples=60, deadline=None)
@given(TEXT | st.text(st.sampled_from("\0&*<:{}[]-?!|>'\"%@`#,\n\t ab01.~")))
def test_any_text_is_yaml_or_refused(text: str) -> None:
    with suppress(InputError):
        value = parse_yaml(text, "f")
        assert not isinstance(value, float) or math.isfinite(value)
