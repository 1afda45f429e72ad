"""`fp4deploy bench --pipeline`: images a second from files and from frames to masks, with the share of each part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fp4deploy.errors import InputError

from ...artifacts import write_json
from ...console import note, notes, results, shown


def pipeline(chosen: list[tuple[Path, dict[str, Any]]], images: Path, batch: int, out: str | None) -> None:
    """Measure each artefact on a batch of the images below a folder, and print a row of each.

    Raises:
        InputError: nothing to measure, no image, or a model whose output is no map of classes.
    """
    from rich.table import Table

    from fp4deploy.bench.environment import environment
    from fp4deploy.bench.runtimes.open import open_runtime
    from fp4deploy.errors import UnavailableError
    from fp4deploy.predict.pipeline import PARTS, Pipeline, frames_of
    from fp4deploy.predict.sources import find_sources

    paths = [source.path for source in find_sources([str(images)]) if not source.is_video]
    frames, decoding = frames_of(paths, batch)
    height, width = frames.shape[1:3]
    note(f"Batches of {batch} images of {width} x {height} pixels; Pillow decodes one in {decoding / batch:.2f} ms.")
    table = Table("artefact", "runtime", box=None, pad_edge=False)
    for name in (*PARTS, "overlapped", "images/s", "with decoding", "x network"):
        table.add_column(name, justify="right")
    found = []
    for path, settings in chosen:
        try:
            runtime = open_runtime(path, **settings)
        except UnavailableError as error:
            note(f"Not {shown(path)}: {error}")
            continue
        measured = Pipeline(runtime).times(frames).to_json()
        measured["images_per_s_with_decoding"] = 1e3 * batch / max(measured["ms"]["overlapped"], decoding)
        found.append({"path": str(path), "runtime": runtime.name, "precision": runtime.precision, **measured})
        parts = [f"{measured['ms'][part]:.2f} ({100 * measured['share'][part]:.0f} %)" for part in PARTS]
        rates = [f"{measured[name]:.1f}" for name in ("images_per_s", "images_per_s_with_decoding")]
        overlapped = f"{measured['ms']['overlapped']:.2f}"
        table.add_row(shown(path), runtime.name, *parts, overlapped, *rates, f"{measured['over_network']:.2f}")
    if not found:
        raise InputError("None of these artefacts runs here. What this machine can run: fp4deploy doctor")
    size = {"height": height, "width": width, "decode_ms": decoding}
    (notes() if out == "-" else results()).print(table)
    write_json({"pipeline": found, **size, "environment": environment()}, out)
