"""report.md, for a pull request: summary, artefacts, engines, scores of classes, machine."""

from __future__ import annotations

from fp4deploy.bench import tables
from fp4deploy.report.model import ENGINE_HEAD, ModelEntry, ReportData, described, engine_row
from fp4deploy.tasks import TASKS


def render_markdown(report: ReportData) -> str:
    """The whole file."""
    parts = [f"# {report.run}\n", " ".join(report.summary) + "\n"]
    parts.append(tables.markdown(tables.head(report.artifacts), tables.rows(report.artifacts)))
    remarks = [*(entry.reason for entry in report.artifacts if entry.reason), *report.remarks]
    if remarks:
        parts.append("\n".join(f"* {remark}" for remark in remarks) + "\n")
    if report.ledgers:
        parts += ["## Engines\n", tables.markdown(ENGINE_HEAD, list(map(engine_row, report.ledgers)))]
    parts += [f"## {TASKS[report.task].per_class} per class, %\n", per_class(report.models)]
    if kinds := tables.error_rows(report.artifacts):
        parts += ["## Kinds of errors: how many, and AP50 that they cost in points\n", tables.markdown(*kinds)]
    if confusions := tables.confusion_rows(report.artifacts):
        parts += ["## Commonest confusions of the detections that are drawn\n", tables.markdown(*confusions)]
    machine = [f"{title}: {text}" for title, text in described(report.environment).items()]
    parts += ["## Measured on\n", "; ".join(machine) + ".\n" if machine else "Not recorded.\n"]
    return "\n".join(parts)


def per_class(models: dict[str, ModelEntry]) -> str:
    """One row a class, one column a model."""
    names = next((list(model.per_class) for model in models.values() if model.per_class), [])
    body = [[name, *(tables.points(model.per_class.get(name)) for model in models.values())] for name in names]
    return tables.markdown(("class", *models), body)
