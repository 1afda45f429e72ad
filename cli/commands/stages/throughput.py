"""`fp4deploy throughput`: images a second of a packed network with several CUDA streams."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...artifacts import PackedOption, packed_networks, write_json
from ...console import notes, results, shown, table
from ...settings import JsonOutOption

STREAMS = (1, 2, 4)


def throughput(
    engine: PackedOption = None,
    streams: Annotated[
        list[int] | None,
        typer.Option("--streams", min=1, help="CUDA streams at the same time; repeatable.", show_default="1, 2 and 4"),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Images of each stream at a time.")] = 1,
    out: JsonOutOption = None,
) -> None:
    """Measure throughput, GPU memory and energy of packed networks with several CUDA streams."""
    from fp4deploy.bench.environment import environment
    from fp4deploy.bench.streams import COLUMNS, throughputs
    from fp4deploy.system.files import require_writable

    require_writable(None if out in (None, "-") else Path(str(out)))
    numbers = streams or list(STREAMS)
    found = {str(path): throughputs(path, numbers, batch) for path in packed_networks(engine)}
    cells = [(shown(Path(path)), *row.cells()) for path, rows in found.items() for row in rows]
    (notes() if out == "-" else results()).print(table(("artefact", *COLUMNS), cells, right=COLUMNS))
    measured = {path: [row.to_json() for row in rows] for path, rows in found.items()}
    write_json({"throughput": measured, "environment": environment()}, out)
