"""report.html: one file with style, curves and pictures inside it; it needs no network and runs no script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from fp4deploy.bench import tables
from fp4deploy.report.figures.overlays import Overlay, colours
from fp4deploy.report.style import CSS

TITLES = {"fp16": "FP16", "nvfp4": "NVFP4", "fp16_control": "FP16 control", "nvfp4_ptq": "NVFP4 PTQ"}
CHIPS = {"ok": "ok", "built, not run": "idle"}
EMULATED = (
    "Latency compares rows of one backend on one machine. On a CPU NVFP4 is emulated with ordinary arithmetic, bit for "
    "bit but slowly: those rows show accuracy, and say nothing about the speed of a Blackwell GPU."
)


OBJECTS = "<span>One colour and a white line an object; crowds, which are not scored, in grey.</span>"


def render_html(
    facts: dict[str, Any],
    curves: str | None,
    overlays: Sequence[Overlay],
    pictures: Sequence[tuple[str, str]] = (),
) -> str:
    """The whole page."""
    sections = [
        _header(facts),
        _tiles(facts),
        _artifacts(facts),
        _engines(facts["ledgers"]),
        f"<h2>Training</h2><figure>{curves}</figure>" if curves else "",
        _telemetry(pictures),
        _samples(facts, overlays),
        _per_class(facts["models"], "AP" if facts["task"] == "instance" else "IoU"),
        _environment(facts),
    ]
    title = escape(f"{facts['run']} · fp4deploy")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{CSS}</style></head>\n'
        f"<body><main>\n{''.join(f'{section}{chr(10)}' for section in sections if section)}</main></body></html>\n"
    )


def _header(facts: dict[str, Any]) -> str:
    model = next(iter(facts["models"].values()), None)
    what = f"{tables.network(model)}, {model['width']} x {model['height']} pixels · " if model else ""
    first, *others = [escape(sentence) for sentence in facts["summary"]] or [""]
    listed = f"<ul>{''.join(f'<li>{sentence}</li>' for sentence in others)}</ul>" if others else ""
    created = facts["created"].replace("T", " ").removesuffix("+00:00")
    return (
        "<h1>FP16 and NVFP4, side by side</h1>"
        f'<p class="sub">{escape(facts["run"])} · {what}data {escape(facts["data"])} · {created} UTC</p>'
        f'<p class="lead">{first}</p>{listed}'
    )


def _tiles(facts: dict[str, Any]) -> str:
    models = facts["models"]
    baseline = tables.baseline_of(facts["artifacts"])
    reference = tables.accuracy(baseline) if baseline else None
    metric = "AP" if facts["task"] == "instance" else "mIoU"
    tiles = []
    for name, model in models.items():
        value = tables.accuracy(model)
        tail = f"drop {tables.drop(value, reference)} points" if name == "nvfp4" else "validation, points"
        tiles.append(tile(f"{metric}, {TITLES.get(name, name)}", tables.points(value), tail))
    if ".onnx" in facts["sizes"]:
        small, large = facts["sizes"][".onnx"]
        tail = f"{tables.size(small)} against {tables.size(large)}"
        tiles.append(tile("ONNX file, of FP16's", f"{small / large:.2f} x", tail))
    for ledger in facts["ledgers"]:
        if ledger["model"] == "nvfp4":
            counts = ledger["counts"]
            tail = f"matrix products; {counts['FP16 layers, FP4 weights']} convolutions with FP4 weights"
            tiles.append(tile("FP4 kernels in the engine", f"{counts['FP4 matrix products']}", tail))
    return f'<div class="tiles">{"".join(tiles)}</div>'


def tile(name: str, value: str, tail: str) -> str:
    """A number in large letters; plain text."""
    name, value, tail = escape(name), escape(value), escape(tail)
    return f'<div class="tile"><span class="name">{name}</span><b>{value}</b><span>{tail}</span></div>'


def _artifacts(facts: dict[str, Any]) -> str:
    entries = facts["artifacts"]
    body = []
    for entry, cells in zip(entries, tables.rows(entries), strict=True):
        shown = [escape(cell) for cell in cells]
        shown[0] = (
            f'<span class="chip {escape(str(entry["model"]))}">{escape(TITLES.get(entry["model"], cells[0]))}</span>'
        )
        shown[1] = f"<code>{shown[1]}</code>"
        shown[-1] = f'<span class="chip {CHIPS.get(entry["status"], "bad")}">{shown[-1]}</span>'
        body.append(shown)
    found = tables.baseline_of(entries)
    against = f" Drop is against {escape(found['path'])}." if found else ""
    reasons = "".join(f"<li>{escape(entry['reason'])}</li>" for entry in entries if entry["reason"])
    remarks = "".join(f"<li>{escape(remark)}</li>" for remark in facts["remarks"])
    listed = f'<ul class="note">{reasons}{remarks}</ul>' if reasons or remarks else ""
    return f'<h2>Artefacts</h2>{table(tables.head(entries), body)}<p class="note">{EMULATED}{against}</p>{listed}'


def _engines(ledgers: Sequence[dict[str, Any]]) -> str:
    if not ledgers:
        return ""
    counts = list(ledgers[0]["counts"])
    body = [
        [
            f"<code>{escape(entry['engine'])}</code>",
            escape(entry["built"]),
            *(str(entry["counts"][name]) for name in counts),
        ]
        for entry in ledgers
    ]
    details = "".join(_layers(entry) for entry in ledgers)
    return (
        f"<h2>What the engines compute in</h2>{table(('engine', 'built by', *counts), body, numeric=counts)}"
        f'<p class="note">Read from what the compiler lists of each engine, layer by layer.</p>{details}'
    )


def _layers(entry: dict[str, Any]) -> str:
    body = [[f"<code>{escape(row[0])}</code>", *(escape(cell) for cell in row[1:])] for row in entry["layers"]]
    if not body:
        return ""
    layers = table(entry["columns"], body, numeric=())
    return f"<details><summary>{escape(entry['engine'])}, layer by layer</summary>{layers}</details>"


def _samples(facts: dict[str, Any], overlays: Sequence[Overlay]) -> str:
    if not overlays:
        return ""
    legend = OBJECTS if facts["task"] == "instance" else _class_legend(facts["models"]["nvfp4"]["class_names"])
    cells = "".join(f'<div class="head">{escape(title)}</div>' for title in overlays[0].pictures)
    for overlay in overlays:
        cells += "".join(
            f'<img src="{uri}" alt="{escape(overlay.name)}, {escape(title)}">'
            for title, uri in overlay.pictures.items()
        )
        worst = "; the most of the images looked at" if overlay.worst else ""
        told = f"the models differ on {100 * overlay.differing:.2f} % of pixels{worst}"
        cells += f'<div class="caption">{escape(overlay.name)}: {told}</div>'
    return f'<h2>Samples</h2><div class="legend">{legend}</div><div class="samples">{cells}</div>'


def _telemetry(pictures: Sequence[tuple[str, str]]) -> str:
    """Heatmaps of the training: (caption, data URI) of each."""
    if not pictures:
        return ""
    shown = "".join(
        f'<figure><img src="{uri}" alt="{escape(caption)}"><figcaption>{escape(caption)}</figcaption></figure>'
        for caption, uri in pictures
    )
    where = "All of them, with pages that answer the mouse, lie in <code>plots/heatmaps</code>."
    return f'<h2>Telemetry</h2><div class="heatmaps">{shown}</div><p class="note">{where}</p>'


def _class_legend(names: Sequence[str]) -> str:
    palette = colours(len(names), background=names[0] == "background")
    return "".join(
        f'<span><i style="background:rgb{colour}"></i>{escape(name)}</span>'
        for name, colour in zip(names, palette, strict=True)
        if colour
    )


def _per_class(models: dict[str, Any], metric: str) -> str:
    names = next((list(model["per_class"]) for model in models.values() if model["per_class"]), [])
    if not names:
        return ""
    body = []
    for name in names:
        values = {key: model["per_class"].get(name) for key, model in models.items()}
        bars = "".join(
            f'<div class="bar"><i class="{escape(key)}" style="width:{100 * (value or 0):.1f}%"></i></div>'
            for key, value in values.items()
        )
        lost = tables.drop(values.get("nvfp4"), values.get("fp16_control", values.get("fp16")))
        body.append([escape(name), *(tables.points(value) for value in values.values()), lost, bars])
    titles = [TITLES.get(key, key) for key in models]
    return f"<h2>{metric} per class</h2>{table(('class', *titles, 'drop', ''), body, numeric=(*titles, 'drop'))}"


def _environment(facts: dict[str, Any]) -> str:
    stages = ", ".join(f"{stage['stage']} {tables.duration(stage['seconds'])}" for stage in facts["stages"])
    pairs = list(machine_rows(facts["environment"]).items()) or [("machine", "not recorded")]
    pairs += [("time", stages)] if stages else []
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in pairs)
    commands = "\n".join(escape(command) for command in facts["commands"])
    again = f"<h2>To repeat it</h2><pre><code>{commands}</code></pre>" if commands else ""
    return f"<h2>Measured on</h2><dl>{listed}</dl>{again}"


def machine_rows(machine: dict[str, Any] | None) -> dict[str, str]:
    """What `environment` found, for a person; empty where nothing was recorded."""
    if not machine:
        return {}
    return {
        "CPU": f"{machine['cpu']}, {machine['cores']} cores",
        "GPU": ", ".join(f"{gpu['name']} ({gpu['arch']})" for gpu in machine["gpus"]) or "none",
        "system": f"{machine['platform']}, Python {machine['python']}",
        "packages": ", ".join(f"{name} {version}" for name, version in machine["packages"].items()),
    }


def table(head: Iterable[str], body: Iterable[Sequence[str]], numeric: Iterable[str] = tables.NUMERIC) -> str:
    """A table of ready HTML cells; `head` is plain text."""
    names, right = list(head), set(numeric)
    kinds = [' class="n"' if name in right else "" for name in names]
    top = "".join(f"<th{kind}>{escape(name)}</th>" for kind, name in zip(kinds, names, strict=True))
    rows = "".join(
        "<tr>" + "".join(f"<td{kind}>{cell}</td>" for kind, cell in zip(kinds, row, strict=True)) + "</tr>"
        for row in body
    )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{rows}</tbody></table></div>'
