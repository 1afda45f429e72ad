"""The study of kurtosis as files: numbers (json), tables (md), a picture (png)."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from fp4deploy.bench import tables
from fp4deploy.experiments.panels import BLUE, GREEN, GREY, ORANGE, panels, png
from fp4deploy.experiments.sensitivity.study import LayerDamage, Study
from fp4deploy.system.files import write_whole

MEASURES = ("changed", "logit_error", "parameters", "macs")
COLOURS = {
    "GEMMs in FP4": BLUE,
    "first layer": "#e69f00",
    "output layer": ORANGE,
    "normalisation": GREEN,
    "other": GREY,
}
MAX_BARS = 30
MARKERS = {"weight": "o", "bias": "v", "input": "s"}


def save_study(study: Study, folder: Path) -> list[Path]:
    """Write kurtosis.{json,md,png} into `folder`.

    Raises:
        InputError: the disk is full or the folder cannot be written.
    """
    contents = {"json": _json(study), "md": render_study(study).encode(), "png": _png(study)}
    return write_each(folder / "kurtosis", contents)


def write_each(stem: Path, contents: Mapping[str, bytes]) -> list[Path]:
    """Write STEM.SUFFIX for each suffix; their paths."""
    for suffix, content in contents.items():
        write_whole(Path(f"{stem}.{suffix}"), content)
    return [Path(f"{stem}.{suffix}") for suffix in contents]


def render_study(study: Study) -> str:
    """The study as Markdown: what changes the output, then the tails."""
    heading = f"# Kurtosis and NVFP4, {study.precision} checkpoint, {study.images} images\n"
    groups = [
        [
            group,
            f"{len(rows)}",
            *(f"{100 * statistics.fmean(getattr(row, name) for row in rows):.3f}" for name in MEASURES),
        ]
        for group, rows in _groups(study).items()
    ]
    names = ("group", "layers", "pixels changed %", "logit error %", "parameters % each", "MACs % each")
    damage = [
        [row.layer, row.what, f"{100 * row.changed:.3f}", f"{100 * row.logit_error:.3f}", _kept(row.kept) or "FP4"]
        for row in sorted(study.damage, key=lambda row: -row.logit_error)
    ]
    tails = [
        [
            row.layer,
            row.tensor,
            f"{row.elements}",
            *map(_number, (row.kurtosis, row.peak, row.sqnr_db, None if row.lost is None else 100 * row.lost)),
            _kept(row.kept),
        ]
        for row in study.tensors
    ]
    return "\n".join(
        (
            heading,
            "One layer in NVFP4, everything else in high precision; means over the layers of a group:\n",
            tables.markdown(names, groups),
            "Each layer, the largest error first:\n",
            tables.markdown(("layer", "in NVFP4", "pixels changed %", "logit error %", "in the model"), damage),
            "Tails (Pearson's kurtosis, a normal distribution has 3), and the error of NVFP4:\n",
            tables.markdown(
                ("layer", "tensor", "elements", "kurtosis", "amax / std", "SQNR dB", "variance lost %", "kept"), tails
            ),
        )
    )


def _groups(study: Study) -> dict[str, list[LayerDamage]]:
    """The damage by what kind of layer was quantised."""
    groups: dict[str, list[LayerDamage]] = {}
    for row in study.damage:
        groups.setdefault(group_of(row.kept, row.what), []).append(row)
    return groups


def group_of(kept: str, what: str) -> str:
    """The group of a layer, from the reason of its precision."""
    if not kept:
        return "GEMMs in FP4"
    if kept.startswith("first"):
        return "first layer"
    if kept.startswith("output"):
        return "output layer"
    return f"normalisation, {what}" if kept.startswith("normal") else "other"


def _kept(reason: str) -> str:
    return reason.split(":")[0]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _json(study: Study) -> bytes:
    return (json.dumps(asdict(study), indent=1, allow_nan=False) + "\n").encode()


def _png(study: Study) -> bytes:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    figure, (tails, damage) = panels((12.5, 6.2), 2, width_ratios=(1, 1.05))
    for group, colour in COLOURS.items():
        for tensor, marker in MARKERS.items():
            rows = [
                row
                for row in study.tensors
                if row.tensor == tensor
                and group_of(row.kept, "").split(",")[0] == group
                and row.kurtosis is not None
                and row.lost is not None
            ]
            if rows:
                tails.scatter(
                    [row.kurtosis for row in rows],
                    [max(1e-3, 100 * (row.lost or 0.0)) for row in rows],
                    s=34,
                    c=colour,
                    marker=marker,
                    label=f"{group}: {tensor}",
                    edgecolors="white",
                    linewidths=0.6,
                )
    tails.axvline(3, color=GREY, linewidth=0.8, linestyle="--")
    tails.annotate("normal", (3, 0.01), xycoords=("data", "axes fraction"), fontsize=7.5, color="#666666")
    tails.set(xscale="log", yscale="log", xlabel="kurtosis (Pearson)", ylabel="variance lost to NVFP4, %")
    tails.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    for axis in (tails.xaxis, tails.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    tails.xaxis.set_minor_formatter(NullFormatter())
    tails.set_title("Tails of every tensor, and what NVFP4 loses of it", loc="left", fontsize=10)
    tails.legend(fontsize=7.5, frameon=True, framealpha=0.85)
    bars = sorted(study.damage, key=lambda bar: bar.logit_error)[-MAX_BARS:]
    damage.barh(
        [f"{bar.layer}, {bar.what}" for bar in bars],
        [100 * bar.logit_error for bar in bars],
        color=[COLOURS[group_of(bar.kept, bar.what).split(",")[0]] for bar in bars],
    )
    damage.tick_params(axis="y", labelsize=7)
    damage.set_ylim(-0.7, len(bars) - 0.3)
    damage.set(xlabel="error of the logits, % of their rms", xlim=(0, None))
    heading = f"One layer alone in NVFP4, the {len(bars)} largest of {len(study.damage)}"
    damage.set_title(heading, loc="left", fontsize=10)
    return png(figure)
