"""The tables and figures of README.md and docs are those that the results give."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import jinja2
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture(scope="module")
def macros() -> ModuleType:
    spec = importlib.util.spec_from_file_location("macros", ROOT / "docs" / "macros.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TEXTS = ("commands", "public_names")  # what is no table of results


def calls() -> list[tuple[str, str]]:
    """Every table that a page has: (page, name and arguments)."""
    pattern = re.compile("<!-- table (.+): written by")
    return [(page.name, found) for page in PAGES for found in pattern.findall(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(("page", "words"), [call for call in calls() if not call[1].startswith(TEXTS)])
def test_a_table_is_whole(macros: ModuleType, page: str, words: str) -> None:
    text, _, as_of = macros.table(*words.split()).partition("\n\n")
    lines = text.splitlines()
    assert not as_of or re.fullmatch(r"\*As of (\d{4}-\d\d-\d\d \((recorded in )?[0-9a-f]{8}\)(, )?)+\.\*", as_of)
    columns = {line.count(" | ") for line in (lines[0], *lines[2:])}
    assert len(lines) > 2
    assert len(columns) == 1, columns


def test_columns_of_text_are_aligned_to_the_left(macros: ModuleType) -> None:
    _, rule, *_ = macros.table("whole_picture").splitlines()
    assert rule == "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |", (
        "a score and a command are no numbers"
    )


def test_every_table_is_shown(macros: ModuleType) -> None:
    assert {words.split()[0] for _, words in calls()} == macros.TABLES.keys() | macros.TEXTS.keys()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_what_was_measured(macros: ModuleType, page: Path) -> None:
    """Readers of the files see the numbers that the results give, and no call of a program."""
    text = page.read_text(encoding="utf-8")
    assert macros.written(text) == text, "run: python docs/macros.py"
    assert "{{" not in re.sub("```.*?```", "", text, flags=re.DOTALL)


BEGIN, END = "<!-- table kernels: written by python docs/macros.py -->", "<!-- end of table -->"


def test_what_stands_between_marks_is_replaced(macros: ModuleType) -> None:
    text = f"a\n{BEGIN}\n| old |\n{END}\nof <!--= 1 + 1 -->3<!--/--> b\n"
    made = macros.written(text)
    assert made == f"a\n{BEGIN}\n{macros.table('kernels')}\n{END}\nof <!--= 1 + 1 -->2<!--/--> b\n"
    assert macros.written(made) == made


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"{BEGIN}\n", "one of two marks"),
        (f"{BEGIN}\n{BEGIN}\n{END}\n", "one of two marks"),
        (f"{END}\n", "one of two marks"),
        ("of <!--= 1 -->1\n", "one of two marks"),
        ("* <!--= 1 -->1<!--/-->\n", "begins with a mark"),
        ("of <!--= no_such() --><!--/-->\n", "no_such"),
        (f"{BEGIN.replace('kernels', 'no_such')}\n{END}\n", "no_such"),
    ],
)
def test_a_mark_that_cannot_be_written(macros: ModuleType, text: str, reason: str) -> None:
    with pytest.raises((ValueError, KeyError, jinja2.UndefinedError), match=reason):
        macros.written(text)


def test_every_variant_of_the_sweep_is_in_the_ablation(macros: ModuleType) -> None:
    """What ran is in a table; what the file plans beyond that is listed as not measured on the page."""
    ran = macros.result("camvid_sweep_h200")["variants"].keys()
    assert ran - {"fp16", "control", "fp16-model.digits_true"} == macros.ABLATION.keys()
    planned = yaml.safe_load((ROOT / "configs" / "sweep_camvid.yaml").read_text(encoding="utf-8"))["variants"]
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    missing = re.search(r"Not measured: ([^.]*)\.\n", text)
    assert sorted(re.findall(r"`(\w+)`", missing[1] if missing else "")) == sorted(planned.keys() - ran)


def rows_of(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line[:1] == "|"]


def test_no_set_is_missing_in_the_whole_picture(macros: ModuleType) -> None:
    """Of every sweep the variants in default layers that three seeds finished; and the largest loss stands first."""
    shown = {(name, qat) for _, name, _, _, qat in macros.picture.WHOLE_PICTURE}
    shown |= {(name, "fp4") for name in macros.picture.W4A8}  # the same networks and data, in a table of their own
    for path in macros.results.RESULTS.glob("*_h200.json"):
        for name, row in macros.result(path.stem).get("variants", {}).items():
            own = all(each.startswith(("data.", "model.spec")) for each in row["settings"])
            if row["model"] == "nvfp4" and own and sum(run["status"] == "done" for run in row["runs"].values()) >= 3:
                assert (path.stem, name) in shown
    means = [
        float(row[4].strip("*").split()[0].replace(macros.results.MINUS, "-"))
        for row in rows_of(macros.picture.whole_picture())[2:]
    ]
    assert means == sorted(means)
    assert len(means) == len(macros.picture.WHOLE_PICTURE)


@pytest.mark.parametrize("table", ["training_step", "unfused_step", "fp4_training", "recomputed_steps"])
def test_steps_are_compared_with_the_fastest_fp16(macros: ModuleType, table: str) -> None:
    head, _, *rows = rows_of(macros.TABLES[table]())
    columns = [index for index, title in enumerate(head) if title == "over the best FP16"]
    ratios = [float(row[index]) for row in rows if "fp16" in row[0].lower() for index in columns]
    assert min(ratios) == 1.0


def test_a_recipe_without_evidence_says_so(macros: ModuleType) -> None:
    rows = {row[0].strip("`"): set(row[1:]) for row in rows_of(macros.picture.recipe_evidence())[2:]}
    assert rows.keys() >= macros.picture.RECIPES.keys()
    nothing = {name for name, cells in rows.items() if cells == {macros.picture.NOT_MEASURED}}
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    said = re.search(r"\n(`[^\n]*) (?:was|were) not trained to the end anywhere", text)
    assert set(re.findall(r"`(\w+)`", said[1] if said else "")) == nothing


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_sentences_of_the_readme(macros: ModuleType) -> None:
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    rows = macros.result("training_step_h200")["rows"]
    steps = {row["case"]: row.get("graph_ms") for row in rows if row["scale"] == 1.0}
    assert f"costs {steps['nvfp4 fused'] / steps['fp16 fused']:.2f} times the fused FP16 step" in text
    assert f"has {macros.result('packed_unet_h200')['bytes']['ratio']:.2f} of the bytes of FP16 weights" in text
