"""Files, lines and public names of each room, and what has changed since they were recorded, so that growth is seen.

    python tools/size.py               a table; a number that has changed is followed by the difference
    python tools/size.py --record      the same, and write tools/size.json

| column | counts |
|---|---|
| files | `.py`, and sources of CUDA and C++ |
| Python, CUDA/C++ | lines that are not blank |
| comments | share of those lines that have a comment or belong to a docstring, in % |
| Any | uses of `typing.Any` in 1,000 lines of Python |
| names | public: what modules define at their top without a leading underscore; not in tests |

A room is a folder of `fp4deploy`, whose modules outside of folders are one more, or another folder of the checkout.
Nothing is refused: whether a change is worth its size is for its reader to say.
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("fp4deploy", "cli", "native", "tools", "benchmarks", "examples", "docs", "tests")
CUDA = (".cu", ".cuh", ".c", ".cpp", ".h", ".hpp")
COLUMNS = {
    "files": "files",
    "python": "Python",
    "cuda": "CUDA/C++",
    "comments": "comments",
    "any": "Any",
    "names": "names",
}
# A string, so that what looks like a comment in one is none; or a comment.
_STRING_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)


def measure(root: Path) -> dict[str, dict[str, int]]:
    """The columns of each room below `root`, and of "total"; "comments" in per cent, "any" in 1,000 lines."""
    rooms: dict[str, Counter[str]] = {}
    for path in _sources(root):
        parts = path.relative_to(root).parts
        room = "/".join(parts[: 2 if parts[0] == "fp4deploy" and len(parts) > 2 else 1])
        text = path.read_text(encoding="utf-8")
        lines = {number for number, line in enumerate(text.splitlines(), 1) if line.strip()}
        comments = python_comments(text) if path.suffix == ".py" else cuda_comments(text)
        names = len(public_names(text)) if path.suffix == ".py" and "tests" not in parts else 0
        language, uses = ("python", uses_of_any(text)) if path.suffix == ".py" else ("cuda", 0)
        counts = {"files": 1, language: len(lines), "comments": len(lines & comments), "names": names, "any": uses}
        for name in (room, "total"):
            rooms.setdefault(name, Counter()).update(counts)
    return {name: _row(rooms[name]) for name in sorted(rooms, key=lambda name: (name == "total", name))}


def _sources(root: Path) -> Iterator[Path]:
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", *CUDA) and "build" not in path.parts[len(root.parts) :]:
                yield path


def _row(counts: Counter[str]) -> dict[str, int]:
    lines = counts["python"] + counts["cuda"]
    shares = {
        "comments": 100 * counts["comments"] / max(lines, 1),
        "any": 1000 * counts["any"] / max(counts["python"], 1),
    }
    return {name: round(shares.get(name, counts[name])) for name in COLUMNS}


def uses_of_any(text: str) -> int:
    """How often `Any` stands in a module, its import aside."""
    return sum(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(ast.parse(text)))


def public_names(text: str) -> set[str]:
    """What a module defines under a name without a leading underscore; imports are none of it."""
    names: set[str] = set()
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            stored = [each for one in targets for each in ast.walk(one) if isinstance(each, ast.Name)]
            names |= {each.id for each in stored if isinstance(each.ctx, ast.Store)}  # x[0] = 1 defines no x
    return {name for name in names if not name.startswith("_")}


def python_comments(text: str) -> set[int]:
    """Numbers of the lines that have a comment or belong to a docstring."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    found = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(
            node
        ):
            found |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return found


def cuda_comments(text: str) -> set[int]:
    """Numbers of the lines that have a comment or a part of one."""
    found: set[int] = set()
    for match in _STRING_OR_COMMENT.finditer(text):
        if match[0].startswith("/"):
            first = text.count("\n", 0, match.start()) + 1
            found |= set(range(first, first + match[0].count("\n") + 1))
    return found


def table(rooms: dict[str, dict[str, int]], recorded: dict[str, dict[str, int]]) -> str:
    """A line for each room, and one for each that was recorded and is gone."""
    lines = [f"{'room':<24}" + "".join(f"{title:>15}" for title in COLUMNS.values())]
    for room, row in rooms.items():
        before = recorded.get(room, dict.fromkeys(COLUMNS, 0))  # a column that was not recorded has not changed
        changes = {name: row[name] - before.get(name, row[name]) for name in COLUMNS}
        cells = (f"{row[name]}{f' ({change:+})' if change else ''}" for name, change in changes.items())
        lines.append(f"{room:<24}" + "".join(f"{cell:>15}" for cell in cells))
    return "\n".join([*lines, *(f"gone: {room}" for room in recorded if room not in rooms)])


def main(root: Path = ROOT, record: bool = "--record" in sys.argv) -> None:
    file, rooms = root / "tools" / "size.json", measure(root)
    print(table(rooms, json.loads(file.read_text(encoding="utf-8")) if file.is_file() else rooms))
    if record:
        file.write_text(json.dumps(rooms, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
