"""Trackers: what they write, what a resume keeps, what is missing."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from PIL import Image
from torch import nn

from fp4deploy.errors import UnavailableError
from fp4deploy.train.config import TelemetrySection
from fp4deploy.train.logging import telemetry, trackers
from fp4deploy.train.logging.jsonl_tracker import JsonlTracker, read_entries
from fp4deploy.train.logging.telemetry import Telemetry, mean_dice
from fp4deploy.train.logging.tracker import EPOCH, SAMPLE, Entry, rounded
from fp4deploy.train.logging.trackers import WandbTracker, check_trackers, log_pictures, make_trackers


def sample(step: int, epoch: int = 1) -> Entry:
    layers: Any = {"a.conv": {"weight": {"mean": 0.25 * step, "kurtosis": None}}}
    return Entry(SAMPLE, step, epoch, {"gradient_norm": 1.5}, layers, {"a.conv": {"weight": [step] * 16}})


def whole_epoch(epoch: int, step: int) -> Entry:
    return Entry(EPOCH, step, epoch, {"loss": 2.0, "miou": None})


def test_lines_read_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "fp16" / "telemetry.jsonl"
    tracker = JsonlTracker(path)
    entries = [sample(1), sample(11), whole_epoch(1, 20)]
    for entry in entries:
        tracker.log(entry)
    assert read_entries(path) == entries
    assert json.loads(path.read_text().splitlines()[0])["layers"]["a.conv"]["weight"]["kurtosis"] is None
    assert read_entries(tmp_path / "none.jsonl") == []


def test_a_resume_drops_what_will_come_again(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.jsonl"
    tracker = JsonlTracker(path)
    for entry in (sample(1), sample(11), whole_epoch(1, 20), sample(21, 2), whole_epoch(2, 40)):
        tracker.log(entry)
    with path.open("a") as file:
        file.write('{"kind": "look", "step": 41, "ep')
    again = JsonlTracker(path)
    again.resume(30, 1)
    assert [(entry.kind, entry.step) for entry in read_entries(path)] == [
        (SAMPLE, 1),
        (SAMPLE, 11),
        (EPOCH, 20),
        (SAMPLE, 21),
    ]
    again.log(sample(31, 2))
    assert path.read_text().count("\n") == 5
    before = path.stat().st_mtime_ns
    again.resume(40, 2)
    assert path.stat().st_mtime_ns == before
    again.resume(20, 0)  # the state was saved at the last step of an epoch that was not yet evaluated
    assert [(entry.kind, entry.step) for entry in read_entries(path)] == [(SAMPLE, 1), (SAMPLE, 11)]
    again.resume(0, 0)
    assert read_entries(path) == []


@pytest.mark.parametrize("line", ["", "[]", "null", '{"kind": "other", "step": 1, "epoch": 1}', '{"step": 1}', "\x00"])
def test_damaged_lines_are_left_out(tmp_path: Path, line: str) -> None:
    path = tmp_path / "telemetry.jsonl"
    JsonlTracker(path).log(sample(1))
    with path.open("a") as file:
        file.write(line + "\n")
    assert read_entries(path) == [sample(1)]
    JsonlTracker(path).resume(5, 1)
    assert path.read_text().count("\n") == 1


def test_scalars_have_flat_names_and_what_is_undefined_has_none() -> None:
    assert sample(4).scalars() == {"gradient_norm": 1.5, "a.conv/weight/mean": 1.0}
    assert sample(4).histograms() == {"a.conv/weight/codes": [4] * 16}
    assert rounded(math.nan) is rounded(math.inf) is None
    assert rounded(1 / 3) == 0.333333333
    assert rounded(1.23456789012e-30) == 1.23456789e-30


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_is_one_paragraph_with_the_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(UnavailableError, match=rf"'{name}' needs .* pip install -e '.\[{name}\]'"):
        check_trackers(["jsonl", name])
    check_trackers(["jsonl"])


def test_what_a_library_raises_is_said_in_words(tmp_path: Path, picture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = MagicMock(
        **{f"{name}.side_effect": KeyError("no such run") for name in ("resume", "log", "pictures", "close")}
    )
    monkeypatch.setattr(trackers, "make_trackers", lambda *_: [failing])
    monkeypatch.setattr(telemetry, "make_trackers", lambda *_: [failing])
    training = Telemetry(TelemetrySection(), tmp_path, nn.Linear(2, 2), 1)
    line = {"step": 1, "epoch": 1}
    for call in (lambda: training.resume(1, 1), lambda: training.epoch(line), training.close,
                 lambda: log_pictures(["mlflow"], tmp_path, "p", "offline", {"a": picture}, 1)):  # fmt: skip
        with pytest.raises(UnavailableError, match="A tracker failed: KeyError: 'no such run'. Mend its settings"):
            call()


def test_tensorboard_writes_what_was_logged(tmp_path: Path) -> None:
    if importlib.util.find_spec("tensorboard") is None:
        pytest.skip("tensorboard is not installed: pip install -e '.[tensorboard]' -c constraints.txt")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tracker,) = make_trackers(["tensorboard"], tmp_path, "p", "offline", {})
    tracker.resume(0, 0)
    for step in (1, 11, 21):
        tracker.log(sample(step))
    tracker.close()
    (again,) = make_trackers(["tensorboard"], tmp_path, "p", "offline", {})
    again.resume(15, 1)
    again.log(sample(21))
    again.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    scalars = events.Scalars("a.conv/weight/mean")
    assert [(entry.step, entry.value) for entry in scalars] == [(1, 0.25), (11, 2.75), (21, 5.25)]
    assert events.Histograms("a.conv/weight/codes")[-1].histogram_value.num == 21 * 16


def test_wandb_offline_leaves_a_run(tmp_path: Path, picture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package itself: curves in its file, and after the training pictures as a second part of the same run."""
    if importlib.util.find_spec("wandb") is None:
        pytest.skip("wandb is not installed: pip install -e '.[wandb]' -c constraints.txt")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    (tracker,) = make_trackers(["wandb"], tmp_path / "run" / "nvfp4", "p", "offline", {"lr": 0.1})
    tracker.resume(0, 0)
    tracker.log(sample(1))
    tracker.log(Entry(EPOCH, 2, 1, {"loss": 2.0, "miou": 0.5, "dice": 0.625}))
    tracker.close()
    kinds = ("weights/prequantize", "weights/quantized", "weights/dequantized", "gradients")
    log_pictures(
        ["wandb"], tmp_path / "run" / "nvfp4", "p", "offline",
        {f"heatmaps/{kind}/semantic_conv": picture for kind in kinds}, 2,
    )  # fmt: skip
    first, second = sorted((tmp_path / "run" / "nvfp4" / "wandb").glob("offline-run-*/*.wandb"))
    assert first.name == second.name  # of one run
    written = first.read_bytes()  # not compressed
    assert all(word in written for word in (b"dice", b"0.625", b"a.conv/weight/mean"))
    images = second.parent / "files" / "media" / "images" / "heatmaps"
    assert {path.parent.relative_to(images).as_posix() for path in images.rglob("*.png")} == set(kinds)


