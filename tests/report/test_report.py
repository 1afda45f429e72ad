"""The report says what was measured, and nothing that was not."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp4deploy.bench.environment import environment
from fp4deploy.bench.records import ArtifactEntry, Machine
from fp4deploy.data import open_dataset
from fp4deploy.data.palette import COLOURS, VOID, colours, tinted
from fp4deploy.report.collect import collect, size_pairs
from fp4deploy.report.figures.curves import draw_curves
from fp4deploy.report.figures.overlays import Overlay, draw_overlays
from fp4deploy.report.history import Epoch, history
from fp4deploy.report.html import Pictures, render_html
from fp4deploy.report.markdown import render_markdown
from fp4deploy.report.model import Measurement, ReportData, StageTime
from fp4deploy.report.run_folder import read_run
from fp4deploy.report.summary import summary
from fp4deploy.runs import Run
from tests.report.test_pages import own_scripts

TIMED = {
    "latency_ms": {"p50": 2.0, "p90": 3.0, "p99": 4.0},
    "images_per_s": 500.0,
    "batch": 1,
    "timed_runs": 9,
    "device": "a CPU",
}
HOSTILE = "</style></script><img src=x onerror=alert(1)>"


def row(path: str, model: str, miou: float | None, size: int) -> ArtifactEntry:
    status, reason = ("ok", None) if miou is not None else ("built, not run", "no <GPU> here")
    measured: dict[str, Any] = {}
    if miou is not None:
        measured = {"miou": miou, "per_class": {"background": miou, "cat": None}, **TIMED}
    return ArtifactEntry(
        path=path, model=model, backend="test", precision=model.upper(), size_bytes=size, sha256="0", status=status,
        reason=reason, **measured,
    )  # fmt: skip


URIS = {title: f"data:image/png;base64,{title}" for title in ("image", "truth", "FP16", "NVFP4", "difference")}
OVERLAY = Overlay("a.jpg", URIS, 0.25, True, [("road", (1, 2, 3))])


@pytest.fixture
def report(untrained: Run, shapes: Path) -> ReportData:
    rows = [
        row("fp16/best.safetensors", "fp16", 0.81, 4000),
        row("export/unet.fp16.onnx", "fp16", 0.81, 2000),
        row("engines/unet.fp16.sm120.plan", "fp16", None, 3000),
        row("nvfp4/best.safetensors", "nvfp4", 0.80, 4000),
        row("export/unet.nvfp4.onnx", "nvfp4", 0.80, 600),
        row("engines/unet.nvfp4.sm120.plan", "nvfp4", None, 1200),
    ]
    measurement = Measurement(
        data=str(shapes),
        artifacts=rows,
        stages=[StageTime(stage="train", seconds=95.0)],
        remarks=["a <remark>"],
        commands=["fp4deploy run --demo"],
        environment=Machine.model_validate(environment()),
    )
    config = untrained.path / "config.yaml"
    config.write_text("train: {epochs: 0, finetune_epochs: 0}\n")
    try:
        found = collect(untrained, read_run(untrained, measurement=measurement), measurement.remarks)
    finally:
        config.unlink()
    models = {name: model.model_copy(update={"epochs": 3}) for name, model in found.models.items()}
    return found.model_copy(update={"models": models})


def with_models(report: ReportData, **accuracies: float | None) -> ReportData:
    """The report with other values of mIoU; the control is a copy of FP16."""
    known = {"fp16_control": report.models["fp16"], **report.models}
    models = {name: known[name].model_copy(update={"miou": miou}) for name, miou in accuracies.items()}
    return report.model_copy(update={"models": {**report.models, **models}})


def test_the_contract(report: ReportData) -> None:
    found = report.to_json()
    assert found.keys() >= {"models", "artifacts", "environment"}
    assert list(found["models"]) == ["fp16", "nvfp4"]
    assert found["artifacts"][1]["path"] == "export/unet.fp16.onnx"
    assert found["environment"].keys() >= {"python", "cpu", "cores", "gpus", "packages"}
    assert found["models"]["nvfp4"]["miou"] == 0.80
    assert found["sizes"] == {".safetensors": [4000, 4000], ".onnx": [600, 2000], ".plan": [1200, 3000]}
    assert ReportData.model_validate_json(json.dumps(found, allow_nan=False)) == report


def test_what_quantize_made_beside_a_file_is_not_its_size(report: ReportData) -> None:
    graph = next(entry for entry in report.artifacts if entry.path == "export/unet.fp16.onnx")
    beside = graph.model_copy(update={"path": "export/unet.fp16.nvfp4.onnx", "model": "nvfp4", "size_bytes": 1})
    assert size_pairs([beside, *report.artifacts]) == report.sizes


def test_sizes_are_those_of_the_first_pair_of_a_kind(report: ReportData) -> None:
    plans = [entry for entry in report.artifacts if entry.path.endswith(".plan")]
    other = [
        entry.model_copy(update={"path": entry.path.replace("sm120", "sm100"), "size_bytes": 7}) for entry in plans
    ]
    assert [entry.path for entry in other] != [entry.path for entry in plans]
    assert size_pairs([*report.artifacts, *other]) == report.sizes
    assert size_pairs([*other, *report.artifacts])[".plan"] == (7, 7)


def test_a_model_trained_longer_is_said_to_be(report: ReportData) -> None:
    text = " ".join(summary(report))
    assert "NVFP4, trained 3 epochs longer than FP16, has 80.00 % mIoU, FP16 81.00 %: the difference of -1.00" in text
    assert "which was trained 3 epochs less" in render_html(report, Pictures())
    text = " ".join(summary(with_models(report, fp16_control=0.82)))
    assert "against the FP16 control, trained as long" in text
    assert "longer" not in text
    scratch = report.model_copy(update={"fine_tuned": False})
    assert "NVFP4 loses 1.00 points of mIoU against FP16, trained as long (80.00 and 81.00 %)." in summary(scratch)
    shorter = {**report.models, "nvfp4": report.models["nvfp4"].model_copy(update={"epochs": 2})}
    assert "trained" not in " ".join(summary(scratch.model_copy(update={"models": shorter})))


def test_the_summary_is_made_of_measured_numbers(report: ReportData) -> None:
    text = " ".join(report.summary)
    assert "Its ONNX file has 600 B, 30 % of FP16's 2 kB." in text
    assert "Its engine has 1.2 kB, 40 % of FP16's 3 kB" in text
    assert "cannot run the engines" in text


@pytest.mark.parametrize(
    ("nvfp4", "said"),
    [
        (0.80, "NVFP4 gains 1.00 points of mIoU against the FP16 control"),
        (0.78, "NVFP4 loses 1.00 points of mIoU against the FP16 control"),
        (0.790001, "NVFP4 reaches the same mIoU as the FP16 control, trained as long (79.00 and 79.00 %)."),
    ],
)
def test_the_summary_compares_with_the_control_where_there_is_one(report: ReportData, nvfp4: float, said: str) -> None:
    assert summary(with_models(report, fp16_control=0.79, nvfp4=nvfp4))[0].startswith(said)


def test_a_model_whose_rest_is_bf16_is_called_so(report: ReportData) -> None:
    wide = {name: model.model_copy(update={"rest": "bf16"}) for name, model in report.models.items()}
    for models in (report.models, wide):
        named = "BF16" if models is wide else "FP16"
        found = report.model_copy(update={"models": models, "artifacts": []})
        found = found.model_copy(update={"summary": summary(found)})
        page = render_html(found, Pictures(overlays=[OVERLAY]))
        texts = re.findall(r"\b(?:FP|BF)16\b", " ".join([*found.summary, *re.findall(r">([^<>]+)<", page)]))
        assert set(texts) == {named}
        assert f"<h1>{named} and NVFP4 compared</h1>" in page
    control = with_models(report.model_copy(update={"models": wide}), fp16_control=0.82)
    assert "against the BF16 control, trained as long" in " ".join(summary(control))


def test_no_accuracy_no_claim(report: ReportData) -> None:
    assert "mIoU" not in " ".join(summary(with_models(report, nvfp4=None)))


def test_the_table_of_artefacts_has_a_cell_for_each_heading(report: ReportData) -> None:
    table = render_html(report, Pictures("", [], [])).partition("<h2>Artefacts</h2>")[2].partition("</table>")[0]
    rows = table.split("<tr>")[1:]
    assert len(rows) == 1 + len(report.artifacts)
    heads = re.findall(r"<th[^>]*>([^<]*)</th>", rows[0])
    assert all(re.findall(r'<td data-title="([^"]*)"', row) == heads for row in rows[1:]), "titles of a card"
    assert {row.count("<td") for row in rows[1:]} == {rows[0].count("<th")}


def test_markdown(report: ReportData) -> None:
    text = render_markdown(report)
    assert "| nvfp4 | export/unet.nvfp4.onnx | test | NVFP4 | 600 B | 80.00 | -1.00 | 2 | 3 | 4 | 500 | ok |" in text
    assert (
        "| nvfp4 | engines/unet.nvfp4.sm120.plan | test | NVFP4 | 1.2 kB | – | – | – | – | – | – | built, not run |"
        in text
    )
    assert "| cat | – | – |" in text
    assert "a <remark>" in text


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        ({"nvfp4": 0.80}, "drop 1.00 against FP16"),
        ({"nvfp4": 0.82}, "mIoU +1.00 against FP16"),
        ({"nvfp4": 0.80, "fp16": 0.79}, "mIoU +1.00 against FP16"),  # the model's score, not its ONNX file's 0.81
    ],
)
def test_the_page_says_drop_of_a_loss_alone(report: ReportData, scores: dict[str, float], said: str) -> None:
    page = render_html(with_models(report, **scores), Pictures())
    assert said in page
    assert "drop -" not in page


def test_html_escapes_what_it_is_given(report: ReportData) -> None:
    page = render_html(report, Pictures())
    assert "no &lt;GPU&gt; here" in page
    assert "a &lt;remark&gt;" in page
    assert "<GPU>" not in page
    assert "<remark>" not in page


def test_no_string_of_a_report_becomes_markup(report: ReportData) -> None:
    """Every string of report.json, one after another, and the captions of pictures."""
    tree = report.to_json()
    model = tree["models"].pop("fp16")
    tree["models"][HOSTILE] = model
    model["per_class"] = {HOSTILE: 0.5}

    def spoiled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: spoiled(item) for key, item in value.items()}
        if isinstance(value, list):
            return [spoiled(item) for item in value]
        return HOSTILE if isinstance(value, str) and value not in ("semantic", "measured") else value

    engine = {
        "engine": HOSTILE, "model": "nvfp4", "built": HOSTILE, "statement": "", "summary": HOSTILE,
        "fp4_mac_share": 0.5, "counts": {HOSTILE: 1}, "requested": {HOSTILE: 1.0},
        "actual": {HOSTILE: 0.5, "FP4": 0.5}, "not_as_requested": 1,
        "columns": [HOSTILE], "layers": [[HOSTILE]],
    }  # fmt: skip
    hostile = ReportData.model_validate({**spoiled(tree), "ledgers": [engine]})
    overlay = Overlay(HOSTILE, {HOSTILE: "data:image/png;base64,AAAA"}, 0.5, True)
    page = render_html(hostile, Pictures("data:image/svg+xml;base64,AAAA", [(HOSTILE, HOSTILE)], [overlay]))
    assert "<img src=x" not in page
    assert page.count("</style>") == 1
    assert len(own_scripts(page)) == 1
    assert page.count("&lt;img src=x onerror=alert(1)&gt;") > 30


def test_html_shows_telemetry_where_there_is_some(report: ReportData) -> None:
    assert "Telemetry" not in render_html(report, Pictures())
    heatmaps = [("nvfp4: codes <that> changed", "data:image/png;base64,AAAA")]
    page = render_html(report, Pictures(heatmaps=heatmaps))
    assert "<h2>Telemetry</h2>" in page
    assert 'src="data:image/png;base64,AAAA"' in page
    assert "codes &lt;that&gt; changed" in page


def test_pictures_and_scores_come_before_heatmaps(report: ReportData) -> None:
    overlay = Overlay("a", {"image": "data:image/png;base64,AAAA"}, 0.5, True)
    heatmaps = [("codes", "data:image/png;base64,AAAA")]
    page = render_html(report, Pictures("data:image/svg+xml;base64,AAAA", heatmaps, [overlay]))
    halves = page[page.index('<figure class="halves">') : page.index("<h2>Telemetry")]
    assert halves.count("data:image/svg+xml;base64,AAAA") == 2, "a narrow page has one chart below the other"
    places = [
        page.index(f"<h2>{title}") for title in ("Artefacts", "Samples", "IoU per class", "Training", "Telemetry")
    ]
    assert places == sorted(places)


def test_html_needs_no_network_and_runs_its_own_script_alone(report: ReportData) -> None:
    page = render_html(report, Pictures())
    assert "http://" not in page
    assert "https://" not in page
    assert len(own_scripts(page)) == 1
    assert "@import" not in page
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]+)">', page)
    allowed = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert allowed["default-src"] == "'none'"
    assert allowed["img-src"] == "data:"


def test_history_skips_a_line_cut_short(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.model_dir("fp16").mkdir()
    diverged = '{"epoch": 2, "loss": NaN, "miou": null, "per_class": {"a": NaN}}'
    (run.model_dir("fp16") / "metrics.jsonl").write_text(f'{{"epoch": 1, "miou": 0.5}}\n{diverged}\n{{"epoch": 3, "mi')
    assert history(run, "fp16") == [Epoch(epoch=1, miou=0.5), Epoch(epoch=2, per_class={"a": None})]
    assert history(run, "nvfp4") == []


def test_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    epochs = [Epoch(epoch=number, loss=1 / number, miou=0.5) for number in (1, 2, 3)]
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "x")
    svg = draw_curves({"fp16": epochs, "nvfp4": epochs[:1]}, fine_tuned=True)
    assert svg is not None
    assert svg.startswith("<svg")
    assert os.environ["SOURCE_DATE_EPOCH"] == "x"
    assert svg == draw_curves({"fp16": epochs, "nvfp4": epochs[:1]}, fine_tuned=True), "the same picture every time"
    assert svg.count("legend_") == 2, "each chart names its lines"
    assert "@media(prefers-color-scheme:dark)" in svg
    assert draw_curves({"fp16": []}, fine_tuned=True) is None
    unscored = [epoch.model_copy(update={"miou": None}) for epoch in epochs[:2]]
    assert draw_curves({"fp16": [*unscored, epochs[2]]}, fine_tuned=False) is not None


def test_overlays_show_the_worst_last(untrained: Run, shapes: Path) -> None:
    overlays = draw_overlays(untrained.checkpoint("fp16"), untrained.checkpoint("nvfp4"), shapes)
    assert len(overlays) == 4
    assert [overlay.worst for overlay in overlays] == [False, False, False, True]
    assert overlays[-1].differing == max(overlay.differing for overlay in overlays)
    assert list(overlays[0].pictures) == ["image", "truth", "FP16", "NVFP4", "difference"]
    assert all(uri.startswith("data:image/png;base64,") for uri in overlays[0].pictures.values())
    assert overlays[0].columns == ["image", "truth", "FP16 | NVFP4", "difference"]
    assert overlays[0].pair == (overlays[0].pictures["FP16"], overlays[0].pictures["NVFP4"])
    for overlay in overlays:
        assert 0 < len(overlay.legend) < len(open_dataset(shapes, "val").class_names)


def test_a_page_lays_fp16_and_nvfp4_over_one_another(report: ReportData) -> None:
    page = render_html(report, Pictures(overlays=[OVERLAY]))
    pair = page[page.index('<div class="pair">') : page.index("</div>", page.index('<div class="pair">'))]
    assert re.findall(r'src="data:image/png;base64,(\w+)"', pair) == ["FP16", "NVFP4"]
    assert '<input type="range"' in pair
    assert page.count("base64,FP16") == page.count("base64,NVFP4") == 1
    assert "rgb(1,2,3)" in page


def test_equal_models_do_not_differ(untrained: Run, shapes: Path) -> None:
    path = untrained.checkpoint("fp16")
    assert {overlay.differing for overlay in draw_overlays(path, path, shapes)} == {0.0}


def test_tint() -> None:
    image = np.full((1, 3, 3), 100, np.uint8)
    drawn = tinted(image, np.array([[0, 1, 255]], np.uint8), colours(("background", "cat"), background=True))
    assert drawn[0, 0].tolist() == [100, 100, 100], "background stays as photographed"
    assert drawn[0, 1].tolist() == [round(0.4 * 100 + 0.6 * value) for value in COLOURS[0]]
    assert drawn[0, 2].tolist() == [round(0.4 * 100 + 0.6 * value) for value in VOID]


def test_every_class_has_a_colour_of_its_own() -> None:
    found = colours([str(number) for number in range(81)], background=True)
    assert found[0] is None
    assert len(set(found)) == 81
    assert None not in colours([str(number) for number in range(11)], background=False)


def test_a_class_that_is_named_background_has_no_colour() -> None:
    """As masks have one, anywhere among the classes."""
    assert colours(("road", "_Background_", "car"), background=False) == [COLOURS[0], None, COLOURS[1]]
