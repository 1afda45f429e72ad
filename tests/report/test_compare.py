"""A comparison subtracts what can be subtracted, says what cannot, and survives any folder."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from fp4deploy.bench.kept import keep
from fp4deploy.bench.records import ArtifactEntry
from fp4deploy.errors import InputError
from fp4deploy.export.ledger.ledger import Ledger
from fp4deploy.report.comparison import compare, labels
from fp4deploy.report.run_folder import read_run
from fp4deploy.report.write import open_runs, rewrite_report, write_comparison
from fp4deploy.runs import Run
from fp4deploy.system.files import file_digest
from tests.report.test_pages import own_scripts

MACHINE = {"python": "3", "platform": "Linux", "cpu": "<a CPU>", "cores": 2, "threads": 1, "gpus": [], "packages": {}}


def make(folder: Path, scores: dict[str, list[dict[str, float]]], *, key: str = "miou", **settings: Any) -> Run:
    """A run written by hand: model -> scores of classes, epoch by epoch; the mean is theirs."""
    tree: dict[str, Any] = {"train": {"epochs": 2, "finetune_epochs": 2}, "data": {"root": "nowhere"}}
    for name, value in settings.items():
        section, _, last = name.partition("__")
        if last:
            tree.setdefault(section, {})[last] = value
        else:
            tree[section] = value
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    for model, epochs in scores.items():
        (folder / model).mkdir()
        lines = [
            {"epoch": number, "loss": 1 / number, key: sum(classes.values()) / len(classes), "per_class": classes}
            for number, classes in enumerate(epochs, 1)
        ]
        (folder / model / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Run(folder)


def compared(*runs: Run) -> dict[str, Any]:
    """The comparison as `--json` writes it."""
    named = labels([run.path for run in runs])
    return compare([read_run(run, label) for run, label in zip(runs, named, strict=True)]).model_dump(mode="json")


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Run, Run]:
    """Two runs; the second's best NVFP4 epoch is its first."""
    one = make(tmp_path / "one", {"fp16": [{"cat": 0.2, "dog": 0.4}, {"cat": 0.4, "dog": 0.6}],
                                  "nvfp4": [{"cat": 0.3, "dog": 0.5}, {"cat": 0.4, "dog": 0.4}]})  # fmt: skip
    two = make(tmp_path / "two", {"fp16": [{"cat": 0.2, "dog": 0.4}, {"cat": 0.5, "dog": 0.7}],
                                  "fp16_control": [{"cat": 0.6, "dog": 0.6}, {"cat": 0.5, "dog": 0.5}],
                                  "nvfp4": [{"cat": 0.6, "dog": 0.3}, {"cat": 0.1, "dog": 0.1}]},
               train__lr=0.1)  # fmt: skip
    return one, two


def test_differences_of_scores(pair: tuple[Run, Run]) -> None:
    rows = {(row["run"], row["model"]): row for row in compared(*pair)["scores"]}
    assert rows["two", "nvfp4"]["best"] == pytest.approx(0.45)
    assert rows["two", "nvfp4"]["best_epoch"] == 1
    assert rows["two", "nvfp4"]["last"] == pytest.approx(0.1)
    assert rows["two", "nvfp4"]["best_to_first"] == pytest.approx(0.05)
    assert rows["two", "nvfp4"]["last_to_first"] == pytest.approx(-0.3)
    assert rows["two", "nvfp4"]["best_to_control"] == pytest.approx(-0.15), "against the control, not FP16"
    assert rows["one", "nvfp4"]["best_to_control"] == pytest.approx(-0.1), "against FP16, where there is no control"
    assert rows["two", "fp16_control"]["best_to_first"] is None, "the first run has none"
    assert rows["one", "nvfp4"]["best_to_first"] is None


def test_classes_are_sorted_by_change(pair: tuple[Run, Run]) -> None:
    table = compared(*pair)["classes"][0]
    assert table["title"] == "NVFP4"
    assert [row["name"] for row in table["rows"]] == ["dog", "cat"]
    assert table["rows"][0]["changes"] == [0, pytest.approx(-0.2)]
    assert table["rows"][1]["values"] == [0.3, 0.6]


