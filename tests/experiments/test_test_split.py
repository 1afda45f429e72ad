"""A sweep scores what it has trained on the test split, where the data has one: once, and as `bench` does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fp4deploy.bench.evaluate import evaluate_task
from fp4deploy.bench.runtimes.pytorch import TorchRuntime
from fp4deploy.data import generate_shapes
from fp4deploy.experiments.sweep import variant as sweep_one
from fp4deploy.experiments.sweep.results import markdown
from fp4deploy.experiments.sweep.run import run_sweep
from fp4deploy.experiments.sweep.spec import load_sweep
from tests.train.small_network import SPEC

TINY = "data.height: 32, data.width: 32, train.epochs: 1, train.finetune_epochs: 1, telemetry.every: 0"
FILE = f"""
set: {{{TINY}, train.batch_size: 4}}
seeds: [0, 1]
against: control
variants:
  control: {{model: fp16_control}}
  qat: {{model: nvfp4}}
"""


def add_test_split(data: Path, images: int = 3) -> None:
    other = data.parent / "other"
    generate_shapes(other, train=1, val=images, size=32, seed=7)
    shutil.move(other / "val2017", data / "test2017")
    shutil.move(other / "annotations" / "instances_val2017.json", data / "annotations" / "instances_test2017.json")


def swept(
    folder: Path, data: Path, *sets: str, only: tuple[str, ...] = ("qat", "control"), seeds: tuple[int, ...] = (0,)
) -> tuple[Any, list[str]]:
    said: list[str] = []
    (folder / "mine.yaml").write_text(FILE)
    settings = (f"model.spec={SPEC}", f"data.root={data}", *sets)
    sweep = load_sweep(folder / "mine.yaml", settings, seeds, named=(SPEC,))
    return run_sweep(sweep, folder / "out", only, say=said.append), said


@pytest.fixture(scope="module")
def trained(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a sweep of two seeds, trained where there was no test split."""
    folder = tmp_path_factory.mktemp("trained")
    results, said = swept(folder, tiny_data, seeds=(0, 1))
    assert results["variants"]["qat"]["test"] is None
    assert "test" not in markdown(results)
    assert not any("test split" in text for text in said)
    assert not list((folder / "out").rglob("test.json"))
    return folder / "out"


@pytest.fixture
def data(tiny_data: Path, trained: Path, tmp_path: Path) -> Path:
    """The data with a test split; in `tmp_path` lies a copy of the sweep."""
    shutil.copytree(trained, tmp_path / "out")
    shutil.copytree(tiny_data, tmp_path / "data")
    add_test_split(tmp_path / "data")
    return tmp_path / "data"


def test_scores_come_with_the_test_split_and_are_those_of_bench(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_one, "train_models", lambda *_, **__: pytest.fail("it is trained"))
    results, said = swept(tmp_path, data, seeds=(0, 1))
    assert sum("on the test split mIoU" in text for text in said) == 6
    for name, model in (("fp16", "fp16"), ("control", "fp16_control"), ("qat", "nvfp4")):
        for seed in ("0", "1"):
            folder = tmp_path / "out" / name / f"seed{seed}" / model
            scores = evaluate_task(TorchRuntime(folder / "best.safetensors"), data, split="test").scores
            assert results["variants"][name]["runs"][seed]["test"] == pytest.approx(scores.score, abs=1e-12)
            assert json.loads((folder / "test.json").read_text())["images"] == 3
    rows = results["variants"]
    gaps = [100 * (rows["qat"]["runs"][seed]["test"] - rows["control"]["runs"][seed]["test"]) for seed in ("0", "1")]
    assert rows["qat"]["gap_test"]["mean"] == pytest.approx(sum(gaps) / 2)
    assert f"| {100 * rows['qat']['test']['mean']:.2f} ± " in markdown(results)
    assert "| mIoU best | mIoU last | mIoU test | against | gap best | gap last | gap test |" in markdown(results)

    again, said = swept(tmp_path, data, seeds=(0, 1))
    assert again == results
    assert not any("test split" in text for text in said)


