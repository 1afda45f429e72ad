"""`fp4deploy settings`: the keys of `--set` and configuration files, with value, default and valid range."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from ...console import print_json, results, table
from ...settings import ConfigOption, SetOption, SettingOptions
from ...settings import settings as resolve


def settings(
    section: Annotated[
        str | None, typer.Argument(help="Only keys that begin with this: train, data.height.", show_default="all")
    ] = None,
    config: ConfigOption = None,
    sets: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of the table.")] = False,
) -> None:
    """List the settings: key, value, default, valid values and meaning."""
    from fp4deploy.train.config import describe_settings

    rows = describe_settings(resolve(SettingOptions(config=config, sets=sets)), section or "")
    if as_json:
        print_json([vars(row) for row in rows])
        return
    cells = [
        (row.key, _text(row.value), "" if row.value == row.default else _text(row.default), row.valid, row.meaning)
        for row in rows
    ]
    results().print(table(("setting", "value", "default", "valid", "meaning"), cells))


def _text(value: Any) -> str:
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)