def test_a_run_without_scores_takes_no_class_from_the_others(pair: tuple[Run, Run], tmp_path: Path) -> None:
    measured = [make(tmp_path / name, {"fp16": [{"cat": 0.1}]}) for name in ("three", "four")]
    for run, value in zip(measured, (0.7, 0.6), strict=True):
        (run.path / "fp16" / "metrics.jsonl").unlink()
        (run.path / "fp16" / "best.safetensors").write_bytes(b"weights")
        found = {**entry(run, "fp16/best.safetensors", "fp16", value), "per_class": {"cat": value}}
        (run.path / "report.json").write_text(json.dumps({"artifacts": [found], "environment": MACHINE}))
    mixed = compared(*pair, *measured)["classes"]
    assert [column["run"] for column in mixed[1]["columns"]] == ["one", "two"]
    only = compared(*measured)
    assert only["classes"][0]["of"] == "the measured checkpoint"
    assert only["classes"][0]["rows"][0]["changes"][1] == pytest.approx(-0.1)
    assert "four: FP16 reaches 60.00 % mIoU, 10.00 points below three (70.00 %)." in only["summary"]


def test_settings_that_change_no_result_are_said_to(tmp_path: Path) -> None:
    same = {"nvfp4": [{"cat": 0.3, "dog": 0.5}]}
    one = make(
        tmp_path / "one", same, train__lr=0.1, telemetry__every=5, data__workers=0, telemetry__trackers=["jsonl"]
    )
    two = make(
        tmp_path / "two", same, train__lr=0.2, telemetry__every=9, data__workers=2, telemetry__trackers=["mlflow"]
    )
    found = compared(one, two)
    assert {each["key"]: each["changes_results"] for each in found["differences"]} == {
        "train.lr": True, "telemetry.every": False, "data.workers": False, "telemetry.trackers": False
    }  # fmt: skip
    assert "Settings that differ: train.lr (3 more without effect on results)." in found["summary"]


def test_settings_that_differ(pair: tuple[Run, Run]) -> None:
    found = compared(*pair)
    assert found["differences"] == [{"key": "train.lr", "values": [0.002, 0.1], "changes_results": True}]
    assert "Settings that differ: train.lr." in found["summary"]


def test_other_tasks_and_classes_are_not_subtracted(pair: tuple[Run, Run], tmp_path: Path) -> None:
    objects = make(tmp_path / "objects", {"nvfp4": [{"cat": 0.1}]}, key="ap", task="instance")
    birds = make(tmp_path / "birds", {"nvfp4": [{"cat": 0.9, "bird": 0.1}]})
    found = compared(objects, pair[0], pair[1], birds)
    rows = {(row["run"], row["model"]): row for row in found["scores"]}
    assert rows["one", "nvfp4"]["best_to_first"] is None
    assert rows["two", "nvfp4"]["first"] == ["one", "nvfp4"], "the first of its own kind"
    assert rows["birds", "nvfp4"]["best_to_first"] is None
    care = " ".join(found["cannot"])
    assert "mIoU of one, two, birds; AP of objects" in care
    assert "one and birds know different classes" in care
    assert "only the 1 class they share is compared" in care


def test_runs_without_a_common_model_are_compared_by_their_most_quantised(tmp_path: Path) -> None:
    one = make(tmp_path / "control" / "seed0", {"fp16_control": [{"cat": 0.5}]})
    two = make(tmp_path / "qat" / "seed0", {"nvfp4": [{"cat": 0.4}]})
    found = compared(one, two)
    assert found["scores"][1]["first"] == ["control/seed0", "fp16_control"]
    assert found["scores"][1]["best_to_first"] == pytest.approx(-0.1)
    assert found["classes"][0]["title"] == "the most quantised model of each run"


