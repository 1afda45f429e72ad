"""The measured roofline of a packed network, from what `fp4deploy profile --json FILE` wrote.

    python benchmarks/roofline_layers.py benchmarks/results/layers_h200.json --out docs/images/roofline_layers.svg

Left: every layer that multiplies, by its operations a byte and the rate that it reached, below the two limits that were
measured in the same run. Right: the share of the nearer limit of all nodes, also of those that only move bytes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
mpl.rcParams["svg.hashsalt"] = "fp4deploy"
from matplotlib import pyplot as plt  # noqa: E402  after the backend is chosen

COLOURS = {"conv2d": "#1f77b4", "conv_transpose2d": "#ff7f0e", "linear": "#2ca02c"}
OTHER = "#7f7f7f"


def draw(found: dict[str, Any], out: Path) -> None:
    """One network's picture."""
    layers, limits = found["layers"], found["limits"]
    bandwidth, rate = limits["bandwidth"], limits["rate"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 0.16 * len(layers) + 2), layout="constrained")
    products = [layer for layer in layers if layer["operations"]]
    for layer in products:
        intensity = layer["operations"] / layer["bytes"]
        reached = layer["operations"] / layer["ms"] / 1e9
        left.plot(intensity, reached, "o", color=COLOURS.get(layer["op"], OTHER), markersize=5)
        left.annotate(layer["layer"], (intensity, reached), fontsize=5, xytext=(3, 2), textcoords="offset points")
    intensities = [layer["operations"] / layer["bytes"] for layer in products]
    ends = [min(intensities) / 2, rate / bandwidth, max(max(intensities), rate / bandwidth) * 2]
    left.plot(ends, [min(end * bandwidth, rate) / 1e12 for end in ends], color="black", linewidth=1)
    left.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="TFLOP/s", title="layers that multiply")
    places = range(len(layers))
    colours = [COLOURS.get(layer["op"], OTHER) for layer in layers]
    right.barh(places, [layer["share"] for layer in layers], color=colours)
    right.set_yticks(places, [f"{layer['layer']}, {1e3 * layer['ms']:.0f} µs" for layer in layers], fontsize=5)
    right.axvline(1, color="black", linewidth=1)
    right.invert_yaxis()
    right.set(xlabel="share of the nearer limit", title="every node")
    figure.suptitle(
        f"batch {found['batch']}, {found['device']}: {bandwidth / 1e9:.0f} GB/s, {rate / 1e12:.0f} TFLOP/s measured"
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layers", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    draw(json.loads(arguments.layers.read_text(encoding="utf-8"))["layers"][0], arguments.out)


if __name__ == "__main__":
    main()