class StandIn:
    """In place of the package wandb: notes what it is given."""

    def __init__(self) -> None:
        self.inits: list[dict[str, Any]] = []
        self.logged: list[tuple[dict[str, Any], int]] = []
        self.finished = 0

    def init(self, **options: Any) -> StandIn:
        self.inits.append(options)
        return self

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logged.append((values, step))

    def finish(self) -> None:
        self.finished += 1

    def Settings(self, **options: Any) -> dict[str, Any]:
        return options

    def Histogram(self, np_histogram: Any) -> Any:
        return np_histogram


def test_wandb_is_offline_unless_asked_and_the_same_run_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = StandIn()
    monkeypatch.setitem(sys.modules, "wandb", package)  # type: ignore[arg-type]
    monkeypatch.delenv("WANDB_MODE", raising=False)
    for step in (0, 10):
        (tracker,) = make_trackers(["wandb"], tmp_path / "nvfp4", "mine", "offline", {})
        tracker.resume(step, 0)
        tracker.log(sample(step + 1))
        tracker.close()
        tracker.close()
    first, second = package.inits
    assert (first["mode"], first["project"], first["resume"], second["resume"]) == ("offline", "mine", None, "allow")
    assert first["id"] == second["id"]
    assert package.finished == 2
    values, step = package.logged[1]
    assert step == 11
    assert values["a.conv/weight/mean"] == 2.75
    counts, edges = values["a.conv/weight/codes"]
    assert (counts, len(edges)) == ([11] * 16, 17)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    (tracker,) = make_trackers(["wandb"], tmp_path / "nvfp4", "mine", "offline", {})
    tracker.log(sample(1))
    assert package.inits[-1]["mode"] == "disabled"


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "semantic_std.png"
    Image.new("RGB", (4, 3), (255, 0, 0)).save(path)
    return path


