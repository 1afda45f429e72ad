"""The report says what was measured, and nothing that was not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp4deploy.bench.artifact import ArtifactResult
from fp4deploy.bench.latency import Latency
from fp4deploy.report import run as report
from fp4deploy.report.figures.curves import draw_curves, history
from fp4deploy.report.figures.overlays import PALETTE, VOID, colours, draw_overlays, tinted
from fp4deploy.report.run_html import render_html
from fp4deploy.runs import Run

TIMED = Latency(p50=2.0, p90=3.0, p99=4.0, batch=1, runs=9, device="a CPU")


def row(path: str, model: str, miou: float | None, size: int) -> ArtifactResult:
    status, reason = ("ok", None) if miou is not None else ("built, not run", "no <GPU> here")
    return ArtifactResult(
        Path(path), model, "test", model.upper(), size, "0", status, reason, miou,
        per_class={"background": miou, "cat": None} if miou is not None else {},
        latency=TIMED if miou is not None else None,
    )  # fmt: skip


@pytest.fixture
def facts(untrained: Run, shapes: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(report, "_fine_tuned", lambda run: True)
    rows = [
        row(f"{untrained.path}/fp16/best.safetensors", "fp16", 0.81, 4000),
        row(f"{untrained.path}/export/unet-fp16.onnx", "fp16", 0.81, 2000),
        row(f"{untrained.path}/engines/unet-fp16.plan", "fp16", None, 3000),
        row(f"{untrained.path}/nvfp4/best.safetensors", "nvfp4", 0.80, 4000),
        row(f"{untrained.path}/export/unet.onnx", "nvfp4", 0.80, 600),
        row(f"{untrained.path}/engines/unet.plan", "nvfp4", None, 1200),
    ]
    journal = report.Journal([("train", 95.0)], ["a <remark>"], ["fp4deploy run --demo"])
    return report.collect(untrained, rows, shapes, journal)


def test_the_contract(facts: dict[str, Any]) -> None:
    assert facts.keys() >= {"models", "artifacts", "environment"}
    assert list(facts["models"]) == ["fp16", "nvfp4"]
    assert facts["artifacts"][1]["path"] == "export/unet-fp16.onnx"
    assert facts["environment"].keys() >= {"python", "cpu", "cores", "gpus", "packages"}
    assert facts["models"]["nvfp4"]["miou"] == 0.80
    json.dumps(facts, allow_nan=False)


def test_a_model_trained_longer_is_said_to_be(facts: dict[str, Any]) -> None:
    assert "epochs longer, which alone helps" in " ".join(report.summary(facts))
    control = {**facts["models"], "fp16_control": {**facts["models"]["fp16"], "miou": 0.82}}
    text = " ".join(report.summary({**facts, "models": control}))
    assert "against the FP16 control" in text
    assert "longer" not in text
    assert "longer" not in " ".join(report.summary({**facts, "fine_tuned": False}))


def test_the_summary_is_made_of_measured_numbers(facts: dict[str, Any]) -> None:
    text = " ".join(facts["summary"])
    assert "NVFP4 loses 1.00 points of mIoU against FP16 (80.00 and 81.00)." in text
    assert "0.30 of the bytes" in text
    assert "0.40 of the bytes" in text
    assert "cannot run the engines" in text


def test_the_summary_compares_with_the_control_where_there_is_one(facts: dict[str, Any]) -> None:
    facts["models"]["fp16_control"] = {**facts["models"]["fp16"], "miou": 0.79}
    assert report.summary(facts)[0].startswith("NVFP4 gains 1.00 points of mIoU against the FP16 control")


def test_no_accuracy_no_claim(facts: dict[str, Any]) -> None:
    facts["models"]["nvfp4"]["miou"] = None
    assert "mIoU" not in " ".join(report.summary(facts))


def test_markdown(facts: dict[str, Any]) -> None:
    text = report.render_markdown(facts)
    assert "| nvfp4 | export/unet.onnx | test | NVFP4 | 600 B | 80.00 | +1.00 | 2 | 500 | ok |" in text
    assert "| nvfp4 | engines/unet.plan | test | NVFP4 | 1.2 kB | – | – | – | – | built, not run |" in text
    assert "| cat | – | – |" in text
    assert "a <remark>" in text


def test_html_escapes_what_it_is_given(facts: dict[str, Any]) -> None:
    page = render_html(facts, "<svg></svg>", [])
    assert "no &lt;GPU&gt; here" in page
    assert "a &lt;remark&gt;" in page
    assert "<GPU>" not in page
    assert "<remark>" not in page


def test_html_shows_telemetry_where_there_is_some(facts: dict[str, Any]) -> None:
    assert "Telemetry" not in render_html(facts, None, [])
    page = render_html(facts, None, [], [("nvfp4: codes <that> changed", "data:image/png;base64,AAAA")])
    assert "<h2>Telemetry</h2>" in page
    assert 'src="data:image/png;base64,AAAA"' in page
    assert "codes &lt;that&gt; changed" in page


def test_html_needs_no_network_and_no_script(facts: dict[str, Any]) -> None:
    page = render_html(facts, None, [])
    assert "http://" not in page
    assert "https://" not in page
    assert "<script" not in page
    assert "@import" not in page


def test_history_skips_a_line_cut_short(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.model_dir("fp16").mkdir()
    (run.model_dir("fp16") / "metrics.jsonl").write_text('{"epoch": 1, "miou": 0.5}\n{"epoch": 2, "mi')
    assert history(run, "fp16") == [{"epoch": 1, "miou": 0.5}]
    assert history(run, "nvfp4") == []


def test_curves() -> None:
    epochs = [{"epoch": number, "loss": 1 / number, "miou": 0.5} for number in (1, 2, 3)]
    svg = draw_curves({"fp16": epochs, "nvfp4": epochs[:1]}, fine_tuned=True)
    assert svg is not None
    assert svg.startswith("<svg")
    assert svg == draw_curves({"fp16": epochs, "nvfp4": epochs[:1]}, fine_tuned=True), "the same picture every time"
    assert draw_curves({"fp16": []}, fine_tuned=True) is None
    unscored = [{**entry, "miou": None} for entry in epochs[:2]]
    assert draw_curves({"fp16": [*unscored, epochs[2]]}, fine_tuned=False) is not None


def test_overlays_show_the_worst_last(untrained: Run, shapes: Path) -> None:
    overlays = draw_overlays(untrained.checkpoint("fp16"), untrained.checkpoint("nvfp4"), shapes)
    assert len(overlays) == 4
    assert [overlay.worst for overlay in overlays] == [False, False, False, True]
    assert overlays[-1].differing == max(overlay.differing for overlay in overlays)
    assert list(overlays[0].pictures) == ["image", "truth", "FP16", "NVFP4", "difference"]
    assert all(uri.startswith("data:image/png;base64,") for uri in overlays[0].pictures.values())


def test_equal_models_do_not_differ(untrained: Run, shapes: Path) -> None:
    path = untrained.checkpoint("fp16")
    assert {overlay.differing for overlay in draw_overlays(path, path, shapes)} == {0.0}


def test_tint() -> None:
    image = np.full((1, 3, 3), 100, np.uint8)
    drawn = tinted(image, np.array([[0, 1, 255]], np.uint8), colours(2, background=True))
    assert drawn[0, 0].tolist() == [100, 100, 100], "background stays as photographed"
    assert drawn[0, 1].tolist() == [round(0.4 * 100 + 0.6 * value) for value in PALETTE[0]]
    assert drawn[0, 2].tolist() == [round(0.4 * 100 + 0.6 * value) for value in VOID]


def test_every_class_has_a_colour_of_its_own() -> None:
    found = colours(81, background=True)
    assert found[0] is None
    assert len(set(found)) == 81
    assert None not in colours(11, background=False)
