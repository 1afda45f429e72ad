"""The room knows images and tensors: it imports nothing of models' preparation, export or measurement."""

from __future__ import annotations

import ast
from pathlib import Path

import fp4deploy.packed

BELOW = {"errors", "formats", "models", "packed", "plugins"}


def test_packed_imports_only_from_below() -> None:
    folder = Path(fp4deploy.packed.__file__).parent
    found = set()
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found |= {name.split(".")[1] for name in names if name.startswith("fp4deploy.")}
    assert "plugins" in found
    assert found <= BELOW
