"""What benchmarks, examples and tools import from fp4deploy is there: most of them run on a GPU alone."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(path for folder in ("benchmarks", "examples", "tools") for path in (ROOT / folder).glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_names_that_are_imported_exist(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fp4deploy":
            module = importlib.import_module(str(node.module))
            names = [alias.name for alias in node.names if not hasattr(module, alias.name)]
            for name in names:
                importlib.import_module(f"{node.module}.{name}")
