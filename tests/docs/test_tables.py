"""The tables of the site are made from the results, and the README's is the one that they give."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jinja2
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))


@pytest.fixture(scope="module")
def macros() -> ModuleType:
    spec = importlib.util.spec_from_file_location("macros", ROOT / "docs" / "macros.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def calls() -> list[tuple[str, str]]:
    """Every table that a page asks for: (page, arguments)."""
    pattern = re.compile(r"\{\{ table\(([^)]*)\) \}\}")
    return [(page.name, found) for page in PAGES for found in pattern.findall(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(("page", "arguments"), calls())
def test_a_table_is_whole(macros: ModuleType, page: str, arguments: str) -> None:
    text, _, as_of = macros.table(*(part.strip().strip("\"'") for part in arguments.split(","))).partition("\n\n")
    lines = text.splitlines()
    assert not as_of or re.fullmatch(r"\*As of (\d{4}-\d\d-\d\d \((recorded in )?[0-9a-f]{8}\)(, )?)+\.\*", as_of)
    columns = {line.count(" | ") for line in (lines[0], *lines[2:])}
    assert len(lines) > 2
    assert len(columns) == 1, columns


def test_every_table_is_shown(macros: ModuleType) -> None:
    shown = {arguments.split(",")[0].strip("\"' ") for _, arguments in calls()}
    assert shown == set(macros.TABLES)


def test_the_readme_has_the_measured_table(macros: ModuleType) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert macros.readme_with_tables(text) == text, "run: python docs/macros.py"
    assert len(text.splitlines()) <= 120


def test_every_variant_of_the_sweep_is_in_the_ablation(macros: ModuleType) -> None:
    """What ran is in a table; what the file plans beyond that is listed as not measured on the page."""
    ran = macros.result("camvid_sweep_h200")["variants"].keys()
    assert ran - {"fp16", "control", "fp16-model.digits_true"} == macros.ABLATION.keys()
    planned = yaml.safe_load((ROOT / "configs" / "sweep_camvid.yaml").read_text(encoding="utf-8"))["variants"]
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    missing = re.search(r"Not measured: ([^.]*)\.\n", text)
    assert sorted(re.findall(r"`(\w+)`", missing[1] if missing else "")) == sorted(planned.keys() - ran)


def test_expressions_in_prose_can_be_rendered(macros: ModuleType) -> None:
    """As mkdocs-macros does it: a name that is not there fails instead of leaving a gap."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
    found: dict[str, Any] = {}
    macros.define_env(SimpleNamespace(macro=lambda function: found.update({function.__name__: function})))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert "{{" not in environment.from_string(text).render(found)


def test_sentences_of_the_readme(macros: ModuleType) -> None:
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    rows = macros.result("training_step_h200")["rows"]
    steps = {row["case"]: row.get("graph_ms") for row in rows if row["scale"] == 1.0}
    assert f"costs {steps['nvfp4 fused'] / steps['fp16 fused']:.2f} times the fused FP16 step" in text
    assert f"has {macros.result('packed_unet_h200')['bytes']['ratio']:.2f} of the bytes of FP16 weights" in text
