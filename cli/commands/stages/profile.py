"""`fp4deploy profile`: where the time of a packed network goes, layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fp4deploy.errors import InputError

from ...artifacts import PackedOption, packed_networks, write_json
from ...console import note, notes, results, shown, table
from ...settings import JsonOutOption


def profile(
    engine: PackedOption = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Images a timed run.")] = 1,
    iterations: Annotated[int, typer.Option("--iterations", min=1, help="Timed runs of each layer.")] = 50,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="Chrome trace of the layers of one network.", show_default="not written"),
    ] = None,
    out: JsonOutOption = None,
) -> None:
    """Time each layer of packed networks, against the limits of this machine."""
    from fp4deploy.bench import layers
    from fp4deploy.bench.environment import environment
    from fp4deploy.system.files import require_writable, write_whole

    require_writable(None if out in (None, "-") else Path(str(out)), trace)
    paths = packed_networks(engine)
    if trace is not None and len(paths) > 1:
        raise InputError(f"--trace takes one network, and there are {len(paths)}: name one with --engine.")
    found = [layers.layer_times(path, batch, iterations) for path in paths]
    console = notes() if out == "-" else results()
    for one in found:
        numeric = {*layers.COLUMNS}.difference(layers.TEXTS)
        console.print(table(layers.COLUMNS, layers.table_rows(one), right=numeric))
        console.print(layers.summary(one), markup=False, soft_wrap=True)
    if trace is not None:
        write_whole(trace, layers.chrome_trace(found[0]))
        note(f"Wrote {shown(trace)}.")
    write_json({"layers": [one.to_json() for one in found], "environment": environment()}, out)
