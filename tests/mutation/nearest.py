"""The test files that are nearest to a file of the code: those that import it, or name what it defines, most often."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from tests.mutation.copies import ROOT

FAMILIES = ("tests/contract/test_results.py", "tests/fuzz/test_edits.py", "tests/contract/test_lines.py")  # every room
FEW, MOST = 2, 4  # files beside them


@cache
def _tests() -> dict[str, tuple[str, set[str]]]:
    """Test file -> its text, and the modules that it imports, and names with the module that it has them from."""
    found = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        names = {f"fp4deploy.{name}" for name in re.findall(r"\bfd\.(\w+)", text)}
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("cli", "fp4deploy"):
                place = f"fp4deploy.{node.module}" if str(node.module).startswith("cli") else str(node.module)
                names |= {place, *(f"{place}.{each.name}" for each in node.names)}
        if not path.stem.endswith("_gpu"):
            found[path.relative_to(ROOT).as_posix()] = text, names
    return found


@cache
def nearest(file: str) -> tuple[str, ...]:
    """pytest arguments for a file of `fp4deploy` or `cli`, the test file of its name first."""
    module = file.removesuffix(".py").replace("/", ".")
    module = f"fp4deploy.{module}" if module.startswith("cli.") else module
    stem, room = module.rpartition(".")[2], "cli" if "cli." in module else Path(file).parts[1]
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    command = f'"{stem.replace("_", "-")}"' if ".commands." in module else ""
    own = re.compile(rf"tests/{room}/(.*/)?test_(\w+_)?{stem}(_\w+)?\.py$")
    parts, found = module.split("."), {}
    places = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]  # from which a name of it may be imported
    for test, (text, names) in _tests().items():
        named = {name for name in defined if names & {f"{place}.{name}" for place in places}}
        named |= {stem} if module in names or module in text else set()
        count = sum(text.count(name) for name in named) + (text.count(command) if command else 0)
        if test not in FAMILIES and (count or own.search(test)):
            found[test] = not own.search(test), not test.startswith(f"tests/{room}/"), -count
    near = sorted(found, key=found.__getitem__)[:MOST]
    if len(near) < FEW:  # those of its folder, with a word of its name first
        folder = Path("tests", *module.split(".")[1:-1])
        while not (ROOT / folder).is_dir():
            folder = folder.parent
        words = {*stem.split("_"), *parts[1:-1]}
        beside = [test for test in _tests() if Path(test).parent == folder and test not in near]
        near += sorted(beside, key=lambda test: -len(words & set(Path(test).stem.split("_"))))
    return (*near[:MOST], *FAMILIES)
