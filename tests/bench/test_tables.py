"""The text of the comparison table."""

from __future__ import annotations

import numpy as np
import pytest

from fp4deploy.bench import tables
from fp4deploy.bench.records import ArtifactEntry, Quantiles


def entry(model: str, miou: float | None, path: str = "x.onnx") -> ArtifactEntry:
    return ArtifactEntry(
        model=model, path=path, backend="b", precision="p", size_bytes=1234567, miou=miou,
        latency_ms=Quantiles(p50=2.345, p90=3, p99=4), images_per_s=426.4, status="ok",
    )  # fmt: skip


def test_rows_against_fp16() -> None:
    first, second = tables.rows([entry("fp16", 0.81234), entry("nvfp4", 0.81)])
    assert first == ("fp16", "x.onnx", "b", "p", "1.23 MB", "81.23", "0.00", "2.35", "3", "4", "426", "ok")
    assert second[5:7] == ("81.00", "-0.23")


def test_each_metric_has_its_columns_shares_in_percent_and_distances_in_millimetres() -> None:
    volumes = ArtifactEntry(path="v", status="ok", miou=0.5, dice=0.81234, hd95_mm=3.456)
    unreached = ArtifactEntry(path="u", status="ok", miou=0.0, dice=0.0, hd95_mm=None)
    whole = ArtifactEntry(path="c", status="ok", top1=0.9)
    objects = ArtifactEntry(path="o", status="ok", ap=0.4, ap50=0.6789)
    every = [volumes, unreached, whole, objects]
    titles = ["mIoU %", "Dice %", "HD95 mm", "top-1 %", "AP %", "AP50 %"]
    assert list(tables.head(every)[5:-6]) == titles
    assert {*titles, *tables.TIMES, "size", "change"} <= tables.NUMERIC
    cells = [
        ("50.00", "81.23", "3.46", "–", "–", "–"), ("0.00", "0.00", "–", "–", "–", "–"),
        ("–", "–", "–", "90.00", "–", "–"), ("–", "–", "–", "–", "40.00", "67.89"),
    ]  # fmt: skip
    assert [row[5:-6] for row in tables.rows(every)] == cells
    assert tables.head([objects])[5:-6] == ("AP %", "AP50 %")


@pytest.mark.parametrize(("p90", "unsteady"), [(2.9, False), (3.0, False), (3.01, True)])
def test_times_are_unsteady_beyond_half_as_long_again(p90: float, unsteady: bool) -> None:
    found = entry("nvfp4", 0.8).model_copy(update={"latency_ms": Quantiles(p50=2.0, p90=p90, p99=9)})
    assert tables.is_unsteady(found) == unsteady


def test_the_control_is_the_fairer_baseline() -> None:
    rows = tables.rows([entry("fp16", 0.8), entry("nvfp4", 0.82), entry("fp16_control", 0.83)])
    assert [row[6] for row in rows] == ["-3.00", "-1.00", "0.00"]


@pytest.mark.parametrize(("p90", "unsteady"), [(3.0, False), (3.6, True)])
def test_a_row_of_unsteady_times_says_so(p90: float, unsteady: bool) -> None:
    found = entry("nvfp4", 0.8).model_copy(update={"latency_ms": Quantiles(p50=2.345, p90=p90, p99=9)})
    assert tables.rows([found])[0][-1] == ("ok, unsteady" if unsteady else "ok")
    sentence = "x.onnx: unsteady, p90 is 1.5 times p50. Measure again when nothing else runs here."
    assert tables.details([found]) == ([sentence] if unsteady else [])


def test_rows_without_numbers() -> None:
    idle = ArtifactEntry(path="x.plan", status="built, not run")
    assert tables.rows([idle])[0][5:] == ("–", "–", "–", "–", "–", "built, not run"), (
        "no column of a score that none has"
    )


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (3_104_000, "3.1 MB"), (2.5e9, "2.5 GB"), (None, "–")],
)
def test_size(count: int | None, text: str) -> None:
    assert tables.size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.42, "0.4 s"), (59.4, "59.4 s"), (95.2, "1 min 35 s"), (7320.0, "2 h 2 min")]
)
def test_duration(seconds: float, text: str) -> None:
    assert tables.duration(seconds) == text


def test_markdown_aligns_numbers_right() -> None:
    assert tables.markdown(("model", "mIoU %"), [("a", "1")]) == "| model | mIoU % |\n| --- | ---: |\n| a | 1 |\n"


def test_a_cell_stays_in_its_column() -> None:
    assert tables.markdown(("class",), [("a|b\nc",)]) == "| class |\n| --- |\n| a\\|b c |\n"


