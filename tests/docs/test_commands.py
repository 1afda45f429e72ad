"""Every `fp4deploy` command that the README and the site show is one that the program takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
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
def program() -> click.Command:
    import importlib

    return typer.main.get_command(importlib.import_module(f"{PACKAGE}.main").app)


@pytest.mark.parametrize(("page", "command"), shown())
def test_a_shown_command_is_valid(program: click.Command, page: str, command: str) -> None:
    """Names, options and values are parsed as the program parses them; nothing is run."""
    words = shlex.split(command)[1:]
    if words[-1:] in (["..."], ["…"]):
        words.pop()
    current = program
    context = click.Context(program, info_name="fp4deploy")
    while isinstance(current, click.Group):
        while words and words[0].startswith("-"):
            assert any(words[0] in option.opts for option in current.params), f"{page}: {command}"
            words.pop(0)
        if not words:  # an option of the program itself, such as --install-completion
            return
        name, found, words = current.resolve_command(context, words)
        assert found is not None, f"{page}: {command}"
        current = found
        context = click.Context(current, info_name=name, parent=context)
        if not words and isinstance(current, click.Group):
            return
    current.make_context(context.info_name, list(words), parent=context.parent)
