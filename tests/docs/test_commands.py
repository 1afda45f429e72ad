"""Every `fp4deploy` command that the README and the site show is one that the program takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.cli.command_line import PACKAGE

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def shown() -> list[tuple[str, str]]:
    """(page, command) of every fenced block and every inline command, in order, each once."""
    found: dict[tuple[str, str], None] = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in re.findall(r"```\w*\n(.*?)```", text, re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                for part in re.split(r"\s&&\s", line.split(" #")[0]):
                    if part.strip().startswith("fp4deploy "):
                        found[page.name, part.strip()] = None
        for inline in re.findall(r"`(fp4deploy [^`]*--[^`]*)`", text.replace("\n", " ")):
            found[page.name, inline] = None
    return list(found)


@pytest.fixture(scope="module")
def program() -> Any:
    import importlib

    return typer.main.get_command(importlib.import_module(f"{PACKAGE}.main").app)


def parse(program: Any, words: list[str]) -> None:
    """Names, options and values as the program parses them; nothing is run. Typer has a click of its own."""
    current, context = program, program.context_class(program, info_name="fp4deploy")
    while hasattr(current, "commands"):
        while words and words[0].startswith("-"):
            assert any(words[0] in option.opts for option in current.params), words
            words = words[1:]
        if not words:  # an option of the program itself, such as --install-completion
            return
        name, current, words = current.resolve_command(context, words)
        assert current is not None, name
        context = current.context_class(current, info_name=name, parent=context)
    current.make_context(context.info_name, list(words), parent=context.parent)


@pytest.mark.parametrize(("page", "command"), shown())
def test_a_shown_command_is_valid(program: Any, page: str, command: str) -> None:
    words = [word.strip("[]") for word in shlex.split(command)[1:]]  # [WORD] is one that may be left out
    if words[-1:] in (["..."], ["…"]):
        words.pop()
    words = [word for word in words if word not in ("--quiet", "--debug")]
    if words != ["COMMAND"]:
        parse(program, words)


@pytest.mark.parametrize("command", ["trian", "train --no-such-option", "bench --batch many", "data chek DIR"])
def test_a_wrong_command_is_not(program: Any, command: str) -> None:
    with pytest.raises(Exception, match="[Nn]o such|valid integer"):
        parse(program, command.split())