def test_mlflow_keeps_metrics_and_pictures(tmp_path: Path, picture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="pip install -e '.[mlflow]' -c constraints.txt")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    model = tmp_path / "run" / "nvfp4"
    (tracker,) = make_trackers(["mlflow"], model, "p", "offline", {"lr": 0.5})
    tracker.resume(0, 0)
    tracker.log(sample(1))
    tracker.log(whole_epoch(1, 20))
    tracker.close()
    (again,) = make_trackers(["mlflow"], model, "p", "offline", {"lr": 0.5})
    again.resume(20, 1)
    again.log(sample(21, 2))
    again.close()
    log_pictures(["jsonl", "mlflow"], model, "p", "offline", {"heatmaps/gradients/semantic_std": picture}, 21)
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(model / "mlflow" / "mlruns").resolve().as_uri())
    (experiment,) = [each for each in client.search_experiments() if each.name == "p"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status, run.data.params) == ("run/nvfp4", "FINISHED", {"lr": "0.5"})
    history = client.get_metric_history(run.info.run_id, "a.conv/weight/mean")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.25), (21, 5.25)]
    assert run.data.metrics["a.conv/weight/codes/03"] == 1 / 16
    kept = client.list_artifacts(run.info.run_id, "heatmaps/gradients")
    assert [file.path for file in kept] == ["heatmaps/gradients/semantic_std.png"]


def test_pictures_go_to_tensorboard(tmp_path: Path, picture: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install -e '.[tensorboard]' -c constraints.txt")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_pictures(["tensorboard"], tmp_path, "p", "offline", {"heatmaps/gradients/semantic_std": picture}, 21)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (image,) = events.Images("heatmaps/gradients/semantic_std")
    assert (image.step, image.height, image.width) == (21, 3, 4)


class Wandb:
    """What a run of Weights & Biases was given."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, Any], int]] = []
        self.finished = 0

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logged.append((values, step))

    def finish(self) -> None:
        self.finished += 1

    @staticmethod
    def Image(path: str) -> tuple[str, str]:
        return "image", path


def test_pictures_go_to_wandb(tmp_path: Path, picture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = Wandb()
    monkeypatch.setattr(trackers, "required", lambda name: wandb)
    monkeypatch.setattr(WandbTracker, "resume", lambda self, step, epoch: setattr(self, "tracker", wandb))
    log_pictures(["jsonl", "wandb"], tmp_path, "p", "offline", {"heatmaps/gradients/semantic_std": picture}, 21)
    assert wandb.logged == [({"heatmaps/gradients/semantic_std": ("image", str(picture))}, 21)]
    assert wandb.finished == 1


def test_dice_of_an_epoch() -> None:
    line = {"miou": 0.5, "per_class": {"a": 1.0, "b": 0.0, "c": None, "d": 0.5}}
    assert mean_dice(line) == pytest.approx((1 + 0 + 2 / 3) / 3)
    assert mean_dice({"miou": None, "per_class": {"a": 1.0}}) is None
    assert mean_dice({"ap": 0.5, "per_class": {"a": 1.0}}) is None
    assert mean_dice({"miou": 0.5, "per_class": None}) is None