@pytest.mark.parametrize(
    ("value", "cell", "words"),
    [(0.5041, "+0.41", "mIoU +0.41"), (0.4959, "-0.41", "drop 0.41"), (0.5, "0.00", "no change"),
     (0.49999, "0.00", "no change"), (0.50001, "0.00", "no change")],
)  # fmt: skip
def test_a_gain_is_positive_and_nothing_has_no_sign(value: float, cell: str, words: str) -> None:
    assert tables.change(value, 0.5) == cell
    assert tables.change_in_words("mIoU", value, 0.5) == words


def test_a_network_in_words() -> None:
    assert tables.network(0.25, False) == "UNet of scale 0.25"
    assert tables.network(1.0, True) == "UNet of scale 1, multi-term FP4 input"


@pytest.mark.parametrize(
    ("paths", "shown"),
    [
        (["runs/a/fp16/best.safetensors", "runs/a/export/u.onnx"], ["fp16/best.safetensors", "export/u.onnx"]),
        (["/r/a/u.onnx", "/r/a/u.fp4"], ["u.onnx", "u.fp4"]),
        (["/r/a/u.onnx", "u.onnx"], ["/r/a/u.onnx", "u.onnx"]),
        (["u.onnx", "b/v.onnx"], ["u.onnx", "b/v.onnx"]),
        (["runs/a/u.onnx", "runs/a/u.onnx"], ["runs/a/u.onnx", "runs/a/u.onnx"]),
        ([], []),
    ],
)
def test_paths_are_shown_below_the_folder_that_they_share(paths: list[str], shown: list[str]) -> None:
    assert tables.names([entry("fp16", 0.5, path) for path in paths]) == shown


def test_the_same_figures_are_one_sentence() -> None:
    figures = {"boundary_f1": 0.25, "recall_by_size": {"small": 0.5, "large": None}}
    found = [entry("fp16", 0.5, f"r/{name}").model_copy(update=figures) for name in ("u.onnx", "u.portable.onnx")]
    other = entry("nvfp4", 0.5, "r/n.onnx").model_copy(update={**figures, "boundary_f1": 0.5})
    other = other.model_copy(update={"never_predicted": ["b", "c"], "per_class": {"a": 0.5, "b": 0.0, "c": 0.0}})
    unmeasured = entry("nvfp4", None, "r/n.plan")
    assert tables.details([*found, other, unmeasured]) == [
        "u.onnx, u.portable.onnx: boundary F1 25.00 %; recall by object size: small 50.00 %, large –.",
        "n.onnx: boundary F1 50.00 %; recall by object size: small 50.00 %, large –. "
        "2 of 3 classes are never predicted: b, c.",
    ]


def detector(model: str, seed: int, path: str = "best.safetensors") -> ArtifactEntry:
    random = np.random.default_rng(seed)
    counts = {truth: {found: int(random.integers(0, 50)) for found in "abcd"} for truth in ("a", "b", "c", "nothing")}
    errors: dict[str, dict[str, int | float | None]] = {"both": {"count": seed, "ap50": seed / 100}, "missed": {}}
    return ArtifactEntry(model=model, path=path, errors=errors, confusion=counts)


def test_the_commonest_confusions_come_first() -> None:
    """Of all checkpoints together, of each its own count; what is right is none."""
    entries = [detector("fp16", 1), detector("nvfp4", 2), detector("nvfp4", 3, "a.onnx")]
    head, body = tables.confusion_rows(entries) or ((), [])
    assert head == ("object", "detected as", "fp16", "nvfp4")
    own = [entry.confusion for entry in entries[:2]]
    assert [row[2:] for row in body] == [[str(each[truth][found]) for each in own] for truth, found, *_ in body]
    most = [max(int(count) for count in row[2:]) for row in body]
    every = {(t, f): max(each[t][f] for each in own) for t in own[0] for f in own[0][t] if t != f}
    assert len(body) == tables.MAX_CONFUSIONS
    assert most == sorted(every.values(), reverse=True)[: len(body)]
    assert {(t, f) for t, f, *_ in body} <= every.keys()
    assert tables.confusion_rows([ArtifactEntry(path="best.safetensors", confusion={"a": {"a": 3}})]) is None
    kinds, rows = tables.error_rows(entries) or ((), [])
    assert (kinds, rows[0]) == (("model", "both", "missed"), ["fp16", "1 (1.00)", "0 (–)"])
    assert [row[0] for row in rows] == ["fp16", "nvfp4"]
    assert tables.error_rows([ArtifactEntry(path="best.safetensors")]) is None