def test_an_error_that_nobody_foresaw_costs_the_score_alone(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def broken(*_: Any) -> None:
        raise RuntimeError("a worker died")

    monkeypatch.setattr(sweep_one, "score_test", broken)
    results, said = swept(tmp_path, data)
    assert "qat, seed 0: not scored on the test split. RuntimeError: a worker died" in said
    assert [run["status"] for row in results["variants"].values() for run in row["runs"].values()] == ["done"] * 3


def test_a_test_image_that_cannot_be_read_costs_the_score_alone(data: Path, tmp_path: Path) -> None:
    image = sorted((data / "test2017").iterdir())[1]
    whole = image.read_bytes()
    image.write_bytes(whole[: len(whole) // 3])
    results, said = swept(tmp_path, data)
    assert [run["status"] for row in results["variants"].values() for run in row["runs"].values()] == ["done"] * 3
    assert all(row["test"] is None for row in results["variants"].values())
    (complaint,) = [text for text in said if text.startswith("qat, seed 0: not scored on the test split. ")]
    assert image.name in complaint
    image.write_bytes(whole)
    results, said = swept(tmp_path, data)
    assert all(row["test"]["mean"] >= 0 for row in results["variants"].values())


def test_a_test_split_without_annotations_is_not_scored(data: Path, tmp_path: Path) -> None:
    path = data / "annotations" / "instances_test2017.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"annotations": []}))
    results, said = swept(tmp_path, data)
    assert sum("not scored on the test split. The test split of" in text for text in said) == 3
    assert all(row["test"] is None and row["best"] for row in results["variants"].values())


def test_classes_are_those_of_the_model(data: Path, tmp_path: Path) -> None:
    """A category more in the test split's file does not move the others."""
    plain, _ = swept(tmp_path, data, only=("control",))
    path = data / "annotations" / "instances_test2017.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"categories": [{"id": 90, "name": "aaa"}, *content["categories"]]}))
    for found in (tmp_path / "out").rglob("test.json"):
        found.unlink()
    again, _ = swept(tmp_path, data, only=("control",))
    assert again == plain


def test_what_is_trained_on_is_scored_anew(data: Path, tmp_path: Path) -> None:
    swept(tmp_path, data, only=("control",))
    folder = tmp_path / "out" / "fp16" / "seed0" / "fp16"
    (folder / "test.json").write_text('{"miou": 2}')
    shutil.rmtree(folder / "state")
    results, _ = swept(tmp_path, data, only=("control",))
    assert results["variants"]["fp16"]["test"]["mean"] < 1


@pytest.mark.variants
@pytest.mark.usefixtures("whole_unets")  # which learn to find some
def test_objects_are_scored_by_ap(tiny_data: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(tiny_data, data)
    shutil.copytree(data / "train2017", data / "test2017")
    shutil.copy(data / "annotations" / "instances_train2017.json", data / "annotations" / "instances_test2017.json")
    settings = (
        "model.spec=unet",
        "model.scale=0.125",
        "task=instance",
        "train.epochs=40",
        "train.evaluate_every=40",
        "train.lr=3e-3",
    )
    results, said = swept(tmp_path, data, *settings, only=("control",))
    (folder,) = (tmp_path / "out" / "fp16" / "seed0").glob("fp16")
    scores = evaluate_task(TorchRuntime(folder / "best.safetensors"), data, split="test").scores
    assert json.loads((folder / "test.json").read_text())["ap50"] == pytest.approx(scores.line()["ap50"])
    assert results["variants"]["fp16"]["runs"]["0"]["test"] == pytest.approx(scores.score)
    assert scores.score > 0
    assert any("on the test split AP " in text for text in said)


def test_volumes_smaller_than_the_window_are_scored_as_a_validation_scores_them(tmp_path: Path) -> None:
    from tests.volumes import write_set

    data = write_set(tmp_path / "data", shape=(15, 18, 13))
    depth = ("data.depth=16", "data.height=16", "data.width=16")
    (tmp_path / "mine.yaml").write_text(
        "set: {train.epochs: 1, telemetry.every: 0}\nvariants:\n  fp16: {model: fp16}\n"
    )
    sweep = load_sweep(tmp_path / "mine.yaml", ("model.scale=0.125", f"data.root={data}", *depth))
    found = run_sweep(sweep, tmp_path / "out", say=lambda _: None)["variants"]["fp16"]["runs"]["0"]
    checkpoint = tmp_path / "out" / "fp16" / "seed0" / "fp16" / "best.safetensors"
    assert found["test"] == pytest.approx(evaluate_task(TorchRuntime(checkpoint), data, split="test").scores.miou)
