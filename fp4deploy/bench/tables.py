"""The comparison table as text cells, shared by the terminal, report.md and report.html, and numbers as text.

mIoU, Dice, top-1 and AP are shown in %, differences of them in points. `change` is the row's accuracy minus the
baseline's: "+0.41" is a gain, "-0.41" a loss. Columns of a metric that no row has are left out.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fp4deploy.bench.records import ArtifactEntry

SEMANTIC = (("mIoU %", "miou"),)  # title and key of a metric
VOLUMES = (("Dice %", "dice"), ("HD95 mm", "hd95_mm"))
LABELS = (("top-1 %", "top1"),)
INSTANCE = (("AP %", "ap"), ("AP50 %", "ap50"))
TIMES = ("p50 ms", "p90 ms", "p99 ms", "images/s")
NUMERIC = frozenset({"size", "change", *(title for title, _ in (*SEMANTIC, *VOLUMES, *LABELS, *INSTANCE)), *TIMES})
NONE = "–"  # a cell without a number
BASELINES = ("fp16_control", "fp16")
MAX_CONFUSIONS = 12  # rows of the table
UNSTEADY = 1.5  # p90 over p50 above which a row says that its times are no property of the artefact


def metrics(artifacts: Sequence[ArtifactEntry]) -> tuple[tuple[str, str], ...]:
    """Title and key of the metrics that an artefact has: mIoU, Dice and distance, top-1, AP and AP50."""
    known = (SEMANTIC, VOLUMES, LABELS, INSTANCE)
    return sum((each for each in known if any(getattr(entry, each[0][1]) is not None for entry in artifacts)), ())


def head(artifacts: Sequence[ArtifactEntry]) -> tuple[str, ...]:
    """Titles of the columns."""
    titles = (title for title, _ in metrics(artifacts))
    return ("model", "artefact", "backend", "precision", "size", *titles, "change", *TIMES, "status")


def baseline_of(artifacts: Sequence[ArtifactEntry]) -> ArtifactEntry | None:
    """The row others are compared with: the FP16 control's first measured artefact, else the FP16 model's."""
    for model in BASELINES:
        for entry in artifacts:
            if entry.model == model and entry.accuracy is not None:
                return entry
    return None


def cells(entry: ArtifactEntry, baseline: float | None, shown: Sequence[tuple[str, str]] = SEMANTIC) -> tuple[str, ...]:
    """One row of the table, in the order of `head`; `shown`: the metrics."""
    return (
        str(entry.model),
        entry.path,
        entry.backend,
        entry.precision,
        size(entry.size_bytes),
        *(_figure(key, getattr(entry, key)) for _, key in shown),
        change(entry.accuracy, baseline),
        *(milliseconds(getattr(entry.latency_ms, name, None)) for name in ("p50", "p90", "p99")),
        rate(entry.images_per_s),
        f"{entry.status}, unsteady" if is_unsteady(entry) else entry.status,
    )


def _figure(key: str, value: float | None) -> str:
    """A share of 1 in %, a distance in mm as it is."""
    return points(value) if not key.endswith("_mm") or value is None else f"{value:.2f}"


def is_unsteady(entry: ArtifactEntry) -> bool:
    """One run of ten took longer than `UNSTEADY` times the median: something else ran on the machine meanwhile."""
    times = entry.latency_ms
    return times is not None and times.p90 > UNSTEADY * times.p50


def rows(artifacts: Sequence[ArtifactEntry]) -> list[tuple[str, ...]]:
    """All rows of the table."""
    found = baseline_of(artifacts)
    baseline, shown = found.accuracy if found else None, metrics(artifacts)
    return [cells(entry, baseline, shown) for entry in artifacts]


def network(scale: float, digits: bool, architecture: str = "unet") -> str:
    """The network of a model in words; one that is no UNet of this project by its spec."""
    if architecture != "unet":
        return architecture
    return f"UNet of scale {scale:g}{', multi-term FP4 input' if digits else ''}"


def points(value: float | None) -> str:
    """0.8123 -> "81.23"."""
    return NONE if value is None else f"{100 * value:.2f}"


def percent(value: float | None) -> str:
    """0.8123 -> "81.23 %"."""
    return NONE if value is None else f"{points(value)} %"


def change(value: float | None, baseline: float | None) -> str:
    """Points above the baseline, signed: "+0.05" is a gain, "-0.31" a loss, "0.00" neither."""
    return NONE if value is None or baseline is None else signed(value - baseline)


def signed(difference: float) -> str:
    """0.0031 -> "+0.31", in points; what rounds to nothing has no sign."""
    text = f"{100 * difference:+.2f}"
    return "0.00" if text in ("+0.00", "-0.00") else text


def change_in_words(metric: str, value: float, baseline: float) -> str:
    """ "mIoU +0.41", "drop 0.31" or "no change", in points."""
    text = signed(value - baseline)
    return "no change" if text == "0.00" else f"{metric} {text}" if value > baseline else f"drop {text[1:]}"


def size(count: int | None) -> str:
    """Bytes in decimal units: 3100000 -> "3.10 MB"."""
    if count is None:
        return NONE
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count} B"


def memory(name: str, found: dict[str, int]) -> str:
    """A sentence about the bytes that `runtimes.packed.memory` gives."""
    parts = [
        f"{what} {size(found[f'{kind}_bytes'])}, in FP16 {size(found[f'{kind}_bytes_fp16'])}"
        for what, kind in (("weights", "weight"), ("live activations", "activation"))
    ]
    return f"{name}: {'; '.join(parts)}."


def names(artifacts: Sequence[ArtifactEntry]) -> list[str]:
    """Paths as a table shows them: of several below one folder what lies below it, "fp16/best.safetensors"."""
    paths = [entry.path for entry in artifacts]
    folders = {PurePath(path).parent for path in paths}
    if len(set(paths)) < 2 or len({folder.anchor for folder in folders}) > 1:
        return paths
    shared = os.path.commonpath(folders)
    return [PurePath(path).relative_to(shared).as_posix() for path in paths]


def details(artifacts: Sequence[ArtifactEntry]) -> list[str]:
    """Sentences about unsteady times, boundaries, objects by size and classes never predicted; equal ones are one."""
    found: dict[str, list[str]] = {}
    for entry, name in zip(artifacts, names(artifacts), strict=True):
        if entry.latency_ms is not None and is_unsteady(entry):
            times = entry.latency_ms
            unsteady = f"p90 is {times.p90 / times.p50:.1f} times p50. Measure again when nothing else runs here."
            found.setdefault(f"unsteady, {unsteady}", []).append(name)
        if entry.boundary_f1 is not None:
            sizes = ", ".join(f"{kind} {percent(value)}" for kind, value in entry.recall_by_size.items())
            figures = f"boundary F1 {percent(entry.boundary_f1)}; recall by object size: {sizes}."
            if entry.never_predicted:
                absent = entry.never_predicted
                verb = "is" if len(absent) == 1 else "are"
                count = f"{len(absent)} of {len(entry.per_class)} classes"
                figures += f" {count} {verb} never predicted: {', '.join(absent)}."
            found.setdefault(figures, []).append(name)
        if entry.dice_per_class:
            each = ", ".join(
                f"{kind} {percent(value)} ({_figure('_mm', entry.hd95_mm_per_class.get(kind))} mm)"
                for kind, value in entry.dice_per_class.items()
            )
            found.setdefault(f"Dice and 95 % Hausdorff distance: {each}.", []).append(name)
    return [f"{', '.join(dict.fromkeys(same))}: {figures}" for figures, same in found.items()]


def milliseconds(value: float | None) -> str:
    """Three significant digits."""
    if value is None:
        return NONE
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def rate(value: float | None) -> str:
    """Images per second, three significant digits."""
    return milliseconds(value)


def duration(seconds: float) -> str:
    """95.2 -> "1 min 35 s"."""
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{seconds:.1f} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table; columns named in `NUMERIC` are right-aligned."""
    rule = ["---:" if name in NUMERIC else "---" for name in head]
    lines = ([cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in (head, rule, *body))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def error_rows(artifacts: Sequence[ArtifactEntry]) -> tuple[tuple[str, ...], list[list[str]]] | None:
    """Head and body of the table of a detector's errors, a row a checkpoint; None where there are none."""
    measured = [entry for entry in artifacts if entry.errors and entry.path.endswith(".safetensors")]
    if not measured:
        return None
    kinds = list(measured[0].errors)
    body = []
    for entry in measured:
        found = [entry.errors.get(kind, {}) for kind in kinds]
        cells = [f"{each.get('count') or 0:.0f} ({points(each.get('ap50'))})" for each in found]
        body.append([str(entry.model), *cells])
    return ("model", *kinds), body


def confusion_rows(artifacts: Sequence[ArtifactEntry]) -> tuple[tuple[str, ...], list[list[str]]] | None:
    """Head and body of the table of the commonest confusions, a column a checkpoint; None where there are none."""
    measured = [entry for entry in artifacts if entry.confusion and entry.path.endswith(".safetensors")]
    counts = [
        {(truth, found): count for truth, row in entry.confusion.items() for found, count in row.items()}
        for entry in measured
    ]
    wrong = {pair for each in counts for pair in each if pair[0] != pair[1]}
    if not wrong:
        return None
    shown = sorted(wrong, key=lambda pair: (-max(each.get(pair, 0) for each in counts), pair))[:MAX_CONFUSIONS]
    body = [[*pair, *(str(each.get(pair, 0)) for each in counts)] for pair in shown]
    return ("object", "detected as", *(str(entry.model) for entry in measured)), body
