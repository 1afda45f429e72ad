"""No call gives two variables to each other's parameters: `resize(image, width, height)` of (image, height, width).

Functions and classes of modules are looked up by their names; methods are not.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = {"fp4deploy": ROOT / "fp4deploy", "fp4deploy.cli": ROOT / "cli"}
MEANT = ("fp4deploy.report.figures.task_pictures: unmatched(one=other, other=one)",)  # of both sides
Known = dict[str, list[str]]  # function or class -> its parameters, those by keyword alone with a star


def modules() -> dict[str, ast.Module]:
    """Name -> what is in it."""
    found = {}
    for package, folder in PARTS.items():
        for path in folder.rglob("*.py"):
            inner = path.relative_to(folder).with_suffix("").parts
            name = ".".join((package, *(part for part in inner if part != "__init__")))
            found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def parameters(node: ast.FunctionDef) -> list[str]:
    given = node.args
    return [*(each.arg for each in (*given.posonlyargs, *given.args)), *(f"*{each.arg}" for each in given.kwonlyargs)]


def signatures(tree: ast.Module) -> Known:
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = parameters(node)
        elif isinstance(node, ast.ClassDef):
            made = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
            fields = [each.target.id for each in node.body
                      if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
                      and "ClassVar" not in ast.unparse(each.annotation)]  # fmt: skip
            found[node.name] = parameters(made[0])[1:] if made else fields
    return found


def imported(tree: ast.Module, known: dict[str, Known]) -> Known:
    return {
        each.asname or each.name: known[node.module][each.name]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in known
        for each in node.names
        if each.name in known[node.module]
    }


def exchanged(name: str, tree: ast.Module, reached: Known) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in reached:
            continue
        if any(isinstance(each, ast.Starred) for each in node.args):
            continue
        positional = (each for each in reached[node.func.id] if each[0] != "*")
        given = {**dict(zip(positional, node.args, strict=False)), **{each.arg: each.value for each in node.keywords}}
        said = {str(key): getattr(value, "id", None) or getattr(value, "attr", "") for key, value in given.items()}
        for one, other in said.items():
            if one < other and said.get(other) == one:
                yield f"{name}: {node.func.id}({one}={other}, {other}={one})"


def test_no_two_arguments_are_exchanged() -> None:
    trees = modules()
    known = {name: signatures(tree) for name, tree in trees.items()}
    for name, tree in trees.items():
        known[name] = imported(tree, known) | known[name]
    calls = [text for name, tree in trees.items() for text in exchanged(name, tree, known[name])]
    assert [text for text in calls if text not in MEANT] == []
    tree = ast.parse("def f(a, height, *, width): ...\nf(1, card.width, width=card.height)\nf(1, height, width=width)")
    assert list(exchanged("m", tree, signatures(tree))) == ["m: f(height=width, width=height)"]
