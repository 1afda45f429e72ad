"""The main results of a run in whole sentences, from measured numbers only.

Nothing is projected: an engine that this machine built and cannot run has a size and a ledger, and no accuracy.
"""

from __future__ import annotations

from fp4deploy.bench import tables
from fp4deploy.bench.artifact import NOT_RUN
from fp4deploy.errors import counted
from fp4deploy.report.model import ReportData
from fp4deploy.tasks import TASKS

SIZES = {".onnx": "ONNX file", ".fp4": "packed file", ".plan": "engine"}


def summary(report: ReportData) -> list[str]:
    """What the run showed."""
    sentences = [*_accuracy(report), *_sizes(report)]
    sentences += [f"{engine.engine}: {engine.summary}" for engine in report.ledgers if engine.model == "nvfp4"]
    sentences += [
        tables.memory(entry.path, entry.memory) for entry in report.artifacts if entry.model == "nvfp4" and entry.memory
    ]
    plans = [entry for entry in report.artifacts if entry.path.endswith(".plan")]
    not_run = any(entry.status == NOT_RUN and entry.reason for entry in plans)  # a reason: somebody tried here
    if not_run and all(entry.latency_ms is None for entry in plans):
        sentences.append("This machine cannot run the engines, so they have no accuracy and no latency here.")
    return sentences


def _accuracy(report: ReportData) -> list[str]:
    """NVFP4 against the FP16 control, which was trained as long; against FP16 where there is no control."""
    found = {name: model.accuracy for name, model in report.models.items()}
    control = "fp16_control" if found.get("fp16_control") is not None else "fp16"
    reference, quantised = found.get(control), found.get("nvfp4")
    if reference is None or quantised is None:
        return []
    metric, extra, plain = TASKS[report.task].metric, report.models["nvfp4"].epochs, report.title(control)
    if control == "fp16" and report.fine_tuned and extra:
        return [
            f"NVFP4, trained {counted(extra, 'epoch')} longer than {plain}, has {tables.percent(quantised)} {metric}, "
            f"{plain} {tables.percent(reference)}: the difference of {tables.signed(quantised - reference)} points is "
            "not of NVFP4 alone.",
            f"--models fp16,fp16_control,nvfp4 adds {'a' if plain == 'BF16' else 'an'} {plain} model trained as long, "
            "to compare with.",
        ]
    alike = ", trained as long" if report.models[control].epochs == extra else ""
    gain = 100 * (quantised - reference)
    verb = "loses" if gain < 0 else "gains"
    title = f"the {plain}" if control == "fp16_control" else plain
    values = f"({tables.points(quantised)} and {tables.percent(reference)})"
    if tables.signed(quantised - reference) == "0.00":
        return [f"NVFP4 reaches the same {metric} as {title}{alike} {values}."]
    return [f"NVFP4 {verb} {abs(gain):.2f} points of {metric} against {title}{alike} {values}."]


def _sizes(report: ReportData) -> list[str]:
    sentences = []
    for suffix, name in SIZES.items():
        if suffix in report.sizes:
            small, large = report.sizes[suffix]
            share = f"{100 * small / large:.0f} % of {report.title('fp16')}'s {tables.size(large)}"
            kernels = "; an engine also holds compiled kernels" if suffix == ".plan" else ""
            sentences.append(f"Its {name} has {tables.size(small)}, {share}{kernels}.")
    return sentences
