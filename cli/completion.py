"""Shell completion: what may follow an option, from the files and tables that the command itself would read.

`fp4deploy --install-completion` adds it to bash, zsh, fish or PowerShell. A completer answers while a person types, so
it opens as few files as it can and never raises: what cannot be read completes to nothing. Recipes and settings need
torch, and take a second or two the first time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import typer

from fp4deploy.errors import InputError
from fp4deploy.runs import MODELS, RUNS, latest_run

MAX_ANNOTATIONS = 64 << 20  # bytes of a COCO file that is worth reading for its classes
_SHELL = re.compile(r"[\x00-\x1f\x7f\"'$`\\;&|<>(){}*?!#~]")


def _plain(names: Iterable[str]) -> list[str]:
    """Names without characters that a shell would act on: it puts what it gets on the command line as it is."""
    return [name for name in names if not _SHELL.search(name)]


def _completer(names: Callable[[typer.Context], Iterable[str]]) -> Callable[[typer.Context, str], list[str]]:
    """A completer of those `names(context)` that begin with what was typed."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        try:
            return [name for name in _plain(names(ctx)) if name.startswith(incomplete)]
        except Exception:  # a traceback in the middle of a command line helps nobody
            return []

    return complete


def _listed(names: Callable[[typer.Context], Iterable[str]]) -> Callable[[typer.Context, str], list[str]]:
    """The same for the last entry of a comma-separated list, without the entries that it has already."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        used = before.split(",")
        try:
            return [before + comma + name for name in _plain(names(ctx)) if name.startswith(last) and name not in used]
        except Exception:
            return []

    return complete


def _recipes(ctx: typer.Context) -> Iterable[str]:
    from fp4deploy.qat.recipes import RECIPES, RULES

    return [*RECIPES, *RULES]


def _architectures(ctx: typer.Context) -> Iterable[str]:
    from fp4deploy.architecture import HARDWARE

    return [str(architecture) for architecture in HARDWARE]


def _runs(ctx: typer.Context) -> Iterable[str]:
    return sorted(str(config.parent) for config in RUNS.glob("*/config.yaml"))


def _artifacts(ctx: typer.Context) -> Iterable[str]:
    """File names in the latest run, then files below the current folder's name."""
    found = []
    with suppress(InputError):
        run = latest_run().path
        found = [path.parent.name for path in run.glob("*/best.safetensors")]
        patterns = ("export/*.onnx", "export/*.fp4", "engines/*.plan")
        found += [path.name for pattern in patterns for path in run.glob(pattern) if not path.name.startswith(".")]
    return sorted(found) + [str(path) for path in Path().glob("*") if not path.name.startswith(".")]


def _classes(ctx: typer.Context) -> Iterable[str]:
    """The categories of the data set that `--data` names on the same line."""
    root = ctx.params.get("data")
    files = sorted(Path(root).expanduser().rglob("*.json")) if root else []
    for file in files:
        if not file.is_file() or file.stat().st_size > MAX_ANNOTATIONS:
            continue
        tree = json.loads(file.read_text(encoding="utf-8"))  # noqa: TID251  a key of the shell waits
        if isinstance(tree, dict) and isinstance(tree.get("categories"), list):
            return [str(category["name"]) for category in tree["categories"]]
    return []


def _settings(ctx: typer.Context) -> Iterable[str]:
    from fp4deploy.train.config import setting_names

    return [f"{name}=" for name in setting_names()]


def _sources(ctx: typer.Context) -> Iterable[str]:
    """Runs, then files and folders of the current folder."""
    return [*_runs(ctx), *(str(path) for path in sorted(Path().glob("*")) if not path.name.startswith("."))]


recipes = _completer(_recipes)
architectures = _completer(_architectures)
runs = _completer(_runs)
artifacts = _completer(_artifacts)
sources = _completer(_sources)
settings = _completer(_settings)
models = _listed(lambda ctx: MODELS)
classes = _listed(_classes)
