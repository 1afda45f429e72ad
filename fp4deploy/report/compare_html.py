"""The page of a comparison: style and pictures inside, no script, no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from fp4deploy.bench import tables
from fp4deploy.report.compare import TITLES, comparable
from fp4deploy.report.figures.compare_curves import colour
from fp4deploy.report.run_html import CHIPS, EMULATED, machine_rows, table, tile
from fp4deploy.report.style import COMPARISON, CSS

if TYPE_CHECKING:
    from fp4deploy.report.figures.compare_images import Row, Samples

MOST_LETTERS = 60  # of a setting's value
Facts = dict[str, Any]


def render_comparison(facts: Facts, curves: str | None, samples: Samples, telemetry: Sequence[Row]) -> str:
    """The whole page; `facts` as `compare` gives them."""
    colours = {run["label"]: colour(place) for place, run in enumerate(facts["runs"])}
    none = '<p class="note">No run has finished an epoch yet.</p>'
    sections = [
        _header(facts, colours),
        _settings(facts, colours),
        _scores(facts, colours),
        f"<h2>Curves</h2>{f'<figure class=scroll>{curves}</figure>' if curves else none}",
        _artifacts(facts, colours),
        "".join(_changes(group, f"{group['metric']} per class", colours) for group in facts["classes"]),
        "".join(_changes(group, "AP by the size of objects", colours) for group in facts["sizes"]),
        _samples(samples),
        _telemetry(facts, telemetry, colours),
        _environment(facts, colours),
    ]
    title = escape(" · ".join([*(run["label"] for run in facts["runs"])][:4]) + " · fp4deploy")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{CSS}{COMPARISON}</style></head>\n"
        f"<body><main>\n{''.join(f'{section}{chr(10)}' for section in sections if section)}</main></body></html>\n"
    )


def _name(label: str, colours: dict[str, str]) -> str:
    return f'<span class="run"><i style="background:{colours[label]}"></i>{escape(label)}</span>'


def _header(facts: Facts, colours: dict[str, str]) -> str:
    first, *others = map(escape, facts["summary"])
    care = "".join(f"<li>{escape(sentence)}</li>" for sentence in facts["cannot"])
    said: dict[str, list[str]] = {}
    for run in facts["runs"]:
        for remark in run["remarks"]:
            said.setdefault(remark, []).append(_name(run["label"], colours))
    remarks = "".join(f"<li>{' '.join(names)} {escape(remark)}</li>" for remark, names in said.items())
    listed = f"<ul>{''.join(f'<li>{sentence}</li>' for sentence in others)}</ul>" if others else ""
    told = f'<div class="care"><b>Read with care</b><ul>{care}{remarks}</ul></div>' if care or remarks else ""
    rows = "".join(
        f"<div>{_name(run['label'], colours)} <code>{escape(run['path'])}</code> {escape(_what(run))}</div>"
        for run in facts["runs"]
    )
    mixed = any(not comparable(facts["runs"][0], run) for run in facts["runs"])
    kind = ", or the first run of the same task and classes" if mixed else ""
    return (
        f"<h1>{len(facts['runs'])} runs, side by side</h1>"
        f'<p class="sub">Changes are against {_name(facts["runs"][0]["label"], colours)}, the first{kind}.</p>'
        f'<p class="lead">{first}</p>{listed}{_tiles(facts)}<div class="runs">{rows}</div>{told}'
    )


def _what(run: Facts) -> str:
    model = next(iter(run["models"].values()), None)
    scale = f"{tables.network(model)}, " if model and model["scale"] else ""
    pixels = f"{run['config'].get('data.width', '?')} x {run['config'].get('data.height', '?')} pixels"
    return f"{run['task']}, {scale}{pixels}, data {run['data'] or 'not named'}"


def _tiles(facts: Facts) -> str:
    tiles = []
    for run in facts["runs"]:
        rows = [row for row in facts["scores"] if row["run"] == run["label"]]
        rows = [row for row in rows if row["best"] is not None or row["measured"] is not None]
        row = min(rows, key=lambda row: _importance(row["model"]), default=None)
        if row is None:
            tiles.append(tile(run["label"], tables.NONE, "no score yet"))
            continue
        which = "best" if row["best"] is not None else "measured"
        gap = row[f"{which}_to_first"]
        tail = f"{TITLES[row['model']]}, {which} {row['metric']}" + (f", {signed(gap)}" if gap is not None else "")
        tiles.append(tile(run["label"], tables.points(row[which]), tail))
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _importance(model: str) -> int:
    return ("nvfp4", "nvfp4_ptq", "fp16_control", "fp16").index(model)


def signed(gap: float | None) -> str:
    """0.0123 -> "+1.23", in points; a minus as long as the plus."""
    return tables.NONE if gap is None else f"{100 * gap:+.2f}".replace("-", "−")


def _coloured(gap: float | None) -> str:
    kind = "" if gap is None or abs(gap) < 5e-5 else "up" if gap > 0 else "down"
    return f'<span class="{kind}">{signed(gap)}</span>' if kind else signed(gap)


def _settings(facts: Facts, colours: dict[str, str]) -> str:
    labels = [run["label"] for run in facts["runs"]]
    if not facts["differences"]:
        return '<h2>Settings that differ</h2><p class="note">None: the configurations are the same.</p>'
    body = [
        [
            f"<code>{escape(entry['key'])}</code>",
            *(f"<code>{escape(_value(value))}</code>" for value in entry["values"]),
        ]
        for entry in sorted(facts["differences"], key=lambda entry: not entry["changes_results"])
    ]
    same = len({key for run in facts["runs"] for key in run["config"]}) - len(body)
    note = f"{same} settings are the same. A setting that a run's file does not name has today's default."
    shown = table(("setting", *labels), body)
    return f'<h2>Settings that differ</h2><div class="settings">{shown}</div><p class="note">{note}</p>'


def _value(value: Any) -> str:
    text = tables.NONE if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= MOST_LETTERS else f"{text[: MOST_LETTERS - 1]}…"


def _scores(facts: Facts, colours: dict[str, str]) -> str:
    if not facts["scores"]:
        return ""
    metrics = sorted({row["metric"] for row in facts["scores"]})
    measured = any(row["measured"] is not None for row in facts["scores"])
    head = ["run", "model", "epochs", "best", "at epoch", "last", *(["measured"] if measured else [])]
    gaps = {
        "best_to_control": "best − control",
        "best_to_first": "best − first run",
        "last_to_first": "last − first run",
    }
    gaps |= {"measured_to_first": "measured − first run"} if measured else {}
    head += gaps.values()
    body = []
    for row in facts["scores"]:
        done = f"{row['epochs']} of {row['planned']}" if row["planned"] not in (None, row["epochs"]) else row["epochs"]
        cells = [
            _name(row["run"], colours),
            f'<span class="chip {row["model"]}">{TITLES[row["model"]]}</span>',
            str(done),
            tables.points(row["best"]),
            str(row["best_epoch"] if row["best_epoch"] is not None else tables.NONE),
            tables.points(row["last"]),
            *([tables.points(row["measured"])] if measured else []),
            *(_coloured(row[key]) for key in gaps),
        ]
        body.append(cells)
    ships = "; measured is of the checkpoint as it ships" if measured else ""
    note = (
        f"{' and '.join(metrics)} in points. Best and last are of the validation during training{ships}. The first run "
        "is the first that a model can be compared with; the control is the run's own FP16 control, or its FP16 where "
        "there is none. A best epoch is chosen on the images it is reported on, and one pair of runs says nothing "
        "about other seeds."
    )
    return f'<h2>Scores</h2>{table(head, body, numeric=head[2:])}<p class="note">{note}</p>'


def _artifacts(facts: Facts, colours: dict[str, str]) -> str:
    rows = facts["artifacts"]
    if not rows:
        return '<h2>Artefacts</h2><p class="note">None of the runs has one.</p>'
    metrics = {row["metric"] for row in rows if row["accuracy"] is not None}
    metric = metrics.pop() if len(metrics) == 1 else "accuracy"
    head = ("artefact", "run", "backend", "size", metric, "p50 ms", "status")
    body, before = [], None
    for row in rows:
        timed = row["latency_ms"]
        body.append(
            [
                f"<code>{escape(row['path'])}</code>" if row["path"] != before else "",
                _name(row["run"], colours),
                escape(row["backend"]),
                tables.size(row["size_bytes"]),
                tables.points(row["accuracy"]),
                tables.milliseconds(timed["p50"]) if timed else tables.NONE,
                f'<span class="chip {CHIPS.get(row["status"], "idle")}">{escape(row["status"])}</span>',
            ]
        )
        before = row["path"]
    devices = sorted({row["device"] for row in rows if row["device"]})
    where = f" Latencies are from different devices: {', '.join(devices)}." if len(devices) > 1 else ""
    reasons = "".join(f"<li>{_name(r['run'], colours)} {escape(r['reason'])}</li>" for r in rows if r["reason"])
    listed = f'<details class="note"><summary>Why some were not run</summary><ul>{reasons}</ul></details>'
    told = f'<p class="note">{EMULATED}{escape(where)}</p>{listed if reasons else ""}'
    return f"<h2>Artefacts</h2>{table(head, body, numeric=('size', metric, 'p50 ms'))}{told}"


def _changes(group: Facts, title: str, colours: dict[str, str]) -> str:
    columns = group["columns"]
    changes = [change for row in group["rows"] for change in row["changes"][1:] if change is not None]
    most = max((abs(change) for change in changes), default=0.0) or 1.0
    several = len({column["model"] for column in columns}) > 1
    names = [f"{c['run']} ({TITLES[c['model']]})" if several else c["run"] for c in columns]
    head = ["", *names, *(f"Δ {name}" for name in names[1:]), "change"]
    body = []
    for row in group["rows"]:
        bars = "".join(
            _bar(change, most, colours[c["run"]])
            for change, c in zip(row["changes"], columns, strict=True)
            if c is not columns[0]
        )
        cells = [escape(row["name"]), *map(tables.points, row["values"]), *map(_coloured, row["changes"][1:]), bars]
        body.append(cells)
    order = "" if "size" in title else ", the largest loss first"
    bars = f"Bars: loss to the left, gain to the right, full at {100 * most:.2f} points." if any(changes) else ""
    return (
        f"<h2>{escape(title)}: {escape(group['title'])}</h2>{table(head, body, numeric=head[1:-1])}"
        f'<p class="note">Points of {group["of"]}{order}. {bars}</p>'
    )


def _bar(change: float | None, most: float, fill: str) -> str:
    width = 50 * abs(change or 0.0) / most
    side = "left:50%" if (change or 0.0) >= 0 else f"left:{50 - width:.1f}%"
    return f'<div class="swing"><i style="{side};width:{width:.1f}%;background:{fill}"></i></div>'


def _pictures(rows: Sequence[Row], kind: str) -> str:
    found = []
    for row in rows:
        cells = "".join(
            f'<figure><img src="{uri}" alt="{escape(row.caption)}, {escape(title)}">'
            + (f"<figcaption>{escape(title)}</figcaption></figure>" if kind == "answers" else "</figure>")
            for title, uri in row.pictures
        )
        found.append(f'<section class="pictures"><p class="caption">{escape(row.caption)}</p>'
                     f'<div class="{kind}">{cells}</div></section>')  # fmt: skip
    return "".join(found)


def _samples(samples: Samples) -> str:
    missing = "".join(f'<p class="note">{escape(sentence)}</p>' for sentence in samples.missing)
    legend = "".join(
        f'<span><i style="background:rgb{shade}"></i>{escape(name)}</span>' for name, shade in samples.legend
    )
    rule = '<p class="note">The images with the most in them, and the one on which the runs differ most.</p>'
    told = f'<div class="legend">{legend}</div>{_pictures(samples.rows, "answers")}{rule}' if samples.rows else ""
    return f"<h2>The same images</h2>{told}{missing}"


def _telemetry(facts: Facts, rows: Sequence[Row], colours: dict[str, str]) -> str:
    tracked = {row["run"] for row in facts["telemetry"]}
    without = [run["label"] for run in facts["runs"] if run["label"] not in tracked]
    told = f"Without telemetry: {escape(', '.join(without))} (fp4deploy train --telemetry-every 200)."
    note = f'<p class="note">{told}</p>' if without else ""
    if not tracked:
        return f"<h2>Telemetry</h2>{note}"
    names = [name for name in facts["telemetry"][0] if name not in ("run", "model", "step", "looks")]
    head = ["run", "model", "looks", "step", *names]
    body = [
        [
            _name(row["run"], colours),
            f'<span class="chip {row["model"]}">{TITLES[row["model"]]}</span>',
            str(row["looks"]),
            str(row["step"]),
            *(tables.NONE if row[name] is None else f"{row[name]:.3g}" for name in names),
        ]
        for row in facts["telemetry"]
    ]
    means = "Means over the layers at the last look. In the heatmaps, equal colours are equal numbers across the runs."
    return (
        f"<h2>Telemetry</h2>{table(head, body, numeric=head[2:])}"
        f'<p class="note">{means}</p>{_pictures(rows, "maps")}{note}'
    )


def _environment(facts: Facts, colours: dict[str, str]) -> str:
    machines = [machine_rows(run["environment"]) for run in facts["runs"]]
    names = list(dict.fromkeys(name for machine in machines for name in machine))
    body = []
    for name in names:
        values = [machine.get(name, "not recorded") for machine in machines]
        kind = "differs" if len(set(values)) > 1 else ""
        body.append([escape(name), *(f'<span class="{kind}">{escape(value)}</span>' for value in values)])
    labels = [run["label"] for run in facts["runs"]]
    told = table(["", *labels], body) if body else '<p class="note">No run has recorded the machine it was on.</p>'
    commands = "".join(
        f"<p>{_name(run['label'], colours)}{'' if run['commands_recorded'] else ' (made from its config.yaml)'}</p>"
        f"<pre><code>{escape(chr(10).join(run['commands']))}</code></pre>"
        for run in facts["runs"]
    )
    return f"<h2>Measured on</h2>{told}<h2>To repeat it</h2>{commands}"
