"""report.html: one file with style and pictures inside it, which needs no network.

Every page is a Jinja2 template of `templates/`. Autoescape is on and nothing is marked as safe, so that a string of
report.json, of a model card or of telemetry stays text. Numbers were parsed by the models of `bench.records`. The
templates' Content-Security-Policy is a second barrier: a browser loads nothing but data: images, and runs no script but
ours, named by its digest (`templates/page.js`: theme, contents, sorting, sliders). Without it a page reads the same.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from fp4deploy.bench import tables
from fp4deploy.errors import counted
from fp4deploy.export.ledger.shares import in_words
from fp4deploy.report.figures.overlays import Overlay
from fp4deploy.report.model import ENGINE_HEAD, MODEL_TITLES, ReportData, described, engine_row
from fp4deploy.tasks import TASKS

if TYPE_CHECKING:
    from jinja2 import Environment


@dataclass(frozen=True)
class Tile:
    """A number in large letters, with its name and a note."""

    name: str
    value: str
    note: str


@dataclass(frozen=True)
class Pictures:
    """Pictures of a run's page as data URIs: curves, heatmaps (caption, picture), samples.

    telemetry: where the page of all heatmaps lies, as a link of this page; None where there is none.
    """

    curves: str | None = None
    heatmaps: Sequence[tuple[str, str]] = ()
    overlays: Sequence[Overlay] = ()
    telemetry: str | None = None


@lru_cache(maxsize=1)
def environment() -> Environment:
    """Templates, and the filters that write numbers."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    found = Environment(
        loader=PackageLoader("fp4deploy.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.globals |= {"tables": tables, "counted": counted, "digest": _digest}
    found.filters |= {
        "change": tables.change,
        "date": lambda text: text.replace("T", " ").removesuffix("+00:00"),
        "duration": tables.duration,
        "milliseconds": tables.milliseconds,
        "model_title": lambda model: MODEL_TITLES.get(model, str(model)),
        "points": tables.points,
        "size": tables.size,
    }
    return found


@lru_cache
def _digest(script: str) -> Markup:
    """The source that a Content-Security-Policy allows: the digest of a script of the templates, as it is included."""
    text = (
        files("fp4deploy.report").joinpath("templates").joinpath(script).read_text(encoding="utf-8").removesuffix("\n")
    )
    return Markup(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'")


def render_html(report: ReportData, pictures: Pictures) -> str:
    """The page of one run."""
    return (
        environment()
        .get_template("run.html.j2")
        .render(
            report=report,
            network=_network(report),
            tiles=_tiles(report),
            baseline=tables.baseline_of(report.artifacts),
            reasons=[entry.reason for entry in report.artifacts if entry.reason],
            curves=pictures.curves,
            heatmaps=pictures.heatmaps,
            telemetry=pictures.telemetry,
            overlays=pictures.overlays,
            engine_head=ENGINE_HEAD,
            engine_rows=[engine_row(entry) for entry in report.ledgers],
            per_class=TASKS[report.task].per_class,
            errors=tables.error_rows(report.artifacts),
            confusions=tables.confusion_rows(report.artifacts),
            classes=_classes(report),
            model_titles=list(map(report.title, report.models)),
            machine=described(report.environment),
        )
    )


def _network(report: ReportData) -> str:
    model = next(iter(report.models.values()), None)
    if model is None or model.scale is None:
        return ""
    aims = sorted({each.target for each in report.models.values() if each.target})
    aimed = f" · trained for {', '.join(aims)}" if aims else ""
    named = tables.network(model.scale, model.digits, model.architecture)
    return f"{named}, {model.width} x {model.height} pixels{aimed} · "


def _tiles(report: ReportData) -> list[Tile]:
    compared = _compared(report)
    reference = report.models[compared].accuracy if compared in report.models else None
    metric = TASKS[report.task].metric
    found = []
    for name, model in report.models.items():
        note = "on the validation images"
        if name == "nvfp4" and reference is not None and model.accuracy is not None:
            longer = report.fine_tuned and compared == "fp16" and model.epochs
            note = f"{tables.change_in_words(metric, model.accuracy, reference)} against {report.title(compared)}"
            note += f", which was trained {counted(model.epochs, 'epoch')} less" if longer else ""
        found.append(Tile(f"{metric}, {report.title(name)}", tables.percent(model.accuracy), note))
    if ".onnx" in report.sizes:
        small, large = report.sizes[".onnx"]
        note = f"{tables.size(small)} instead of {tables.size(large)}"
        found.append(Tile(f"ONNX file, of {report.title('fp16')}'s size", f"{100 * small / large:.0f} %", note))
    for engine in report.ledgers:
        if engine.model == "nvfp4":
            missed = f"{counted(engine.not_as_requested, 'layer')} not as requested"
            note = f"{missed}, {counted(engine.fallbacks, 'fallback')}; requested {in_words(engine.requested)}"
            found.append(Tile(f"multiply-accumulates, {engine.engine}", in_words(engine.actual), note))
    return found


def _compared(report: ReportData) -> str:
    """The model that NVFP4 is compared with: FP16 trained as long, where there is one."""
    return "fp16_control" if "fp16_control" in report.models else "fp16"


def _classes(report: ReportData) -> list[dict[str, Any]]:
    """Scores of each class: of every model, of NVFP4, and of what it is compared with."""
    names = next((list(model.per_class) for model in report.models.values() if model.per_class), [])
    reference = _compared(report)
    found = []
    for name in names:
        scores = {key: model.per_class.get(name) for key, model in report.models.items()}
        found.append(
            {"name": name, "scores": scores, "quantised": scores.get("nvfp4"), "reference": scores.get(reference)}
        )
    return found
