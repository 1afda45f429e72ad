"""`fp4deploy doctor`: what this machine can do, what is missing, and the command that adds it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from ...console import print_json, results, table

if TYPE_CHECKING:
    from fp4deploy.bench.environment import Tool


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of the tables.")] = False,
) -> None:
    """Show what this machine can do, what is missing, and the command that adds it."""
    from fp4deploy.bench.environment import abilities, environment, gpus, tools

    found, devices = tools(), gpus()
    tasks = abilities(found, devices)
    if as_json:
        able = {task: {"able": able, "how": how} for task, able, how in tasks}
        print_json({**environment(), "tools": [dataclasses.asdict(tool) for tool in found], "abilities": able})
        return
    _print_tables(environment(), found, tasks)


def _print_tables(machine: dict, found: list[Tool], tasks: list[tuple[str, bool, str]]) -> None:
    from rich.text import Text

    devices = ", ".join(f"{gpu['name']} ({gpu['arch']})" for gpu in machine["gpus"]) or "none"
    console = results()
    console.print(f"Python {machine['python']} on {machine['cpu']}, {machine['cores']} cores; CUDA GPU: {devices}\n")
    libraries = table(("library", "version", "what for", "to add it"))
    for tool in found:
        fault = tool.fault
        version = Text(fault.state, style="red") if fault else Text(tool.version or "")
        # installing again mends nothing where what a library needs, such as a driver, is not there
        remedy = (fault.reason or tool.install) if fault else ""
        libraries.add_row(tool.name, version, tool.purpose, Text(remedy))
    console.print(libraries)
    console.print("\nThis machine can:")
    answers = {True: Text("yes", style="green"), False: Text("no", style="red")}
    rows = [(f"  {task}", answers[yes], how) for task, yes, how in tasks]
    console.print(table(("task", "able", "how"), rows, header=False))
