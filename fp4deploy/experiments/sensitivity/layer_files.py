"""The study of layers as files: numbers (json), tables (md), a picture (png)."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fp4deploy.bench import tables
from fp4deploy.experiments.panels import BLUE, GREEN, GREY, ORANGE, panels, png
from fp4deploy.experiments.sensitivity.files import write_each
from fp4deploy.experiments.sensitivity.layers import LayerError, LayerStudy

COLOURS = {"input": BLUE, "weight": "#e69f00"}
LONGEST = 60  # layers of a picture
NAMED = 3  # channels in a table


def save_layers(study: LayerStudy, folder: Path) -> list[Path]:
    """Write layers.{json,md,png} into `folder`.

    Raises:
        InputError: the disk is full or the folder cannot be written.
    """
    text = json.dumps(asdict(study), indent=1, allow_nan=False) + "\n"
    contents = {"json": text.encode(), "md": render_layers(study).encode(), "png": _png(study)}
    return write_each(folder / "layers", contents)


def render_layers(study: LayerStudy) -> str:
    """The study as Markdown: what all layers lose together, then each, the largest error at the end first."""
    together = ", ".join(f"{form} {_percent(value)} %" for form, value in study.together.items())
    rows = [
        [
            row.layer,
            f"{row.in_channels}",
            f"{100 * row.macs:.1f}",
            *(_percent(row.at_end[form]) for form in row.at_end),
            *(_percent(row.inside[form]) for form in row.inside),
            _share(row.shift),
            *(_share(row.scales[operand]) for operand in COLOURS),
            _share(row.half),
            ", ".join(f"{at} ({_share(share)} %)" for at, share in row.channels[:NAMED]),
        ]
        for row in sorted(study.layers, key=lambda row: -row.at_end["both"])
    ]
    names = ["layer", "channels", "MACs %", "output: input", "weight", "both", "own: input", "weight", "both"]
    names += ["shift %", "E4M3: input", "weight", "half of it in % of channels", "largest channels"]
    return "\n".join(
        (
            f"# Layers in {study.recipe}, {study.images} images\n",
            f"Every layer quantised, error of the output in % of its rms: {together}; "
            f"{100 * study.changed:.3f} % of it changes class.\n",
            "Each layer alone: error of the network's output and of the layer's own, in % of their rms; shares of the "
            "layer's own squared error:\n",
            tables.markdown(names, rows),
        )
    )


def _percent(value: float) -> str:
    return f"{100 * value:.3g}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f}"


def _png(study: LayerStudy) -> bytes:
    layers = study.layers
    if len(layers) > LONGEST:  # the worst ones, in the network's order
        worst = sorted(layers, key=lambda row: -row.at_end["both"])[:LONGEST]
        layers = [row for row in layers if row in worst]
    figure, (end, own, share) = panels((13, 1.8 + 0.24 * len(layers)), 3, sharey=True, width_ratios=(1.2, 1, 0.8))
    heading = f"Error of the output, this layer alone in {study.recipe}, % of rms"
    _bars(end, layers, [row.at_end for row in layers], heading)
    _bars(own, layers, [row.inside for row in layers], "Error of the layer's own output, % of rms")
    end.set_xscale("log")
    end.legend(fontsize=8)
    shares = {
        "half of the error by the input: % of its channels": [row.half for row in layers],
        "of the error: shift of channels, %": [row.shift for row in layers],
        "of the input's: rounded block scales, %": [row.scales["input"] for row in layers],
    }
    for (label, values), (colour, marker) in zip(
        shares.items(), ((GREEN, "o"), (ORANGE, "D"), (GREY, "s")), strict=True
    ):
        found = [(100 * value, place) for place, value in enumerate(values) if value is not None]
        share.plot(*zip(*found, strict=True), marker, color=colour, label=label, markersize=5)
    share.set_title("Where it is from", loc="left", fontsize=10)
    share.set_xlim(-2, 102)
    figure.legend(handles=share.lines, fontsize=8, loc="outside lower right", ncols=3)
    return png(figure)


def _bars(panel: Any, layers: list[LayerError], errors: list[dict[str, float]], heading: str) -> None:
    """Input and weight of each layer side by side, the first layer on top."""
    for offset, (operand, colour) in zip((-0.2, 0.2), COLOURS.items(), strict=True):
        places = [place + offset for place in range(len(layers))]
        panel.barh(places, [100 * each[operand] for each in errors], 0.4, color=colour, label=f"{operand} in FP4")
    panel.set_yticks(range(len(layers)), [f"{row.layer}  ({row.in_channels})" for row in layers], fontsize=7)
    panel.set_ylim(len(layers) - 0.4, -0.6)
    panel.set_title(heading, loc="left", fontsize=10)