def test_unfinished_and_empty_runs_are_said_to_be(pair: tuple[Run, Run], tmp_path: Path) -> None:
    short = make(tmp_path / "short", {"fp16": [{"cat": 0.1, "dog": 0.1}]})
    with (short.path / "fp16" / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 2, "mio')
    empty = make(tmp_path / "empty", {})
    found = compared(pair[0], short, empty)
    assert any("fp16 is unfinished, 1 of 2 epochs" in remark for remark in found["runs"][1]["remarks"])
    assert any("no model has been trained here yet" in remark for remark in found["runs"][2]["remarks"])
    assert "No model yet: empty." in found["summary"]
    assert not any("unfinished" in remark for remark in found["runs"][0]["remarks"])


def entry(run: Run, path: str, model: str, miou: float) -> dict[str, Any]:
    (run.path / path).parent.mkdir(parents=True, exist_ok=True)
    (run.path / path).write_bytes(b"weights")
    return {"path": path, "model": model, "backend": "torch", "precision": "FP16", "size_bytes": 7, "status": "ok",
            "sha256": file_digest(run.path / path), "miou": miou, "latency_ms": {"p50": 2.0, "p90": 2.0, "p99": 2.0},
            "reason": None, "images_per_s": 500.0}  # fmt: skip


def test_numbers_belong_to_the_file_that_was_measured(pair: tuple[Run, Run]) -> None:
    run = pair[0]
    entries = [entry(run, "export/unet.onnx", "nvfp4", 0.4), entry(run, "export/unet.fp4", "nvfp4", 0.3)]
    report = {
        "artifacts": entries,
        "environment": MACHINE,
        "commands": ["fp4deploy run"],
        "created": "2026-01-01T00:00:00+00:00",
    }
    (run.path / "report.json").write_text(json.dumps(report))
    content = (run.path / "export" / "unet.fp4").read_bytes()
    (run.path / "export" / "unet.fp4").write_bytes(content[::-1])  # as long as it was
    assert content != content[::-1]
    (run.path / "engines").mkdir()
    (run.path / "engines" / "unet.plan").write_bytes(b"engine")
    found = {entry.path: entry for entry in read_run(run).artifacts}
    assert found["export/unet.onnx"].miou == 0.4
    assert found["export/unet.fp4"].miou is None
    assert found["export/unet.fp4"].status == "changed since"
    assert found["engines/unet.plan"].status == "not measured"
    assert read_run(run).commands == ["fp4deploy run"]


@pytest.mark.parametrize(("at", "expected"), [("2025-12-31", 0.4), ("2026-01-02", 0.5)])
def test_the_later_of_a_report_and_a_bench_counts(at: str, expected: float, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    run = make(tmp_path / "run", {"nvfp4": [{"cat": 0.3}]}, data__root=str(tmp_path / "data"))
    told = {"artifacts": [entry(run, "export/unet.onnx", "nvfp4", 0.4)], "created": "2026-01-01T00:00:00+00:00"}
    (run.path / "report.json").write_text(json.dumps(told))
    measured = ArtifactEntry.model_validate(entry(run, "export/unet.onnx", "nvfp4", 0.5))
    keep(run.path / "export" / "unet.onnx", measured, tmp_path / "data")
    lines = run.path / "bench.jsonl"
    lines.write_text(re.sub(r'"at": "[^"]*"', f'"at": "{at}T00:00:00+00:00"', lines.read_text()))
    (found,) = read_run(run).artifacts
    assert found.miou == expected


@pytest.mark.parametrize("text", ["", "[]", '{"artifacts": [{"path": 3}]}', '{"artifacts": 1}', '{"environment": 2}'])
def test_a_damaged_report_is_a_remark(pair: tuple[Run, Run], text: str) -> None:
    (pair[0].path / "report.json").write_text(text)
    found = read_run(pair[0])
    assert any("report.json cannot be read" in remark for remark in found.remarks)
    assert found.environment is None


@pytest.mark.parametrize("text", ["train: [1", "- 1", "no_such: 3\ntrain: {epochs: -1}", "task: 7"])
def test_a_damaged_configuration_is_a_remark(pair: tuple[Run, Run], text: str) -> None:
    pair[1].config_path.write_text(text)
    found = compared(*pair)
    assert any("config.yaml is not valid today" in remark for remark in found["runs"][1]["remarks"])
    json.dumps(found, allow_nan=False)


def test_the_page_stands_alone(pair: tuple[Run, Run], tmp_path: Path) -> None:
    found = write_comparison(pair, tmp_path / "page.html").model_dump(mode="json")
    page = (tmp_path / "page.html").read_text()
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert len(own_scripts(page)) == 1
    assert "@import" not in page
    assert "url(" not in page
    for heading in ("Settings that differ", "Scores", "Curves", "Artefacts", "IoU per class",
                    "Predictions on the same images", "Telemetry", "Measured on", "Commands"):  # fmt: skip
        assert f"<h2>{heading}" in page
    assert "has no checkpoint." in page
    assert "Without telemetry: one, two" in page
    assert 'src="data:image/svg+xml;base64,' in page
    json.dumps(found, allow_nan=False)


HOSTILE = "</style></script><img src=x onerror=alert(1)>"


def test_strings_of_files_never_become_markup(tmp_path: Path) -> None:
    """Of names, settings, metrics, report.json and commands.jsonl."""
    runs = [make(tmp_path / name, {"fp16": [{HOSTILE: 0.5}]}, data__classes=[HOSTILE]) for name in ("<i>one", "two")]
    machine = {**MACHINE, "packages": {HOSTILE: HOSTILE}}
    found = entry(runs[0], "export/unet.onnx", HOSTILE, 0.5) | {
        "backend": HOSTILE,
        "reason": HOSTILE,
        "status": HOSTILE,
    }
    report = {"artifacts": [found], "environment": machine, "created": HOSTILE, "commands": [HOSTILE]}
    (runs[0].path / "report.json").write_text(json.dumps(report))
    (runs[1].path / "commands.jsonl").write_text(json.dumps({"command": HOSTILE, "environment": machine}) + "\n")
    write_comparison(runs, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<img src=x" not in page
    assert "<i>one" not in page
    assert "&lt;i&gt;one" in page
    assert page.count("</style>") == 1
    assert page.count("&lt;img src=x onerror=alert(1)&gt;") >= 8


@pytest.mark.parametrize(
    ("key", "value"),
    [("size_bytes", HOSTILE), ("miou", HOSTILE), ("latency_ms", {"p50": HOSTILE, "p90": 1, "p99": 1}),
     ("images_per_s", HOSTILE), ("per_class", {"cat": HOSTILE}), ("memory", {"weight_bytes": HOSTILE})],
)  # fmt: skip
def test_numbers_are_parsed_as_numbers(pair: tuple[Run, Run], key: str, value: Any) -> None:
    found = entry(pair[0], "export/unet.onnx", "nvfp4", 0.4) | {key: value}
    (pair[0].path / "report.json").write_text(json.dumps({"artifacts": [found], "environment": MACHINE}))
    assert any("report.json cannot be read" in remark for remark in read_run(pair[0]).remarks)


def test_an_epoch_with_a_score_that_is_no_number_is_skipped(pair: tuple[Run, Run]) -> None:
    with (pair[0].path / "nvfp4" / "metrics.jsonl").open("a") as file:
        file.write(
            json.dumps({"epoch": HOSTILE, "miou": 0.9}) + "\n" + json.dumps({"epoch": 3, "miou": HOSTILE}) + "\n"
        )
    assert read_run(pair[0]).models["nvfp4"].epochs == 2


def test_images_are_predicted_by_both_runs(untrained: Run, shapes: Path, tmp_path: Path) -> None:
    names = read_run_names(untrained)
    runs = []
    for name in ("one", "two"):
        run = make(tmp_path / name, {"nvfp4": [dict.fromkeys(names, 0.5)]}, data__root=str(shapes))
        shutil.copy(untrained.checkpoint("nvfp4"), run.checkpoint("nvfp4"))
        runs.append(run)
    found = write_comparison(runs, tmp_path / "page.html")
    assert len(found.samples.images) == 3
    assert all("up to 0.00 % of pixels differ" in caption for caption in found.samples.images)
    assert (tmp_path / "page.html").read_text().count("<figcaption>two: NVFP4") == 3


def read_run_names(run: Run) -> list[str]:
    from fp4deploy.models import read_card

    return list(read_card(run.checkpoint("nvfp4")).class_names)


def snapshot(step: int, kurtosis: float) -> str:
    layers = {
        "head": {"weight": {"kurtosis": 3.0, "flips": 0.1, "sqnr_db": 20.0}, "activation": {"kurtosis": kurtosis}}
    }
    return json.dumps({"kind": "look", "step": step, "epoch": 1, "values": {}, "layers": layers}) + "\n"


def test_telemetry_shares_its_colours(pair: tuple[Run, Run], monkeypatch: pytest.MonkeyPatch) -> None:
    from fp4deploy.report.figures import telemetry

    for run, kurtosis in zip(pair, (2.0, 9.0), strict=True):
        (run.model_dir("nvfp4") / "telemetry.jsonl").write_text(snapshot(1, kurtosis) + snapshot(2, kurtosis + 1))
    drawn: list[Any] = []
    monkeypatch.setattr(telemetry, "_themed", lambda heatmap: drawn.append(heatmap) or "")
    runs = [read_run(run) for run in pair]
    tracked = telemetry.tracked_models(runs)
    assert [row["activation kurtosis"] for row in telemetry.telemetry_numbers(runs, tracked)] == [3.0, 10.0]
    telemetry.draw_telemetry(runs, tracked)
    kurtoses = [heatmap for heatmap in drawn if heatmap.unit == "kurtosis"]
    assert [(heatmap.low, heatmap.high) for heatmap in kurtoses] == [(2.0, 10.0)] * 2


def test_folders_that_are_no_runs(pair: tuple[Run, Run], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nope is not a run") as caught:
        open_runs([pair[0].path, tmp_path / "nope", tmp_path])
    assert "is a folder of runs; give them by name" in str(caught.value)
    with pytest.raises(InputError, match="given twice"):
        open_runs([pair[0].path, pair[0].path / ".." / "one"])


def test_a_report_is_regenerated(untrained: Run, shapes: Path, tmp_path: Path) -> None:
    names = read_run_names(untrained)
    run = make(
        tmp_path / "run", {m: [dict.fromkeys(names, 0.5)] * 2 for m in ("fp16", "nvfp4")}, data__root=str(shapes)
    )
    for model in ("fp16", "nvfp4"):
        shutil.copy(untrained.checkpoint(model), run.checkpoint(model))
    first = rewrite_report(run)
    assert first.data.models["nvfp4"].accuracy_from == "validation during training"
    assert first.data.models["nvfp4"].miou == 0.5
    assert "<h2>Samples</h2>" in first.html.read_text()
    assert "| nvfp4 | nvfp4/best.safetensors | – |" in first.markdown.read_text()
    assert "cannot run the engines" not in " ".join(first.data.summary)
    second = rewrite_report(run)
    assert second.data.artifacts == first.data.artifacts
    assert second.data.models == first.data.models
    assert second.data.created == first.data.created
    shutil.rmtree(run.path / "fp16")
    config = run.config_path.read_text()
    run.config_path.write_text(config.replace(str(shapes), "gone"))
    elsewhere = rewrite_report(run, tmp_path / "page.html")
    assert any("Samples are left out" in remark for remark in elsewhere.data.remarks)
    assert "NVFP4" in (tmp_path / "page.html").read_text()


def test_a_run_without_a_checkpoint_has_no_report(pair: tuple[Run, Run]) -> None:
    with pytest.raises(InputError, match="no finished model to report"):
        rewrite_report(pair[0])
    assert not (pair[0].path / "report.html").exists()


def test_an_engine_that_nobody_measured_was_built(pair: tuple[Run, Run]) -> None:
    """Also where bench listed it: a machine without its GPU has no number to keep."""
    run = pair[0]
    (run.path / "engines").mkdir()
    (run.path / "engines" / "unet.plan").write_bytes(b"engine")
    path = run.path / "engines" / "unet.ledger.json"
    made = ("tensorrt-rtx", "1.7", "sm120", "auto", "build log", "unet.onnx", "0" * 64, "unet.plan", "0" * 64)
    path.write_text(Ledger(*made, 6, 0.5, (1, 1, 8), None, (), ()).to_json())
    plan = next(entry for entry in read_run(run).artifacts if entry.path == "engines/unet.plan")
    assert (plan.status, plan.backend) == ("built, not run", "TensorRT-RTX 1.7 for SM120")
    path.write_text("{")
    assert {entry.path: entry.status for entry in read_run(run).artifacts}["engines/unet.plan"] == "not measured"
